"""What a step needs on any machine, and the changes of a configuration with which it needs less.

They come in the order of how little they change: those that compute the same (micro-batches, recomputation, ZeRO, fewer
replicas on one host, offload), a smaller batch, shorter sequences, a smaller preset.  Whether one is enough is for the
caller to find out, who knows the machine.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jhpt.core.cluster import Cluster, Device, Link, Node
from jhpt.core.config import Config
from jhpt.core.divisors import divisors
from jhpt.core.errors import InputError
from jhpt.core.families.family import ModelConfig
from jhpt.core.load import load_config
from jhpt.core.plan import Plan
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.presets import PRESETS
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.profiles.analytic import analytic_profile

SHORTEST = 64
"""Tokens; shorter sequences are not proposed."""

BYTES = 256
"""Token ids of raw bytes."""

STORED = ("optimizer", "weights in", "remainders", "moments in")
"""How the causes begin that are stored state and known exactly; the others are estimates."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Estimated bytes by cause: `device` on each device of the fullest stage, `host` on the fullest host."""

    device: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def least(self) -> float:
        """Bytes of a device that are needed for certain: the stored state, and half of what is estimated."""
        return sum(size * (1.0 if cause.startswith(STORED) else 0.5) for cause, size in self.device.items())


def needed(config: Config, plan: Plan, kind: str, dtype: str) -> Needed | None:
    """What a step of the plan needs on devices of this kind; None if the planner does not know such layers.

    kind: what the driver calls the device.  dtype: of computing.
    """
    device = Device(name=kind, peak_flops={dtype: 1.0}, memory=1.0, memory_bandwidth=1.0)
    link = Link(bandwidth=1.0, latency=0.0)
    node = Node(device=device, devices=plan.devices, inside=link, host=link, host_memory=1.0)
    try:
        profile = analytic_profile(config, device, dtype)
        stages = evaluate(plan, profile, Cluster(name="here", nodes=(node,), network=link)).stages
    except InputError:
        return None
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    return Needed(
        device=fullest.bytes, host=max((stage.host_bytes for stage in stages), key=lambda host: sum(host.values()))
    )


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """A configuration that needs less, laid out by hand.

    settings: what is changed, by dotted name.  preset: the one that takes the model's place.  same_results: whether it
    computes the same.
    """

    config: Config
    plan: Plan
    settings: Mapping[str, Any]
    same_results: bool
    preset: str | None = None

    @property
    def text(self) -> str:
        """What to set."""
        settings = " ".join(f"{name}={str(value).lower()}" for name, value in self.settings.items())
        return f"train the preset {self.preset} with {settings}" if self.preset else f"set {settings}"


def smaller(config: Config, devices: int, *, one_memory: bool) -> Iterator[Smaller]:
    """What needs less memory than `config` does on so many devices, the least change first.

    one_memory: whether the devices share the memory of one host, so that fewer replicas need less.
    """
    by_hand = {"parallel.auto": False} if config.parallel.auto else {}
    for settings in _same_results(config, devices, one_memory=one_memory):
        yield from _laid_out(config, by_hand | settings, devices, same_results=True)
    for settings in _other_results(config, devices, one_memory=one_memory):
        yield from _laid_out(config, by_hand | settings, devices, same_results=False)
    kept = {"model.vocab_size": config.model.vocab, "data.tokenizer": config.data.tokenizer}
    for preset in _smaller_presets(config):
        settings = _least(load_config(preset), devices, one_memory=one_memory)
        for one in _laid_out(load_config(preset, kept), settings, devices, same_results=False):
            yield Smaller(**vars(one) | {"preset": preset})


def _laid_out(config: Config, settings: Mapping[str, Any], devices: int, *, same_results: bool) -> Iterator[Smaller]:
    """The configuration with these settings; nothing if they contradict each other."""
    try:
        changed = load_config(config, settings)
        plan = plan_by_hand(changed, devices)
    except InputError:
        return
    yield Smaller(config=changed, plan=plan, settings=settings, same_results=same_results)


def _replicas(config: Config, devices: int) -> int:
    parallel = config.parallel
    return parallel.data or max(devices // (parallel.pipe * parallel.tensor), 1)


def _same_results(config: Config, devices: int, *, one_memory: bool) -> Iterator[dict[str, Any]]:
    replicas, now = _replicas(config, devices), config.parallel.micro_batches
    each = config.data.batch_size // replicas
    more: list[dict[str, Any]] = [{"parallel.micro_batches": count} for count in divisors(each) if count > now]
    memory = config.memory
    recomputed = [] if memory.recompute == "full" and memory.recompute_blocks is None else [_all_recomputed(config)]
    levels: list[dict[str, Any]] = [{"parallel.zero": zero} for zero in (1, 2, 3) if zero > config.parallel.zero]
    levels = levels if replicas > 1 else []
    yield from more
    yield from recomputed
    yield from (first | second for first, second in itertools.product(recomputed, more))
    yield from levels
    least: dict[str, Any] = {**(recomputed or [{}])[0], **(more or [{}])[-1]}
    yield from (level | count for level, count in itertools.product(levels, [{}, *more]))
    yield from (level | least for level in levels)
    if one_memory:
        for fewer in reversed(divisors(replicas)[:-1]):
            shared: dict[str, Any] = {"parallel.data": fewer}
            yield shared | {"parallel.micro_batches": now * (replicas // fewer)}
            yield shared | least | {"parallel.micro_batches": config.data.batch_size // fewer}
    if config.memory.offload not in ("both",):
        yield {"memory.offload": "both"}
        yield {"memory.offload": "both"} | least


def _all_recomputed(config: Config) -> dict[str, Any]:
    """The settings with which every block saves its input alone."""
    some = config.memory.recompute_blocks is not None
    return {"memory.recompute": "full"} | ({"memory.recompute_blocks": None} if some else {})


def _least(config: Config, devices: int, *, one_memory: bool) -> dict[str, Any]:
    """The settings with which a step needs least, whatever the batch."""
    replicas = 1 if one_memory else _replicas(config, devices)
    settings: dict[str, Any] = {"parallel.data": 1} if one_memory and _replicas(config, devices) > 1 else {}
    return settings | {
        **_all_recomputed(config),
        "parallel.micro_batches": max(config.data.batch_size // replicas, 1),
    }


def _other_results(config: Config, devices: int, *, one_memory: bool) -> Iterator[dict[str, Any]]:
    least, batch = _least(config, devices, one_memory=one_memory), config.data.batch_size
    if config.data.tokenizer == "bytes" and config.model.vocab > BYTES:
        yield {"model.vocab_size": BYTES}
    for size in (batch >> power for power in range(1, batch.bit_length())):
        count = least["parallel.micro_batches"] * size // batch
        if count:
            yield {"data.batch_size": size} | least | {"parallel.micro_batches": count}
    length = config.data.sequence_length
    while (length := length // 2) >= SHORTEST:
        yield {"data.sequence_length": length} | least


def _smaller_presets(config: Config) -> list[str]:
    """Presets of the same family that have fewer parameters with as many token ids, the largest first."""

    def model_of(preset: str) -> ModelConfig:
        return load_config(preset, {"model.vocab_size": config.model.vocab}).model

    models = {name: model for name in PRESETS if (model := model_of(name)).family == config.model.family}
    counts = {name: model.parameter_count().total for name, model in models.items()}
    fewer = (name for name, count in counts.items() if count < config.model.parameter_count().total)
    return sorted(fewer, key=lambda name: -counts[name])
