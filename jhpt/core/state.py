"""Bytes per parameter of the state that training stores from step to step, as the section `optimizer` says.

    weights   float32: 4; bfloat16, whatever its rounding: 2, and 4 of what models use in float32; bfloat16_kahan:
              with a remainder of 2
    moments   float32: 4 each; int8, of a matrix or table: a code of 1 and a scale of 4 for each block of a row

An optimizer has as many moments as `jhpt.core.optimizers` says: AdamW two.  The figures are means over all parameters
of a model, padding included: layers differ by the share of norms and biases in them, a thousandth.  Only with Muon they
differ by more: blocks have one moment, embedding and head two.
"""

from pydantic import Field

from jhpt.core.config import MomentStorage, OptimizerConfig, WeightStorage
from jhpt.core.families.family import Matrices, ModelConfig
from jhpt.core.optimizers import OptimizerNumbers, optimizer_numbers
from jhpt.core.section import NonNegative, Positive, Section

BLOCK = 64
"""Numbers that share a scale, at most: scales cost 1/16 byte a number.  Dettmers et al. have 2048; here the last
dimension of a matrix should hold several blocks, for a tensor axis cuts between them."""

LEAST = 8
"""With fewer numbers in a block, scales would cost more than half of what codes do."""

FLOAT32, BFLOAT16, CODE = 4, 2, 1


class State(Section):
    """How weights and moments are stored, and their bytes per parameter."""

    optimizer: str = "adamw"
    weights: WeightStorage = "float32"
    moments: MomentStorage = "float32"
    weight_bytes: Positive = 4.0
    remainder_bytes: NonNegative = 0.0
    moment_bytes: NonNegative = 8.0
    decoded_bytes: NonNegative = Field(0.0, description="moments in float32 of the largest matrix, while it is updated")

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.weight_bytes + self.remainder_bytes + self.moment_bytes

    @property
    def low_precision(self) -> bool:
        """Whether anything is stored in less than float32."""
        return self.weights != "float32" or self.moments != "float32"

    @property
    def causes(self) -> dict[str, float]:
        """Bytes by what they are."""
        stored = "float32" if self.weights == "float32" else "bfloat16"
        sizes = {
            f"weights in {stored}": self.weight_bytes,
            "remainders": self.remainder_bytes,
            f"moments in {self.moments}": self.moment_bytes,
        }
        return {cause: size for cause, size in sizes.items() if size}


def state_of(model: ModelConfig, optimizer: OptimizerConfig) -> State:
    """The state of this model under this optimizer."""
    numbers = optimizer_numbers(optimizer.name)
    moments = numbers.moments
    return State(
        optimizer=optimizer.name,
        weights=optimizer.weights,
        moments=optimizer.moments,
        weight_bytes=float(FLOAT32) if optimizer.weights == "float32" else _bfloat16_bytes(model),
        remainder_bytes=float(BFLOAT16) if optimizer.weights == "bfloat16_kahan" else 0.0,
        moment_bytes=_moments(model, numbers) * FLOAT32
        if optimizer.moments == "float32"
        else moments * _coded_bytes(model),
        decoded_bytes=0.0 if optimizer.moments == "float32" else _decoded_bytes(model, moments),
    )


def block_size(row: int) -> int | None:
    """Numbers in a block of rows of this length: the largest divisor up to `BLOCK`; None: rows are not coded."""
    return next((size for size in range(min(BLOCK, row), LEAST - 1, -1) if row % size == 0), None)


def most_cuts(row: int) -> int:
    """The most pieces that a row can be cut into: its blocks, or its numbers where it is not coded."""
    return row // (block_size(row) or 1)


def _moments(model: ModelConfig, numbers: OptimizerNumbers) -> float:
    """Numbers that the optimizer stores per parameter of the model."""
    changed = sum(_moments_of(each, numbers) - numbers.moments * each.numbers for each in model.matrices())
    return numbers.moments + changed / model.parameter_count().allocated


def _moments_of(matrices: Matrices, numbers: OptimizerNumbers) -> int:
    if numbers.factored:
        return numbers.moments * matrices.count * (matrices.inputs + matrices.outputs)
    of_blocks = numbers.moments_in_blocks if matrices.of_blocks else None
    return matrices.numbers * (numbers.moments if of_blocks is None else of_blocks)


def _bfloat16_bytes(model: ModelConfig) -> float:
    wide = model.float32_parameters() / model.parameter_count().allocated
    return BFLOAT16 + wide * (FLOAT32 - BFLOAT16)


def _decoded_bytes(model: ModelConfig, moments: int) -> float:
    """Decoded moments of the largest matrix of all blocks, or of all tables, in bytes per parameter of the model.
    Programs for an H100 hold 1.5 to 1.9 times one of them (jax 0.10.2)."""
    sizes = [(each.numbers, each.of_blocks) for each, _ in _coded(model)]
    tables = sum(numbers for numbers, of_blocks in sizes if not of_blocks)
    largest = max(tables, *(numbers for numbers, of_blocks in sizes if of_blocks), 0)
    return moments * FLOAT32 * largest / model.parameter_count().allocated


def _coded(model: ModelConfig) -> list[tuple[Matrices, int]]:
    """The matrices and tables whose moments can be coded, with the numbers in a block of a row."""
    return [(each, block) for each in model.matrices() if (block := block_size(each.row))]


def _coded_bytes(model: ModelConfig) -> float:
    """Bytes per parameter of one moment; what is not coded is float32."""
    saved = sum(each.numbers * (FLOAT32 - CODE - FLOAT32 / block) for each, block in _coded(model))
    return FLOAT32 - saved / model.parameter_count().allocated
