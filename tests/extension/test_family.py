"""A model family that is neither GPT nor BERT, through the public registries alone.

    x += down(gelu(up(mean of norm(x) so far)));   x += mlp(norm(x))

Tokens are mixed by a running mean, without attention.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pytest

import jhpt
from jhpt.core.catalogue import cluster_named
from jhpt.core.families.family import BLOCK_INPUT, LayerCost, Matrices, ParameterCount, Sizes, register_family, table
from jhpt.core.families.text import TextConfig
from jhpt.core.load import load_config, to_yaml
from jhpt.core.work import NamedTensor, Work, matmul, stream, transposed
from jhpt.models.context import WHOLE, Context
from jhpt.models.family import Objective, Rows, build, register_model
from jhpt.models.hooks import Hooks
from jhpt.models.layers import MLPHalf, Parted, apply, collected, norm, scan_layers
from jhpt.models.objective import summed_loss
from jhpt.models.vocabulary import embed, project_to_vocabulary

FACTOR = 2
"""Hidden units of a half block, in widths."""


@register_family
class MixerConfig(TextConfig):
    """Two MLPs a block, the first of them over running means."""

    causal: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    named_tensors: ClassVar[tuple[str, ...]] = (BLOCK_INPUT, "mixed", "mlp_hidden", "mlp_out")

    family: Literal["mixer"] = "mixer"

    @property
    def hidden(self) -> int:
        """Hidden units of a half block."""
        return FACTOR * self.d_model

    @property
    def tied_table(self) -> bool:
        """Always."""
        return True

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Hidden units."""
        return {"hidden": self.hidden}

    def parameter_count(self) -> ParameterCount:
        """Exact, by place."""
        d, f = self.d_model, self.hidden
        return ParameterCount(
            embedding=self.vocab * d,
            per_layer=2 * (d + 2 * d * f + f + d),
            num_layers=self.num_layers,
            head=d,
            padding=(self.padded_vocab - self.vocab) * d,
        )

    def matrices(self) -> tuple[Matrices, ...]:
        """The table, and both matrices of all half blocks."""
        d, f = self.d_model, self.hidden
        half = partial(Matrices, count=2 * self.num_layers, of_blocks=True)
        return (table(self.padded_vocab, d), half(inputs=d, outputs=f, row=f), half(inputs=f, outputs=d, row=d))

    def float32_parameters(self) -> int:
        """Scales of norms."""
        return (2 * self.num_layers + 1) * self.d_model

    def block_products(self, keys: float) -> float:
        """Two matrices in each half."""
        return 4 * self.d_model * self.hidden

    def head_products(self) -> int:
        """The logits."""
        return self.vocab * self.d_model

    def embedding_cost(self, sizes: Sizes) -> LayerCost:
        """Rows of the table."""
        residual = sizes.tokens * self.d_model * sizes.element
        return LayerCost(
            work=lambda batch, tensor: Work((stream(2 * batch * residual),), (stream(3 * batch * residual),)),
            boundary_bytes=residual,
            tensor_forward_bytes=residual,
        )

    def block_cost(self, sizes: Sizes) -> LayerCost:
        """Four matrix products and two all-reduces."""
        d, residual = self.d_model, sizes.tokens * self.d_model * sizes.element

        def work(batch: int, tensor: int) -> Work:
            rows = batch * sizes.tokens
            products = 2 * (
                matmul(rows, self.hidden / tensor, d, sizes.element),
                matmul(rows, d, self.hidden / tensor, sizes.element),
            )
            traffic = stream(12 * batch * residual)
            return Work((*products, traffic), (*transposed(products), traffic))

        half = partial(NamedTensor, bytes=residual, flops=4.0 * sizes.tokens * d * self.hidden, sharded=False)
        return LayerCost(
            work=work,
            boundary_bytes=residual,
            tensor_forward_bytes=2.0 * residual,
            tensor_backward_bytes=2.0 * residual,
            tensors=(
                NamedTensor(name=BLOCK_INPUT, bytes=residual, sharded=False),
                half(name="mixed", inputs=(BLOCK_INPUT,), summed=True),
                NamedTensor(
                    name="mlp_hidden",  # of both halves
                    bytes=2 * FACTOR * residual,
                    flops=4.0 * sizes.tokens * d * self.hidden,
                    inputs=(BLOCK_INPUT, "mixed"),
                ),
                half(name="mlp_out", inputs=("mlp_hidden",), summed=True, read=False),
            ),
        )

    def head_cost(self, sizes: Sizes) -> LayerCost:
        """The logits and their softmax."""

        def work(batch: int, tensor: int) -> Work:
            rows, columns = batch * sizes.predicted, self.padded_vocab / tensor
            product = matmul(rows, columns, self.d_model, sizes.element)
            return Work((product, stream(12 * rows * columns)), (*transposed((product,)), stream(6 * rows * columns)))

        return LayerCost(work=work, activation_bytes=4.0 * sizes.predicted * self.padded_vocab)


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """Pure functions over `{"embedding": ..., "blocks": [L, ...], "head": ...}`."""

    config: MixerConfig
    dtype: Any = jnp.float32
    implementation: Any = "xla"
    hooks: Hooks = field(default_factory=Hooks)
    head_reads: ClassVar[tuple[str, ...]] = ("head", "embedding/tokens")
    partition_rules: ClassVar[Any] = (
        (r"mix/up/(kernel|bias)$", ("tensor",)),
        (r"mix/down/kernel$", ("tensor", None)),
    )

    def _half(self) -> MLPHalf:
        return MLPHalf(self.config.d_model, self.config.hidden, "gelu", self.dtype, self.hooks, 0.02)

    def _norm(self) -> Any:
        return norm("rmsnorm", 1e-5, self.dtype, "norm")

    def init(self, key: jax.Array) -> Any:
        blocks = jax.vmap(partial(self.init_block, key))(jnp.arange(self.config.num_layers))
        return {**self.init_embedding_and_head(key), "blocks": blocks}

    def init_embedding_and_head(self, key: jax.Array) -> Any:
        table = 0.02 * jax.random.normal(jax.random.fold_in(key, 0), (self.config.padded_vocab, self.config.d_model))
        return {"embedding": {"tokens": table}, "head": {"norm": {"scale": jnp.ones(self.config.d_model)}}}

    def init_block(self, key: jax.Array, layer: Any) -> Any:
        keys = jax.random.split(jax.random.fold_in(key, layer + 1))
        x = jnp.zeros((1, 1, self.config.d_model), self.dtype)
        ones = jnp.ones(self.config.d_model)
        mix, mlp = (self._half().init(one, x, None, None)["params"] for one in keys)
        return {"mix": mix, "mlp": mlp, "mix_norm": {"scale": ones}, "mlp_norm": {"scale": ones}}

    def inputs(self, rows: Rows, keys: jax.Array, objective: Objective) -> jax.Array:
        return rows.windows[:, :-1]

    def embed(
        self, params: Any, tokens: jax.Array, *, keys: jax.Array | None = None, context: Context = WHOLE
    ) -> jax.Array:
        return embed(params["embedding"]["tokens"], tokens, self.dtype, self.hooks)

    def attend(
        self, layer_params: Any, x: jax.Array, context: Context = WHOLE, ordering_token: jax.Array | None = None
    ) -> Parted:
        h = apply(self._norm(), layer_params["mix_norm"], x)
        count = jnp.arange(1, x.shape[1] + 1, dtype=self.dtype)
        h = jnp.cumsum(h, axis=1) / count[None, :, None]
        return Parted(x, *self._parts(layer_params["mix"], h, None, ordering_token))

    def feed(
        self, layer_params: Any, parted: Parted, keys: jax.Array | None = None, ordering_token: jax.Array | None = None
    ) -> Parted:
        x = collected(parted, 0.0, None, 0, self.hooks, "mixed")
        h = apply(self._norm(), layer_params["mlp_norm"], x)
        return Parted(x, *self._parts(layer_params["mlp"], h, parted.tokens, ordering_token))

    def _parts(self, params: Any, h: jax.Array, tokens: Any, ordering_token: Any) -> tuple[Any, Any, Any]:
        part, bias = apply(self._half(), params, h, tokens, ordering_token)
        return part, tokens, bias

    def finish(self, parted: Parted, keys: jax.Array | None = None) -> jax.Array:
        return collected(parted, 0.0, None, 1, self.hooks, "mlp_out")

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        x = apply(self._norm(), params["head"]["norm"], x)
        table = params["embedding"]["tokens"]
        return project_to_vocabulary(x, table, self.config.vocab, self.dtype, self.hooks)

    def loss(self, params: Any, x: jax.Array, rows: Rows, keys: jax.Array, objective: Objective) -> Any:
        return summed_loss(self.logits(params, x), rows.windows[:, 1:], rows.weights, objective.z_loss, self.hooks)

    def apply(self, params: Any, tokens: jax.Array) -> jax.Array:
        def block(layer_params: Any, x: jax.Array, keys: Any) -> jax.Array:
            return self.finish(self.feed(layer_params, self.attend(layer_params, x)))

        return self.logits(params, scan_layers(block, params["blocks"], self.embed(params, tokens), None))


register_model("mixer", Mixer)

MODEL = {"family": "mixer", "num_layers": 2, "d_model": 16, "max_length": 16}
RUN = {
    "model": MODEL,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "train.steps": 3,
    "optimizer.warmup_steps": 1,
    "log.every": 1,
    "log.tensorboard": False,
    "evaluation.batches": 1,
}


def trained(corpus, out, **changes) -> list[float]:
    result = jhpt.train("gpt-tiny", out=out, overrides=corpus | RUN | changes)
    assert result.step == 3
    return list(result.losses.values())


def test_it_trains_alike_on_one_device_and_on_eight(corpus, tmp_path):
    quiet = {"evaluation.sample_tokens": 0}
    one = trained(corpus, tmp_path / "one", **{"parallel.data": 1, "evaluation.sample_tokens": 4})
    axes = {"parallel.data": 2, "parallel.tensor": 2, "parallel.pipe": 2, "parallel.micro_batches": 2}
    eight = trained(corpus, tmp_path / "eight", **axes, **quiet)
    assert one[-1] < one[0] and eight == pytest.approx(one, rel=1e-4)


def test_it_is_planned():
    config = load_config("gpt-tiny", RUN | {"parallel": "auto"})
    answer = jhpt.plan(config, cluster=cluster_named("h100x8x1"))
    assert answer.devices == 8 and answer.seconds > 0


def test_its_parameters_are_counted():
    config = load_config("gpt-tiny", RUN).model
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.parameter_count().allocated


def test_its_configuration_is_written_whole(tmp_path):
    config = load_config("gpt-tiny", RUN)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert "num_heads" not in to_yaml(config)
