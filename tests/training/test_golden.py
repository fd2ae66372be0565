"""Losses that a change which is not about numbers leaves where they are.

`golden.json` holds the first losses of tiny runs.  A change that means to alter them replaces the file:
`python -m tests.training.test_golden > tests/training/golden.json`.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

import jhpt
from tests import conftest
from tests.covers import quick_and_exhaustive

RUNS = {
    "gpt": ("gpt-tiny", {}),
    "llama": (
        "gpt-tiny",
        {
            "model.positions": "rotary",
            "model.norm": "rmsnorm",
            "model.activation": "swiglu",
            "model.num_kv_heads": 2,
            "model.tied": False,
            "model.bias": False,
            "optimizer.schedule": "linear",
            "optimizer.z_loss": 1e-4,
            "parallel.micro_batches": 2,
        },
    ),
    "bert": ("bert-tiny", {"model.dropout": 0.1}),
}


def losses(name: str, corpus, out) -> dict[str, list[float]]:
    preset, changes = RUNS[name]
    settings = conftest.tiny_overrides(corpus) | {"train.steps": 6, "evaluation.every": 3, "parallel.data": 1} | changes
    result = jhpt.train(preset, out=out, overrides=settings)
    return {"loss": list(result.losses.values()), "validation": list(result.validation_losses.values())}


@pytest.mark.parametrize("name", quick_and_exhaustive(RUNS, ["llama", "bert"]))
def test_losses_are_the_golden_ones(name, corpus, tmp_path):
    golden = json.loads(Path(__file__).with_name("golden.json").read_text())[name]
    recorded = losses(name, corpus, tmp_path / "run")
    for kind in ("loss", "validation"):
        assert recorded[kind] == pytest.approx(golden[kind], rel=2e-5)  # machines and jax versions add up differently


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        corpus = conftest.write_corpus(Path(folder) / "corpus")
        stdout, sys.stdout = sys.stdout, sys.stderr
        recorded = {name: losses(name, corpus, Path(folder) / name) for name in RUNS}
        sys.stdout = stdout
    print(json.dumps(recorded, indent=1))
