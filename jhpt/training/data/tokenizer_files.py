"""The files in which people have tokenizers: one JSON file, a Hugging Face folder or repository, a run directory.

All become the text of a tokenizers JSON file, and what the configuration beside it says of special tokens.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from jhpt.core.errors import InputError
from jhpt.core.load import CONFIG_FILE
from jhpt.core.text_files import read_text, tree_of
from jhpt.training.data.tokenizer_kinds import BERT_SPECIAL, GPT_SPECIAL, byte_level, library_faults, word_piece

TOKENIZER_FILE = "tokenizer.json"
"""A tokenizer of the `tokenizers` library, complete."""

SPECIAL_FILE = "special_tokens_map.json"
SETTINGS_FILES = (SPECIAL_FILE, "tokenizer_config.json")
"""What Hugging Face's transformers write beside a vocabulary; where both say something, the last counts."""

FILES = (TOKENIZER_FILE, *SETTINGS_FILES, "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")

SPECIAL_NAMES = ("eos_token", "bos_token", "mask_token", "cls_token", "sep_token")
"""The special tokens that are read, by their names in the settings."""

GPT_CLASSES = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer")
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
"""Classes of transformers whose vocabulary alone says how text is cut."""

HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
HUB_SECONDS = 10.0
"""How long the hub may take to answer."""

FORMS = "'bytes', a tokenizers JSON file, a Hugging Face folder, a run directory or a name on the Hugging Face hub"


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as it was found.

    text: that of a tokenizers JSON file.  special: the tokens of `SPECIAL_NAMES` that settings beside it name; None:
    they say that there is none.  files: those that were read.
    """

    text: str
    special: Mapping[str, str | None]
    files: tuple[Path, ...]


def read_tokenizer(name: str) -> TokenizerFiles:
    """The tokenizer that `data.tokenizer` names; what lies on this disk comes before the hub.

    Raises:
      InputError: there is none of that name, the hub cannot be reached, or its files cannot be read.
    """
    found = _find(name)
    settings: dict[str, Any] = {}
    for file in filter(found.__contains__, SETTINGS_FILES):
        settings |= _json(name, found[file])
    if TOKENIZER_FILE in found:
        text, read = _text(name, found[TOKENIZER_FILE]), [TOKENIZER_FILE]
    else:
        text, read = _built(name, found, settings)
    return TokenizerFiles(
        text=text,
        special={key: _token(settings[key]) for key in SPECIAL_NAMES if key in settings},
        files=tuple(found[file] for file in FILES if file in found and file in (*read, *SETTINGS_FILES)),
    )


def _find(name: str) -> dict[str, Path]:
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        found = {file: path / file for file in FILES if (path / file).is_file()}
        if complete(found):
            return found
        if (path / CONFIG_FILE).is_file():
            raise InputError(
                f"data.tokenizer={name}: this run has no {TOKENIZER_FILE}; if it reads bytes, give 'bytes'"
            )
        raise InputError(
            f"data.tokenizer={name}: the folder has no {TOKENIZER_FILE}, no vocab.json with merges.txt (GPT-2) and no "
            "vocab.txt (BERT); give a folder that has"
        )
    if path.exists():
        return {TOKENIZER_FILE: path}
    if not HUB_NAME.fullmatch(name) or name.endswith(".json"):
        raise InputError(f"data.tokenizer={name}: no such file; give {FORMS}")
    return _on_hub(name)


def lies_in(folder: Path) -> bool:
    """Whether the files of a tokenizer are in the folder."""
    return complete(file for file in FILES if (folder / file).is_file())


def complete(found: Iterable[str]) -> bool:
    """Whether files of these names are a tokenizer."""
    names = set(found)
    return bool(names & {TOKENIZER_FILE, "vocab.txt"}) or names >= {"vocab.json", "merges.txt"}


# --- the hub ---------------------------------------------------------------------------------------------------


def _on_hub(name: str) -> dict[str, Path]:
    """The files of a repository, downloaded into the hub's cache; where the hub cannot be reached, those of the cache.

    One request, without repetition, finds out whether the hub can be reached.
    """
    import huggingface_hub as hub  # takes long to import
    from huggingface_hub.utils import HFValidationError, RepositoryNotFoundError

    try:
        info = hub.HfApi().model_info(name, timeout=HUB_SECONDS)
        listed = {file.rfilename for file in info.siblings or ()}
        found = {file: Path(hub.hf_hub_download(name, file)) for file in FILES if file in listed}
        problem = f"has no {TOKENIZER_FILE}, no vocab.json with merges.txt and no vocab.txt"
    except (RepositoryNotFoundError, HFValidationError):
        found, problem = {}, "has no such public repository (a private one needs `hf auth login`)"
    except Exception as error:  # of whichever library makes the requests
        places = {file: hub.try_to_load_from_cache(name, file) for file in FILES}
        found = {file: Path(place) for file, place in places.items() if isinstance(place, str)}
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        problem = f"cannot be reached ({reason})"
    if not complete(found):
        raise InputError(
            f"data.tokenizer={name}: no such file or folder, and the Hugging Face hub {problem}; give {FORMS}"
        )
    return found


# --- reading ---------------------------------------------------------------------------------------------------


def _text(name: str, path: Path) -> str:
    try:
        return read_text(path)
    except (FileNotFoundError, InputError) as error:
        raise InputError(f"data.tokenizer={name}: not a tokenizers JSON file: {error}") from None


def _json(name: str, path: Path) -> dict[str, Any]:
    try:
        tree = tree_of(read_text(path))
    except (FileNotFoundError, InputError) as error:
        raise InputError(f"data.tokenizer={name}: {path} is not JSON: {error}; repair or remove it") from None
    if not isinstance(tree, dict):
        raise InputError(f"data.tokenizer={name}: {path} is no JSON object; repair or remove it")
    return tree


def _token(setting: Any) -> str | None:
    """The text of a special token, which settings hold as such or with its properties."""
    content = setting.get("content") if isinstance(setting, Mapping) else setting
    return content if isinstance(content, str) else None


# --- building --------------------------------------------------------------------------------------------------


def _built(name: str, found: Mapping[str, Path], settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(the text of the tokenizer that these vocabularies make, the files that it is made of)."""
    gpt = "vocab.json" in found and "merges.txt" in found
    build: Callable[[Mapping[str, Path], Mapping[str, Any]], Tokenizer] = _gpt if gpt else _bert
    classes, files = (GPT_CLASSES, ["vocab.json", "merges.txt"]) if gpt else (BERT_CLASSES, ["vocab.txt"])
    kind = str(settings.get("tokenizer_class") or classes[0])
    if kind.removesuffix("Fast") not in classes:
        raise InputError(
            f"data.tokenizer={name}: the folder has no {TOKENIZER_FILE}, and {' and '.join(files)} are enough only for "
            f"{', '.join(classes)}, not for {kind}; save it with AutoTokenizer(...).save_pretrained of transformers"
        )
    with library_faults(f"data.tokenizer={name}: no vocabulary in {' and '.join(files)}"):
        tokenizer = build(found, settings)
    if "added_tokens.json" in found:
        files.append("added_tokens.json")
        _add(name, tokenizer, _json(name, found["added_tokens.json"]))
    special = [*(GPT_SPECIAL if gpt else BERT_SPECIAL), *(_token(settings.get(key)) for key in SPECIAL_NAMES)]
    known = [token for token in special if token is not None and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(known)])
    return tokenizer.to_str(), files


def _gpt(found: Mapping[str, Path], settings: Mapping[str, Any]) -> Tokenizer:
    model = models.BPE.from_file(str(found["vocab.json"]), str(found["merges.txt"]))
    return byte_level(model, add_prefix_space=bool(settings.get("add_prefix_space", False)))


def _bert(found: Mapping[str, Path], settings: Mapping[str, Any]) -> Tokenizer:
    unknown = _token(settings.get("unk_token")) or "[UNK]"
    model = models.WordPiece.from_file(str(found["vocab.txt"]), unk_token=unknown)
    return word_piece(
        model,
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        chinese_characters=settings.get("tokenize_chinese_chars", True),
    )


def _add(name: str, tokenizer: Tokenizer, added: Mapping[str, Any]) -> None:
    """Adds tokens, whose ids must follow those of the vocabulary."""
    numbers = {token: number for token, number in added.items() if isinstance(number, int)}
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sorted(numbers, key=numbers.__getitem__)])
    if wrong := [token for token in added if tokenizer.token_to_id(token) != added[token]]:
        raise InputError(
            f"data.tokenizer={name}: added_tokens.json gives {wrong[0]!r} the id {added[wrong[0]]}, which is not the "
            f"next; give a folder with a {TOKENIZER_FILE}"
        )
