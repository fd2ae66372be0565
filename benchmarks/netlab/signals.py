"""SIGTERM and SIGHUP as exceptions: hosts run in sessions of their own, and would survive their parent."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType


class Ended(SystemExit, KeyboardInterrupt):
    """SIGTERM or SIGHUP came.  Code that catches Ctrl-C catches it too, as the command line does (status 130); a
    program that does not exits with 128 + the signal's number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class OrderlyEnd:
    """While it is entered, in the main thread, the first SIGTERM or SIGHUP raises `Ended`.

    A signal that is ignored, as by nohup(1), or that has a handler is left alone.  Only the first signal counts:
    timeout(1) sends two, and the second must not disturb the clean-up that the first has started.
    """

    def __init__(self) -> None:
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> "OrderlyEnd":
        if _in_main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._handled.append(number)
                    signal.signal(number, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)
        if self._handled:
            came, _state.came = _state.came, None
            # Python drops exceptions that are raised during garbage collection, for example.
            if came and not isinstance(error, Ended):
                raise Ended(came)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Delays the exception of a signal until the block is over.  A process that is being started, for example, is not
    known yet, and would not be ended."""
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
    """Of the main thread.  came: the first signal.  waits: it has not been raised yet.  depth: how many `unbroken`
    blocks are entered."""

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
