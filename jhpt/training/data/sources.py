"""The sources that a configuration names, each with its tokens."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from jhpt.core.config import DataConfig
from jhpt.training.data.cache import Progress, Say, TokenCache, token_cache, unseen
from jhpt.training.data.labelled import LabelledRows
from jhpt.training.data.synthetic import ImageRows
from jhpt.training.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Source:
    """Text, or images, and its weight in the mixture.  setting: what names it."""

    setting: str
    path: str | tuple[str, ...]
    weight: float
    cache: TokenCache | LabelledRows | ImageRows


def open_sources(data: DataConfig, tokenizer: Tokenizer, say: Say, progress: Progress = unseen) -> tuple[Source, ...]:
    """`data.path`, or each of `data.sources`, with its tokens; what is not cached is tokenised.

    Raises:
      InputError: as `token_cache`.
    """
    if not data.sources:
        cache = token_cache(data, tokenizer, say, progress)
        return (Source(setting="data.path", path=data.path, weight=1.0, cache=cache),)
    sources = []
    for number, source in enumerate(data.sources):
        alone = data.model_copy(update={"path": source.path, "sources": ()})
        setting = f"data.sources.{number}"
        cache = token_cache(alone, tokenizer, say, progress, f"{setting}.path")
        sources.append(Source(setting=setting, path=source.path, weight=source.weight, cache=cache))
    return tuple(sources)


def data_key(sources: Sequence[Source]) -> str:
    """Identifies the content of all sources; of a single one, its cache's key."""
    keys = [source.cache.key for source in sources]
    return keys[0] if len(keys) == 1 else hashlib.blake2b("\n".join(keys).encode(), digest_size=16).hexdigest()
