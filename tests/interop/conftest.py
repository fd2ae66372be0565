"""Trained runs, one of each kind, for all tests of this folder."""

from functools import partial
from pathlib import Path

import jax
import pytest

import jhpt
from jhpt.core.load import load_config
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.device_step import fresh_state
from jhpt.training.record import make_record
from jhpt.training.run_dir import write_config
from jhpt.training.setup import prepare
from tests.conftest import tiny_overrides

SMALL = {
    "data.batch_size": 8,
    "train.steps": 2,
    "optimizer.warmup_steps": 1,
    "evaluation.batches": 100,
    "parallel.data": 1,
}


def trained(out: Path, corpus, preset: str = "gpt-tiny", **overrides) -> Path:
    """A run of a few steps.  Tests must leave it as it is."""
    jax.config.update("jax_disable_most_optimizations", True)  # a few steps are sooner run than optimised
    try:
        result = jhpt.train(preset, out=out, overrides=tiny_overrides(corpus) | SMALL | overrides)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return result.run_dir


@pytest.fixture(scope="session")
def gpt(tmp_path_factory, corpus) -> Path:
    """A Llama-like run: rotary positions, grouped queries, an untied head."""
    shape = {"model.positions": "rotary", "model.num_kv_heads": 4, "model.tied": False, "model.vocab_size": 300}
    shape |= {"model.num_layers": 1}
    return trained(tmp_path_factory.mktemp("gpt") / "run", corpus, **shape)


@pytest.fixture(scope="session")
def bert(tmp_path_factory, corpus) -> Path:
    """A run of BERT that has been saved before its first step."""
    config = load_config("bert-tiny", tiny_overrides(corpus) | SMALL | {"model.num_layers": 1})
    run, setup = tmp_path_factory.mktemp("bert"), prepare(config)
    write_config(run, config)
    (run / "checkpoints").mkdir()
    with Checkpoints(run / "checkpoints", config.checkpoint) as checkpoints:
        checkpoints.save(
            0, jax.jit(partial(fresh_state, setup))(), make_record(config, setup.sources[0].cache.key, "float32")
        )
    return run


@pytest.fixture(scope="session")
def divided(tmp_path_factory, corpus) -> Path:
    """A run under tensor 2 x pipe 2, with parameters in bfloat16."""
    plan = {"parallel.tensor": 2, "parallel.pipe": 2, "parallel.micro_batches": 2, "model.positions": "rotary"}
    weights = {"optimizer.weights": "bfloat16_kahan"}
    return trained(tmp_path_factory.mktemp("divided") / "run", corpus, **plan, **weights)


@pytest.fixture(scope="session")
def loaded(gpt) -> jhpt.Loaded:
    """`gpt` on one device."""
    return jhpt.load(gpt)
