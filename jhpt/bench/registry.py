"""The benchmarks of `jhpt bench` by name: some are part of the package, others exist in a checkout only.

Benchmarks that users run on their machines belong to the package.  Evidence for claims of the project (oracles,
emulated hosts, trained comparisons) is in the folder `benchmarks` of its source, beside the package.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import jhpt
from jhpt.core.errors import NotHere

Benchmark = Literal[
    "train", "planner", "predict", "hybrid", "comms", "kernels", "convergence", "precision", "memory", "faults"
]

PACKAGED = {
    "train": "jhpt.bench.train",
    "predict": "jhpt.bench.predict",
    "kernels": "jhpt.bench.kernels",
    "memory": "jhpt.bench.memory.run",
}
"""Modules of the package.  They are imported on use, because some need software that not every machine has."""

EVIDENCE = {
    "planner": "benchmarks.planner.run",
    "hybrid": "benchmarks.hybrid.run",
    "comms": "benchmarks.comms.run",
    "convergence": "benchmarks.convergence.run",
    "precision": "benchmarks.convergence.precision",
    "faults": "benchmarks.faults.run",
}
"""Modules of a checkout."""

NAMES = get_args(Benchmark)

CHECKOUT = Path(jhpt.__file__).resolve().parent.parent
"""The folder that holds the package: the root of a checkout, or `site-packages`."""


def load(name: Benchmark, checkout: Path = CHECKOUT) -> ModuleType:
    """The module of a benchmark; it has `run(*, quick, json_path)`, which returns an exit status.

    Raises:
      NotHere: the benchmark needs a checkout, and jhpt was installed from a wheel.
    """
    if name in PACKAGED:
        return importlib.import_module(PACKAGED[name])
    # Another project may have a package of that name in site-packages; pyproject.toml shows that this is a checkout.
    if not ((checkout / "pyproject.toml").is_file() and (checkout / "benchmarks" / "planner" / "run.py").is_file()):
        raise NotHere(
            f"benchmark {name!r} is not part of the installed package, which has {', '.join(PACKAGED)}; run "
            f"'python -m jhpt bench {name}' in a checkout of jhpt's source, which holds the folder benchmarks"
        )
    _make_importable(str(checkout))
    return importlib.import_module(EVIDENCE[name])


def _make_importable(root: str) -> None:
    """Puts a folder first on the path of this process and of all processes that it starts."""
    if root not in sys.path:
        sys.path.insert(0, root)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
