"""Token ids on disk, memory-mapped: built once, atomically, and identified by content and tokenizer.

A cache is a folder `<key>/` with shards `train-00000.bin`, ... and `validation-00000.bin`, ... (little-endian uint8,
uint16 or uint32), `index.json`, and a manifest, which is compared with the files before they are used.  It is written
under another name and renamed, so that readers never see an incomplete one.  Shards that are done when a process is
killed stay there, and the next one goes on with them.  `key` hashes the content of every file, the tokenizer and the
split.  Files are hashed again only if path, size or time of one of them has changed.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jhpt.core.amounts import gib
from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError
from jhpt.core.folders import cache_folder
from jhpt.core.manifest import MANIFEST, manifest_faults, write_manifest
from jhpt.core.text_files import read_text
from jhpt.training.data.corpus import STDLIB, digest, find_files, split_files
from jhpt.training.data.documents import Part, check_file
from jhpt.training.data.duplicates import PIECE, apart
from jhpt.training.data.shards import UNFINISHED, Tokens
from jhpt.training.data.tokenizer import BYTES, Tokenizer
from jhpt.training.data.workers import (
    Job,
    Shard,
    WorkerLost,
    available_workers,
    cores,
    parts_of,
    shard_bytes,
    shards_of,
    write_shards,
)

FORMAT = 3
"""Increased when the same input would give other tokens."""

CUTS = 2
"""Increased when the same text would be cut into other shards: those of a killed process are then not used."""


TEXT_OF_A_TOKEN = 4
"""Bytes of text that a tokenizer with tens of thousands of ids puts into a token, about."""


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Token ids of the training and the held-out text; `key` identifies their content."""

    key: str
    folder: Path
    train: Tokens
    validation: Tokens
    built: bool
    """Whether this call built it."""

    @property
    def summary(self) -> str:
        """How much there is, in words."""
        return f"{self.train.size:,} training and {self.validation.size:,} held-out tokens"


Say = Callable[[str], None]
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Bytes in all -> a context, in which it is told how many more are done."""


@contextmanager
def unseen(total: int) -> Iterator[Callable[[int], None]]:
    """Progress that nobody watches."""
    yield lambda count: None


def token_cache(
    data: DataConfig,
    tokenizer: Tokenizer,
    say: Say = lambda line: None,
    progress: Progress = unseen,
    setting: str = "data.path",
) -> TokenCache:
    """The cache for `data.path` and the tokenizer, built if it does not exist, which `say` and `progress` report.

    Args:
      tokenizer: the one that `data.tokenizer` names.
      setting: what messages call the path.

    Raises:
      InputError: missing, empty or malformed files; a damaged cache; a cache folder that cannot be written.
    """
    root = Path(os.path.expanduser(data.cache_dir)) if data.cache_dir else cache_folder() / "tokens"
    files = find_files(data.path, setting)
    held = find_files(data.validation_path, "data.validation_path") if data.validation_path else []
    settings = [FORMAT, tokenizer.fingerprint, data.text_key, data.validation_fraction, data.validation_path is None]
    if _keeps_apart(data):
        settings.append(PIECE)
    try:
        root.mkdir(parents=True, exist_ok=True)
        digests = _digests(root, [*files, *held])
        key = _hash([sorted(digests[file] for file in files), sorted(digests[file] for file in held), settings])
        with _lock(root / f"{key}.lock"):
            built = not _is_whole(root / key, say)
            if built:
                # The key depends on content and not on names, so the order of the files must not depend on names
                # either.
                files = sorted(files, key=digests.__getitem__)
                if data.validation_path is None:
                    files, held = split_files(files, data.validation_fraction)
                split = {"train": files, "validation": sorted(held, key=digests.__getitem__)}
                _build(root, key, split, data, tokenizer, say, progress)
    except OSError as error:
        raise InputError(
            f"token cache {root} cannot be used: {error}; set data.cache_dir to a writable folder"
        ) from None
    return _open(root / key, built)


def _keeps_apart(data: DataConfig) -> bool:
    """Whether training text that stands in the held-out text is left out: of the default text, not of a user's.

    Held-out files count: where the share is so small that none fits into it, the last tokens are held out as they are.
    """
    return data.path in (STDLIB, (STDLIB,)) and data.validation_path is None


def _is_whole(folder: Path, say: Say) -> bool:
    """Whether the cache is there as it was written; a damaged one is removed.  Caches of earlier versions have no
    manifest and are taken as they are."""
    if not folder.is_dir() or not (folder / MANIFEST).is_file():
        return folder.is_dir()
    if faults := manifest_faults(folder):
        say(f"warning: token cache {folder} is damaged ({faults[0]}); it is made again")
        shutil.rmtree(folder)
    return not faults


def _digests(root: Path, files: Sequence[Path]) -> dict[Path, str]:
    """The hash of every file, stored under the files' names, sizes and times."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    memo = root / "seen" / _hash([FORMAT, stats])
    if (known := _remembered(memo)) is not None and len(known) == len(files):
        return dict(zip(files, known, strict=True))
    with ThreadPoolExecutor(cores()) as pool:
        digests = list(pool.map(digest, files))
    memo.parent.mkdir(exist_ok=True)
    _write_atomically(memo, "\n".join([*digests, _hash(digests)]))
    return dict(zip(files, digests, strict=True))


def _remembered(memo: Path) -> list[str] | None:
    """The hashes in a file, whose last line is the hash of them all; None: there are none, or they are damaged."""
    if not memo.is_file():
        return None
    *known, check = memo.read_text(errors="replace").split("\n")
    return known if check == _hash(known) else None


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    # Process ids would repeat if containers share a file system.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    partial.write_text(text)
    partial.rename(path)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time on this file system; because of the rename, readers are safe even if locks do not work."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(
    root: Path,
    key: str,
    split: dict[str, list[Path]],
    data: DataConfig,
    tokenizer: Tokenizer,
    say: Say,
    progress: Progress,
) -> None:
    """Writes what is missing of the shards, then the index, and gives the folder its name.

    Bad input leaves nothing behind; whatever else ends this keeps the shards that are done.
    """
    files = [file for part in split.values() for file in part]
    size = shard_bytes(files)
    for file in files:
        check_file(file, data.text_key)
    parts = {name: parts_of(part, size, data.text_key) for name, part in split.items()}
    total = sum(file.stat().st_size for file in files)
    if _keeps_apart(data):
        parts["train"], left_out = _apart(split)
        total -= left_out
        say(f"left out {left_out / 2**20:,.1f} MiB of the training text: lines that stand in the held-out text, too")
    workers = available_workers(data.workers, total, size)
    partial = root / f"{key}.{_hash([CUTS, size])[:8]}.partial"
    going_on = partial.is_dir() and any(partial.glob("*.bin"))
    say(
        f"tokenising {total / 2**20:,.1f} MiB of text, once, into {root / key}"
        + (f", by {workers} processes" if workers > 1 else "")
        + (", going on where an earlier run ended" if going_on else "")
    )
    dtype = np.dtype(np.min_scalar_type(tokenizer.vocab_size - 1))
    expected = total * dtype.itemsize / (1 if data.tokenizer == BYTES else TEXT_OF_A_TOKEN)
    if not going_on and (free := shutil.disk_usage(root).free) < expected:
        say(
            f"warning: the tokens will take about {gib(expected)}, and the disk of {root} has {gib(free)} free; "
            "data.cache_dir names another one"
        )
    partial.mkdir(exist_ok=True)
    job = Job(tokenizer=data.tokenizer, fingerprint=tokenizer.fingerprint, text_key=data.text_key, dtype=dtype.name)
    shards = itertools.chain.from_iterable(shards_of(name, part, size) for name, part in parts.items())
    names: list[str] = []

    try:
        with progress(total) as advance:

            def done(shard: Shard) -> None:
                names.append(shard.name)
                advance(shard.size)

            write_shards(partial, shards, job, tokenizer, workers, done)
        counts = {name: (partial / name).stat().st_size // dtype.itemsize for name in sorted(names)}
        _write_index(partial, counts, dtype, data.validation_fraction, tokenizer)
        _publish(partial, root / key)
    except BaseException as error:
        if isinstance(error, InputError) and not isinstance(error, WorkerLost):
            shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.rmdir()  # if nothing was done yet
        # If locks do not work, another builder may have published this folder.
        if not (isinstance(error, FileNotFoundError) and (root / key).is_dir()):
            raise


def _apart(split: Mapping[str, Sequence[Path]]) -> tuple[Iterator[tuple[Part, int]], int]:
    """The training text apart from the held-out text, and how many bytes are left out."""
    kept = apart(split["train"], split["validation"])
    return iter(kept), sum(file.stat().st_size for file in split["train"]) - sum(count for _, count in kept)


def _write_index(folder: Path, counts: dict[str, int], dtype: np.dtype, fraction: float, tokenizer: Tokenizer) -> None:
    """The index of these shards.  Of text of which no whole file could be held out, the last tokens are."""
    shards = {
        part: {name: count for name, count in counts.items() if name.startswith(part)}
        for part in ("train", "validation")
    }
    train, held = (sum(part.values()) for part in shards.values())
    if not shards["validation"]:
        held = int(train * fraction)
        train -= held
    tokens = {"train": train, "validation": held}
    index = {
        "format": FORMAT,
        "dtype": dtype.name,
        "tokens": tokens,
        "tokenizer": tokenizer.fingerprint,
        "shards": shards,
    }
    _write_atomically(folder / "index.json", json.dumps(index, indent=1))


def _publish(partial: Path, folder: Path) -> None:
    """Renames the folder, without what killed processes have left."""
    for file in partial.glob(f"*{UNFINISHED}"):
        file.unlink(missing_ok=True)
    write_manifest(partial)
    try:
        partial.rename(folder)
    except OSError:  # if locks do not work, another builder may have been first, whose cache is as good
        if not folder.is_dir():
            raise


def _open(folder: Path, built: bool) -> TokenCache:
    remedy = f"delete it (rm -r {folder}) and it is built again"
    try:
        index = json.loads(read_text(folder / "index.json"))
        dtype = np.dtype(index["dtype"])
        tokens = {name: int(index["tokens"][name]) for name in ("train", "validation")}
        # Caches of earlier versions have one file for each of the two.
        shards = index.get("shards") or {name: {f"{name}.bin": count} for name, count in tokens.items()}
        counts = {name: {folder / file: int(count) for file, count in shards[name].items()} for name in tokens}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"token cache {folder} has no readable index ({error!r}); {remedy}") from None
    for file, count in itertools.chain.from_iterable(part.items() for part in counts.values()):
        size = file.stat().st_size if file.is_file() else 0
        if size != count * dtype.itemsize:
            raise InputError(
                f"token cache {file} holds {size} bytes where its index says {count * dtype.itemsize}; {remedy}"
            )
    train, validation = (Tokens(part, dtype) for part in counts.values())
    if train.size > tokens["train"]:
        train, validation = train.split(tokens["train"])
    return TokenCache(key=folder.name, folder=folder, built=built, train=train, validation=validation)
