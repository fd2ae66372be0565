"""Downloads the wheels that a GPU machine without network lacks: `python -m benchmarks.gpu.prepare`.

Run it with the GPU machine's version of Python, which needs nothing but pip.  pip resolves jhpt's requirements and
holds the packages that the machine has at their versions (machine.txt), so that conflicts show up here.  Only packages
that the machine lacks are downloaded.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import ROOT, WHEELS

GLIBC = (35, 34, 31, 28, 27, 24, 17)
"""Minor versions of the GNU C library whose wheels run on a machine that has 2.35."""


def canonical(name: str) -> str:
    """A package's name as PEP 503 normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(text: str) -> dict[str, str | None]:
    """{name: version} of lines NAME==VERSION; None for lines NAME, packages whose version is not known."""
    lines = (line.partition("#")[0].strip().partition("==") for line in text.splitlines())
    return {canonical(name): version or None for name, _, version in lines if name}


def requirements() -> list[str]:
    """The requirements of pyproject.toml, to run and to test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *_extra(project, "test")]


def _extra(project: dict[str, Any], name: str) -> list[str]:
    """What an extra asks for; `jhpt[a,b]` in it stands for the project's own extras a and b."""
    wanted = []
    for text in project["optional-dependencies"][name]:
        own = re.fullmatch(rf"{project['name']}\[(.+)\]", text)
        wanted += [one for each in own[1].split(",") for one in _extra(project, each)] if own else [text]
    return wanted


def lacking(report: dict[str, Any], machine: dict[str, str | None]) -> list[str]:
    """NAME==VERSION of the packages that pip would install and the machine does not have."""
    packages = [(canonical(item["metadata"]["name"]), item["metadata"]["version"]) for item in report["install"]]
    return [f"{name}=={version}" for name, version in packages if machine.get(name, "") not in (None, version)]


def prepare(machine: dict[str, str | None]) -> list[Path]:
    """Resolves and downloads; returns the wheels."""
    target = ["--only-binary=:all:"]
    for tag in [*(f"manylinux_2_{minor}" for minor in GLIBC), "manylinux2014", "manylinux1"]:
        target += ["--platform", f"{tag}_x86_64"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        constraints, file = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in machine.items() if version))
        resolve = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(file), *target]
        resolve += ["--target", folder, "--constraint", str(constraints), *requirements()]
        subprocess.run([*pip, *resolve], check=True)
        names = lacking(json.loads(file.read_text()), machine)
    shutil.rmtree(WHEELS, ignore_errors=True)
    subprocess.run([*pip, "download", "--quiet", "--no-deps", *target, "--dest", str(WHEELS), *names], check=True)
    return sorted(WHEELS.glob("*.whl"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.prepare", description=__doc__)
    parser.add_argument(
        "--machine",
        type=Path,
        default=Path(__file__).parent / "machine.txt",
        help="its packages, as `pip list --format=freeze` prints them",
    )
    options = parser.parse_args(arguments)
    wheels = prepare(installed(options.machine.read_text()))
    size = sum(wheel.stat().st_size for wheel in wheels)
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"{len(wheels)} wheels for Python {python}, {size / 2**20:.1f} MiB, in {WHEELS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
