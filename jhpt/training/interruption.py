"""Signals that ask a run to save and stop."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jhpt.core.errors import Exit
from jhpt.training.watch import Watch, later

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; what schedulers and `kill` send; a terminal that closes; what SLURM is told to send before the time is up."""


AT_ONCE = 1.0
"""Seconds after a second SIGINT in which the main thread may end by itself."""


@contextmanager
def stops_on_signals(watch: Watch) -> Iterator[None]:
    """Signals stop the run on all processes, after a step that all save; a second SIGINT ends this process at once.

    Python runs handlers between two of its own instructions, and the main thread may be compiling for minutes, so
    another thread reads the numbers of the signals from a socket.  A SIGHUP that is ignored, as under nohup, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    inlet, outlet = socket.socketpair()
    inlet.setblocking(False)
    thread = threading.Thread(target=_watch_signals, args=(outlet, watch), name="jhpt-signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(inlet.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, _Handler()) for number in ours}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        inlet.close()
        thread.join()
        outlet.close()


class _Handler:
    """Raises KeyboardInterrupt at the second SIGINT."""

    def __init__(self) -> None:
        self._again = False

    def __call__(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self._again:
            raise KeyboardInterrupt
        self._again = True


def _watch_signals(outlet: socket.socket, watch: Watch) -> None:
    """Until the other end closes."""
    seen: set[int] = set()
    while numbers := outlet.recv(64):
        for number in numbers:
            if number == signal.SIGINT and number in seen and not hasattr(sys, "ps1"):
                later(AT_ONCE, lambda: os._exit(Exit.INTERRUPTED))
            if number in SIGNALS:
                seen.add(number)
                watch.stop(signal.Signals(number).name)
