"""The stages of the GPU kit: their parts, the order, and the time limits.

Nothing of jhpt is imported here: the stages are read before the wheels that jhpt needs are installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LIMIT_S = 560.0
"""Seconds of a stage: many machines end a command after ten minutes."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of a stage.

    seconds: its time limit.  arguments: of Python; "{result}" is the file for its results, "{folder}" a folder that the
    parts of a stage share.  dry: the arguments on a CPU, if they differ.  variables: of its environment.
    """

    name: str
    seconds: float
    arguments: tuple[str, ...]
    dry: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


PREDICTED = (
    "gpt2-124m batch_size=8 from 4 and 16",
    "bert-base batch_size=32 from 8 and 16",
    "gpt2-1.5b batch_size=8 from 2 and 4",
)
"""The cases of `jhpt bench predict` on a GPU, as it names them."""


def _bench(name: str, seconds: float, *arguments: str, dry: tuple[str, ...] = ()) -> Part:
    """A run of `jhpt bench`."""
    result = ("--json", "{result}")
    return Part(
        name=name,
        seconds=seconds,
        arguments=("-m", "jhpt", "bench", *arguments, *result),
        dry=("-m", "jhpt", "bench", *(dry or arguments), *result),
    )


def _check(name: str, seconds: float, *options: str) -> Part:
    """A function of `benchmarks.gpu.checks`."""
    arguments = ("-m", "benchmarks.gpu.checks", name, "--result", "{result}", *options)
    return Part(name="-".join([name, *options[1::2]]), seconds=seconds, arguments=arguments, dry=(*arguments, "--dry"))


PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark")
"""pytest-benchmark warns where there are several processes, and warnings are errors."""

GPU_TESTS = ("tests/kernels/test_mosaic_gpu.py", "tests/models/test_gpu.py")

STAGES: dict[str, tuple[Part, ...]] = {
    "smoke": (
        _check("environment", 60),
        Part(name="doctor", seconds=60, arguments=("-m", "jhpt", "doctor")),
        Part(
            name="gpu-tests",
            seconds=220,
            arguments=("-m", "pytest", "-m", "gpu", "-n", "4", "-v", *PLUGINS, *GPU_TESTS),
            dry=("-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-n", "0", *PLUGINS, *GPU_TESTS),
            variables={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # four processes share the GPU
        ),
        Part(
            name="train-tiny",
            seconds=110,
            arguments=("-m", "jhpt", "train", "gpt-tiny", "--train.steps", "50", "--out", "{folder}/tiny"),
            dry=("-m", "jhpt", "train", "gpt-tiny", "--train.steps", "2", "--out", "{folder}/tiny"),
        ),
        _check("parity", 110, "--family", "gpt"),
        _check("parity", 110, "--family", "bert"),
        _bench("kernels", 200, "kernels", "--quick"),
    ),
    "train": tuple(
        _bench(preset, 190, "train", "--quick", "--only", preset, dry=("train", "--quick"))
        for preset in ("gpt2-1.5b", "gpt2-124m", "bert-base")
    ),
    "memory": (
        _check("grow-memory", 70),
        _check("copies", 60),
        *(
            _check("steps", 130, "--setup", setup, "--competitor", name)
            for setup in ("0", "1")
            for name in ("planned", "synchronous")
        ),
    ),
    "predict": (
        Part(
            name="profile",
            seconds=220,
            arguments=(
                *("-m", "jhpt", "profile", "gpt2-124m", "--model.vocab_size", "50257", "--quick", "--out", "{result}"),
            ),
            dry=("-m", "jhpt", "profile", "gpt-tiny", "--quick", "--out", "{result}"),
        ),
        *(
            _bench(f"predict-{case.split()[0]}", 160, "predict", "--only", case, dry=("predict", "--quick"))
            for case in PREDICTED
        ),
    ),
    "variants": tuple(_check("variants", 180, "--group", group) for group in ("schedules", "offload", "low-precision")),
    "large": (
        _check("grow-memory", 70),
        *(_check("steps", 230, "--setup", "2", "--competitor", name) for name in ("planned", "synchronous")),
    ),
}
"""The stages by name, in the order in which they should run."""
