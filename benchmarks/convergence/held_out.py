"""Whether the held-out text, on which losses are compared, stands in the training text."""

import numpy as np

from jhpt.bench.results import Claim
from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.training.data.cache import token_cache
from jhpt.training.data.duplicates import PIECE, shared_pieces
from jhpt.training.data.tokenizer import BYTES, load_tokenizer


def shared(data: DataConfig) -> int:
    """The number of pieces of the held-out text that stand in the training text, both as a run reads them.

    Raises:
      InputError: tokens that are not bytes.
    """
    if data.tokenizer != BYTES:
        raise InputError(f"data.tokenizer={data.tokenizer}: pieces are compared byte by byte; set it to {BYTES}")
    text = token_cache(data, load_tokenizer(data.tokenizer))
    return shared_pieces(np.asarray(text.train), np.asarray(text.validation))


def checked(data: DataConfig) -> dict[str, Claim]:
    """The claim that none are shared.

    Raises:
      InputError: some are, so that losses would say how well training text is remembered.
    """
    if count := shared(data):
        raise InputError(
            f"{count:,} pieces of the held-out text stand in the training text (data.path={data.path}); losses of it "
            "are not comparable; see jhpt/training/data/duplicates.py"
        )
    return {
        "shared_pieces": Claim(
            value=0,
            unit=f"pieces of {PIECE} bytes with a letter or digit that held-out and training text share",
            setup=f"data.path={data.path}, the text of this machine",
        )
    }
