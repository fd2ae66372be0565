"""Tokens per second with a cache of keys and values, and without: `python benchmarks/generation.py`.

Both readers generate the same greedy tokens in the same process, in turn, after a run of each that compiles.
"""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np

from jhpt.core.families.gpt import GPTConfig
from jhpt.interop.rows import advanced, begun
from jhpt.models.decoding import CachedReader, Reader, RereadingReader
from jhpt.models.drawing import Drawing
from jhpt.models.family import Params, build

SHAPES = {
    "gpt2": GPTConfig(vocab_size=8192, num_layers=6, d_model=256, num_heads=4, max_length=1024),
    "llama": GPTConfig(
        vocab_size=8192,
        num_layers=6,
        d_model=256,
        num_heads=8,
        num_kv_heads=2,
        max_length=1024,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=False,
    ),
}

PROMPT = 16
"""Tokens of the prompt."""


def generated(params: Params, reader: Reader, total: int) -> np.ndarray:
    """Greedy tokens after the prompt, until there are `total`."""
    greedy, none = Drawing(temperature=0.0), np.zeros(0, np.int32)
    prompt, count = np.arange(PROMPT, dtype=np.int32)[None], total - PROMPT
    lengths, limits, keys = np.asarray([PROMPT]), np.asarray([count]), jax.random.split(jax.random.key(0), 1)
    state = begun(params, prompt, lengths, limits, keys, none, reader=reader, drawing=greedy, room=total)
    _, tokens = advanced(params, state, none, reader=reader, drawing=greedy, count=count - 1)
    return np.asarray(tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints, for each shape, the median seconds of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help=f"tokens in all, of which the prompt has {PROMPT}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    for name, config in SHAPES.items():
        model = build(config)
        params = jax.jit(model.init)(jax.random.key(0))
        readers: dict[str, Reader] = {
            "with a cache": CachedReader(model=model),
            "without": RereadingReader(model=model),
        }
        tokens = {label: generated(params, reader, options.tokens) for label, reader in readers.items()}
        same = np.array_equal(tokens["with a cache"], tokens["without"])
        seconds: dict[str, list[float]] = {label: [] for label in readers}
        for _ in range(options.rounds):
            for label, reader in readers.items():
                start = time.perf_counter()
                generated(params, reader, options.tokens)
                seconds[label].append(time.perf_counter() - start)
        medians = {label: float(np.median(samples)) for label, samples in seconds.items()}
        rates = ", ".join(f"{label} {(options.tokens - PROMPT) / s:,.0f} tokens/s" for label, s in medians.items())
        print(
            f"{name}: {rates}: {medians['without'] / medians['with a cache']:.1f} times as fast, "
            f"{'the same tokens' if same else 'OTHER TOKENS'}; {seconds}"
        )


if __name__ == "__main__":
    main()
