"""The folder for what jhpt can make again: tokens, compiled programs, measurements."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/jhpt`, or `~/.cache/jhpt`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jhpt"
