"""SIGTERM and SIGHUP as exceptions: hosts run in sessions of their own, and would go on without their parent."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType


class Ended(SystemExit, KeyboardInterrupt):
    """SIGTERM or SIGHUP came.  Like Ctrl-C it is an interruption to those who catch it, as the command line does
    (status 130); a program that does not exits with 128 + the signal's number, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class OrderlyEnd:
    """While it is entered, in the main thread, the first SIGTERM or SIGHUP raises `Ended`.

    Only where the process would die at once: a signal that is ignored, as by nohup(1), or that somebody handles stays
    as it is.  The first counts: timeout(1) sends two, and the second must not disturb what the first has set off.
    """

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []

    def __enter__(self) -> "OrderlyEnd":
        if _in_main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._taken.append(number)
                    signal.signal(number, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._taken:
            signal.signal(number, signal.SIG_DFL)
        if self._taken:
            came, _state.came = _state.came, None
            # Python drops what is raised while it collects garbage, for example.
            if came and not isinstance(error, Ended):
                raise Ended(came)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """For what a signal must not tear apart: it raises afterwards.  A process that is being started, for example, is
    not known yet, and would not be ended."""
    if not _in_main_thread():
        yield
        return
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        if _state.waits and not _state.depth:
            _raise()


@dataclass
class _State:
    """Of the main thread: the first signal, whether it has not been raised yet, and how many `unbroken` there are."""

    came: int | None = None
    waits: bool = False
    depth: int = 0


_state = _State()


def _note(number: int, frame: FrameType | None) -> None:
    if _state.came is None:
        _state.came, _state.waits = number, True
        if not _state.depth:
            _raise()


def _raise() -> None:
    assert _state.came is not None
    _state.waits = False
    raise Ended(_state.came)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
