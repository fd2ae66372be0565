"""The exceptions for what a user can put right."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot work: a config value, a file, a run directory, a device count.

    The message names the offending thing and what to do about it.  The command line prints it without a
    traceback and exits with `status`; nothing has been written when it is raised.
    """

    status = 2


class NotHere(InputError):
    """This machine lacks something that the command needs; the message says what to install."""

    status = 3


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean NAME?"` for the closest of `choices`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
