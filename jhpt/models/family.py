"""Model families as training sees them: pure functions of a parameter tree, behind a protocol and a registry.

    register_model("mixer", Mixer)      # Mixer(config=..., dtype=..., implementation=..., hooks=...) is a `Model`

The family's settings and numbers are registered with `jhpt.core.families.family.register_family`.  A family of this
package is the module of its name in this folder, which is imported when the family is first built.
"""

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from jhpt.core.families.family import ModelConfig
from jhpt.models.attention import Implementation
from jhpt.models.context import WHOLE, Context
from jhpt.models.hooks import Hooks
from jhpt.models.layers import Parted
from jhpt.models.masking import SpecialTokens

Params = Any
"""A tree of arrays in plain dicts: `{"embedding": ..., "blocks": [L, ...], "head": ...}`."""

PartitionRules = tuple[tuple[str, tuple[str | None, ...]], ...]
"""(pattern on a parameter's path, mesh axes of its last dimensions); the first match wins."""


class Rows(NamedTuple):
    """Rows of a batch: windows [B, W] of token ids (with labels: `jhpt.models.labelled`), or of pixels and a class,
    and, for rows that count less, weights [B]."""

    windows: jax.Array
    weights: jax.Array | None = None


class Sums(NamedTuple):
    """Sums over predicted tokens, or classified rows.  loss: to be minimised.  nll: negative log likelihood in nats.
    tokens: their number.  correct: of classified rows, those whose class is the most likely one; of pairs, each as
    often as the tokens that it predicts; None: of tokens."""

    loss: jax.Array
    nll: jax.Array
    tokens: jax.Array
    correct: jax.Array | None = None


class Objective(NamedTuple):
    """What the loss depends on, beside the model: the settings of data and optimizer, and the tokenizer's ids.

    end: the token after which another document begins, where documents are kept apart; None: they are not.
    padded_after: the token after whose first occurrence a row is padding, where it is padded; None: rows are full.
    continues: [V], which ids go on with the word of the token before, where whole words are masked; None: tokens are.
    drops: whether dropout acts.
    """

    z_loss: float
    mask_fraction: float
    tokens: SpecialTokens
    end: int | None = None
    padded_after: int | None = None
    continues: np.ndarray | None = None
    drops: bool = False


class Model(Protocol):
    """What the functions of all families are; those of text are `TextModel`s, those of images `ImageModel`s.

    Parameters named `kernel`, `tokens`, `positions` or `types` are matrices and tables: they decay, can be coded in 8
    bits and are split by ZeRO.  Those under a name that ends in `norm` are used in float32, all others are cast to
    `dtype` where they are used.  A kernel maps its first dimension to all others (`jhpt.training.matrices`).
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    """A frozen dataclass, so that the runtime can replace its hooks."""

    @property
    def config(self) -> Any:
        """The settings, a `ModelConfig` of the family."""

    @property
    def dtype(self) -> Any:
        """The compute dtype."""

    @property
    def implementation(self) -> Implementation:
        """The attention kernel."""

    @property
    def head_reads(self) -> tuple[str, ...]:
        """Paths of the parameters that the head reads, such as `embedding/tokens` where it shares the table."""

    @property
    def partition_rules(self) -> PartitionRules:
        """Rules for parameters that `jhpt.sharding.partition.RULES` does not know; they come first."""

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters."""

    def inputs(self, rows: Rows, keys: jax.Array, objective: Objective) -> jax.Array:
        """What the model reads of these rows: token ids [B, S], or images [B, H, W, C]."""

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """x[..., D] -> logits [..., V] in float32."""

    def loss(self, params: Params, x: jax.Array, rows: Rows, keys: jax.Array, objective: Objective) -> Sums:
        """The sums over the predicted tokens, or the classes, of these rows from x after the last block."""

    def apply(self, params: Params, inputs: jax.Array) -> jax.Array:
        """Inputs -> logits[..., V]."""


class ImageModel(Model, Protocol):
    """A family of unlike blocks, `{"0": ..., "1": ...}`, each a stack of one."""

    def embed(self, params: Params, images: jax.Array) -> jax.Array:
        """images[B, H, W, C] -> x[B, ...]."""

    def block(self, layer_params: Params, x: jax.Array) -> jax.Array:
        """One block."""


class TextModel(Model, Protocol):
    """A family of equal blocks over a residual stream.

    A block is cut before each of its two all-reduces over the tensor axis: `attend` up to the first, `feed` from there
    up to the second, `finish` the rest.  keys: [B], a key for each row; None: no dropout.  context: of the rows; a
    family whose settings have no `keeps_documents_apart` gets no documents and no padding.
    """

    def init_embedding_and_head(self, key: jax.Array) -> Params:
        """The parameters of `init`, except those of blocks."""

    def init_block(self, key: jax.Array, layer: Any) -> Params:
        """The parameters of `init` of one block."""

    def embed(
        self, params: Params, tokens: jax.Array, *, keys: jax.Array | None = None, context: Context = WHOLE
    ) -> jax.Array:
        """tokens[B, S] -> x[B, S, D]."""

    def attend(
        self, layer_params: Params, x: jax.Array, context: Context = WHOLE, ordering_token: jax.Array | None = None
    ) -> Parted:
        """A block up to its first all-reduce."""

    def feed(
        self,
        layer_params: Params,
        parted: Parted,
        keys: jax.Array | None = None,
        ordering_token: jax.Array | None = None,
    ) -> Parted:
        """A block from its first all-reduce up to its second."""

    def finish(self, parted: Parted, keys: jax.Array | None = None) -> jax.Array:
        """The rest of the block."""


def as_text(model: Model) -> TextModel:
    """A model that reads text, for what only such models can do."""
    assert model.config.reads == "text", model.config.family
    return cast(TextModel, model)


_MODELS: dict[str, Callable[..., Model]] = {}


def register_model(family: str, model: Callable[..., Model]) -> None:
    """Registers `model(config=, dtype=, implementation=, hooks=)` as the functions of a family.

    Raises:
      ValueError: other functions are registered for the family.
    """
    if _MODELS.setdefault(family, model) is not model:
        raise ValueError(f"the functions of model family {family!r} are registered twice; give one another name")


def build(
    config: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    implementation: Implementation = "xla",
    hooks: Hooks | None = None,
) -> Any:
    """The model of this configuration, computing in `dtype` with the given attention kernel.

    Raises:
      ValueError: the family has settings and no functions.
    """
    if config.family not in _MODELS:
        try:
            module = importlib.import_module(f"jhpt.models.{config.family}")
        except ModuleNotFoundError:
            raise ValueError(f"model.family={config.family} has no functions; call register_model") from None
        register_model(config.family, module.MODEL)
    return _MODELS[config.family](config=config, dtype=dtype, implementation=implementation, hooks=hooks or Hooks())
