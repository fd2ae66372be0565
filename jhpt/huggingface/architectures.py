"""The architectures by `model_type`, and what each leaves out or says twice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jhpt.core.errors import InputError
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.family import ModelConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.families.text import TextConfig
from jhpt.huggingface import bert, gpt2, llama
from jhpt.huggingface.files import read_json
from jhpt.huggingface.settings import Settings
from jhpt.huggingface.tensors import Part

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture.

    settings: `config.json` -> the model.
    parts: the model -> its parameters and their tensors.
    prefix: of the tensors of the model without its head; released files may leave it out.
    copies: tensors that may stand in a file a second time, under other names, and the names.
    ignored: pattern of tensors that hold no weights, such as masks.
    left_out: pattern of weights that have no place here, which is said.
    """

    settings: Callable[[Settings], TextConfig]
    parts: Callable[[Any], tuple[Part, ...]]
    prefix: str
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: str = r"$^"
    left_out: str = r"$^"


_CAUSAL = dict(parts=llama.parts, prefix="model.", copies={"lm_head.weight": "model.embed_tokens.weight"})

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        settings=gpt2.settings,
        parts=gpt2.parts,
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        ignored=r"\.attn\.(masked_)?bias$",
    ),
    "llama": Architecture(settings=llama.llama, ignored=r"rotary_emb\.inv_freq$", **_CAUSAL),  # type: ignore[arg-type]
    "mistral": Architecture(settings=llama.mistral, **_CAUSAL),  # type: ignore[arg-type]
    "qwen2": Architecture(settings=llama.qwen2, **_CAUSAL),  # type: ignore[arg-type]
    "bert": Architecture(
        settings=bert.settings,
        parts=bert.parts,
        prefix="bert.",
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=r"embeddings\.position_ids$",
        left_out=r"^cls\.seq_relationship\.",
    ),
}
"""By `model_type`."""


def architecture_of(there: Settings) -> Architecture:
    """The architecture of a `config.json`.

    Raises:
      InputError: it is none of these.
    """
    name = there.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise InputError(f"{there.place}: model_type={name!r} is not supported; supported: {names}")
    return ARCHITECTURES[name]


def is_folder(path: Path) -> bool:
    """Whether a model in Hugging Face's layout lies there."""
    return (path / CONFIG).is_file()


def described(path: Path) -> tuple[Architecture, TextConfig]:
    """(the architecture of a folder, its model as `config.json` describes it).

    Raises:
      InputError: it cannot be read, or is of an architecture that is not supported.
    """
    there = Settings(read_json(path / CONFIG), str(path / CONFIG))
    architecture = architecture_of(there)
    try:
        return architecture, architecture.settings(there)
    except ValidationError as error:  # sizes that do not go together
        faults = [f"{'.'.join(map(str, fault['loc']))} {fault['msg']}".strip() for fault in error.errors()]
        raise InputError(f"{there.place} describes no possible model: {'; '.join(faults)}; repair the file") from None


def exported(model: ModelConfig) -> tuple[Architecture, dict[str, Any]]:
    """(the architecture of a model, its `config.json`).

    Raises:
      InputError: no architecture is this model.
    """
    if isinstance(model, BERTConfig):
        return ARCHITECTURES["bert"], bert.config(model)
    if not isinstance(model, GPTConfig):
        raise InputError(f"model.family={model.family} has no architecture in Hugging Face's library")
    obstacles = {"gpt2": gpt2.why_not(model), "Llama": llama.why_not(model)}
    if obstacles["gpt2"] is None:
        return ARCHITECTURES["gpt2"], gpt2.config(model)
    if obstacles["Llama"] is None:
        tree = llama.config(model)
        return ARCHITECTURES[tree["model_type"]], tree
    raise InputError(
        f"the model is no GPT-2, which has no {obstacles['gpt2']}, and no Llama, Mistral or Qwen2, which have no "
        f"{obstacles['Llama']}; Hugging Face's library knows no other model of these settings"
    )
