"""jhpt: JAX High-Performance Training.  Importing this imports no jax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jhpt.core.config import Config
    from jhpt.core.errors import InputError
    from jhpt.core.load import load_config
    from jhpt.core.plan import Plan
    from jhpt.interop.load import Loaded, load
    from jhpt.planner.api import plan
    from jhpt.planner.report.planned import Planned
    from jhpt.training.run import RunResult, train

__version__ = "0.1.0"

__all__ = ["Config", "InputError", "Loaded", "Plan", "Planned", "RunResult", "load", "load_config", "plan", "train"]

_HOME = {
    "Config": "jhpt.core.config",
    "InputError": "jhpt.core.errors",
    "load_config": "jhpt.core.load",
    "Loaded": "jhpt.interop.load",
    "load": "jhpt.interop.load",
    "Plan": "jhpt.core.plan",
    "Planned": "jhpt.planner.report.planned",
    "plan": "jhpt.planner.api",
    "RunResult": "jhpt.training.run",
    "train": "jhpt.training.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jhpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
