"""What jhpt changes in Orbax, whose functions have no settings for it: stack traces, and two calls that leak memory."""

import logging
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import tensorstore


@cache
def leave_out_stack_traces() -> None:
    """Leaves out the stack traces of saving, of which `Checkpoints` tells in a line.

    Orbax logs what it raises as well.  It stops waiting at the first write that fails, so the writes that are under
    way end when nobody waits for them any more: Python reports their callbacks, and asyncio their tasks.
    """
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    report = sys.unraisablehook

    def report_others(failure: "sys.UnraisableHookArgs") -> None:
        if failure.object is not None or str(failure.exc_value) != "Event loop is closed":
            report(failure)

    sys.unraisablehook = report_others


@cache
def leave_out_leaks() -> None:
    """Leaves out two calls that leak, where the installed tensorstore leaks (0.1.69 to 0.1.86 do).

    tensorstore never releases the keys and values of a dict that it makes from JSON (`JsonToPyObject`).  Orbax 0.12.8
    asks for such a dict for every array that it writes, to complete what it knows of the folder, and for all metrics
    twice a save, to log the rate of writing.  Its module is given a tensorstore without both; all others keep theirs.
    """
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils as specs
    except ImportError:  # a version of Orbax that is arranged differently: it leaks, or no longer does
        return
    if getattr(specs, "ts", None) is tensorstore and leaks():
        setattr(specs, "ts", _TensorStore(tensorstore.__name__))  # noqa: B010  (mypy knows modules)


def leaks() -> bool:
    """Whether tensorstore keeps a value that it made from JSON when nobody else refers to it any more."""
    made = tensorstore.KvStore.Spec({"driver": "file", "path": "/folder/"}).to_json()
    released = {"path": "/".join(("", "folder", ""))}
    return sys.getrefcount(made["path"]) > sys.getrefcount(released["path"])


class _Spec:
    """The spec of a key-value store, of which only Orbax's module of specs knows.  given: its JSON."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def to_json(self) -> Any:
        """The complete JSON; that of a local folder has nothing to add."""
        complete = self.given.keys() == {"driver", "path"} and self.given["driver"] == "file"
        return dict(self.given) if complete else tensorstore.KvStore.Spec(self.given).to_json()


class _KvStore:
    Spec = _Spec

    @staticmethod
    def open(spec: _Spec, **settings: Any) -> Any:
        return tensorstore.KvStore.open(spec.given, **settings)


class _TensorStore(ModuleType):
    """tensorstore without metrics, and without asking it for the JSON of local folders."""

    KvStore = _KvStore

    def experimental_collect_matching_metrics(self, prefix: str) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(tensorstore, name)
