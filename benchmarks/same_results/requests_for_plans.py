"""Requests to the planner: models x clusters, single settings, random settings, and requests that are refused.

All are in the names of the old tree; `renamed` translates them.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

Options = Mapping[str, str]

PRESETS = (
    "gpt-tiny",
    "gpt2-124m",
    "gpt2-350m",
    "gpt2-774m",
    "gpt2-1.5b",
    "gpt-6.7b",
    "gpt-13b",
    "llama-8b",
    "bert-tiny",
    "bert-base",
    "bert-large",
)
NETWORKS = ("vgg16", "resnet50", "gnmt")
CLUSTERS = ("h100x1x1", "a100x4x1", "v100x4x2-10gbe", "h100pciex2x4-25gbe")
MIXED = "mixed.json"
"""A cluster of two kinds of nodes, which the recording writes."""

CASES = (
    ("gpt2-350m", "a100x4x1"),
    ("gpt2-1.5b", "v100x4x1"),
    ("bert-large", "v100x2x2-10gbe"),
    ("llama-8b", "h100x8x1"),
    ("gpt-6.7b", "h100x1x1"),
)
"""The models and clusters on which every setting is tried on its own."""

SETTINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("memory.offload", ("off", "auto", "parameters", "optimizer", "both")),
    ("memory.recompute", ("auto", "none", "full", "qkv", "mlp_hidden,qkv", "attention_out")),
    ("memory.budget_bytes", ("8GiB", "24GiB", "60e9")),
    ("memory.host_budget_bytes", ("64GiB", "1e12")),
    ("parallel.compression", ("off", "auto")),
    ("parallel.compression.bits", ("8", "4")),
    ("parallel.compression.tokens", ("0.3",)),
    ("parallel.gradient_compression", ("quantize", "topk")),
    ("optimizer.clip", ("global", "previous", "layer")),
    ("optimizer.weights", ("bfloat16", "bfloat16_kahan", "bfloat16_stochastic")),
    ("optimizer.moments", ("int8",)),
    ("model.matmul_dtype", ("float8",)),
    ("model.dtype", ("float32",)),
    ("data.batch_size", ("4", "24", "128")),
    ("data.sequence_length", ("128",)),
)

FLAGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("microbatches", ("1", "4")),
    ("schedule", ("gpipe", "1f1b", "eager-1f1b", "interleaved")),
    ("space", ("general",)),
    ("budget", ("30GB",)),
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One request.  settings: of the configuration.  flags: of `jhpt plan`.  function: call `jhpt.plan` instead."""

    source: str | None
    settings: Options = field(default_factory=dict)
    flags: Options = field(default_factory=dict)
    function: bool = False

    @property
    def name(self) -> str:
        """The name of the request: the command line."""
        words = [self.source or "", *(f"--{key} {value}" for key, value in {**self.flags, **self.settings}.items())]
        return ("jhpt.plan: " if self.function else "") + " ".join(words)


def plan_requests() -> list[PlanRequest]:
    """All requests, each once."""
    requests = [
        *every_model(),
        *networks(),
        *single_settings(),
        *offloaded(),
        *general(),
        *large(),
        *at_random(),
        *refused(),
        *by_function(),
    ]
    return list({each.name: each for each in requests}.values())


def every_model() -> list[PlanRequest]:
    """Presets on clusters from one device to eight."""
    return [ask(model, cluster) for model in PRESETS for cluster in CLUSTERS]


def networks() -> list[PlanRequest]:
    """Classic networks, in both spaces."""
    return [
        ask(model, cluster, flags={"batch": batch, "space": space})
        for model in NETWORKS
        for cluster in ("v100x1x1", "v100x4x1", "v100x2x2-10gbe", "a100x2x4-100gbe")
        for batch in ("32", "128")
        for space in ("spmd", "general")
    ]


def single_settings() -> list[PlanRequest]:
    """One setting or flag at a time."""
    settings = [
        ask(model, cluster, settings={name: value})
        for model, cluster in CASES
        for name, values in SETTINGS
        for value in values
    ]
    flags = [
        ask(model, cluster, flags={name: value})
        for model, cluster in CASES
        for name, values in FLAGS
        for value in values
    ]
    return settings + flags


def offloaded() -> list[PlanRequest]:
    """Models larger than their devices: CPU offload, gradient clipping, and recomputation."""
    return [
        ask(
            model,
            "h100x1x1",
            settings={
                "memory.offload": offload,
                "optimizer.clip": clip,
                "memory.recompute": recompute,
                "data.batch_size": "8",
            },
            flags={"budget": budget},
        )
        for model, budget in (("gpt2-1.5b", "16GiB"), ("llama-8b", "48GiB"))
        for offload in ("auto", "optimizer", "both")
        for clip in ("global", "layer")
        for recompute in ("auto", "full", "qkv,attention_out")
    ]


def general() -> list[PlanRequest]:
    """Stages of any size, on equal and on mixed nodes."""
    models = ("gpt-tiny", "gpt2-124m", "bert-base", "bert-large", "gpt2-774m")
    clusters = ("v100x4x1", "a100x2x2-10gbe", MIXED)
    return [
        ask(model, cluster, settings=settings, flags={"space": "general", "batch": "16"})
        for model in models
        for cluster in clusters
        for settings in ({}, {"memory.recompute": "full"}, {"memory.recompute": "none", "optimizer.moments": "int8"})
    ] + [
        ask(model, MIXED, flags={"batch": "32", "space": space}) for model in NETWORKS for space in ("spmd", "general")
    ]


def large() -> list[PlanRequest]:
    """A few requests for many devices, which take longest."""
    return [
        ask("gpt-13b", "h100x8x8"),
        ask("llama-8b", "a100x4x4-25gbe", flags={"batch": "64"}),
        ask("bert-large", "a100x8x8"),
        ask("gpt2-1.5b", "v100x4x4-10gbe"),
        ask("gpt-6.7b", "h200x8x4", settings={"memory.recompute": "full"}),
        ask("gpt-13b", "b200x8x2"),
        ask("gpt2-774m", "a10040x8x4", settings={"memory.budget_bytes": "20GiB"}),
        ask("vgg16", "v100x8x8", flags={"batch": "512"}),
    ]


def at_random(count: int = 110) -> list[PlanRequest]:
    """Three settings in each request, drawn from a fixed seed."""
    rng = random.Random("settings of plans")
    models = ("gpt-tiny", "gpt2-124m", "gpt2-350m", "gpt2-774m", "bert-base", "llama-8b")
    clusters = ("h100x1x1", "h100x4x1", "v100x2x2-10gbe", "a100x4x1", "a100pciex4x1", "h100pciex2x2-25gbe")
    requests = []
    for _ in range(count):
        chosen = {name: rng.choice(values) for name, values in rng.sample(SETTINGS, 3)}
        flags = {name: rng.choice(values) for name, values in rng.sample(FLAGS, rng.choice((0, 0, 1)))}
        requests.append(ask(rng.choice(models), rng.choice(clusters), settings=chosen, flags=flags))
    return requests


def refused() -> list[PlanRequest]:
    """Requests that are refused."""
    return [
        ask("gpt-13b", "v100x1x1", settings={"memory.offload": "off"}),
        ask("gpt-13b", "v100x1x1", flags={"budget": "1GiB"}),
        ask("llama-8b", "a100x2x1", settings={"memory.offload": "off", "memory.recompute": "none"}),
        ask("gpt2-124m", "a100x4x1", flags={"batch": "7", "microbatches": "3"}),
        ask("gpt2-124m", "a100x4x1", flags={"batch": "0"}),
        ask("gpt2-124m", "a100x16x1"),
        ask("gpt2-124m", "a101x8x1"),
        ask("gpt2-124m", "a100x8x1-11gbe"),
        ask("gpt2-125m", "a100x8x1"),
        ask("gpt2-124m", "nowhere.json"),
        ask("vgg16", "v100x4x1"),
        ask("vgg16", "v100x4x1", flags={"batch": "64", "microbatches": "5"}),
        ask("gpt2-124m", "a100x4x1", flags={"space": "general", "schedule": "interleaved"}),
        ask("gpt2-124m", "a100x4x1", flags={"space": "general"}, settings={"memory.offload": "both"}),
        ask("gpt2-124m", "v100x4x1", settings={"model.matmul_dtype": "float8"}),
        ask("gpt2-124m", "a100x4x1", settings={"model.dtype": "float8_e4m3"}),
        ask("gpt2-124m", "a100x4x1", settings={"memory.offload": "both", "optimizer.moments": "int8"}),
        ask("gpt2-124m", "a100x4x1", settings={"memory.recompute": "qkv,qkv"}),
        ask("gpt2-124m", "a100x4x1", settings={"memory.recompute": "residual_in"}),
        ask("gpt2-124m", "a100x4x1", settings={"memory.recompute": "nothing_like_it"}),
        ask("gpt2-124m", "a100x4x1", settings={"memory.budget_bytes": "many"}),
        ask("gpt2-124m", "a100x4x1", flags={"budget": "-3GiB"}),
        ask("gpt2-124m", "a100x4x1", settings={"model.num_heads": "7"}),
        ask("gpt2-124m", "a100x4x1", settings={"data.sequence_length": "4096"}),
        ask("gpt2-124m", "a100x4x1", settings={"parallel.gradient_compression.share": "0.2"}),
        ask("gpt2-124m", "a100x4x1", settings={"parallel.compression.tokens": "1.5"}),
        ask("gpt2-124m", "a100x4x1", settings={"parallel.zero": "2"}),
        ask("gpt2-124m", "a100x4x1", settings={"optimizer.weights": "float16"}),
    ]


def by_function() -> list[PlanRequest]:
    """Requests through Python, which has its own code for settings and budgets."""
    settings: tuple[dict[str, str], ...] = (
        {},
        {"memory.recompute": "full"},
        {"memory.offload": "both"},
        {"parallel.compression.bits": "8"},
    )
    requests = [ask(model, cluster, settings=each) for model, cluster in CASES[:3] for each in settings]
    requests.append(ask("resnet50", "v100x4x1", flags={"batch": "64", "space": "general"}))
    requests.append(ask("gpt2-124m", MIXED, flags={"batch": "16", "microbatches": "4", "space": "general"}))
    return [
        PlanRequest(source=each.source, settings=each.settings, flags=each.flags, function=True) for each in requests
    ]


def ask(source: str, cluster: str, *, settings: Options | None = None, flags: Options | None = None) -> PlanRequest:
    """A request for a model on a cluster."""
    return PlanRequest(source=source, settings=settings or {}, flags={"cluster": cluster, **(flags or {})})
