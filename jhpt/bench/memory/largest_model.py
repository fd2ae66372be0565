"""The largest model that a machine can train, with and without CPU offload.

Each width of Brown et al. 2020 (arXiv 2005.14165, table 2.1) is made as deep as the planner still finds a plan for, and
the model with the most parameters wins.  Without CPU offload a parameter takes 18 bytes of a device: float32 weight and
moments, gradient, and the weight in 16 bits.  It takes 14 bytes where weights are rounded when they are used (ZeRO-3 on
one data rank) and the gradients of a single micro-batch stay in 16 bits, and fewer where weights or moments are stored
in low precision.  With CPU offload it takes 16 bytes of the host, or 12 where gradients are consumed in the backward
pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
"""Number of attention heads for each width."""

DEEPEST = 512
"""Most layers that are tried."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """A model, a plan that trains it, and what that costs."""

    config: Config
    plan: Plan
    estimate: Estimate

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.config.model.parameter_count().total


def largest_trainable(
    cluster: Cluster,
    offload: tuple[OffloadKind | None, ...],
    *,
    zero: Zero = 0,
    update_in_backward: bool = False,
    optimizer: Mapping[str, str] = MappingProxyType({}),
    batch: int = 8,
    tokens: int = 1024,
) -> Largest | None:
    """The GPT with the most parameters for which there is a plan; None if even one block does not fit.

    Args:
      cluster: its memory is what plans may use (`jhpt.planner.api.capped`).
      offload: what may be offloaded to the host; (None,): nothing.
      zero: ZeRO level of plans without offload.
      update_in_backward: blocks are updated in the backward pass; gradients are clipped by the previous step's norm.
      optimizer: settings of the section optimizer.
      batch, tokens: samples per step, and tokens per sample.
    """
    settings: dict[str, Any] = {"data.sequence_length": tokens, "model.max_length": tokens, "data.batch_size": batch}
    settings |= {"optimizer.clip": "previous"} if update_in_backward else {}
    settings |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    search_request = request(
        batch, offload=offload, zero=(zero if None in offload else 0,), update_in_backward=update_in_backward
    )
    candidates = [model for width in WIDTHS if (model := _deepest(width, cluster, search_request, settings))]
    return max(candidates, key=lambda model: model.parameters, default=None)


def _deepest(width: int, cluster: Cluster, search_request: Request, settings: Mapping[str, Any]) -> Largest | None:
    """The deepest model of this width, by bisection: a deeper model needs more memory."""

    def attempt(layers: int) -> Largest | None:
        shape = {"model.num_layers": layers, "model.d_model": width, "model.num_heads": WIDTHS[width]}
        config = load_config("gpt2-1.5b", {**shape, **settings})
        model = CostModel(analytic_profile(config, cluster.nodes[0].device), cluster)
        incumbent = search(search_request, model, "spmd") if None in search_request.offload else Incumbent()
        search_offloaded(search_request, model, incumbent)
        if incumbent.plan is None:
            return None
        return Largest(config=config, plan=incumbent.plan, estimate=price(incumbent.plan, model))

    best, low, high = attempt(1), 1, DEEPEST
    while best and high - low > 1:
        middle = (low + high) // 2
        if larger := attempt(middle):
            best, low = larger, middle
        else:
            high = middle
    return best
