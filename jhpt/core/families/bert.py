"""BERT in numbers: a bidirectional encoder with a masked-LM head or a classifier (Devlin et al. 2018, arXiv
1810.04805)."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from jhpt.core.errors import InputError
from jhpt.core.families.family import LayerCost, Matrices, ParameterCount, Sizes, register_family, table
from jhpt.core.families.transformer import TransformerConfig
from jhpt.core.section import Count, Positive
from jhpt.core.work import Work, matmul, stream, transposed


@register_family
class BERTConfig(TransformerConfig):
    """A bidirectional encoder with token types, pooler and a head, by its task (Devlin et al. 2018, arXiv 1810.04805).

    pretrain: a masked-LM head.  Nothing reads the pooler, which stays as it is initialised: with it the parameters are
    those of published weights.  With the objective `mlm+nsp` a linear layer on the pooled vector predicts whether the
    second piece of a row follows the first.  classify: a linear layer on the pooled vector, and no masked-LM head.
    """

    causal: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    post_norm: ClassVar[bool] = True
    head_transform: ClassVar[bool] = True

    family: Literal["bert"] = "bert"
    type_vocab_size: Count = Field(2, description="token types (segments)")
    norm_eps: Positive = Field(1e-12, description="added to the variance")
    task: Literal["pretrain", "classify"] = Field(
        "pretrain",
        description="pretrain: predict masked tokens; classify: predict the label of a text, or of a pair of texts",
    )
    objective: Literal["mlm", "mlm+nsp"] = Field(
        "mlm",
        description="of model.task=pretrain; mlm: predict masked tokens; mlm+nsp: and whether the second half of a row "
        "follows the first in the text (next-sentence prediction)",
    )
    num_classes: Count | Literal["auto"] = Field(
        "auto", description="classes of model.task=classify; auto: as many labels as the training data has"
    )
    class_names: tuple[str, ...] | None = Field(
        None, description="labels of the classes, in their order; null: those of the training data, sorted"
    )

    @model_validator(mode="after")
    def _names_of_all_classes(self) -> "BERTConfig":
        names = self.class_names
        if names is None:
            return self
        if len(set(names)) < max(len(names), 2):
            raise ValueError(f"model.class_names={list(names)} are not two or more different names; repair the list")
        if self.num_classes not in ("auto", len(names)):
            raise ValueError(
                f"model.num_classes={self.num_classes} and model.class_names has {len(names)} names; leave one of them "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _pairs_only_in_pretraining(self) -> "BERTConfig":
        if self.pairs and self.classifies:
            raise ValueError(
                f"model.objective={self.objective} is for model.task=pretrain, and model.task={self.task}; set "
                "model.objective=mlm"
            )
        if self.pairs and self.type_vocab_size < 2:
            raise ValueError(
                f"model.objective={self.objective} needs a token type for each piece of a row, and "
                f"model.type_vocab_size={self.type_vocab_size}; use 2, or model.objective=mlm"
            )
        return self

    @property
    def pairs(self) -> bool:
        """Whether the objective has next-sentence prediction."""
        return self.objective == "mlm+nsp"

    @property
    def classifies(self) -> bool:
        """Whether the task is to classify."""
        return self.task == "classify"

    @property
    def classes(self) -> int:
        """The number of classes.

        Raises:
          InputError: it is not known yet.
        """
        if self.class_names is not None:
            return len(self.class_names)
        if self.num_classes == "auto":
            raise InputError(
                "model.num_classes=auto is counted in the training data when training starts; set model.num_classes to "
                "the number of classes"
            )
        return self.num_classes

    @property
    def mlp_activation(self) -> str:
        """The exact form of gelu."""
        return "gelu_exact"

    @property
    def norm_parameters(self) -> int:
        """A scale and a bias."""
        return 2 * self.d_model

    @property
    def tied_table(self) -> bool | None:
        """The masked-LM head always shares the embedding table; a classifier has none."""
        return None if self.classifies else True

    def parameter_count(self) -> ParameterCount:
        """By place; the head's count holds the pooler, which masked-LM training leaves as it is initialised."""
        d, norm = self.d_model, self.norm_parameters
        pooler, unused = d * d + d, self.padded_vocab - self.vocab
        masked_lm = d * d + d + norm + self.vocab + (2 * d + 2 if self.pairs else 0)
        return ParameterCount(
            embedding=self.vocab * d + self.max_length * d + self.type_vocab_size * d + norm,
            per_layer=self.block_parameters(),
            num_layers=self.num_layers,
            head=pooler + ((d + 1) * self.classes if self.classifies else masked_lm),
            padding=unused * (d if self.classifies else d + 1),
        )

    def matrices(self) -> tuple[Matrices, ...]:
        """Tables of tokens, positions and types, matrices of pooler and head, and the matrices of blocks."""
        rows = (self.padded_vocab, self.max_length, self.type_vocab_size, self.d_model)
        head = table(self.d_model, self.classes if self.classifies else self.d_model)
        pair = (table(self.d_model, 2),) if self.pairs else ()
        return (*(table(each, self.d_model) for each in rows), head, *pair, *self.block_matrices())

    def float32_parameters(self) -> int:
        """Those of norms: two in a block and the embedding's; of a masked-LM head its norm and its bias."""
        norms = (2 * self.num_layers + 1) * self.norm_parameters
        return norms if self.classifies else norms + self.norm_parameters + self.padded_vocab

    def head_products(self) -> int:
        """The logits of words or classes, after a matrix [d, d]: the masked-LM head's transform or the pooler.

        The two small products a row of next-sentence prediction are left out.
        """
        outputs = self.classes if self.classifies else self.vocab
        return outputs * self.d_model + self.d_model * self.d_model

    def predicted_tokens(self, sequence_length: int, mask_fraction: float) -> int:
        """As of all families; of a pair, the `[SEP]` in the middle is not among them either."""
        return super().predicted_tokens(sequence_length - self.pairs, mask_fraction)

    def head_cost(self, sizes: Sizes) -> LayerCost:
        """That of the masked-LM head, of a classifier, or of the masked-LM head and a classifier of pairs."""
        if self.classifies:
            return self._classifier_cost(sizes, self.classes)
        masked_lm = super().head_cost(sizes)
        if not self.pairs:
            return masked_lm
        pair = self._classifier_cost(sizes, 2)

        def work(batch: int, tensor: int) -> Work:
            both = zip(masked_lm.work(batch, tensor), pair.work(batch, tensor), strict=True)
            return Work(*((*ours, *theirs) for ours, theirs in both))

        return replace(masked_lm, work=work, replicated_bytes=masked_lm.replicated_bytes + pair.replicated_bytes)

    def _classifier_cost(self, sizes: Sizes, classes: int) -> LayerCost:
        """Two products a sample, which every tensor rank computes, and the gradient of the whole stream, zero but for
        its first position."""
        d, element = self.d_model, sizes.element

        def work(batch: int, tensor: int) -> Work:
            products = (matmul(batch, d, d, element), matmul(batch, classes, d, element))
            whole = tuple(product._replace(repeated=True) for product in products)
            return Work(whole, (*transposed(whole), stream(batch * self._residual(sizes), repeated=True)))

        return LayerCost(work=work, replicated_bytes=float((3 * d + classes) * element))
