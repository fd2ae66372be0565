"""Keeps the messages of loading libraries away from standard error."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards everything that is written to standard error inside, unless an exception is raised.

    CUDA's libraries report a missing driver there.  They write to the file descriptor, not to `sys.stderr`.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            captured.seek(0)
            os.write(saved, captured.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
