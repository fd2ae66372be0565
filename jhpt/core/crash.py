"""The last resort: an error that nothing else has caught becomes one line, and a file with the details."""

import os
import platform
import shlex
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jhpt.core.errors import for_terminal
from jhpt.core.folders import cache_folder

PACKAGES = ("jhpt", "jax", "jaxlib", "numpy", "orbax-checkpoint")

SHOW = "JHPT_TRACEBACK"
"""Environment variable; if it is set, the details are printed as well."""


def crash_report(error: BaseException, arguments: Sequence[str]) -> str:
    """Writes the details to a file in the user's cache folder; returns the line that names it.

    Where no file can be written, the details follow the line.
    """
    details = _details(error, arguments)
    reason = for_terminal(f"{type(error).__name__}: {str(error).strip() or 'no message'}".partition("\n")[0])
    line = f"error in jhpt itself: {reason}"
    shown = f"\n{details}" if os.environ.get(SHOW) else ""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    file = cache_folder() / "crashes" / f"{stamp}-{os.getpid()}.txt"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(details, encoding="utf-8", errors="replace")
    except OSError:
        return f"{line}; the details:\n{details}"
    return f"{line}; the details are in {file}, please report it with them{shown}"


def _details(error: BaseException, arguments: Sequence[str]) -> str:
    lines = [
        f"jhpt {shlex.join(arguments)}",
        f"folder: {Path.cwd()}",
        f"python {platform.python_version()} on {platform.platform()}",
        ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "",
    ]
    return "\n".join(lines) + "".join(traceback.format_exception(error))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
