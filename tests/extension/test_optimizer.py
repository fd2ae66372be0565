"""RMSprop as an optimizer, through the public registry alone."""

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


def rmsprop(config: OptimizerConfig) -> optax.GradientTransformation:
    """g / (sqrt(v) + eps), decoupled decay (Tieleman & Hinton 2012)."""
    return optax.chain(
        optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


register_optimizer("rmsprop", rmsprop, numbers=OptimizerNumbers(moments=1, settings=("b2", "eps")))


def test_it_trains(tiny, tmp_path):
    config = tiny(
        **{"optimizer.name": "rmsprop", "optimizer.learning_rate": 1e-3, "parallel.data": 1, "train.steps": 3}
    )
    result = jhpt.train(config, out=tmp_path / "run")
    losses = list(result.losses.values())
    assert result.step == 3 and losses[-1] < losses[0]


def test_the_planner_counts_one_moment():
    device = cluster_named("h100x8x1").nodes[0].device
    profiles = [
        analytic_profile(load_config("gpt2-124m", {"optimizer.name": name}), device) for name in ("adamw", "rmsprop")
    ]
    adamw, with_rmsprop = (profile.state_bytes for profile in profiles)
    assert (adamw, with_rmsprop) == (16.0, 12.0)  # weight, gradient and copy 8, moments of 4 bytes each
    assert profiles[1].update_seconds < profiles[0].update_seconds


@pytest.mark.parametrize(
    "setting, value", [("optimizer.moments", "int8"), ("memory.offload", "both"), ("optimizer.name", "rmspop")]
)
def test_what_it_cannot_do_is_refused(setting, value):
    with pytest.raises(InputError, match=rf"{setting}='?{value}.*use"):
        load_config("gpt-tiny", {"optimizer.name": "rmsprop", setting: value})
