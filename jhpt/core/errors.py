"""The exceptions that end a command with one message, and the exit statuses of all commands."""

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """The exit status of a command, the same on every process of a run; docs/guides/faults.md says what to do then."""

    DONE = 0
    DIVERGED = 1
    """Training ended with a loss that is not finite, skipped too many steps in a row, or went back too often."""
    INPUT = 2
    """What the user gave cannot work; nothing has been written."""
    NOT_HERE = 3
    """The command cannot run on this machine."""
    STORAGE = 4
    """Checkpoints could not be written several times in a row; the last good one is whole."""
    PEER = 5
    """Another process is gone, stopped, stuck, or never came."""
    DAMAGED = 6
    """No checkpoint of the run is whole."""
    MEMORY = 7
    """A device or this host ran out of memory while the command ran."""
    REPLICAS = 8
    """Devices hold different copies of the state (`guards.replicas_every`)."""
    CRASH = 70
    """An error in jhpt itself; a file with the details has been written."""
    INTERRUPTED = 130
    """Stopped by a signal; a training run has been saved."""


class JhptError(Exception):
    """A fault with one message, which the command line prints without a traceback before it exits with `status`."""

    status = Exit.CRASH


class InputError(JhptError, ValueError):
    """Something the user gave cannot work: a config value, a file, a run directory, a device count.

    The message names the offending thing and what to do about it; nothing has been written when it is raised.
    """

    status = Exit.INPUT


class NotHere(InputError):
    """This machine lacks something that the command needs; the message says what to install."""

    status = Exit.NOT_HERE


class OutOfMemory(JhptError):
    """A device or this host ran out of memory while a command ran; what was saved is whole."""

    status = Exit.MEMORY


LONGEST_LINE, MOST_LINES = 1000, 60
"""Of a message on a terminal.  Messages name what was given, which may be a file of a single line."""


def for_terminal(message: str) -> str:
    """A message without control characters, which could change what a terminal shows, and of bounded length."""
    lines = message.split("\n")
    more = [f"... and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([*map(_shown, lines[:MOST_LINES]), *more])


def _shown(line: str) -> str:
    if len(line) > LONGEST_LINE:
        half = LONGEST_LINE // 2
        line = f"{line[:half]} [... {len(line) - 2 * half:,} characters ...] {line[-half:]}"
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean NAME?"` for the closest of `choices`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
