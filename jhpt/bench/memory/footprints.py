"""Bytes of planned steps, predicted and as compiled for an H100 that is not attached."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jhpt.compiled.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Plan
from jhpt.planner.api import prepare
from jhpt.planner.cost.estimate import Estimate
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.compile import lower_step
from jhpt.training.setup import design_step, fitting_tokenizer

CLUSTER = "h100x1x1"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-large": ("bert-large", {}),
    "gpt2-1.5b": ("gpt2-1.5b", {}),
    "bert-4b": ("bert-large", {"model.num_layers": 50, "model.d_model": 2560, "model.num_heads": 32}),
    "gpt-6.7b": ("gpt-6.7b", {}),
    "gpt-13b": ("gpt-13b", {}),
}
"""Presets and changes of them: the planner's constants were counted in programs of these."""

_LONG = {"data.sequence_length": 4096, "model.max_length": 4096}

HELD_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-774m": ("gpt2-774m", {}),
    "gpt2-774m, 4,096 tokens": ("gpt2-774m", _LONG),
    "llama-8b": ("llama-8b", {}),
    "llama-8b, 4,096 tokens": ("llama-8b", _LONG),
    "bert-large, 4,096 tokens": ("bert-large", _LONG),
}
"""Models and lengths in whose programs nothing was counted."""

BUDGETS = (16 << 30, 24 << 30, 40 << 30, 80 << 30)
"""Bytes of the device that a plan may use."""

BATCHES = (8, 4, 2, 1)
"""Batches; the largest for which there is a plan is used."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a plan on the device and on its host.  plan: None: there is no plan for any batch."""

    model: str
    held_out: bool
    parameters: int
    budget: int
    batch: int
    plan: dict[str, Any] | None
    predicted: dict[str, float]
    device: float
    predicted_host: float
    host: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(sum(self.predicted.values()) / self.device - 1)


def footprints(models: Iterable[str], budgets: tuple[int, ...]) -> Iterator[Footprint]:
    """The footprint of every model in every budget.

    Raises:
      NotHere: a package that compiling needs is not installed.
    """
    for name in models:
        for budget in budgets:
            yield _footprint(name, budget)


def _footprint(name: str, budget: int) -> Footprint:
    preset, changes = (MODELS | HELD_OUT)[name]
    for batch in BATCHES:
        config = load_config(preset, changes | {"data.batch_size": batch, "parallel.micro_batches": 1})
        try:
            answer = prepare(config, cluster=CLUSTER, budget=budget).solve()
        except InputError:
            continue
        return _compiled(name, budget, config, answer.plan, answer.estimate)
    nothing: dict[str, float] = {}
    count = load_config(preset, changes).model.parameter_count().total
    return Footprint(
        model=name,
        held_out=name in HELD_OUT,
        parameters=count,
        budget=budget,
        batch=0,
        plan=None,
        predicted=nothing,
        device=0.0,
        predicted_host=0.0,
        host=0.0,
    )


def _compiled(name: str, budget: int, config: Config, plan: Plan, estimate: Estimate) -> Footprint:
    device, host = compiled_bytes(config, plan)
    (stage,) = estimate.stages
    return Footprint(
        model=name,
        held_out=name in HELD_OUT,
        parameters=config.model.parameter_count().total,
        budget=budget,
        batch=plan.batch,
        plan=plan.model_dump(mode="json", exclude_defaults=True),
        predicted=dict(stage.bytes),
        device=device,
        predicted_host=stage.total_host_bytes,
        host=host,
    )


def compiled_bytes(config: Config, plan: Plan) -> tuple[float, float]:
    """(arguments and temporaries on the device, arguments on the host) of the training step."""
    cluster = find_cluster(CLUSTER)
    devices, info = compile_only_devices(cluster), compile_only_info(cluster)
    design = design_step(config, plan, fitting_tokenizer(config), devices, info)
    analysis: Any = compiled_for(lower_step(design), compiler_options("gpu", plan)).memory_analysis()
    device = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    return float(device), float(analysis.host_argument_size_in_bytes)


def as_row(footprint: Footprint) -> dict[str, Any]:
    """The footprint as a row of a results file."""
    return {"kind": "bytes", **asdict(footprint)}
