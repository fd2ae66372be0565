"""Lion as an optimizer, through the public registry alone."""

import optax
import pytest

import jhpt
from jhpt.core.catalogue import cluster_named
from jhpt.core.config import OptimizerConfig
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.optimizers import OptimizerNumbers
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training.optimizer import decay_mask, register_optimizer


def lion(config: OptimizerConfig) -> optax.GradientTransformation:
    """sign(b1 m + (1 - b1) g), decoupled decay (Chen et al. 2023, arXiv 2302.06675)."""
    return optax.chain(
        optax.scale_by_lion(config.b1, config.b2),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


register_optimizer("lion", lion, numbers=OptimizerNumbers(moments=1))


def test_it_trains(tiny, tmp_path):
    config = tiny(**{"optimizer.name": "lion", "optimizer.learning_rate": 1e-3, "parallel.data": 1, "train.steps": 3})
    result = jhpt.train(config, out=tmp_path / "run")
    losses = list(result.losses.values())
    assert result.step == 3 and losses[-1] < losses[0]


def test_the_planner_counts_one_moment():
    device = cluster_named("h100x8x1").nodes[0].device
    profiles = [
        analytic_profile(load_config("gpt2-124m", {"optimizer.name": name}), device) for name in ("adamw", "lion")
    ]
    adamw, with_lion = (profile.state_bytes for profile in profiles)
    assert (adamw, with_lion) == (16.0, 12.0)  # weight, gradient and copy 8, moments of 4 bytes each
    assert profiles[1].update_seconds < profiles[0].update_seconds


@pytest.mark.parametrize(
    "setting, value", [("optimizer.moments", "int8"), ("memory.offload", "both"), ("optimizer.name", "lino")]
)
def test_what_it_cannot_do_is_refused(setting, value):
    with pytest.raises(InputError, match=rf"{setting}='?{value}.*use"):
        load_config("gpt-tiny", {"optimizer.name": "lion", setting: value})
