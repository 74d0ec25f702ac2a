"""Two nodes: each is a process with a folder of its own, joined by Gloo."""

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest
from joined import run_two
from nodes_together import main, task_inputs, teacher_answers

from compress import distributed, peers
from compress.distributed import ProcessShare, shares
from compress.progress import Event
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from serve.errors import BadInput


def together(folders: dict[str, Path], *, stays: int | None = None) -> list[tuple[int, str]]:
    """The exit code of the jobs on each of two nodes, and what they wrote on stderr; each job has a folder, with one for each node.

    The process `stays`, which stands still, is killed.
    """
    own = [[(job, folder / str(rank)) for job, folder in folders.items()] for rank in range(2)]
    for _, each in (*own[0], *own[1]):
        (each / "tmp").mkdir(parents=True)
    ended = run_two(
        main,
        lambda rank: [str(part) for each in own[rank] for part in each],
        nodes=True,
        environment=lambda rank: {"TMPDIR": str(own[rank][0][1] / "tmp")},
        stays=stays,
    )
    return [(code, "\n".join(line for line in said.splitlines() if ": " in line)) for code, said in ended]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, task_data: Path) -> dict[str, Path]:
    """What two nodes made in one start: stages, and a teacher's answers, which one process alone made before."""
    folders = {job: tmp_path_factory.mktemp(job) for job in ("teacher-answers", "stages")}  # behind which one goes on
    folder = folders["teacher-answers"]
    shutil.copytree(tiny_teacher, folder / "teacher")
    shutil.copytree(task_data, folder / "data")
    (folder / "tuned").mkdir()
    task_stages.make_fold_teacher(folder / "tuned", task_inputs(folder / "tuned"), 2, fold=9)
    (folder / "alone").mkdir()
    teacher_answers(folder / "alone")
    assert [code for code, _ in together(folders)] == [0, 0]
    return folders


def test_another_node_gets_what_the_main_process_made_and_leaves_nothing(made: dict[str, Path]) -> None:
    folder = made["stages"]
    assert sorted(path.name for path in (folder / "0").iterdir()) == ["out", "read.txt", "tmp"]
    assert sorted(path.name for path in (folder / "1").iterdir()) == ["read.txt", "tmp"]
    for rank, work in ((0, "work"), (1, "work.node-1")):
        read = (folder / str(rank) / "read.txt").read_text()
        assert read == repr(("of the main process", 51_200_000, str(folder / str(rank) / work / "first")))


def test_two_processes_make_the_bytes_of_a_teachers_answers_that_one_makes(made: dict[str, Path]) -> None:
    folder = made["teacher-answers"]
    alone = folder / "alone"
    for name in ("logits.npy", "confidence.json"):
        assert (folder / "0" / "soft" / name).read_bytes() == (alone / "soft" / name).read_bytes()
    assert not list((folder / "1" / "soft").iterdir())
    about = json.loads((alone / "about.json").read_text())
    for rank in range(2):  # each node keeps a copy of the cache
        numbers = (folder / str(rank) / "cache" / "numbers.bin").read_bytes()
        assert numbers == (alone / "cache" / "numbers.bin").read_bytes()
        assert json.loads((folder / str(rank) / "about.json").read_text()) | {"seconds": 0} == about | {"seconds": 0}


def test_nodes_that_disagree_are_told_which_one_and_in_what(tmp_path: Path) -> None:
    for code, said in together({"differ": tmp_path}):
        assert code == 2
        assert "bad input: Node 1 (" in said
        assert "the contents of --data; --batch is 32 there and 16 in the main process. All nodes need" in said
        assert "--teacher" not in said


@pytest.mark.parametrize(("job", "dies"), [("killed", 1), ("killed-main", 0)])
def test_a_process_that_is_killed_ends_the_other_with_one_message(tmp_path: Path, job: str, dies: int) -> None:
    found = together({job: tmp_path})
    assert found[dies][0] == -signal.SIGKILL
    code, said = found[1 - dies]
    assert code == peers.LOST
    lost = [line for line in said.splitlines() if line.startswith("lost: ")]
    assert len(lost) == 1
    assert f"Node {dies} (" in lost[0]
    assert "it goes on from the last checkpoint" in lost[0]
    assert "Traceback" not in said


def test_a_node_that_no_longer_answers_ends_the_main_process(tmp_path: Path) -> None:
    code, said = together({"stopped": tmp_path}, stays=1)[0]
    assert code == peers.LOST
    assert "process 1, has not answered for" in said


def test_a_node_that_cannot_go_on_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    (code, said), (other, own) = together({"failed": tmp_path})
    assert (code, other) == (peers.LOST, 2)
    assert "process 1, ended: the disk of this node is full. This training stopped on all nodes." in said
    assert own == "bad input: the disk of this node is full."


def test_an_address_where_nothing_answers_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:  # bound, so that nobody else is there, and not listening
        free.bind(("127.0.0.1", 0))
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(free.getsockname()[1]))):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(peers, "CONNECT_WITHOUT_TORCHRUN_S", 1.0)
        with pytest.raises(BadInput, match=r"Nothing answers at 127.0.0.1:\d+ \(MASTER_ADDR, MASTER_PORT\) within 1 s"):
            peers.meet(1, 2, 1, print)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(BadInput, match=r"MASTER_ADDR is ''.*Start them by torchrun"):
        peers.meet(1, 2, 1, print)


def test_a_process_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(peers, "MEET_WITHOUT_TORCHRUN_S", 0.5)
    with pytest.raises(BadInput, match=r"2 of 3 processes did not start within 0.5 s, of rank 1, 2"):
        peers.meet(0, 3, 0, print)


def test_a_training_of_two_processes_goes_on_in_one_with_the_same_parts(tmp_path: Path) -> None:
    said: list[Event] = []
    work = Workdir(tmp_path / "work", said.append)
    work.stage("first", "mark", lambda folder: None)
    (work.root / "made-by-stillroom").touch()
    (work.root / "processes.json").write_text('{"processes": 2, "of": "mark"}')
    with work.locked("mark"):
        assert shares(2) == [ProcessShare(number, 4) for number in range(4)]
    (event,) = said
    assert event.text.startswith("This run began with 2 processes and goes on with 1")
    assert shares(2) == [ProcessShare(0, 2), ProcessShare(1, 2)]


def test_the_parts_of_a_run_with_other_settings_are_forgotten(tmp_path: Path) -> None:
    said: list[Event] = []
    work = Workdir(tmp_path / "work", said.append)
    work.root.mkdir()
    (work.root / "made-by-stillroom").touch()
    (work.root / "processes.json").write_text('{"processes": 2, "of": "other"}')
    with work.locked("mark"):
        assert shares(1) == [ProcessShare(0, 1)]
    assert said == []


def test_a_launcher_that_does_not_say_which_process_this_is_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadInput, match="RANK and LOCAL_WORLD_SIZE and LOCAL_RANK are not set"):
        distributed.meet()


def test_parts_are_divided_among_fewer_processes_than_a_training_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    taken: list[int] = []
    distributed.begin_with(3)
    try:
        for number in range(2):
            monkeypatch.setenv("RANK", str(number))
            taken += [share.number for share in shares(1)]
            assert {share.of for share in shares(1)} == {3}
    finally:
        distributed.begin_with(1)
    assert taken == [0, 1, 2]
