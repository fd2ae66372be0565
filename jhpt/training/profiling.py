"""`jhpt profile`: the seconds of a model's layers and the rates of this machine, measured once and cached.

`jhpt.measure.profile` times layers; this module makes the training steps that it times, with the real objective, hooks,
optimizer and step, for models of few blocks.  Bytes and parameters come from `jhpt.planner.profiles.analytic`.
"""

import hashlib
import json
import platform
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from jhpt.core.amounts import gib
from jhpt.core.cluster import Cluster, Device, load_cluster
from jhpt.core.config import Config, OptimizerConfig, ParallelConfig
from jhpt.core.errors import InputError
from jhpt.core.families.text import TextConfig
from jhpt.core.folders import cache_folder
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.plausible import (
    cluster_faults,
    cluster_spreads,
    noisy,
    profile_faults,
    profile_spreads,
    spread_text,
)
from jhpt.core.profile import ModelProfile, load_profile
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.measure.probe import probe_cluster
from jhpt.measure.profile import Call, LayerSeconds, Shallow, depths, layer_seconds, predict_step, whole_seconds
from jhpt.measure.rank import rank_share, tensor_degrees
from jhpt.measure.repeated import note
from jhpt.models.attention import choose_attention
from jhpt.models.family import Model, Rows, Sums, TextModel, as_text, build
from jhpt.models.products import check_products
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.sharding.mesh import make_device_mesh
from jhpt.sharding.step import Execution
from jhpt.sharding.types import Params
from jhpt.training.clipping import Clipping
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.data.windows import check_documents, check_masked, check_words
from jhpt.training.optimizer import learning_rate, make_optimizer
from jhpt.training.parts import model_layout
from jhpt.training.runtime import configure_runtime, prepare_collectives
from jhpt.training.setup import compute_dtype, decided, execution, stored_weights
from jhpt.training.step import Gradients, TrainState, TrainStep, init_state, make_train_step
from jhpt.training.weights import Weights

MeasuredT = TypeVar("MeasuredT", ModelProfile, Cluster)

FORMAT = 2
"""Increased when the way of measuring changes."""

MOST_TENSOR = 8
"""Largest tensor degree that is profiled by default: the devices of one node."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The grid of a measurement: micro-batch sizes, tensor degrees, and the number of rounds."""

    batches: tuple[int, ...]
    tensors: tuple[int, ...]
    rounds: int

    def __post_init__(self) -> None:
        for name, values in (("batches", self.batches), ("tensors", self.tensors)):
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise InputError(f"{name} to profile must ascend from 1 or more, found {list(values)}")
        if self.tensors[0] != 1:
            raise InputError(f"tensors to profile must begin with 1, found {list(self.tensors)}")
        if self.rounds < 1:
            raise InputError(f"rounds={self.rounds}: measure at least once")


def default_grid(config: Config, quick: bool = False) -> Grid:
    """Micro-batches of 1, a quarter and all of a step's samples on one device; tensor degrees 1, 2, 4, 8."""
    most = config.data.batch_size // config.parallel.micro_batches
    quarter = max(most // 4, 1)
    if quick:
        return Grid(batches=tuple(sorted({quarter, most})), tensors=(1,), rounds=3)
    most_tensor = MOST_TENSOR if config.model.alike else 1
    tensors = tuple(t for t in tensor_degrees(config.model) if t <= most_tensor and t & (t - 1) == 0)
    return Grid(batches=tuple(sorted({1, quarter, most})), tensors=tensors, rounds=7)


def planning_grid(config: Config, devices: int) -> Grid:
    """The grid that a plan for this many devices needs, with few sizes and rounds, which take a fraction of the
    time."""
    quick = default_grid(config, quick=True)
    tensors = tuple(t for t in default_grid(config).tensors if t <= devices)
    return Grid(batches=quick.batches, tensors=tensors, rounds=quick.rounds)


def measure_layers(config: Config, grid: Grid, beside: Mapping[str, Call] | None = None) -> LayerSeconds:
    """The timings of the configured model's layers on the first local device.

    beside: other calls, timed in turn with them.

    Raises:
      InputError: a grid, tokenizer or attention kernel that cannot work, or a model that the device cannot hold.
    """
    for tensor in grid.tensors:
        rank_share(config.model, tensor)  # refuses
    builder = _Builder(config)
    if not config.model.alike:
        whole = partial(builder, config.model.num_layers, 1)
        return whole_seconds(whole, partial(_shares, config), grid.batches, grid.rounds, beside)
    return layer_seconds(builder, config.model.num_layers, grid.batches, grid.tensors, grid.rounds, beside)


def _nominal(config: Config) -> ModelProfile:
    """The analytic profile for a device of no particular rates, which counts FLOP."""
    device = device_info()
    dtype = compute_dtype(config, device).name
    nominal = Device(name=device.kind, peak_flops={dtype: 1.0}, memory=1.0, memory_bandwidth=1.0)
    return analytic_profile(config, nominal, dtype)


def _shares(config: Config, batch: int) -> dict[str, tuple[float, float]]:
    """Relative to each other, what every kind of layer takes at this batch."""
    return {name: kind.seconds(batch, 1) for name, kind in _nominal(config).kinds.items()}


def assemble(config: Config, grid: Grid, seconds: LayerSeconds) -> ModelProfile:
    """The analytic profile with measured seconds."""
    profile = _nominal(config)
    measured = profile.model_copy(
        update={
            "device": device_info().kind,
            "update_seconds": seconds.update,
            "update_spread": seconds.update_spread,
            "kinds": {
                name: kind.model_copy(update={"timings": seconds.timings[name]}) for name, kind in profile.kinds.items()
            },
        }
    )
    rounds = max(timing.repetitions or grid.rounds for row in seconds.timings.values() for timing in row)
    models = "whole training steps, divided among layers by their FLOP"
    if config.model.alike:
        models = "training steps of {} and {} blocks".format(*depths(config.model.num_layers))
    source = [
        f"measured: {models}, {rounds} rounds",
        spread_text(profile_spreads(measured)),
        f"jax {jax.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    ]
    return measured.model_copy(update={"source": ", ".join(filter(None, source))})


class _Builder:
    """Makes shallow models; those with the same tensor degree share their training state between batch sizes."""

    def __init__(self, config: Config) -> None:
        self.config, self.device = config, device_info()
        check_products(config.model, self.device.platform, self.device.capability)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        if config.data.packing != "stream":
            check_documents(self.tokenizer, config.data.packing)
        if config.data.whole_words:
            check_words(self.tokenizer)
        if config.model.masked:
            check_masked(self.tokenizer, config.data.sequence_length, masks=not config.model.classifies)
        self.dtype = compute_dtype(config, self.device)
        self.optimizer = make_optimizer(config.optimizer)
        self.tensor = 0
        self.running: dict[int, _Running] = {}

    def __call__(self, depth: int, tensor: int, batch: int) -> Shallow | None:
        if tensor != self.tensor:
            self.tensor, self.running = tensor, {}
        if depth not in self.running:
            model = self._model(depth, tensor)
            self.running[depth] = _Running(model, self.optimizer, stored_weights(self.config.optimizer.weights, model))
        return self._shallow(self.running[depth], batch)

    def _model(self, depth: int, tensor: int) -> Model:
        share = rank_share(self.config.model, tensor)
        share = share.model_copy(update={"num_layers": depth}) if share.alike else share
        attention = choose_attention(share, self.device.platform, self.dtype, self.device.capability, self.config.data)
        return build(share, dtype=self.dtype, implementation=attention.implementation)

    def _execution(self, model: Model, batch: int) -> Execution:
        """One device's step at this batch."""
        data = self.config.data.model_copy(update={"batch_size": batch})
        config = self.config.model_copy(update={"model": model.config, "data": data, "parallel": ParallelConfig()})
        plan = plan_by_hand(config, 1)
        grid = make_device_mesh(plan, jax.local_devices()[:1])
        return execution(config, model, model_layout(model, plan, grid), self.tokenizer, train=True)

    def _shallow(self, running: "_Running", batch: int) -> Shallow | None:
        config, model = self.config, running.model
        program = self._execution(model, batch)
        length = config.model.row_length(config.data.sequence_length)
        text = isinstance(model.config, TextConfig)
        ids = np.random.default_rng(0).integers(0, model.config.vocab if text else 2, (batch, length), np.int32)
        windows, key = jnp.asarray(ids), jax.random.key(0)

        train = self._step(lambda params, windows, key: program.gradients(params, Rows(windows), key), running.weights)
        step = jax.jit(train, donate_argnums=0).lower(running.state, windows).compile()
        if not _fits(step, self.device):
            return None
        forward = jax.jit(lambda params, windows: program.sums(params, Rows(windows), key))
        programs = _embedding_programs(as_text(model), windows[:, : config.data.sequence_length]) if text else None
        embedding, embedding_both = programs or (forward, forward)  # of unlike layers the whole alone is timed
        update = jax.jit(self._step(_given_gradients, running.weights), donate_argnums=0)
        return Shallow(
            parameters=running.parameters,
            forward=lambda: forward(running.state.params, windows),
            step=lambda: running.step(step, windows),
            embedding=lambda: embedding(running.state.params["embedding"]),
            embedding_both=lambda: embedding_both(running.state.params["embedding"]),
            update=lambda: running.step(update, running.gradients),
        )

    def _step(self, gradients: Gradients, weights: Weights) -> TrainStep:
        config = self.config
        rate = partial(learning_rate, config.optimizer, config.train.steps)
        return make_train_step(
            gradients,
            self.optimizer,
            rate,
            seed=config.seed,
            max_bad_steps=config.train.max_bad_steps,
            clip=Clipping(limit=config.optimizer.clip_norm),
            weights=weights,
        )


class _Running:
    """A model in training: every step takes the state and replaces it."""

    def __init__(self, model: Model, optimizer: optax.GradientTransformation, weights: Weights) -> None:
        self.model, self.weights = model, weights
        fresh = jax.jit(lambda key: init_state(model.init(key), optimizer, weights=weights))
        self.state: TrainState = fresh(jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        self._gradients: jax.Array | None = None

    @property
    def gradients(self) -> jax.Array:
        """Gradients of all parameters, concatenated [N]."""
        if self._gradients is None:
            self._gradients = 1e-3 * jax.random.normal(jax.random.key(1), (self.parameters,))
        return self._gradients

    def step(self, program: Callable[..., Any], batch: jax.Array) -> Any:
        """Takes one step; returns its metrics."""
        self.state, metrics = program(self.state, batch)
        return metrics


def _given_gradients(params: Params, gradients: jax.Array, key: jax.Array) -> tuple[Any, Sums]:
    """Returns its second argument, the batch of a step, as the gradient, so that only the update remains."""
    leaves, tree = jax.tree.flatten(params)
    stops = np.cumsum([leaf.size for leaf in leaves])
    pieces = [gradients[stop - leaf.size : stop].reshape(leaf.shape) for leaf, stop in zip(leaves, stops, strict=True)]
    return jax.tree.unflatten(tree, pieces), Sums(jnp.zeros(()), jnp.zeros(()), jnp.ones(()))


def _embedding_programs(model: TextModel, tokens: jax.Array) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward, and forward and backward, of the embedding."""
    keys = jax.random.split(jax.random.key(0), len(tokens)) if model.config.dropout else None

    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        return model.embed({"embedding": params}, tokens, keys=keys)

    def both(params: Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
        x, backward = jax.vjp(lambda params: forward(params, tokens), params)
        return x, backward(x)

    programs = jax.jit(forward), jax.jit(both)
    return tuple(lambda params, program=program: program(params, tokens) for program in programs)  # type: ignore[return-value]


def _fits(program: Any, device: DeviceInfo) -> bool:
    analysis = program.memory_analysis()
    if analysis is None or device.memory is None:
        return True
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes <= device.memory


def cached_profile(config: Config, grid: Grid, again: bool = False) -> tuple[ModelProfile, Path, bool]:
    """(profile, its file in the cache folder, whether it was there).

    A file that is corrupt, or holds what cannot be right, is measured again.

    Raises:
      InputError: what is measured cannot be right, time and again.  The cache stays as it is.
    """
    device = device_info()
    model = {
        "model": config.model.model_dump(mode="json"),
        "sequence_length": config.data.sequence_length,
        "mask_fraction": config.data.mask_fraction,
        "optimizer": [
            config.optimizer.clip_norm is None,
            bool(config.optimizer.z_loss),
            *_low_precision(config.optimizer),
        ],
        "dtype": compute_dtype(config, device).name,
        "grid": [grid.batches, grid.tensors, grid.rounds],
    }
    if config.data.packing != "stream":
        model["packing"] = config.data.packing
    path = _cache_path("profiles", model, "profile.json")
    if (known := _known(path, load_profile, profile_faults, again)) is not None:
        return known.model_copy(update={"name": config.name}), path, True
    profile = assemble(config, grid, measure_layers(config, grid))
    _store(profile, path)
    return profile, path, False


def _low_precision(optimizer: OptimizerConfig) -> list[str]:
    return [optimizer.weights, optimizer.moments] if optimizer.low_precision else []


def cached_cluster(rounds: int, again: bool = False) -> tuple[Cluster, Path, bool]:
    """(this machine, its file in the cache folder, whether it was there), as `cached_profile`."""
    path = _cache_path("clusters", {"devices": jax.local_device_count(), "rounds": rounds}, "cluster.json")
    if (known := _known(path, load_cluster, cluster_faults, again)) is not None:
        return known, path, True
    cluster = probe_cluster(rounds=rounds)
    _store(cluster, path)
    return cluster, path, False


def _known(
    path: Path, load: Callable[[Path], MeasuredT], faults: Callable[[MeasuredT], list[str]], again: bool
) -> MeasuredT | None:
    """What a file of the cache holds; None, with a word about it, if that is of no use."""
    if again or not path.is_file():
        return None
    try:
        measured = load(path)
        found = faults(measured)
    except InputError as error:
        found = str(error).splitlines()
    if not found:
        return measured
    note(f"measured again, because the cache is of no use: {path}: {'; '.join(found)}")
    return None


def _cache_path(folder: str, measured: Mapping[str, Any], name: str) -> Path:
    """A path that is different for everything that a measurement depends on, including this machine."""
    everything = [FORMAT, dict(measured), device_info().kind, platform.node(), jax.__version__]
    key = hashlib.blake2b(json.dumps(everything).encode(), digest_size=16).hexdigest()
    return cache_folder() / folder / key / name


def _store(measured: ModelProfile | Cluster, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent} cannot be made: {error}; set XDG_CACHE_HOME to a writable folder") from None
    # Processes of one host may measure the same at the same time.
    partial_path = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    measured.save(partial_path)
    partial_path.replace(path)


def profile_command(
    config: Config, out: str | None = None, cluster_out: str | None = None, quick: bool = False, again: bool = False
) -> int:
    """Measures the model and the machine, or reads both from the cache; prints them and writes the requested files.

    Raises:
      InputError: a file cannot be written, or `decided` or `measure_layers` refuses the configuration.
    """
    for file in filter(None, (out, cluster_out)):
        if not Path(file).parent.is_dir() or Path(file).is_dir():
            raise InputError(f"{file} cannot be written: give a file in an existing folder")
    config = decided(config)
    configure_runtime()
    prepare_collectives()
    grid = default_grid(config, quick)
    profile, profile_path, known = cached_profile(config, grid, again)
    cluster, cluster_path, known_cluster = cached_cluster(grid.rounds, again)
    if out:
        profile.save(out)
    if cluster_out:
        cluster.save(cluster_out)
    console = Console()
    console.print(_profile_table(profile))
    console.print(f"one step on one device: {predict_step(profile, config) * 1e3:.1f} ms predicted")
    console.print(_cluster_table(cluster))
    for line in _spread_lines(profile, cluster):
        console.print(line, markup=False, soft_wrap=True)
    for path, cached in ((out or profile_path, known), (cluster_out or cluster_path, known_cluster)):
        console.print(f"{path}{'  (from the cache; --again measures again)' if cached else ''}", soft_wrap=True)
    return 0


def _spread_lines(profile: ModelProfile, cluster: Cluster) -> list[str]:
    """How far the repetitions vary, and what to do if that is far."""
    layers, machine = profile_spreads(profile), cluster_spreads(cluster)
    texts = {"layers": spread_text(layers), "machine": spread_text(machine)}
    lines = [f"{name}: {text}" for name, text in texts.items() if text]
    if noisy(layers.values()) or noisy(machine.values()):
        lines.append("noisy: plans made from this may be off as far; stop other programs and measure with --again")
    return lines


def _profile_table(profile: ModelProfile) -> Table:
    table = Table(title=f"{profile.name} on {profile.device}; {profile.source}", title_justify="left")
    table.add_column("layer")
    for column in ("how many", "parameters", "tensor", "batch", "forward ms", "backward ms"):
        table.add_column(column, justify="right")
    for name, kind in profile.kinds.items():
        for timing in kind.timings:
            for batch, forward, backward in zip(timing.batches, timing.forward, timing.backward, strict=True):
                first = timing is kind.timings[0] and batch == timing.batches[0]
                about = (name, str(profile.layers.count(name)), f"{kind.parameters:,}") if first else ("", "", "")
                figures = (f"{batch:g}", f"{forward * 1e3:.3f}", f"{backward * 1e3:.3f}")
                table.add_row(*about, str(timing.tensor), *figures)
    return table


def _cluster_table(cluster: Cluster) -> Table:
    node = cluster.nodes[0]
    table = Table("what", "measured", "how", title=cluster.name, title_justify="left")
    rows = {
        f"peak_flops.{dtype}": f"{peak / 1e12:.3g} TFLOP/s" for dtype, peak in sorted(node.device.peak_flops.items())
    }
    rows |= {
        "memory": gib(node.device.memory),
        "memory_bandwidth": f"{node.device.memory_bandwidth / 1e9:.3g} GB/s",
        "host": f"{node.host.bandwidth / 1e9:.3g} GB/s, {node.host.latency * 1e6:.3g} us",
        "inside": f"{node.inside.bandwidth / 1e9:.3g} GB/s, {node.inside.latency * 1e6:.3g} us",
    }
    for name, figure in rows.items():
        table.add_row(name, figure, cluster.sources.get(name.split(".")[0], ""))
    return table
