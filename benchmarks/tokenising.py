"""How fast text becomes a token cache, next to the tokenizers library called by hand; the memory it takes; whether it
survives SIGKILL.

    python benchmarks/tokenising.py --megabytes 2000 --workers 2

The text is random words by Zipf's law, some with letters of several bytes, half of it in text files and half in JSONL
files.  The tokenizer is a byte-level BPE of 8,192 ids, trained on the head of the text.  By hand: as many processes,
each of which reads its share of the text files in pieces, encodes them with `encode_batch_fast` and keeps nothing.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tokenizers

from jhpt.core.config import DataConfig
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import load_tokenizer

VOCABULARY, WORDS, BLOCK_WORDS = 8192, 50_000, 1_000_000
HEAD = 8_000_000
"""Bytes of text that the tokenizer is trained on."""

FILES = 4


def blocks(seed: int) -> Iterator[str]:
    """Endless text.  Rank r has probability ~ 1 / r; lines have 12 words on average, documents about 40 lines."""
    rng = np.random.default_rng(seed)
    letters = np.asarray(list("eeeettaaooiinnsshhrrdllcumwfgypbvkéüñжλ字"))
    words = ["".join(rng.choice(letters, 1 + rng.poisson(4))) for _ in range(WORDS)]
    table = np.asarray([f"{word} " for word in words] + ["\n", "\n\n"], object)
    shares = np.cumsum(1 / np.arange(1, WORDS + 1))
    while True:
        chosen = np.searchsorted(shares, rng.random(BLOCK_WORDS) * shares[-1])
        chosen[rng.random(BLOCK_WORDS) < 1 / 12] = WORDS
        chosen[rng.random(BLOCK_WORDS) < 1 / 500] = WORDS + 1
        yield "".join(table[chosen].tolist())


def write_corpus(folder: Path, size: int) -> None:
    """Files of about `size` bytes in all: half text, half JSONL with a document per paragraph."""
    folder.mkdir(parents=True)
    text = blocks(0)
    for number in range(FILES):
        jsonl = number % 2
        with (folder / f"{number}.{'jsonl' if jsonl else 'txt'}").open("w", encoding="utf-8") as stream:
            while stream.tell() < size / FILES:
                block = next(text)
                documents = block.split("\n\n")
                stream.write(
                    "".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in documents)
                    if jsonl
                    else block
                )


def train_tokenizer(corpus: Path, out: Path) -> None:
    """A byte-level BPE with an end of text."""
    with (corpus / "0.txt").open(encoding="utf-8") as stream:
        head = stream.read(HEAD)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(head.splitlines(keepends=True), trainer)
    tokenizer.save(str(out))


BY_HAND = """
import sys
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8", newline="") as stream:
    stream.seek(int(sys.argv[3]))
    left = int(sys.argv[4])
    while left > 0 and (text := stream.read(1 << 20)):
        text += stream.readline()
        tokenizer.encode_batch_fast([text], add_special_tokens=False)
        left -= len(text.encode())
"""


def processor_seconds() -> float:
    """Of all processes that this one, and those that it has waited for, have waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def by_hand(tokenizer: Path, corpus: Path, workers: int, limit: int) -> tuple[float, float]:
    """(MB/s, MB per processor second) of `workers` processes that together encode about `limit` bytes of text files."""
    shares = [(corpus / f"{2 * (number % 2)}.txt", number // 2) for number in range(workers)]
    environment, size = os.environ | {"TOKENIZERS_PARALLELISM": "false"}, limit // workers
    starts = [(file, line_start(file, part * size)) for file, part in shares]
    start, used = time.perf_counter(), processor_seconds()
    processes = [
        subprocess.Popen([sys.executable, "-c", BY_HAND, tokenizer, file, str(first), str(size)], env=environment)
        for file, first in starts
    ]
    assert not any(process.wait() for process in processes)
    encoded = workers * size / 1e6
    return encoded / (time.perf_counter() - start), encoded / (processor_seconds() - used)


def line_start(file: Path, offset: int) -> int:
    """The first byte behind the next line end."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return offset + len(stream.readline()) if offset else 0


def build(settings: str) -> None:
    """The process that is measured: builds a cache."""
    data = DataConfig.model_validate_json(settings)
    token_cache(data, load_tokenizer(data.tokenizer))


def started(data: DataConfig) -> subprocess.Popen[bytes]:
    """A process that builds this cache."""
    return subprocess.Popen([sys.executable, __file__, "--build", data.model_dump_json()])


def family(root: int) -> list[int]:
    """A process and all that it has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    members = [root]
    for member in members:
        members += [process for process, parent in parents.items() if parent == member]
    return members


def resident(process: int) -> int:
    """Resident bytes, those of files that are mapped included."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def watched(process: subprocess.Popen[bytes], until: Callable[[], bool] = lambda: False) -> tuple[float, int]:
    """(seconds, peak resident bytes of it and its processes) until it ends, or is killed because `until` holds."""
    start, peak = time.perf_counter(), 0
    while process.poll() is None:
        peak = max(peak, sum(map(resident, family(process.pid))))
        if until():
            members = family(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(2)
            left = [member for member in members if Path(f"/proc/{member}").exists()]
            assert not left, f"processes {left} have outlived the one that started them"
        time.sleep(0.1)
    return time.perf_counter() - start, peak


def shards(root: Path) -> dict[str, tuple[int, int]]:
    """The finished shards below a cache's folder, each with what changes if it is written again."""
    found = [(file, file.stat()) for file in root.glob("*/*.bin")]
    return {file.name: (stat.st_ino, stat.st_mtime_ns) for file, stat in found}


def fingerprint(root: Path) -> str:
    """A hash of all shards."""
    total = hashlib.blake2b()
    for file in sorted(root.glob("*/*.bin")):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "blake2b").digest())
    return total.hexdigest()


def measure(folder: Path, size: int, workers: int, sample: int) -> dict[str, object]:
    """Everything, in order; the two speeds in turn: by hand before and after."""
    corpus, tokenizer = folder / "corpus", folder / "tokenizer.json"
    if not corpus.is_dir():
        write_corpus(corpus, size)
        train_tokenizer(corpus, tokenizer)
    total = sum(file.stat().st_size for file in corpus.iterdir())
    data = DataConfig(path=str(corpus), tokenizer=str(tokenizer), cache_dir=str(folder / "cache"), workers=workers)
    hand = [by_hand(tokenizer, corpus, workers, min(sample, total // 4))]
    used = processor_seconds()
    seconds, peak = watched(started(data))
    used = processor_seconds() - used
    hand.append(by_hand(tokenizer, corpus, workers, min(sample, total // 4)))
    whole, count = fingerprint(folder / "cache"), len(shards(folder / "cache"))
    shutil.rmtree(folder / "cache")
    watched(started(data), lambda: len(shards(folder / "cache")) >= count // 2)
    done = shards(folder / "cache")
    rest, _ = watched(started(data))
    now = shards(folder / "cache")
    return {
        "megabytes": total / 1e6,
        "workers": workers,
        "load average": os.getloadavg(),
        "MB/s": total / seconds / 1e6,
        "MB/s by hand, before and after": [rate for rate, _ in hand],
        "ratio": total / seconds / 1e6 / (sum(rate for rate, _ in hand) / len(hand)),
        "MB per processor second": total / used / 1e6,
        "MB per processor second by hand": [rate for _, rate in hand],
        "peak resident MB, all processes": peak / 1e6,
        "shards": count,
        "done when killed": len(done),
        "of these written again": sum(now.get(name) != mark for name, mark in done.items()),
        "seconds for the rest / for all": [rest, seconds],
        "the same bytes": fingerprint(folder / "cache") == whole,
    }


def main() -> None:
    """Prints the measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="of text")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--sample", type=int, default=200, help="megabytes that are encoded by hand, at most")
    parser.add_argument("--folder", type=Path, help="keeps the text; default: a temporary folder")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        return build(options.build)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        figures = measure(folder, options.megabytes * 10**6, options.workers, options.sample * 10**6)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
