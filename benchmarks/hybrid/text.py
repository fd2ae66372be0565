"""Real text for the models of `jhpt bench hybrid`: Python's own help, in ids of a tokenizer trained on it.

Half a megabyte of prose about the language ships with every Python (`pydoc_data.topics`).  The tokenizer is trained as
`jhpt tokenizer train` does it, which takes about a second; the same Python gives the same ids on every host.
"""

import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from jhpt.training.data.tokenizer import Tokenizer, load_tokenizer
from jhpt.training.data.tokenizer_training import Kind, train_tokenizer
from jhpt.training.data.windows import causal_windows, masked_windows

NAME = "Python's help"


@dataclass(frozen=True)
class Text:
    """The text as one model reads it.  kind: of the tokenizer, which has so many ids."""

    kind: Kind
    vocab_size: int

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Trained on this text."""
        return _trained(self.kind, self.vocab_size)

    def windows(self, length: int, count: int) -> np.ndarray:
        """The first windows, as training reads them: int32 [count, length + 1], of WordPiece [count, length].

        They follow one another in the text; a batch longer than the text begins again with it.
        """
        ids = _ids(self)
        if self.kind == "bpe":
            found = causal_windows(ids, length, NAME)
        else:
            found = masked_windows(ids, length, NAME, self.tokenizer)
        return np.stack([found[at % len(found)] for at in range(count)])


@cache
def everything() -> str:
    """All topics, in the order of their names."""
    return "\n".join(topics[name] for name in sorted(topics))


@cache
def _trained(kind: Kind, vocab_size: int) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "help.txt"), Path(folder, "tokenizer.json")
        source.write_text(everything(), encoding="utf-8")
        train_tokenizer([source], kind, vocab_size).save(str(made))
        return load_tokenizer(str(made))


@cache
def _ids(text: Text) -> np.ndarray:
    return text.tokenizer.encode(everything())
