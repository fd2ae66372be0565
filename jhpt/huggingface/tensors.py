"""What parameters are made of: a leaf of our tree is joined from tensors of the other library, and split again.

    Hugging Face                                    here
    q [H E, D], k [K E, D], v [K E, D]              attention/qkv/kernel [D, K, G + 2, E]    (head h belongs to h // G)
    q [H E], k [K E], v [K E]                       attention/qkv/bias [K, G + 2, E]
    GPT-2's c_attn [D, 3 D]                         the same, with K = H, G = 1
    gate [F, D], up [F, D]                          mlp/up/kernel [D, 2, F]
    a linear layer's weight [out, in]               kernel [in, out]
    a table [V, D]                                  [padded V, D], zeros in the rows of padding

with D the model's width, H = K G query heads, K key heads, E their width, F the MLP's width, V the vocabulary.  Both
directions only move numbers, so a value survives the way there and back bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter and its tensors.

    leaf: path in our tree.  Leaves under `blocks/` have a layer as their first dimension; then names hold a `{}` for
      its number, and `join` and `split` see one layer.
    names: of the tensors.
    join: tensors -> the leaf.  split: the leaf -> tensors, which may be views.
    fresh: whether a folder may lack it, so that it begins with fresh values.
    """

    leaf: str
    names: tuple[str, ...]
    join: Callable[[Arrays], np.ndarray]
    split: Callable[[np.ndarray], Arrays]
    fresh: bool = False

    @property
    def layered(self) -> bool:
        """Whether there is one for each layer."""
        return self.leaf.startswith("blocks/")

    def of_layer(self, layer: int) -> tuple[str, ...]:
        """The tensors' names in this layer."""
        return tuple(name.format(layer) for name in self.names) if self.layered else self.names


def same(leaf: str, name: str, *, fresh: bool = False) -> Part:
    """A parameter that is the same in both."""
    return Part(leaf=leaf, names=(name,), join=lambda arrays: arrays[0], split=lambda array: [array], fresh=fresh)


def transposed(leaf: str, name: str, *, fresh: bool = False) -> Part:
    """The weight of a linear layer."""
    return Part(leaf=leaf, names=(name,), join=lambda arrays: arrays[0].T, split=lambda array: [array.T], fresh=fresh)


def linear(leaf: str, name: str, *, bias: bool = True, fresh: bool = False) -> tuple[Part, ...]:
    """Weight and bias of a linear layer."""
    weight = transposed(f"{leaf}/kernel", f"{name}.weight", fresh=fresh)
    return (weight, same(f"{leaf}/bias", f"{name}.bias", fresh=fresh)) if bias else (weight,)


def layer_norm(leaf: str, name: str, *, fresh: bool = False) -> tuple[Part, ...]:
    """Scale and bias of a LayerNorm."""
    scale = same(f"{leaf}/scale", f"{name}.weight", fresh=fresh)
    return scale, same(f"{leaf}/bias", f"{name}.bias", fresh=fresh)


def table(leaf: str, name: str, rows: int, padded: int, *, fresh: bool = False) -> Part:
    """A table, or a vector, of as many rows as the vocabulary."""

    def join(arrays: Arrays) -> np.ndarray:
        (array,) = arrays
        return np.concatenate([array, np.zeros((padded - rows, *array.shape[1:]), array.dtype)])

    return Part(leaf=leaf, names=(name,), join=join, split=lambda array: [array[:rows]], fresh=fresh)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """kv: key heads.  group: query heads of each.  width: of a head."""

    kv: int
    group: int
    width: int

    @property
    def sizes(self) -> tuple[int, int]:
        """(numbers of a token's queries, of its keys)."""
        return self.kv * self.group * self.width, self.kv * self.width

    def joined(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """[..., H E], [..., K E], [..., K E] -> [..., K, G + 2, E]."""
        grouped = [x.reshape(*x.shape[:-1], self.kv, -1, self.width) for x in (q, k, v)]
        return np.concatenate(grouped, axis=-2)

    def parted(self, qkv: np.ndarray) -> list[np.ndarray]:
        """The inverse of `joined`."""
        parts = np.split(qkv, [self.group, self.group + 1], axis=-2)
        return [part.reshape(*qkv.shape[:-3], -1) for part in parts]


def separate_qkv(heads: Heads, names: Sequence[str], *, bias: bool) -> tuple[Part, ...]:
    """Queries, keys and values of three linear layers."""
    leaf = "blocks/attention/qkv"
    kernel = Part(
        leaf=f"{leaf}/kernel",
        names=tuple(f"{name}.weight" for name in names),
        join=lambda arrays: heads.joined(*(array.T for array in arrays)),
        split=lambda array: [part.T for part in heads.parted(array)],
    )
    if not bias:
        return (kernel,)
    biases = tuple(f"{name}.bias" for name in names)
    return kernel, Part(
        leaf=f"{leaf}/bias", names=biases, join=lambda arrays: heads.joined(*arrays), split=heads.parted
    )


def fused_qkv(heads: Heads, name: str) -> tuple[Part, ...]:
    """Queries, keys and values of one layer whose weight is [in, out], as GPT-2 has it."""
    queries, keys = heads.sizes

    def join(arrays: Arrays) -> np.ndarray:
        return heads.joined(*np.split(arrays[0], [queries, queries + keys], axis=-1))

    def split(array: np.ndarray) -> Arrays:
        return [np.concatenate(heads.parted(array), axis=-1)]

    return tuple(
        Part(leaf=f"blocks/attention/qkv/{ours}", names=(f"{name}.{theirs}",), join=join, split=split)
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    )


def gated(leaf: str, gate: str, up: str) -> Part:
    """The two input matrices of a gated MLP."""
    return Part(
        leaf=leaf,
        names=(gate, up),
        join=lambda arrays: np.stack([array.T for array in arrays], axis=1),
        split=lambda array: [array[:, 0].T, array[:, 1].T],
    )
