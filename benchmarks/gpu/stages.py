"""The stages of the GPU kit: their parts, the order, and the time limits."""

from dataclasses import dataclass

from jhpt.bench.predict import GPU_CASES

LIMIT_S = 560.0
"""Seconds of a stage: many machines end a command after ten minutes."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of a stage.

    seconds: its time limit.  arguments: of Python; "{result}" is the file for its results, "{folder}" a folder that the
    parts of a stage share.  dry: the arguments on a CPU, if they differ.
    """

    name: str
    seconds: float
    arguments: tuple[str, ...]
    dry: tuple[str, ...] = ()


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


GPU_TESTS = ("tests/kernels/test_mosaic_gpu.py", "tests/models/test_gpu.py")

STAGES: dict[str, tuple[Part, ...]] = {
    "smoke": (
        _check("environment", 60),
        Part(name="doctor", seconds=60, arguments=("-m", "jhpt", "doctor")),
        Part(
            name="gpu-tests",
            seconds=220,
            arguments=("-m", "pytest", "-m", "gpu", "-n", "4", "-v", "-p", "no:cacheprovider", *GPU_TESTS),
            dry=("-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *GPU_TESTS),
        ),
        Part(
            name="train-tiny",
            seconds=110,
            arguments=("-m", "jhpt", "train", "gpt-tiny", "--train.steps", "50", "--out", "{folder}/tiny"),
            dry=("-m", "jhpt", "train", "gpt-tiny", "--train.steps", "2", "--out", "{folder}/tiny"),
        ),
        _check("parity", 170),
        _bench("kernels", 200, "kernels", "--quick"),
    ),
    "train": tuple(
        _bench(preset, 190, "train", "--quick", "--only", preset, dry=("train", "--quick"))
        for preset in ("gpt2-1.5b", "gpt2-124m", "bert-base")
    ),
    "memory": (
        _check("grow-memory", 70),
        _check("copies", 60),
        _check("steps", 200, "--setup", "0"),
        _check("steps", 220, "--setup", "1"),
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
            _bench(f"predict-{case.preset}", 160, "predict", "--only", str(case), dry=("predict", "--quick"))
            for case in GPU_CASES
        ),
    ),
    "variants": (_check("variants", 420),),
    "large": (_check("grow-memory", 70), _check("steps", 400, "--setup", "2")),
}
"""The stages by name, in the order in which they should run."""
