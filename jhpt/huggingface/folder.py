"""A folder in Hugging Face's layout as a source of parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jhpt.core.errors import InputError
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.text import TextConfig
from jhpt.huggingface.architectures import CONFIG, Architecture, described
from jhpt.huggingface.files import StoredTensor, listed, stored_tensors
from jhpt.huggingface.tensors import Part
from jhpt.models.family import Params, build
from jhpt.sharding.partition import path_name
from jhpt.sharding.types import KeyPath


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The parameters of a folder, each of whose tensors has been found.

    parts: by leaf; those in `fresh` have no tensors here.  tensors: by the names that parts have.
    left_out: tensors that the model has no place for.
    """

    path: Path
    model: TextConfig
    parts: Mapping[str, Part]
    tensors: Mapping[str, StoredTensor]
    left_out: tuple[str, ...]

    @property
    def fresh(self) -> tuple[str, ...]:
        """Leaves that begin with fresh values, because the folder lacks them."""
        return tuple(leaf for leaf, part in self.parts.items() if part.names[0] not in self.tensors and part.fresh)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out and what begins fresh, for people."""
        return notes_of(self.fresh, self.left_out)

    def read(self, leaf: str, layer: int = 0) -> np.ndarray:
        """A leaf, or one layer of it, in float32."""
        part = self.parts[leaf]
        tensors = [self.tensors[name].read() for name in part.of_layer(layer)]
        return np.ascontiguousarray(part.join(tensors), np.float32)

    def piece(self, leaf: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a leaf of the model's tree, [L, ...] if it is of blocks."""
        if not self.parts[leaf].layered:
            return self.read(leaf)[index]
        first, *rest = index
        layers = range(self.model.num_layers)[first]
        return np.stack([self.read(leaf, layer)[tuple(rest)] for layer in layers])

    def parameters(self, like: Params, seed: int = 0) -> Params:
        """The model's own tree.

        Args:
          like: shapes.  Leaves with a sharding become device arrays, of which every process reads its own parts; leaves
            without one become numpy arrays.
          seed: of the leaves that begin fresh.
        """
        fresh = self._fresh(seed)

        def leaf(path: KeyPath, shape: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
            name = path_name(path)

            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                index = index or (slice(None),) * len(shape.shape)
                return fresh[name][index] if name in fresh else self.piece(name, index)

            if shape.sharding is None:
                return read(None)
            return jax.make_array_from_callback(shape.shape, shape.sharding, read)

        return jax.tree_util.tree_map_with_path(leaf, like)

    def _fresh(self, seed: int) -> dict[str, np.ndarray]:
        if not self.fresh:
            return {}
        tree = jax.jit(build(self.model).init_embedding_and_head)(jax.random.key(seed))
        leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: np.asarray(leaves[name]) for name in self.fresh}


def notes_of(fresh: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """Notes for people.  fresh: parameters that the weights lack.  left_out: tensors or parameters without a place."""
    notes = {
        "left out, because the model has no place for it": left_out,
        "begins fresh, because the weights lack it": fresh,
    }
    return tuple(f"{what}: {listed(names)}" for what, names in notes.items() if names)


def open_folder(path: Path, *, pairs: bool = False) -> Folder:
    """Finds every tensor of the model, and checks its shape.

    Args:
      pairs: whether a BERT for pre-training predicts pairs too (`model.objective: mlm+nsp`), which no `config.json`
        says.

    Raises:
      InputError: an architecture that is not supported; files that are missing or damaged; tensors that are missing,
        unknown, of another shape than `config.json` says, or there twice with other numbers.
    """
    architecture, model = described(path)
    if pairs and isinstance(model, BERTConfig) and not model.classifies:
        model = model.model_copy(update={"objective": "mlm+nsp"})
    parts = {part.leaf: part for part in architecture.parts(model)}
    there = _named_in_full(architecture, stored_tensors(path))
    wanted = {name: leaf for leaf, part in parts.items() for name in _names(part, model.num_layers)}
    left_out = [name for name in there if name not in wanted and re.search(architecture.left_out, name)]
    copies = {name: of for name, of in architecture.copies.items() if name in there and name not in wanted}
    ignored = [name for name in there if re.search(architecture.ignored, name)]
    unknown = sorted(set(there) - set(wanted) - set(left_out) - set(copies) - set(ignored))
    if unknown:
        raise InputError(f"{path} has tensors that no {model.family} of {CONFIG} has: {listed(unknown)}")
    _check_missing(path, parts, wanted, there)
    _check_copies(path, copies, there)
    folder = Folder(path=path, model=model, parts=parts, tensors=there, left_out=tuple(left_out))
    _check_shapes(folder)
    return folder


def _named_in_full(architecture: Architecture, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the names that they have in a model with a head: those of a bare model lack its prefix."""
    prefix = architecture.prefix
    if any(name.startswith(prefix) for name in tensors):
        return {_without_old_words(name): tensor for name, tensor in tensors.items()}
    return {_without_old_words(prefix + name): tensor for name, tensor in tensors.items()}


def _without_old_words(name: str) -> str:
    """Files converted from TensorFlow call the parameters of norms gamma and beta."""
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def _names(part: Part, layers: int) -> list[str]:
    return [name for layer in range(layers if part.layered else 1) for name in part.of_layer(layer)]


def _check_missing(
    path: Path, parts: Mapping[str, Part], wanted: Mapping[str, str], there: Mapping[str, StoredTensor]
) -> None:
    """A head or pooler is there whole or not at all; all else has to be there."""
    missing = [name for name in wanted if name not in there]
    groups = {_group(name) for name, leaf in wanted.items() if name in there and parts[leaf].fresh}
    bad = [name for name in missing if not parts[wanted[name]].fresh or _group(name) in groups]
    if bad:
        raise InputError(f"{path} lacks tensors of the model in {CONFIG}: {listed(bad)}; download it again, whole")


def _group(name: str) -> str:
    """The head or pooler that a tensor is of: `cls.predictions`, `cls.seq_relationship`, `bert.pooler`."""
    return ".".join(name.split(".")[:2])


def _check_copies(path: Path, copies: Mapping[str, str], there: Mapping[str, StoredTensor]) -> None:
    for name, of in copies.items():
        if of in there and not np.array_equal(there[name].read(), there[of].read()):
            raise InputError(
                f"{path}: {name} and {of} are one parameter by {CONFIG} (tie_word_embeddings), and differ; if the "
                "model was trained with two, set tie_word_embeddings to false there"
            )


def _check_shapes(folder: Folder) -> None:
    model = build(folder.model)
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    for path, shape in shapes:
        part = folder.parts[path_name(path)]
        one = shape.shape[1:] if part.layered else shape.shape
        split = part.split(np.broadcast_to(np.float32(0), one))
        for layer in range(folder.model.num_layers if part.layered else 1):
            for name, array in zip(part.of_layer(layer), split, strict=True):
                found = folder.tensors.get(name)
                if found is not None and found.shape != array.shape:
                    raise InputError(
                        f"{folder.path}: {name} is {list(found.shape)}, and by {CONFIG} it is {list(array.shape)}; "
                        "the files do not belong together"
                    )
