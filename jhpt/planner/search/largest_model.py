"""The largest model that fits a machine, with blocks on the host and without.

Of the widths of Brown et al. 2020 (arXiv 2005.14165, table 2.1) each is made as deep as the planner finds a plan for;
the most parameters count.  Without blocks on the host a parameter takes 18 bytes of a device (float32 weight and
moments, gradient, the weight in 16 bits), or 14 where weights are rounded as they are used (ZeRO-3 over the one rank)
and gradients of the one micro-batch stay in 16 bits; with blocks on the host 16 bytes of the host, or 12 where a
gradient is used up at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jhpt.core.cluster import Cluster
from jhpt.core.config import Config
from jhpt.core.load import load_config
from jhpt.core.plan import OffloadKind, Plan, Zero
from jhpt.planner.cost.estimate import Estimate, price
from jhpt.planner.cost.model import CostModel
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.search.offload import search_offloaded
from jhpt.planner.search.request import Incumbent, Request, request
from jhpt.planner.search.solve import search

WIDTHS = {1536: 16, 2048: 16, 2560: 32, 4096: 32, 5120: 40}
"""Heads by width."""

DEEPEST = 512


@dataclass(frozen=True, kw_only=True)
class Largest:
    """A model, a plan that trains it, and what that costs."""

    config: Config
    plan: Plan
    estimate: Estimate

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.config.model.parameter_count().total


def largest_trainable(
    cluster: Cluster,
    offload: tuple[OffloadKind | None, ...],
    *,
    zero: Zero = 0,
    update_in_backward: bool = False,
    batch: int = 8,
    tokens: int = 1024,
) -> Largest | None:
    """The GPT with most parameters for which there is a plan; None: there is none even with one block.

    Args:
      cluster: its memory is what may be used, as `front.capped` says.
      offload: what may live on the host; (None,): nothing.
      zero: level where nothing does.
      at_once: blocks step in the backward pass, by the last step's norm.
      batch: samples of so many tokens in a step.
    """
    settings: dict[str, Any] = {"data.sequence_length": tokens, "model.max_length": tokens, "data.batch_size": batch}
    settings |= {"optimizer.clip": "previous"} if update_in_backward else {}
    asked = request(
        batch, offload=offload, zero=(zero if None in offload else 0,), update_in_backward=update_in_backward
    )
    found = [one for width in WIDTHS if (one := _deepest(width, cluster, asked, settings))]
    return max(found, key=lambda one: one.parameters, default=None)


def _deepest(width: int, cluster: Cluster, asked: Request, settings: Mapping[str, Any]) -> Largest | None:
    """Bisected: a deeper model needs more."""

    def tried(layers: int) -> Largest | None:
        shape = {"model.num_layers": layers, "model.d_model": width, "model.num_heads": WIDTHS[width]}
        config = load_config("gpt2-1.5b", {**shape, **settings})
        model = CostModel(analytic_profile(config, cluster.nodes[0].device), cluster)
        found = search(asked, model, "spmd") if None in asked.offload else Incumbent()
        search_offloaded(asked, model, found)
        return Largest(config=config, plan=found.plan, estimate=price(found.plan, model)) if found.plan else None

    best, low, high = tried(1), 1, DEEPEST
    while best and high - low > 1:
        middle = (low + high) // 2
        if one := tried(middle):
            best, low = one, middle
        else:
            high = middle
    return best
