"""`python -m tests.malformed NAME`: makes the files of a case in a folder, shows the command, and runs it there."""

import os
import shlex
import sys
import tempfile
from pathlib import Path

from tests.malformed.cases import CASES
from tests.malformed.forked import made_here, mount, prepare, status_of


def main() -> int:
    """Runs the case that is named; without a name it lists all."""
    if len(sys.argv) != 2 or sys.argv[1] not in CASES:
        print(*CASES)
        return 2
    prepare()
    folder = Path(tempfile.mkdtemp(prefix="jhpt-malformed-"))
    case = made_here(sys.argv[1], folder)
    os.environ |= case.environment
    os.chdir(folder / "case" / "here")
    shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in case.environment.items())
    line = f"cd {Path.cwd()}\n{shown} jhpt {shlex.join(case.arguments):.2000}"
    print(line.encode(errors="replace").decode(), flush=True)
    mount(case.mounts)
    return status_of(case.arguments)


if __name__ == "__main__":
    sys.exit(main())
