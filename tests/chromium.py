"""A real browser for tests: headless Chromium, driven over the pipe that its DevTools protocol offers."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The browser reads commands at descriptor 3 and answers at 4.
MOVED = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
CONTROL = 2  # the protocol's bit for the Ctrl key


class Tab:
    """One tab. `problems` holds what its console and the browser itself complained of: errors, violations of a policy."""

    def __init__(self, to: int, from_: int) -> None:
        self._to, self._from, self._unread = to, from_, b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """What the browser answers to one command."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            self._note(message)
        assert "error" not in message, (method, message)
        return dict(message["result"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until the expression is true."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < until_s, f"never true: {expression}; problems: {self.problems}"
            time.sleep(0.02)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to `url` in a window of that size, where the reader prefers light or dark."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Text into what has the focus, as an input method or a paste gives it."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, code: int, control: bool = False) -> None:
        """One key, by its name and its Windows key code."""
        pressed: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, typed in (("keyDown", text), ("keyUp", {})):
            self.send("Input.dispatchKeyEvent", type=kind, modifiers=CONTROL if control else 0, **pressed, **typed)

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG."""
        file.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])
        )

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._from], [], [], PATIENCE_S)[0], "the browser says nothing"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser ended"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(about["exceptionDetails"]["text"])
        elif message.get("method") == "Log.entryAdded" and about["entry"]["level"] in {"error", "warning"}:
            self.problems.append(about["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and about["type"] in {"error", "warning", "assert"}:
            self.problems.append(str(about["args"]))


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """A tab of a browser that keeps its things in `profile`; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here; install chromium to test the page in a real browser")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    quiet = ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"]
    place = [f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    commands, answers = _pipe(), _pipe()
    with subprocess.Popen(
        [sys.executable, "-c", MOVED, str(commands[0]), str(answers[1]), found, *flags, *quiet, *place],
        pass_fds=(commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(commands[0])
        os.close(answers[1])
        try:
            yield Tab(commands[1], answers[0])
        finally:
            process.kill()
            process.wait()
            os.close(commands[1])
            os.close(answers[0])


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are beyond 3 and 4, which are to be the browser's."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 5) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
