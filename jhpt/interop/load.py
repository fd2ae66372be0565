"""`jhpt.load`: the parameters of a trained run, and what can be done with them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.load import CONFIG_FILE, load_config
from jhpt.core.plan import Plan
from jhpt.huggingface.architectures import is_folder
from jhpt.huggingface.folder import open_folder
from jhpt.interop import evaluate, generate, likelihood, rows, score
from jhpt.measure.device import DeviceInfo, device_info
from jhpt.models.family import Model, Params, build
from jhpt.models.products import obstacle_to_8_bits
from jhpt.sharding.layout import Layout
from jhpt.sharding.mesh import make_device_mesh
from jhpt.training.checkpoint import FOLDER, Checkpoints, newest
from jhpt.training.data.tokenizer import Tokenizer
from jhpt.training.data.tokenizer_files import lies_in
from jhpt.training.init_from import weights_at
from jhpt.training.parts import model_layout
from jhpt.training.planning import check_fits_model
from jhpt.training.runtime import configure_runtime, prepare_collectives
from jhpt.training.setup import compute_dtype, fitting_tokenizer
from jhpt.training.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A trained model.

    source: where it came from.  config: of its run; of a folder of Hugging Face's, the one that a run would begin with.
    step: the number of its optimizer steps, 0 in such a folder.
    params: the model's own tree, as it was stored: on one device, or sharded under the plan that `load` was given.
    """

    source: Path
    config: Config
    step: int
    model: Model
    params: Params

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of its text; InputError where there is none."""
        return _tokenizer(self.source, self.config)

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[generate.Generated]:
        """The continuation of every prompt; settings: those of `jhpt.interop.generate.Settings`."""
        wanted = generate.Settings(**settings)
        return list(generate.generate(self.model, self.params, self.tokenizer, prompts, wanted))

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """The continuation of one prompt, piece by piece."""
        return generate.stream(self.model, self.params, self.tokenizer, prompt, generate.Settings(**settings))

    def score(self, tokens: np.ndarray, *, batch: int = rows.BATCH, **others: np.ndarray) -> np.ndarray:
        """float32 logits [N, S, V] of tokens [N, S], or [N, C] of a classifier; others: for BERT `types` [N, S] and
        `lengths` [N]."""
        inputs = {"tokens": np.asarray(tokens)} | {name: np.asarray(array) for name, array in others.items()}
        pieces = list(score.score(self.model, self.params, inputs, batch))
        return np.concatenate(pieces or [np.zeros(score.logits_shape(self.model, inputs["tokens"]), np.float32)])

    def evaluate(self, **overrides: Any) -> evaluate.Evaluated:
        """Loss and perplexity on a text, `evaluate(**{"data.path": FILES})`, or on the one that the run held out.

        overrides: settings by dotted name that `jhpt.interop.evaluate` reads.
        """
        return evaluate.evaluate(evaluate.evaluation_setup(self.config, overrides), self.params)

    def log_likelihoods(
        self, texts: Sequence[str | tuple[str, str]], *, batch: int = rows.BATCH
    ) -> list[likelihood.Likelihood]:
        """The log-likelihood of every text, or of the second text of a pair, given the first."""
        return likelihood.of_all(self.model, self.params, self.tokenizer, texts, batch)


def load(
    source: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    reads_text: bool = True,
) -> Loaded:
    """The model in the newest checkpoint of a run, whatever plan it was trained under, or in Hugging Face's layout.

    Nothing is written.

    Attention is XLA's, which takes sequences of every length.

    Args:
      source: run directory, or a folder with `config.json` and safetensors files.
      tokenizer: takes the place of `data.tokenizer`, where that file has moved.
      plan: a plan or its file: every parameter is cut over its devices, as far as its dims allow.  Programs that take
        such parameters are divided by the compiler.  None: all on the first device.
      reads_text: whether a model without a usable tokenizer is refused at once; token ids need none.

    Raises:
      InputError: no run, no checkpoint yet, one that cannot be read, no tokenizer, or a plan that does not fit.
    """
    configure_runtime()
    prepare_collectives()
    folder = Path(source)
    config = run_settings(folder, tokenizer)
    if reads_text:
        _tokenizer(folder, config)
    model = _model(config, device_info())
    layout = None if plan is None else _layout(config, model, plan)
    step, params = _restored(folder, config, model, layout)
    return Loaded(source=folder, config=config, step=step, model=model, params=params)


def run_settings(folder: Path, tokenizer: str | None = None) -> Config:
    """The configuration of the run in this folder, or of one that would begin with the weights there."""
    overrides = {} if tokenizer is None else {"data.tokenizer": tokenizer}
    if (folder / CONFIG_FILE).is_file():
        if tokenizer is None and lies_in(folder):
            overrides = {"data.tokenizer": str(folder)}
        config = load_config(folder / CONFIG_FILE, overrides)
    elif is_folder(folder):
        config = load_config(None, overrides, weights_at(folder))
    else:
        found = "is no run directory" if folder.is_dir() else "does not exist"
        raise InputError(
            f"{folder} {found}; give the directory of a run, which has a {CONFIG_FILE}, or a model in Hugging Face's "
            "layout, which has a config.json"
        )
    eight_bits = config.model.matmul_dtype != "same"
    if eight_bits and obstacle_to_8_bits(device_info().platform, device_info().capability) is not None:
        # Products in 8 bits approximate those in the compute dtype, which every device has.
        config = load_config(config, {"model.matmul_dtype": "same"})
    return config


def _tokenizer(folder: Path, config: Config) -> Tokenizer:
    try:
        return fitting_tokenizer(config)
    except InputError as error:
        raise InputError(
            f"the tokenizer of {folder} cannot be used: {error}; if it has moved, give its file: --tokenizer FILE, "
            "or --data.tokenizer FILE for jhpt eval"
        ) from None


def _model(config: Config, device: DeviceInfo) -> Model:
    model: Model = build(config.model, dtype=compute_dtype(config, device), implementation="xla")
    return model


def _layout(config: Config, model: Model, plan: Plan | str | os.PathLike[str]) -> Layout:
    plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    check_fits_model(plan, load_config(config, {"data.batch_size": plan.batch}))
    mesh = make_device_mesh(plan, jax.devices())
    return model_layout(model, plan, mesh)


def _restored(folder: Path, config: Config, model: Model, layout: Layout | None) -> tuple[int, Params]:
    """(step, parameters) of the newest checkpoint, or of a folder of Hugging Face's."""
    stored = Weights(storage=config.optimizer.weights).stored
    shapes = jax.eval_shape(lambda: stored(model.init(jax.random.key(0))))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = layout.model_shardings(shapes) if layout else jax.tree.map(lambda _: one, shapes)
    like = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
    if not (folder / CONFIG_FILE).is_file():
        return 0, open_folder(folder).parameters(like)
    step = newest(folder)
    if step is None:
        raise InputError(f"{folder} has no checkpoint yet; wait until the run has saved one (checkpoint.every)")
    with Checkpoints(folder / FOLDER, None) as saved:
        return step, saved.parameters(step, like)
