"""When reports are written: as measurements come, so that what stops later loses nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import started
from small_profiles import Models

from stillroom.verbs.profile.run import UNENDED

PROFILE = """
import sys
from pathlib import Path
from stillroom.verbs.profile.run import profile_models
from stillroom.verbs.profile import Profiling

settings = Profiling(seconds=6.0, tight=1e-9, batches=(1,), lengths=(8, 16), threads=1, bound_ms=50.0, sweep=True, out=sys.argv[2])
profile_models([Path(sys.argv[1])], settings, "profile it")
"""


def test_what_was_measured_before_an_interrupt_is_in_the_report(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "timings"
    command = [sys.executable, "-c", PROFILE, str(models.fast), str(out)]
    with started(command, stderr=subprocess.PIPE) as profiling:
        while not (out / "table.md").is_file():  # the last of the three
            assert profiling.poll() is None, profiling.communicate()
            time.sleep(0.01)
        profiling.send_signal(signal.SIGINT)
        _, said = profiling.communicate()
    assert b"KeyboardInterrupt" in said
    assert sorted(file.name for file in out.iterdir()) == ["report.html", "report.json", "table.md"]
    document = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {row["tokens"] for row in document["candidates"]} >= {8}
    assert document["given"][0]["model"] == str(models.fast)
    assert document["command"] == "profile it"
    assert UNENDED in document["warnings"]
    assert "peaks" not in document
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.rstrip().endswith("</html>")
    assert UNENDED in page
