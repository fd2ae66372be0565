"""What is no file, or enormous, in the place of every file that a command reads or writes."""

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from tests.malformed.case import Case, Valid, command
from tests.malformed.register import BY_HAND, Make

READ_AS: dict[str, str] = {
    "config": "train bad.yaml --data.path nothing.txt --out run",
    "planned": "plan bad.yaml --cluster h100x2x1",
    "cluster": "plan gpt-tiny --cluster bad.yaml",
    "profile": "plan --profile bad.json --cluster h100x2x1 --batch 4",
    "plan_file": "train tiny.yaml --plan bad.json --out out",
    "text": "train tiny.yaml --data.path bad.txt --out out",
    "training_text": "tokenizer train bad.txt --vocab-size 300 --out made.json",
    "tokenizer_file": "train tiny.yaml --data.tokenizer bad.json --out out",
    "init": "train --init bad --data.path nothing.txt --out out",
    "imported": "import hf bad --out out",
    "exported": "export hf bad out",
    "run_directory": "generate bad --prompt def",
    "verified": "verify bad",
    "prompts": "generate run --prompts bad.txt --out out.file",
    "documents_file": "eval run --documents bad.jsonl --out out.file",
    "tokens": "score run --tokens bad.npy --out out.file",
    "labelled_rows": "train bert-tiny --data.path bad.csv --model.task classify --out out",
    "published_runs": "bench predict --published bad.csv --json out.json",
    "data_cache": "train tiny.yaml --data.cache_dir bad --out out",
    "out": "train tiny.yaml --out bad",
    "out_of_plan": "plan gpt-tiny --cluster h100x2x1 --model.num_layers 1 --out bad",
    "svg_of_plan": "plan gpt-tiny --cluster h100x2x1 --model.num_layers 1 --svg bad",
    "out_of_import": "import hf hf --out bad",
    "out_of_export": "export hf run bad",
    "out_of_tokenizer": "tokenizer train text.txt --vocab-size 300 --out bad",
    "out_of_generate": "generate run --prompt a --prompt b --tokens 1 --out bad",
    "out_of_launch": "launch --slurm --out bad -- train gpt-tiny --out run",
}
"""What a command calls `bad`, or `bad` with a suffix."""

FOLDERS = (
    "init",
    "imported",
    "exported",
    "run_directory",
    "verified",
    "data_cache",
    "out",
    "out_of_import",
    "out_of_export",
)
"""Where a folder is what is expected."""


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        listening.bind(path.name)
        os.chdir(here)


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("kept")


def empty(path: Path) -> None:
    path.touch()


def zeros(path: Path) -> None:
    path.write_bytes(bytes(100_000))


def not_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x80" * 30_000)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


def one_line(path: Path) -> None:
    """100 MB without a space."""
    with path.open("wb") as stream:
        for _ in range(100):
            stream.write(b"x" * 1_000_000)


WRITTEN = ("out", "out_of_plan", "svg_of_plan", "out_of_generate", "out_of_launch", "data_cache")
"""Where an empty file, folder or place to write to is fine."""


def in_place(make: Callable[[Path], None], words: str) -> Make:
    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        for name in ("tiny.yaml", "text.txt", "run", "hf"):
            if name.split(".")[0] in words:
                valid.copied(name, here)
        bad = next(word for word in words.split() if word.startswith("bad"))
        make(here / bad)
        return command(words)

    return made


for _make in (loop, dangling, pipe, unix_socket, full_folder, empty, zeros, not_utf8, sparse, one_line):
    for _name, _words in READ_AS.items():
        enormous = _make in (sparse, one_line) and (_name in FOLDERS or _name.startswith(("out", "svg")))
        writes = _name in WRITTEN and _make in (empty, full_folder, dangling, zeros, not_utf8)
        if not enormous and not writes:
            BY_HAND[f"{_make.__name__}_as_{_name}"] = in_place(_make, _words)
