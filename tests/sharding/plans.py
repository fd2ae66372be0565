"""Plans by hand, and setups that run them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.plan import Chunk, Plan, Run, Stage, runs_of
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import make_device_mesh
from jhpt.sharding.partition import path_name
from jhpt.training.data.batches import shuffled
from jhpt.training.setup import execution, stored_weights


def piped(
    layers: Sequence[int], stages: int, *, data=1, tensor=1, sample_chunks=1, batch=32, micro_batches=1, **settings
) -> Plan:
    """So many stages of data x tensor devices.  layers: of every chunk, in the order of the model."""
    edges, devices = [0, *itertools.accumulate(layers)], data * tensor

    def stage(number: int) -> Stage:
        parts = range(number, len(layers), stages)
        alike = {"tensor": tensor, "sample_chunks": sample_chunks}
        chunks = (Chunk(first=edges[part], runs=(Run(layers=layers[part], **alike),)) for part in parts)
        return Stage(device=number * devices, devices=devices, chunks=tuple(chunks))

    settings |= {"batch": batch, "micro_batches": micro_batches}
    return Plan(model="any", cluster="any", stages=tuple(map(stage, range(stages))), **settings)


def mixed(degrees: Sequence[int], devices=8, *, sample_chunks=None, batch=32, micro_batches=1, **settings) -> Plan:
    """One stage.  degrees, sample_chunks: of every layer, the two ends included."""
    stage = Stage(device=0, devices=devices, chunks=(Chunk(first=0, runs=runs_of(degrees, sample_chunks)),))
    settings |= {"batch": batch, "micro_batches": micro_batches}
    return Plan(model="any", cluster="any", stages=(stage,), **settings)


def spread(blocks: int, parts: int, shape: str = "even") -> list[int]:
    """Layers of so many chunks: `blocks` between two ends, the first chunks taking one more where they do not divide.

    shape: "bare entry" or "bare exit": that end has its chunk for itself.
    """
    bare = shape.startswith("bare")
    counts = [blocks // (parts - bare) + (part < blocks % (parts - bare)) for part in range(parts - bare)]
    counts = {"bare entry": [0, *counts], "bare exit": [*counts, 0]}.get(shape, counts)
    counts[0] += 1
    counts[-1] += 1
    return counts


def laid_out(setup, plan: Plan, **changes):
    """The setup of another plan.  changes: of how it is executed."""
    model = setup.config.model
    layout = Layout(
        plan=plan,
        device_mesh=make_device_mesh(plan, jax.devices()),
        num_layers=model.num_layers,
        alike=model.alike,
    )
    training, evaluation = (
        execution(setup.config, setup.model, layout, setup.tokenizer, train=train) for train in (True, False)
    )
    return replace(
        setup,
        layout=layout,
        training=replace(training, **changes),
        evaluation=replace(evaluation, **changes),
        weights=stored_weights(setup.config.optimizer.weights, setup.model, layout.stored),
    )


def random_params(setup, seed: int = 0):
    """The model's tree, every leaf random: zero biases and unit scales would hide mistakes."""
    shapes, rng = jax.eval_shape(setup.model.init, jax.random.key(0)), np.random.default_rng(seed)

    def leaf(path, shape):
        centre = 1.0 if path_name(path).endswith("scale") else 0.0
        return rng.normal(centre, 0.1, shape.shape).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def stored(setup, params):
    """The model's tree on the devices, as the plan stores it."""
    tree = on_host(setup.layout.stored(jax.tree.map(jnp.asarray, params)))
    return jax.device_put(tree, setup.layout.shardings(tree))


def batch(setup, size: int):
    """The first rows of the training text."""
    rows = shuffled(setup.train_windows, 0)
    return np.stack([rows[index] for index in range(size)])


def compiled(function, *arguments):
    """What the jitted function returns, on the host."""
    return on_host(jax.jit(function).lower(*arguments).compile()(*arguments))


def on_host(tree):
    """Leaves in numpy."""
    return jax.tree.map(np.asarray, tree)


def by_path(tree):
    """Float64 leaves by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in leaves}
