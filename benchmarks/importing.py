"""How much memory `jhpt import hf` and `jhpt export hf` take: `python -m benchmarks.importing FOLDER [--gb 2]`.

Makes a Llama of so many gigabytes in FOLDER, in shards of a quarter, imports it and exports it again, each in a process
of its own, whose anonymous memory is read every 20 ms.  Mapped files are no anonymous memory: the system drops their
pages when it needs room.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from jhpt.core.families.gpt import GPTConfig
from jhpt.huggingface.architectures import CONFIG, exported
from jhpt.huggingface.files import Writable, stored_tensors, write_tensors

LAYERS = 16


def model_of(gigabytes: float) -> GPTConfig:
    """A Llama whose float32 weights take so many gigabytes: a layer has about 12 d^2 numbers."""
    width = int((gigabytes * 1e9 / 4 / (12 * LAYERS)) ** 0.5) // 128 * 128
    return GPTConfig(
        vocab_size=32000,
        num_layers=LAYERS,
        d_model=width,
        num_heads=width // 128,
        max_length=2048,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=False,
    )


def make(folder: Path, model: GPTConfig, shard_bytes: int) -> None:
    """Random weights."""
    folder.mkdir(parents=True)
    architecture, tree = exported(model)
    (folder / CONFIG).write_text(json.dumps(tree))
    rng = np.random.default_rng(0)
    tensors = []
    for part in architecture.parts(model):
        shape = _shape(model, part.leaf)
        for layer in range(model.num_layers if part.layered else 1):
            pieces = part.split(np.broadcast_to(np.float32(0), shape))
            for name, piece in zip(part.of_layer(layer), pieces, strict=True):
                make = partial(_random, rng, piece.shape)
                tensors.append(Writable(name=name, bytes=4 * piece.size, make=make))
    write_tensors(folder, tensors, shard_bytes)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _shape(model: GPTConfig, leaf: str) -> tuple[int, ...]:
    """The shape of a leaf, of one layer where there are several."""
    d, f, kv, width = model.d_model, model.ffn_width, model.kv_heads, model.head_dim
    shapes = {
        "tokens": (model.padded_vocab, d),
        "scale": (d,),
        "qkv/kernel": (d, kv, model.num_heads // kv + 2, width),
        "projection/kernel": (d, d),
        "up/kernel": (d, 2, f),
        "down/kernel": (f, d),
    }
    return next(shape for name, shape in shapes.items() if leaf.endswith(name))


def peak_of(*arguments: str) -> tuple[float, float]:
    """(most anonymous bytes of `jhpt ARGUMENTS`, seconds)."""
    start, most = time.perf_counter(), 0.0
    process = subprocess.Popen([sys.executable, "-m", "jhpt", *arguments])
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        most = max(most, 1024.0 * int(found.group(1)) if found else 0.0)
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(process.returncode)
    return most, time.perf_counter() - start


def main() -> None:
    """Prints both peaks, and whether the weights have survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    options = parser.parse_args()
    there, run, again = (options.folder / name for name in ("model", "run", "again"))
    shard = int(options.gb * 1e9 / 4)
    make(there, model_of(options.gb), shard)
    files = sorted(there.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards, the largest {max(sizes) / 1e9:.2f} GB")
    for words in (("import", "hf", str(there), "--out", str(run)), ("export", "hf", str(run), str(again))):
        most, seconds = peak_of(*words, *(("--shard", str(shard)) if words[0] == "export" else ()))
        allowed = 1.3 * max(sizes) + 1e9
        print(f"{words[0]}: {most / 1e9:.2f} GB of anonymous memory (limit {allowed / 1e9:.2f}), {seconds:.0f} s")
    before, after = stored_tensors(there), stored_tensors(again)
    same = before.keys() == after.keys() and all(
        np.array_equal(tensor.read(), after[name].read()) for name, tensor in before.items()
    )
    print("the exported tensors are the same, bit for bit" if same else "the exported tensors differ")


if __name__ == "__main__":
    main()
