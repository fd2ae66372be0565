"""What a run that starts with other weights takes over from there, beside them: the model and the tokenizer; no jax."""

import os
from pathlib import Path

from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.families.text import TextConfig
from jhpt.core.load import CONFIG_FILE, Weights, load_config
from jhpt.huggingface.architectures import described, is_folder
from jhpt.training.data.tokenizer import BYTES, ByteTokenizer
from jhpt.training.data.tokenizer_files import lies_in


def weights_at(path: Path) -> Weights:
    """The weights of a run or of a folder of Hugging Face's.

    Raises:
      InputError: neither lies there, or its description cannot be read.
    """
    if (path / CONFIG_FILE).is_file():
        config = load_config(path / CONFIG_FILE)
        if not isinstance(config.model, TextConfig):
            raise InputError(
                f"--init {path} holds a model of {config.model.reads}, and only models of text start from other "
                f"weights; go on with that run (--out {path}), or leave --init out"
            )
        tokenizer = str(path) if lies_in(path) else config.data.tokenizer
        return Weights(path=path, model=config.model, tokenizer=tokenizer)
    if is_folder(path):
        model = described(path)[1]
        # A folder without a tokenizer is named, too, so that its text is refused and not read as bytes by oversight.
        named = lies_in(path) or model.vocab > ByteTokenizer.vocab_size
        return Weights(path=path, model=model, tokenizer=str(path) if named else None)
    raise InputError(
        f"--init {path} holds neither a run ({CONFIG_FILE}) nor a model of Hugging Face's (config.json); give a folder "
        "with one of them"
    )


def with_kept_tokenizer(config: Config, run_dir: Path) -> Config:
    """The configuration with the tokenizer that the run keeps, if the one that it names is not there any more."""
    name = config.data.tokenizer
    if name == BYTES or Path(os.path.expanduser(name)).exists() or not lies_in(run_dir):
        return config
    return load_config(config, {"data.tokenizer": str(run_dir)})
