"""Downloads the wheels that a GPU machine without network lacks: `python -m benchmarks.gpu.prepare`.

pip resolves jhpt's requirements for that machine's Python, with the packages that it has held at their versions
(machine.txt); so whatever does not fit together fails here.  Only what the machine lacks is downloaded.
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

from benchmarks.gpu.run import ROOT, WHEELS

GLIBC = (35, 34, 31, 28, 27, 24, 17)
"""Minor versions of the GNU C library whose wheels run on a machine with 2.35."""


def canonical(name: str) -> str:
    """A package's name as PEP 503 normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(text: str) -> dict[str, str]:
    """{name: version} of lines NAME==VERSION; others, such as comments, are left out."""
    pairs = (line.strip().split("==") for line in text.splitlines() if re.fullmatch(r"[\w.-]+==\S+", line.strip()))
    return {canonical(name): version for name, version in pairs}


def requirements() -> list[str]:
    """What pyproject.toml asks for, to run and to test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["test"]]


def lacking(report: dict, machine: dict[str, str]) -> list[str]:
    """NAME==VERSION of what pip would install and the machine does not have."""
    packages = [(canonical(item["metadata"]["name"]), item["metadata"]["version"]) for item in report["install"]]
    return [f"{name}=={version}" for name, version in packages if machine.get(name) != version]


def prepare(machine: dict[str, str], python: str) -> list[Path]:
    """Resolves and downloads; returns the wheels."""
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for tag in [*(f"manylinux_2_{minor}" for minor in GLIBC), "manylinux2014", "manylinux1"]:
        target += ["--platform", f"{tag}_x86_64"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        constraints, file = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in machine.items()))
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
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python")
    parser.add_argument(
        "--machine",
        type=Path,
        default=Path(__file__).parent / "machine.txt",
        help="its packages, as `pip list --format=freeze` prints them",
    )
    options = parser.parse_args(arguments)
    wheels = prepare(installed(options.machine.read_text()), options.python)
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB, in {WHEELS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
