"""`python -m jhpt.launched PID ARGUMENTS`: `jhpt ARGUMENTS` as a child of `jhpt launch`, which it does not outlive."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def ends_with(launcher: int) -> bool:
    """Lets this process get SIGTERM when the launcher ends (prctl(2)); False: it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == launcher


if __name__ == "__main__":
    if not ends_with(int(sys.argv[1])):
        sys.exit("jhpt launch has ended")
    from jhpt.cli import main  # takes a while, in which the launcher may end

    sys.exit(main(sys.argv[2:]))
