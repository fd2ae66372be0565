"""All formats of the same documents give the same tokens; a file that is not what its name says gets fitting advice."""

import gzip
import importlib.util
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jhpt.core.config import DataConfig
from jhpt.core.errors import InputError, NotHere
from jhpt.training.data import streams
from jhpt.training.data.cache import token_cache
from jhpt.training.data.columns import rows
from jhpt.training.data.corpus import find_files
from jhpt.training.data.tokenizer import ByteTokenizer

DOCUMENTS = [f"Dokument {number}: größer 𝄞\r\n" + "word\n" * (number % 7) for number in range(600)]


def lines(documents) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents).encode()


def table(documents, **others) -> pa.Table:
    return pa.table({"id": list(range(len(documents))), "text": documents, **others})


def parquet(documents, rows=100) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table(documents), sink, row_group_size=rows)
    return sink.getvalue()


def arrow(documents) -> bytes:
    sink, content = io.BytesIO(), table(documents)
    with pa.ipc.new_stream(sink, content.schema) as stream:
        stream.write_table(content, max_chunksize=64)
    return sink.getvalue()


def frames(content: bytes) -> bytes:
    """Two zstd frames, one after the other."""
    half, compress = len(content) // 2, zstandard.ZstdCompressor().compress
    return compress(content[:half]) + compress(content[half:])


def save_dataset(folder: Path, documents) -> Path:
    """What `datasets.Dataset.save_to_disk` leaves: two files, and one of a cache, which is none of it."""
    folder.mkdir(parents=True)
    files, half = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"], len(documents) // 2
    for name, part in zip(files, (documents[:half], documents[half:]), strict=True):
        (folder / name).write_bytes(arrow(part))
    (folder / "cache-1234.arrow").write_bytes(b"something else")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def save_splits(folder: Path, **splits) -> Path:
    for name, documents in splits.items():
        save_dataset(folder / name, documents)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def tokens(path, root, **changes) -> list[str]:
    """All documents, sorted, because files are read in the order of their content's hash."""
    data = DataConfig(path=str(path), cache_dir=str(root), validation_fraction=0, **changes)
    stream = np.asarray(token_cache(data, ByteTokenizer()).train)
    *documents, rest = bytes(stream.tolist()).split(bytes([ByteTokenizer.end]))
    assert rest == b""
    return [document.decode() for document in documents]


FORMATS = {
    "a.jsonl": lines,
    "a.jsonl.gz": lambda documents: gzip.compress(lines(documents)),
    "two members.jsonl.gz": lambda documents: gzip.compress(lines(documents[:9])) + gzip.compress(lines(documents[9:])),
    "a.jsonl.zst": lambda documents: frames(lines(documents)),
    "a.parquet": parquet,
    "a.arrow": arrow,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_rows_gives_the_same_documents_in_order(tmp_path, name, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", 1000)
    (tmp_path / name).write_bytes(FORMATS[name](DOCUMENTS))
    assert tokens(tmp_path / name, tmp_path / "cache") == DOCUMENTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.md.gz"])
def test_every_format_of_text_gives_one_document(tmp_path, name, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", 1000)
    content = "".join(DOCUMENTS)
    compress = {".gz": gzip.compress, ".zst": frames}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content.encode()))
    assert tokens(tmp_path / name, tmp_path / "cache") == [content]


def test_a_folder_gives_files_of_all_formats_and_data_sets(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    parts = [DOCUMENTS[at : at + 60] for at in range(0, len(DOCUMENTS), 60)]
    for name, part in zip(FORMATS, parts, strict=False):
        if name != "a.arrow":  # only the file of a data set says which of a folder's Arrow files are meant
            (folder / name).write_bytes(FORMATS[name](part))
    (folder / "stray.arrow").write_bytes(b"?")
    save_dataset(folder / "deep" / "saved", parts[6])
    save_splits(folder / "splits", train=parts[7], test=parts[8])
    expected = [text for at, part in enumerate(parts) if at not in (5, 8, 9) for text in part]
    assert sorted(tokens(folder, tmp_path / "cache")) == sorted(expected)


def test_of_splits_train_is_read_unless_another_is_named(tmp_path):
    splits = save_splits(tmp_path / "splits", train=["a", "b"], validation=["c", "d"], test=["e", "f"])
    for path, expected in {
        splits: ["a", "b"],
        splits / "validation": ["c", "d"],
        f"{tmp_path}/spl*": ["a", "b"],
        f"{splits}/t*": ["a", "b", "e", "f"],
        f"{splits}/test/data*.arrow": ["e", "f"],
    }.items():
        assert sorted(tokens(path, tmp_path / "cache")) == expected


def test_formats_of_the_same_bytes_have_keys_of_their_own(tmp_path):
    files = [tmp_path / name for name in ("a.txt.gz", "a.jsonl.gz")]
    for file in files:
        file.write_bytes(gzip.compress(lines(["x", "y"])))
    assert tokens(files[0], tmp_path / "cache") != tokens(files[1], tmp_path / "cache") == ["x", "y"]


# --- what is refused -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A file that is refused, and words of the message."""

    name: str
    content: bytes
    words: tuple[str, ...]


def cut(content: bytes, share=0.6) -> bytes:
    return content[: int(share * len(content))]


def columns(**named) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(named), sink)
    return sink.getvalue()


def flipped(content: bytes) -> bytes:
    """With a damaged byte in the middle."""
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(np.asarray([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")]
)

BAD = {
    "text called parquet": Bad("a.parquet", b"some text", ("no Parquet file", ".txt")),
    "gzip called parquet": Bad("a.parquet", gzip.compress(b"x"), ("no Parquet file", "looks like gzip", ".gz")),
    "parquet cut short": Bad("a.parquet", cut(parquet(DOCUMENTS)), ("cut short", "download it again")),
    "parquet without rows": Bad("a.parquet", parquet([]), ("no rows", "leave it out")),
    "parquet without the column": Bad("a.parquet", columns(body=["x"]), ("no column 'text'", "body", "data.text_key")),
    "parquet of numbers": Bad("a.parquet", columns(text=[1, 2]), ("holds int64", "data.text_key")),
    "parquet with a null": Bad("a.parquet", columns(text=["x", None]), ("row 2", "null", "leave out")),
    "parquet that is no utf-8": Bad("a.parquet", columns(text=NOT_UTF8), ("row 2", "UTF-8")),
    "parquet with a damaged footer": Bad("a.parquet", parquet(["x"])[:-8] + b"\1\0\0\0PAR1", ("damaged", "again")),
    "parquet called text": Bad("a.txt", parquet(["x"]), ("no text", "looks like Parquet", ".parquet")),
    "text called gz": Bad("a.txt.gz", b"some text", ("not compressed by gzip", ".txt")),
    "gz called text": Bad("a.txt", gzip.compress(b"x"), ("looks like gzip", ".gz")),
    "gz cut short": Bad("a.jsonl.gz", cut(gzip.compress(lines(DOCUMENTS))), ("cut short", "again")),
    "gz damaged": Bad("a.jsonl.gz", flipped(gzip.compress(lines(DOCUMENTS))), ("damaged", "again")),
    "gz that is no utf-8": Bad("a.txt.gz", gzip.compress(b"abc\xff"), ("not UTF-8 at byte 3 of its text", "iconv")),
    "gz of what": Bad("a.gz", gzip.compress(b"x"), ("NAME.txt.gz", "NAME.jsonl.gz")),
    "bad line in gz": Bad("a.jsonl.gz", gzip.compress(lines(["x"]) + b"{\n"), ("line 2", "not valid JSON")),
    "text called zst": Bad("a.jsonl.zst", b"some text", ("not compressed by zstd", ".txt")),
    "zst cut short": Bad("a.jsonl.zst", cut(zstandard.compress(lines(DOCUMENTS))), ("cut short", "again")),
    "zst cut between blocks": Bad("a.txt.zst", zstandard.compress(b"x")[:5], ("cut short", "again")),
    "zst damaged": Bad("a.jsonl.zst", frames(lines(DOCUMENTS)) + b"and more", ("damaged", "again")),
    "arrow cut short": Bad("a.arrow", cut(arrow(DOCUMENTS)), ("cut short", "again")),
    "arrow without its end": Bad("a.arrow", arrow(DOCUMENTS)[:-8], ("cut short", "again")),
    "text called arrow": Bad("a.arrow", b"some text" + bytes(8), ("damaged", "again")),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_fitting_advice_and_leaves_nothing(tmp_path, bad):
    file, root = tmp_path / bad.name, tmp_path / "cache"
    file.write_bytes(bad.content)
    with pytest.raises(InputError) as caught:
        tokens(file, root)
    message = str(caught.value)
    for word in (str(file), *bad.words):
        assert word in message, message
    assert "\n" not in message
    assert not [path for path in root.glob("*") if path.is_dir() and path.name != "seen"]


def test_a_null_is_named_by_its_row_in_the_file(tmp_path):
    """Row groups before the part that is read count."""
    file = tmp_path / "a.parquet"
    pq.write_table(table(["x"] * 10 + [None]), file, row_group_size=4)
    with pytest.raises(InputError, match="row 11,"):
        list(rows(file, "text", 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "state.json").write_text("{"), ["no readable state.json", "save_to_disk"]),
        (lambda folder: (folder / "state.json").write_text("[]"), ["no readable state.json"]),
        (lambda folder: (folder / "data-00001-of-00002.arrow").unlink(), ["lacks data-00001-of-00002.arrow"]),
        (
            lambda folder: (folder / "state.json").write_text(
                json.dumps({"_data_files": [{"filename": "cache-1234.arrow"}], "_indices_data_files": [{}]})
            ),
            ["flatten_indices"],
        ),
    ],
    ids=["broken state", "state a list", "missing file", "selection"],
)
def test_a_damaged_data_set_is_refused(tmp_path, damage, words):
    folder = save_dataset(tmp_path / "saved", ["a", "b"])
    damage(folder)
    with pytest.raises(InputError) as caught:
        find_files(str(folder))
    for word in (str(folder), *words):
        assert word in str(caught.value)


def test_splits_without_train_name_those_there_are(tmp_path):
    splits = save_splits(tmp_path / "splits", train=["a", "b"], test=["c", "d"])
    shutil.rmtree(splits / "train")
    with pytest.raises(InputError, match="name one of its sub-folders: test"):
        find_files(str(splits))


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("a.arrow", "pyarrow", "parquet"), ("a.txt.zst", "zstandard", "zstd")],
)
def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch, name, package, extra):
    monkeypatch.setattr("jhpt.training.data.formats.find_spec", lambda name: None if name == package else importlib)
    (tmp_path / name).write_bytes(b"content")
    with pytest.raises(NotHere) as caught:
        find_files(str(tmp_path / name))
    assert f"pip install 'jhpt[{extra}]'" in str(caught.value) and package in str(caught.value)
