"""Documents are read from any format and from any part of a file, or refused with their place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jhpt.training.data import documents
from jhpt.training.data.documents import Part
from tests.training.data.test_corpus import PROPERTY, refusal, write


def read(file, text_key="text") -> list[str]:
    """The documents of a file, each as one string."""
    return joined(documents.read(Part(file=file), text_key))


def joined(pieces) -> list[str]:
    """Documents from their pieces; each must have its end."""
    texts, open_text = [], None
    for piece in pieces:
        if piece is None:
            texts.append(open_text or "")
            open_text = None
        else:
            open_text = (open_text or "") + piece
    assert open_text is None
    return texts


@given(text=st.text(st.sampled_from("ab\n\r é𝄞"), max_size=60), piece=st.integers(1, 20))
@PROPERTY
def test_pieces_add_up_to_the_text_and_end_at_line_ends(tmp_path_factory, text, piece):
    (file,) = write(tmp_path_factory.getbasetemp() / "pieces", [text.encode()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_CHARS", piece)
        *pieces, end = documents.read(Part(file=file), "text")
    assert end is None
    assert "".join(pieces) == text
    assert all(part.endswith(("\n", "\r")) for part in pieces[:-1])


def test_a_file_of_a_single_line_is_cut_too(tmp_path, monkeypatch):
    (file,) = write(tmp_path / "line", [b"abcdefgh\nij"])
    monkeypatch.setattr(documents, "PIECE_CHARS", 2)
    monkeypatch.setattr(documents, "LINE_CHARS", 3)
    assert list(documents.read(Part(file=file), "text")) == ["abcde", "fgh\n", "ij", None]


@given(texts=st.lists(st.text(max_size=20), max_size=6))
@PROPERTY
def test_every_line_of_a_jsonl_file_is_a_document(tmp_path_factory, texts):
    file = tmp_path_factory.getbasetemp() / "lines.jsonl"
    file.write_text("\n\n".join(json.dumps({"body": text, "id": 1}) for text in texts))
    assert read(file, "body") == texts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": ', ["not valid JSON", "one object"]),
        (b"[" * 100_000, ["not valid JSON"]),
        (b'{"text": ' + b"9" * 5000 + b"}", ["not valid JSON"]),
        (b'{"body": "a", "id": 1}', ["no text under 'text'", "found: body, id", "data.text_key"]),
        (b'{"text": 3}', ["no text under 'text'", "found: text"]),
        (b"[1]", ["no text under 'text'", "found: list"]),
        (b'{"text": "a\\ud800b"}', ["surrogate"]),
    ],
    ids=["cut off", "deep", "long number", "other key", "no string", "list", "surrogate"],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, words):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    text = refusal(lambda: read(file))
    for word in [f"{file}, line 3", *words]:
        assert word in text, text


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_bytes_that_are_no_utf8_are_refused_with_their_place(tmp_path, name):
    file = tmp_path / name
    content = b'{"text": "r\xc3\xa9sum\xc3\xa9 \xff"}\n'
    file.write_bytes(content)
    text = refusal(lambda: read(file))
    assert f"{file} is not UTF-8 at byte {content.index(0xFF)};" in text and "iconv" in text
