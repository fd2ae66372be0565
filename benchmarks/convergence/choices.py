"""Which tokens are sent in more bits: by importance, at random, or the least important, at equal bytes.

`jhpt bench convergence` runs these cells after its others; `python -m benchmarks.convergence.only_choices` runs them
alone.  All of them send 30 % of the tokens in 8 bits and the others in 4, but those that send all tokens in 4 or in 8
bits.  Runs have the preset's number of steps, of `BATCH` sequences instead of its 32, so that one takes minutes on one
core.

`attention` and `own` are rules of the product.  The two others exist here only, as controls:

    random    any tokens, other ones in every layer and step
    least     the tokens that receive least attention
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.convergence import cells as all_cells
from benchmarks.convergence.cells import COMPRESSION, HEADLINE, TENSOR, Cell
from jhpt.bench.results import Claim
from jhpt.core.compression import tokens_of
from jhpt.core.config import Compression
from jhpt.kernels.attention_importance import attention_importance
from jhpt.kernels.implementation import Implementation
from jhpt.kernels.token_topk import token_topk
from jhpt.sharding import operators

GROUP, PRESET = "choice", "gpt-tiny"
SEEDS = (0, 1, 2, 3, 4)
STEPS, BATCH, BATCHES = 800, 8, 160
"""Of the preset; sequences in a step; held-out batches of as many."""

RANDOM, LEAST = "random", "least"

KINDS: dict[str, tuple[Compression | None, str | None]] = {
    "30% at 8 bits by attention, the rest at 4": (HEADLINE.model_copy(update={"importance": "attention"}), None),
    "30% at 8 bits at random, the rest at 4": (HEADLINE.model_copy(update={"importance": "attention"}), RANDOM),
    "30% at 8 bits by least attention, the rest at 4": (HEADLINE.model_copy(update={"importance": "attention"}), LEAST),
    "30% at 8 bits by own size, the rest at 4": (HEADLINE.model_copy(update={"importance": "own"}), None),
    "all at 4 bits": (Compression(bits=4, steps=2), None),
    "nothing compressed": (None, None),
    "all at 8 bits": (Compression(bits=8, steps=2), None),
}
"""What is sent in which bits -> the compression, and the control in place of its rule; in the order of the runs."""

CONTROL = "30% at 8 bits at random, the rest at 4"
"""What the others are compared with."""

Result = Mapping[str, Any]
"""The content of a cell's file."""

COLUMNS = ("tokens", "seeds", "validation loss", "minus random, 1e-3 nats", "standard deviation", "each seed")


def cells(*, quick: bool, seeds: Sequence[int] = SEEDS) -> dict[Cell, str]:
    """The cells with their kinds.  Three kinds come first, seed by seed, so that what there is can be compared
    whenever it is stopped; then the others, alike."""
    base = {"train.steps": STEPS, "evaluation.batches": BATCHES, "data.batch_size": BATCH}
    base |= {"log.tensorboard": False, "parallel.data": 1, **(all_cells.QUICK if quick else {})}
    kinds, chosen = list(KINDS), seeds[:1] if quick else seeds
    return {
        _cell(kind, seed, base): kind
        for part in ((kinds[:2],) if quick else (kinds[:3], kinds[3:]))
        for seed in chosen
        for kind in part
    }


def _cell(kind: str, seed: int, base: Mapping[str, Any]) -> Cell:
    compression, control = KINDS[kind]
    if compression is None:
        return Cell(group=GROUP, preset=PRESET, seed=seed, changes=base)
    settings = compression.model_dump(exclude_defaults=True)
    changes = {f"{COMPRESSION}{name}": value for name, value in settings.items()}
    return Cell(
        group=GROUP, preset=PRESET, seed=seed, changes={**base, "parallel.tensor": TENSOR, **changes}, control=control
    )


@contextmanager
def controlled(control: str | None) -> Iterator[None]:
    """Programs that are built inside choose tokens by this control instead of by the rule of their configuration."""
    rule = operators.important_tokens
    operators.important_tokens = rule if control is None else {RANDOM: any_tokens, LEAST: least_attended}[control]
    try:
        yield
    finally:
        operators.important_tokens = rule


def any_tokens(
    axes: tuple[str, ...],
    compression: Compression,
    causal: bool,
    implementation: Implementation,
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array | None,
    residual: jax.Array,
) -> jax.Array:
    """In place of `important_tokens`: as many, drawn from a key that is made of the bits of the residual stream, which
    is the same on all ranks, and in the backward pass."""
    total = jnp.sum(jnp.abs(jax.lax.stop_gradient(residual).astype(jnp.float32)), (1, 2))
    seeds = jax.lax.bitcast_convert_type(total, jnp.uint32)
    scores = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), residual.shape[1:2]))(seeds)
    return token_topk(scores, tokens_of(compression, q.shape[1]), implementation=implementation)


def least_attended(
    axes: tuple[str, ...],
    compression: Compression,
    causal: bool,
    implementation: Implementation,
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array | None,
    residual: jax.Array,
) -> jax.Array:
    """In place of `important_tokens`: as many, those that receive least attention."""
    of_heads = attention_importance(q, k, causal=causal, lengths=lengths, implementation=implementation)
    scores = jax.lax.psum(of_heads, axes)
    return token_topk(-scores, tokens_of(compression, q.shape[1]), implementation=implementation)


def differences(results: Mapping[Cell, Result], kinds: Mapping[Cell, str]) -> dict[str, dict[int, float]]:
    """Kind -> seed -> validation loss minus that of the random choice with the same seed, where both have been run."""
    losses: dict[str, dict[int, float]] = {}
    for cell, result in results.items():
        losses.setdefault(kinds[cell], {})[cell.seed] = result["validation"]
    control = losses.get(CONTROL, {})
    return {
        kind: {seed: loss - control[seed] for seed, loss in of_kind.items() if seed in control}
        for kind, of_kind in losses.items()
        if kind != CONTROL
    }


def lines(results: Mapping[Cell, Result], kinds: Mapping[Cell, str]) -> list[Sequence[str]]:
    """A line for every kind: mean loss, and differences from the random choice, seed by seed."""
    apart, rows = differences(results, kinds), list[Sequence[str]]()
    for kind in KINDS:
        losses = [result["validation"] for cell, result in results.items() if kinds[cell] == kind]
        if losses:
            each = [1e3 * apart[kind][seed] for seed in sorted(apart[kind])] if kind in apart else []
            rows.append(
                (
                    kind,
                    str(len(losses)),
                    f"{fmean(losses):.4f}",
                    f"{fmean(each):+.1f}" if each else "",
                    f"{stdev(each):.1f}" if len(each) > 1 else "",
                    ", ".join(f"{one:+.1f}" for one in each),
                )
            )
    return rows


def claims_of(results: Mapping[Cell, Result], kinds: Mapping[Cell, str]) -> dict[str, Claim]:
    """Loss at random / loss by attention, and so on: above 1, the choice is better than a random one."""
    names = {
        "attention_vs_random": "30% at 8 bits by attention, the rest at 4",
        "own_size_vs_random": "30% at 8 bits by own size, the rest at 4",
        "least_attention_vs_random": "30% at 8 bits by least attention, the rest at 4",
        "all_4_bits_vs_random": "all at 4 bits",
    }
    apart, claims = differences(results, kinds), {}
    for name, kind in names.items():
        if seeds := sorted(apart.get(kind, {})):
            of = {
                each: fmean(
                    one["validation"] for cell, one in results.items() if kinds[cell] == each and cell.seed in seeds
                )
                for each in (kind, CONTROL)
            }
            steps = {cell.changes["train.steps"] for cell in results}
            claims[name] = Claim(
                value=of[CONTROL] / of[kind],
                unit=f"validation loss of '{CONTROL}' / that of '{kind}', means over the same seeds",
                setup=f"{PRESET}, tensor {TENSOR}, {max(steps)} steps, {len(seeds)} seed(s)",
            )
    return claims
