"""Peers that are gone, stopped, stuck, absent, or that refuse: what is concluded, and what processes then do."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults.injected import moment
from benchmarks.faults.peers import POINTS
from jhpt.core.errors import Exit, InputError
from jhpt.core.peers_config import PeersConfig
from jhpt.core.ports import free_port
from jhpt.training.channel import Channel
from jhpt.training.peers import PAUSE, Beat, Members, ranges, roll_call
from jhpt.training.processes import _own_address, _place
from jhpt.training.wire import Place
from tests.conftest import tiny_overrides

SECONDS = 5.0


def beat(process: int, **changes) -> Beat:
    plain = Beat(
        process=process,
        host=f"node{process}",
        pid=100 + process,
        doing="in step 7",
        position=7,
        work=0,
        waits=False,
        allowance=SECONDS,
        run=1,
        ended=0,
    )
    return replace(plain, **changes)


def after(seconds: int, *beats: Beat, says=lambda second, beat: beat):
    """The verdict on processes that say the same (or what `says` makes of it) every second, and when it comes."""
    members = Members(len(beats))
    for second in range(seconds):
        for each in beats:
            said = says(second, each)
            if said is not None:
                members.hear(said, float(second))
        verdict = members.judge(float(second))
        if verdict is not None:
            return second, verdict
    return None


def test_processes_that_move_are_left_alone():
    moving = lambda second, each: replace(each, position=second)  # noqa: E731
    assert after(100, beat(0), beat(1), says=moving) is None
    working = lambda second, each: replace(each, work=second)  # noqa: E731
    assert after(100, beat(0, doing="compiling"), beat(1, doing="compiling"), says=working) is None


def test_the_process_that_is_behind_is_stuck():
    second, verdict = after(20, beat(0, position=8), beat(1), beat(2, position=8))
    assert second == SECONDS + 1 and verdict.stacks == (1,) and verdict.status == Exit.PEER
    assert verdict.text.startswith("process 1 on node1 (pid 101) was in step 7 and has made no progress for 6 s")


def test_of_those_at_one_point_the_one_that_waits_for_nobody_is_stuck():
    doing = {"doing": "saving step 40"}
    _, verdict = after(20, beat(0, waits=True, **doing), beat(1, **doing), beat(2, waits=True, **doing))
    assert verdict.stacks == (1,) and "was saving step 40" in verdict.text
    _, verdict = after(20, *(beat(process, waits=True) for process in range(3)))
    assert verdict.stacks == (0, 1, 2) and "process 0 on node0 (pid 100) and 2 others were in step 7" in verdict.text


def test_who_waits_for_one_that_works_is_not_stuck():
    """Process 0 writes a checkpoint for long; process 1 waits for it."""
    works = lambda second, each: replace(each, work=second) if each.process == 0 else each  # noqa: E731
    assert after(100, beat(0), beat(1, waits=True), says=works) is None
    assert after(100, beat(0, allowance=1000), beat(1)) is None


def test_one_that_has_not_begun_the_run_keeps_the_others_for_as_long_as_it_likes():
    assert after(100, beat(0, run=2, ended=1), beat(1, run=1, ended=1)) is None
    assert after(100, beat(0, run=1, ended=1), beat(1, run=1, ended=1)) is None
    assert after(100, beat(0, run=1, ended=1, position=3), beat(1)) is not None  # 0 is done, 1 is not


def test_a_silent_process_is_stopped():
    silent = lambda second, each: replace(each, position=second) if each.process == 0 or second < 10 else None  # noqa: E731
    second, verdict = after(30, beat(0), beat(1), says=silent)
    assert second == 9 + SECONDS + 1 and verdict.stacks == ()
    assert verdict.text.startswith("process 1 on node1 (pid 101) was in step 7 and has not answered for 6 s")


def test_a_stopped_process_is_not_called_stuck():
    """Nothing has moved for a while, and then one is silent."""
    says = lambda second, each: each if each.process == 0 or second < 3 else None  # noqa: E731
    _, verdict = after(30, beat(0, waits=True), beat(1), says=says)
    assert "process 1" in verdict.text and "has not answered for 4 s" in verdict.text and not verdict.stacks


def test_a_judge_that_was_stopped_itself_blames_nobody():
    members = Members(2)
    for process in (0, 1):
        members.hear(beat(process), 0.0)
    assert members.judge(1.0) is None
    assert members.judge(1.0 + max(PAUSE, SECONDS) * 100) is None
    assert members.judge(1.0 + max(PAUSE, SECONDS) * 100 + 1) is None


@pytest.mark.parametrize(
    ("here", "gone", "fault"),
    [
        (beat(0), beat(1), True),
        (beat(0, ended=1), beat(1), False),  # nobody needs it
        (beat(0), beat(1, ended=1), False),  # it has done its part
        (beat(0, run=2, ended=1), beat(1, ended=1), True),
    ],
)
def test_the_end_of_a_process_matters_while_another_needs_it(here, gone, fault):
    members = Members(2)
    members.hear(here, 0.0)
    members.hear(gone, 0.0)
    verdict = members.lost(1)
    assert (verdict is not None) == fault
    if verdict is not None:
        assert verdict.text.startswith("process 1 on node1 (pid 101) is gone; it was in step 7; ")
        assert "--out" in verdict.text and verdict.status == Exit.PEER


def test_who_is_missing_is_said_in_short():
    assert ranges([0, 2, 3, 4, 9]) == "0, 2-4, 9"
    members = Members(64)
    for process in range(12):
        members.hear(beat(process), 0.0)
    assert roll_call(members) == "12 of 64 processes are here; missing: 12-63"


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("node0:29400", "node0", 29400), ("10.0.0.1:1", "10.0.0.1", 1), ("[::1]:80", "::1", 80)],
)
def test_process_0_binds_what_it_was_given(address, host, port):
    place = _place(address, 1, 2, PeersConfig(), jax_port=0)
    assert (place.host, place.port, str(place)) == (host, port, address)
    assert _own_address("127.0.0.1") == "127.0.0.1" and _own_address("localhost") == "localhost"


@pytest.mark.parametrize("address", ["node0", "node0:", ":80", "node0:http", "node0:0", "node0:65536", "node0:-1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match="HOST:PORT"):
        _place(address, 0, 2, PeersConfig(), jax_port=0)


class Here:
    """A process that notes what it is told."""

    def __init__(self, process: int) -> None:
        self.process, self.told, self.change = process, [], threading.Condition()
        self.step, self.asked = 10 + process, 0

    def beat(self) -> Beat:
        if self.asked:
            self._note("beat")  # it has been a member for a second
        self.asked += 1
        return beat(self.process, position=time.monotonic_ns(), allowance=60.0)

    def _note(self, *what) -> None:
        with self.change:
            self.told.append(what)
            self.change.notify_all()

    def joined(self):
        self._note("joined")

    def say(self, text):
        self._note("say", text)

    def conclude(self, verdict):
        self._note("conclude", verdict.status, verdict.text)

    def refused(self, process, text, status):
        self._note("refused", process, text, status)

    def hold(self, reason, run):
        self._note("hold", reason, run)
        return self.step

    def stop_after(self, step, run):
        self._note("stop", step, run)

    def close(self, everyone):
        self._note("close", everyone)

    def hears(self, *what):
        """Waits until it is told something that begins so; returns it."""
        found = lambda: next((told for told in self.told if told[: len(what)] == what), None)  # noqa: E731
        with self.change:
            assert self.change.wait_for(found, 20), (what, self.told)
            return found()


@pytest.fixture(autouse=True)
def channels():
    """Those that a test begins, ended after it."""
    begun: list[Channel] = []
    yield begun
    for channel in reversed(begun):
        channel.end()


@pytest.fixture
def gather(channels):
    return lambda *arguments, **options: _gather(channels, *arguments, **options)


def _gather(channels, count: int, of: int | None = None, port: int | None = None, wait: float = 20.0, first: int = 0):
    """(`Here`, channel) of the first `count` of so many processes, each in a thread."""
    port = port or free_port()
    members = []
    for process in range(first, first + count):
        place = Place(
            host="127.0.0.1",
            port=port,
            listen="127.0.0.1" if process == 0 else None,
            process=process,
            count=of or count,
            jax_port=1,
            wait=wait,
            heartbeat=10.0,
        )
        here = Here(process)
        channel = Channel(here, place)
        channel.begin()
        channels.append(channel)
        members.append((here, channel))
    return members


def test_all_join_stop_after_a_step_that_none_has_begun_and_leave(gather):
    members = gather(3)
    for here, _ in members:
        here.hears("joined")
    members[1][1].send({"stop": "SIGTERM", "run": 1})
    members[2][1].send({"stop": "SIGINT", "run": 1})
    for here, channel in members:
        assert here.hears("stop") == ("stop", 13, 1)
        channel.send({"leaving": True})
    for here, _ in members:
        here.hears("close", True)


def test_a_refusal_reaches_all(gather):
    members = gather(3)
    for here, _ in members:
        here.hears("joined")
    members[2][1].send({"refused": "no", "status": 2})
    for here, _ in members:
        here.hears("refused", 2, "no", 2)


def test_those_who_are_there_hear_who_never_came(gather):
    members = gather(2, of=4, wait=1.0)
    for here, _ in members:
        _, status, text = here.hears("conclude")
        assert status == Exit.PEER and text.startswith("after 1 s 2 of 4 processes are here; missing: 2-3; check")
    ((here, _),) = gather(1, of=4, wait=1.0, first=1)
    _, status, text = here.hears("conclude")
    assert status == Exit.PEER and text.startswith("process 1 has waited 1 s for process 0 at 127.0.0.1:")


def test_a_process_that_is_there_twice_and_one_told_of_another_number_are_refused(gather):
    port = free_port()
    members = gather(2, of=3, port=port)
    members[1][0].hears("beat")
    ((twin, _),) = gather(1, of=3, port=port, first=1)
    _, status, text = twin.hears("conclude")
    assert status == Exit.INPUT and "process 1 is here already: process 1 on node1" in text
    ((other, _),) = gather(1, of=4, port=port, first=3)
    for here in (other, members[0][0], members[1][0]):
        _, status, text = here.hears("conclude")
        assert status == Exit.INPUT and "was told of 4 processes, and process 0 of 3" in text


def test_strangers_are_ignored(gather):
    """Garbage at the port ends neither process 0 nor its wait."""
    port = free_port()
    ((here, _),) = gather(1, of=2, port=port)
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\n",
        b"{}\n",
        b'{"beat": {"process": "a"}, "processes": 2}\n',
        b"x" * 99999,
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(garbage)
    ((second, _),) = gather(1, of=2, port=port, first=1)
    for each in (here, second):
        each.hears("joined")


# Real processes


def arguments(corpus: Path, out: Path, port: int, process: int, count: int = 2, **more) -> list[str]:
    settings = tiny_overrides(corpus) | {"model.num_layers": 1, "parallel.data": 2, "evaluation.sample_tokens": 0}
    settings |= {"peers.heartbeat_seconds": SECONDS, "peers.stall_seconds": SECONDS, "log.every": 1}
    settings |= {"evaluation.batches": 1, "evaluation.every": 100_000} | more
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    joined = ["--coordinator", f"127.0.0.1:{port}", "--process-id", str(process), "--num-processes", str(count)]
    return ["gpt-tiny", "--out", str(out), *joined, *flags]


def start(words: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.faults.injected", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def met(corpus: Path, out: Path, fault: str, point: str, victim: int, **more) -> list[tuple[int, str, float]]:
    """Two processes, of which one meets a fault: (status, stderr, seconds since the fault) of each."""
    port = free_port()
    processes = []
    for process in range(2):
        what = (fault, point) if process == victim else ("none", "never")
        processes.append(start([*what, *arguments(corpus, out, port, process, **more)]))
    outcomes = {}

    def wait(process: int) -> None:
        output, error = processes[process].communicate(timeout=200)
        outcomes[process] = (processes[process].returncode, output, error, time.time())

    threads = [threading.Thread(target=wait, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    threads[1 - victim].join(200)
    if fault == "stopped":
        processes[victim].kill()
    threads[victim].join(200)
    begun = moment(outcomes[victim][1])
    assert begun is not None, outcomes
    return [(status, error, end - begun) for status, _, error, end in (outcomes[process] for process in range(2))]


def the_line(error: str) -> str:
    """The only line of a process's errors."""
    (line,) = lines(error)
    return line


def lines(error: str) -> list[str]:
    """The lines of a process's errors but those that say who is awaited, as on a busy machine."""
    return [line for line in error.splitlines() if line and "; missing: " not in line]


def test_a_killed_process_ends_the_other_with_one_line(tmp_path, corpus):
    outcomes = met(corpus, tmp_path / "run", "killed", "in step 3.", 1, **{"train.steps": 100_000})
    assert outcomes[1][0] == -signal.SIGKILL
    status, error, seconds = outcomes[0]
    assert status == Exit.PEER and seconds < 15
    assert "process 1 on " in the_line(error) and "is gone; it was in step 3; look at" in the_line(error)


SAID = {phase: point.removesuffix(".") for phase, point in POINTS.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """A run of two processes at step 2."""
    out = tmp_path_factory.mktemp("peers") / "run"
    port = free_port()
    more = {"train.steps": 2, "checkpoint.every": 2}
    processes = [start(["none", "never", *arguments(corpus, out, port, process, **more)]) for process in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0 and not lines(error), error
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "stopped", "stuck", "refused"])
@pytest.mark.parametrize("phase", POINTS)
def test_every_fault_in_every_phase_ends_all(tmp_path, corpus, trained, phase, fault, victim):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    more = {"train.steps": 100_000, "checkpoint.every": 4}
    outcomes = met(corpus, out, fault, POINTS[phase], victim, **more)
    status, error, seconds = outcomes[1 - victim]
    print(f"{phase} {fault} {victim}: {seconds:.1f} s: {error.strip()}")
    line = the_line(error)
    if fault == "refused":
        assert status == outcomes[victim][0] == Exit.INPUT and seconds < 5
        assert "this cannot work; do something else" in line and "this cannot work" in the_line(outcomes[victim][1])
        return
    assert status == Exit.PEER and f"process {victim} on {socket.gethostname()} (pid " in line
    assert SAID[phase] in line and seconds < {"killed": 15, "stopped": SECONDS + 10, "stuck": SECONDS + 10}[fault]
    if fault == "stuck":
        assert outcomes[victim][0] == Exit.PEER
        said, _, path = the_line(outcomes[victim][1]).partition("; stacks: ")
        assert said == line and "injected.py" in Path(path).read_text()
        assert (Path(path).parent == out) == (phase != "connecting")


@pytest.mark.exhaustive
@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_process_ends_the_other(tmp_path, corpus, absent):
    begun = time.time()
    words = arguments(corpus, tmp_path / "run", free_port(), 1 - absent)
    process = start(["none", "never", *words, "--wait", "7"])
    _, error = process.communicate(timeout=100)
    took = time.time() - begun
    print(f"{took:.1f} s: {error}")
    assert process.returncode == Exit.PEER and not (tmp_path / "run").exists()
    expected = (
        "after 7 s 1 of 2 processes is here; missing: 1" if absent else "has waited 7 s for process 0 at 127.0.0.1"
    )
    assert expected in error


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize("phase", ["compiling", "restoring", "stepping"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path, corpus, trained, phase, name, victim):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    outcomes = met(corpus, out, name, POINTS[phase], victim, **{"train.steps": 100_000, "checkpoint.every": 100_000})
    for status, error, seconds in outcomes:
        assert status == Exit.INTERRUPTED and seconds < 15, error
    saved = sorted(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdecimal())
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert saved[-1] == steps[-1] and (saved == [2] if phase != "stepping" else saved[-1] >= 5)
