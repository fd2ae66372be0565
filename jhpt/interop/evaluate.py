"""Loss of a trained model on any text, under any plan, by the evaluation of the training loop.

    loss            mean negative log-likelihood in nats per predicted token, over all windows of the text
    perplexity      e^loss
    accuracy        share of rows whose class is the most likely one, of a classifier; of pairs with mlm+nsp
    bits per byte   loss / ln 2 x (tokens of the text) / (its bytes as UTF-8)
                    (Gao et al. 2020, arXiv 2101.00027, section 3.1)

Tokens count the end of every document, which has no bytes.  A rest at the end of the text that is shorter than a window
is not read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jhpt.core.config import Config, MemoryConfig, ParallelConfig
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.unused import unused_settings
from jhpt.models.family import Params
from jhpt.training import loop
from jhpt.training.data.corpus import find_files
from jhpt.training.data.documents import Part, read
from jhpt.training.data.mixture import Mixture, Sequences
from jhpt.training.data.pairs import PairedRows
from jhpt.training.data.windows import Windows
from jhpt.training.device_step import evaluate_program
from jhpt.training.setup import Setup, prepare

READ = (
    "data.path",
    "data.text_key",
    "data.pair_key",
    "data.label_key",
    "data.tokenizer",
    "data.sequence_length",
    "data.batch_size",
    "data.cache_dir",
    "data.mask_fraction",
    "evaluation.batches",
    "model.dtype",
    "model.attention",
    "seed",
)
"""Settings that an evaluation may change, beside those of the section `parallel`."""

READ_OF_IMAGES = ("data.batch_size", "evaluation.batches", "model.dtype")
"""Those of them that an evaluation on images may change."""

OF_TRAINING = (
    "parallel.auto",
    "parallel.cluster",
    "parallel.space",
    "parallel.trials",
    "parallel.gradient_compression",
)
"""Settings of that section which it does not read."""

ALL = 2**31 - 1
"""As `evaluation.batches`: all of them."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The figures of the module's text.

    bits_per_byte: None for a model that predicts masked tokens, or classes.  tokens: predicted ones, or rows.
    left_out: tokens at the end of the text that are not read.  accuracy: None for a model that predicts tokens alone.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    left_out: int
    accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        """e^loss."""
        return math.exp(self.loss)


def evaluation_setup(config: Config, overrides: Mapping[str, Any]) -> Setup:
    """The evaluation of a run with this configuration: on all of `data.path` where that is among `overrides`, otherwise
    on the text that the run held out.

    Devices share the rows of a batch, unless `parallel` among the overrides says otherwise; the run's own section is
    not read, because there may be other devices here.

    Raises:
      InputError: a setting that would not be read, text or devices that do not fit, or no held-out text.
    """
    _check_read(config, overrides)
    fresh: dict[str, Any] = {
        "parallel": ParallelConfig().model_dump(),
        "memory": MemoryConfig(offload="off").model_dump(),
        "evaluation.batches": ALL,
    }
    if "data.path" in overrides:
        fresh |= {"data.sources": (), "data.validation_path": None, "data.validation_fraction": 0.0}
    config = load_config(load_config(config, fresh), overrides)
    if unused := [line for line in unused_settings(config) if line.startswith("parallel.")]:
        raise InputError("\n".join(unused))
    setup = prepare(_shared(config))
    windows = setup.train_windows if "data.path" in overrides else setup.validation_windows
    if windows is None:
        raise InputError("the run holds no text out; give the files to evaluate on: data.path")
    return replace(setup, validation_windows=windows)


def evaluate(setup: Setup, params: Params) -> Evaluated:
    """The loss of the model's own tree of parameters, wherever its leaves are."""
    windows, config = setup.validation_windows, setup.config
    assert windows is not None
    found = loop.evaluate(setup, evaluate_program(setup), _stored(setup, params))
    return Evaluated(
        loss=found.loss,
        bits_per_byte=None
        if config.model.masked or config.model.reads == "images"
        else found.loss / math.log(2) * _tokens_per_byte(setup),
        tokens=found.tokens,
        left_out=_left_out(windows),
        accuracy=found.accuracy,
    )


def _check_read(config: Config, overrides: Mapping[str, Any]) -> None:
    unread: tuple[str, ...] = () if config.model.masked else ("data.mask_fraction", "seed")
    if config.model.reads == "images":
        unread = tuple(name for name in READ if name not in READ_OF_IMAGES)
    for name in overrides:
        of_plan = name.startswith("parallel") and not name.startswith(OF_TRAINING)
        if name in unread or not (name in READ or of_plan):
            reads = [read for read in READ if read not in unread]
            raise InputError(f"{name} would not be read: an evaluation reads parallel and {', '.join(reads)}")


def _shared(config: Config) -> Config:
    """With as many devices as share the rows of a batch evenly, where their number is not given."""
    parallel = config.parallel
    if parallel.data is not None:
        return config
    there = max(jax.device_count() // (parallel.pipe * parallel.tensor), 1)
    rows = config.data.batch_size // parallel.micro_batches
    return load_config(config, {"parallel.data": math.gcd(there, rows)})


def _stored(setup: Setup, params: Params) -> Params:
    """The model's own tree as the plan stores it."""
    layout = setup.layout
    shapes = jax.eval_shape(lambda tree: tree, params)
    params = jax.device_put(params, layout.model_shardings(shapes))
    places = layout.shardings(jax.eval_shape(layout.stored, shapes))
    stored: Params = jax.jit(layout.stored, out_shardings=places)(params)
    return stored


def _tokens_per_byte(setup: Setup) -> float:
    """Of the text that the windows are from; where it is a share of files, of all of these."""
    data, sources = setup.config.data, setup.sources
    if data.validation_path is not None:
        return sources[0].cache.validation.size / text_bytes(data.validation_path, data.text_key)
    tokens = sum(source.cache.train.size + source.cache.validation.size for source in sources)
    return tokens / sum(text_bytes(source.path, data.text_key) for source in sources)


def _left_out(windows: Sequences) -> int:
    """Tokens at the ends of texts that are too few for a window."""
    if isinstance(windows, Mixture):
        return sum(map(_left_out, windows.sources))
    if isinstance(windows, PairedRows):
        return _left_out(windows.pieces)
    if not isinstance(windows, Windows):  # rows of a text or a document each
        return 0
    return len(windows.tokens) - len(windows) * windows.stride - windows.overlap


def text_bytes(path: str | Sequence[str], text_key: str) -> int:
    """Bytes of the documents in these files as UTF-8."""
    pieces = (piece for file in find_files(path) for piece in read(Part(file=file), text_key))
    return sum(len(piece.encode()) for piece in pieces if piece is not None)
