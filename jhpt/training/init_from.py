"""What a run that starts with other weights takes over from there, beside them: the model and the tokenizer; no jax."""

from pathlib import Path

from jhpt.core.errors import InputError
from jhpt.core.load import CONFIG_FILE, Weights, load_config
from jhpt.huggingface.architectures import described, is_folder
from jhpt.training.data.tokenizer_files import lies_in


def weights_at(path: Path) -> Weights:
    """The weights of a run or of a folder of Hugging Face's.

    Raises:
      InputError: neither lies there, or its description cannot be read.
    """
    if (path / CONFIG_FILE).is_file():
        config = load_config(path / CONFIG_FILE)
        return Weights(path=path, model=config.model, tokenizer=_beside(path) or config.data.tokenizer)
    if is_folder(path):
        return Weights(path=path, model=described(path)[1], tokenizer=_beside(path))
    raise InputError(
        f"--init {path} holds neither a run ({CONFIG_FILE}) nor a model of Hugging Face's (config.json); give a folder "
        "with one of them"
    )


def _beside(path: Path) -> str | None:
    return str(path) if lies_in(path) else None
