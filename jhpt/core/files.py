"""Files that commands write: checked before the work, and never seen half written."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jhpt.core.errors import InputError


def check_writable(flag: str, path: str | os.PathLike[str] | None) -> None:
    """Refuses a file that could not be written once the work is done; leaves no trace."""
    if path is None:
        return
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if Path(path).exists() and not Path(path).is_file():  # a pipe would wait for a reader, a device be replaced
            raise OSError(None, "it is no regular file")
        if Path(path).exists():
            Path(path).open("ab").close()
        else:
            tempfile.TemporaryFile(dir=Path(path).parent).close()
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end; nothing is left of it if the body fails."""
    partial = Path(path).with_name(f"{Path(path).name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
