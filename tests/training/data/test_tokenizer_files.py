"""Every form in which people have tokenizers gives the same ids, the configured special ones, or one clear refusal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub.errors import RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.implementations import BertWordPieceTokenizer

from jhpt.core.errors import InputError
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.data.tokenizer_training import train_tokenizer
from tests.conftest import text
from tests.training.data.test_tokenizer import PROPERTY

ALPHABET = "theмesh Éé,.çß中\n'1"
"""Of text for WordPiece: known and unknown letters, accents, capitals, punctuation, a Chinese character."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with `gpt.json` and `bert.json`, trained on the same text."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(text(4000) + "Été, mesh's 1 中 end.\n" * 3)
    files = [folder / "text.txt"]
    train_tokenizer(files, "bpe", 300).save(str(folder / "gpt.json"))
    train_tokenizer(files, "wordpiece", 150).save(str(folder / "bert.json"))
    return folder


def folder_of(file: Path, folder: Path, **settings: object) -> Path:
    """A Hugging Face folder with a tokenizer.json and, if there are any, settings."""
    folder.mkdir(exist_ok=True)
    shutil.copy(file, folder / "tokenizer.json")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def vocabulary_of(file: Path, folder: Path, **settings: object) -> Path:
    """A Hugging Face folder as before tokenizer.json: only the vocabulary."""
    folder.mkdir(exist_ok=True)
    tokenizers.Tokenizer.from_file(str(file)).model.save(str(folder))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def specials(name: object) -> tuple[int | None, ...]:
    tokenizer = load_tokenizer(str(name))
    return tokenizer.end, tokenizer.mask, tokenizer.start, tokenizer.separator


# --- the same ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_folder_is_its_tokenizer_file(kind, trained, tmp_path):
    file, folder = trained / f"{kind}.json", folder_of(trained / f"{kind}.json", tmp_path / "folder")
    alone, inside = load_tokenizer(str(file)), load_tokenizer(str(folder))
    assert alone.encode(text(500)).tolist() == inside.encode(text(500)).tolist()
    assert (alone.fingerprint, specials(file)) == (inside.fingerprint, specials(folder))
    assert (alone.files, inside.files) == ((file,), (folder / "tokenizer.json",))


def test_gpt2s_vocabulary_and_merges_are_its_tokenizer_file(trained, tmp_path):
    folder = vocabulary_of(trained / "gpt.json", tmp_path / "old", tokenizer_class="GPT2TokenizerFast")
    assert {path.name for path in folder.iterdir()} == {"vocab.json", "merges.txt", "tokenizer_config.json"}
    file, old = load_tokenizer(str(trained / "gpt.json")), load_tokenizer(str(folder))
    assert {path.name for path in old.files} == {"vocab.json", "merges.txt", "tokenizer_config.json"}

    @given(st.text(max_size=80))
    @PROPERTY
    def same(sample):
        assert old.encode(sample).tolist() == file.encode(sample).tolist()
        assert old.decode(old.encode(sample).tolist()) == sample

    same()
    assert old.encode("the<|endoftext|>").tolist() == file.encode("the<|endoftext|>").tolist()
    assert (old.vocab_size, specials(folder)) == (file.vocab_size, specials(trained / "gpt.json"))


@pytest.mark.parametrize("lowercase", [None, True, False])
def test_berts_vocabulary_is_what_the_library_makes_of_it(lowercase, trained, tmp_path):
    """Without a setting transformers reads in lower case."""
    settings = {} if lowercase is None else {"do_lower_case": lowercase}
    folder = vocabulary_of(trained / "bert.json", tmp_path / "old", **settings)
    old = load_tokenizer(str(folder))
    theirs = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=lowercase is not False)
    plain = load_tokenizer(str(trained / "bert.json"))
    different = 0

    @given(st.text(ALPHABET, max_size=40))
    @PROPERTY
    def same(sample):
        nonlocal different
        assert old.encode(sample).tolist() == theirs.encode(sample, add_special_tokens=False).ids
        different += old.encode(sample).tolist() != plain.encode(sample).tolist()

    same()
    assert bool(different) == (lowercase is not False)  # the file was trained with capitals and accents
    assert specials(folder) == specials(trained / "bert.json") == (3, 4, 2, 3)


def test_added_tokens_have_their_ids(trained, tmp_path):
    folder = vocabulary_of(trained / "gpt.json", tmp_path / "old", pad_token="<pad>", eos_token="<stop>")
    first = load_tokenizer(str(trained / "gpt.json")).vocab_size
    (folder / "added_tokens.json").write_text(json.dumps({"<stop>": first + 1, "<pad>": first}))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.end, tokenizer.vocab_size) == (first + 1, first + 2)
    assert tokenizer.encode("the<pad>")[-1] == first


# --- special ids -----------------------------------------------------------------------------------------------

GUESSED_BERT = (3, 4, 2, 3)  # [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4
SETTINGS = {
    "none": ({}, GUESSED_BERT),
    "text": ({"eos_token": "[CLS]"}, (2, 4, 2, 2)),
    "with properties": ({"mask_token": {"content": "[UNK]", "lstrip": True}}, (3, 1, 2, 3)),
    "first name counts": ({"cls_token": "[PAD]", "bos_token": "[MASK]"}, (3, 4, 0, 3)),
    "null is none": ({"mask_token": None}, (3, None, 2, 3)),
    "null, and another name": ({"cls_token": None, "bos_token": "[UNK]"}, (3, 4, 1, 3)),
    "other settings": ({"model_max_length": 512, "pad_token": "[PAD]"}, GUESSED_BERT),
}
"""What tokenizer_config.json says, and (end, mask, start, separator)."""


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_decide_the_special_ids(case, file, trained, tmp_path):
    settings, expected = SETTINGS[case]
    folder = folder_of(trained / "bert.json", tmp_path / "folder")
    (folder / file).write_text(json.dumps(settings))
    assert specials(folder) == expected
    same = expected == GUESSED_BERT
    plain = load_tokenizer(str(trained / "bert.json"))
    assert (load_tokenizer(str(folder)).fingerprint == plain.fingerprint) == same


@pytest.mark.parametrize("case", SETTINGS)
def test_a_saved_tokenizer_is_the_same(case, trained, tmp_path):
    """As a run directory has it."""
    tokenizer = load_tokenizer(str(folder_of(trained / "bert.json", tmp_path / "folder", **SETTINGS[case][0])))
    (tmp_path / "run").mkdir()
    tokenizer.save(tmp_path / "run")
    again = load_tokenizer(str(tmp_path / "run"))
    assert (again.fingerprint, specials(tmp_path / "run")) == (tokenizer.fingerprint, SETTINGS[case][1])
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"tokenizer.json", "special_tokens_map.json"}


def test_a_saved_vocabulary_is_the_same(trained, tmp_path):
    old = load_tokenizer(str(vocabulary_of(trained / "bert.json", tmp_path / "old", do_lower_case=True)))
    (tmp_path / "run").mkdir()
    old.save(tmp_path / "run")
    again = load_tokenizer(str(tmp_path / "run"))
    assert again.fingerprint == old.fingerprint
    assert again.encode("The MESH, Été").tolist() == old.encode("The MESH, Été").tolist()


# --- refusals --------------------------------------------------------------------------------------------------

JSON = b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}'
VOCAB, MERGES = b'{"a": 0, "b": 1, "ab": 2}', b"#version: 0.2\na b\n"

REFUSED = {
    "nothing": ({"notes.txt": b"x"}, ("no tokenizer.json", "vocab.json with merges.txt", "vocab.txt")),
    "half of GPT-2's": ({"vocab.json": VOCAB}, ("no vocab.json with merges.txt",)),
    "a run on bytes": ({"config.yaml": b"name: x"}, ("this run has no tokenizer.json", "'bytes'")),
    "malformed": ({"tokenizer.json": b"{"}, ("not a tokenizers JSON file",)),
    "malformed settings": ({"tokenizer.json": JSON, "tokenizer_config.json": b"{"}, ("tokenizer_config.json", "JSON")),
    "settings in a list": ({"tokenizer.json": JSON, "special_tokens_map.json": b"[]"}, ("no JSON object",)),
    "a special token that is not there": (
        {"tokenizer.json": JSON, "special_tokens_map.json": b'{"mask_token": "<mask>"}'},
        ("'<mask>' as mask_token", "which its vocabulary has not", "correct special_tokens_map.json"),
    ),
    "malformed vocabulary": ({"vocab.json": b"[", "merges.txt": MERGES}, ("no vocabulary in vocab.json",)),
    "malformed merges": ({"vocab.json": VOCAB, "merges.txt": b"a c d\n"}, ("no vocabulary in vocab.json",)),
    "another class": (
        {"vocab.json": VOCAB, "merges.txt": MERGES, "tokenizer_config.json": b'{"tokenizer_class": "CLIPTokenizer"}'},
        ("not for CLIPTokenizer", "GPT2Tokenizer", "save_pretrained"),
    ),
    "another class of words": (
        {"vocab.txt": b"a\n", "tokenizer_config.json": b'{"tokenizer_class": "MPNetTokenizerFast"}'},
        ("not for MPNetTokenizerFast", "BertTokenizer"),
    ),
    "added tokens elsewhere": (
        {"vocab.json": VOCAB, "merges.txt": MERGES, "added_tokens.json": b'{"<x>": 9}'},
        ("'<x>' the id 9", "not the next", "tokenizer.json"),
    ),
    "added tokens without ids": (
        {"vocab.json": VOCAB, "merges.txt": MERGES, "added_tokens.json": b'{"<x>": "9"}'},
        ("'<x>' the id 9",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_tokenizer_is_refused(case, tmp_path):
    files, words = REFUSED[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_tokenizer(str(tmp_path))
    for word in (f"data.tokenizer={tmp_path}", *words):
        assert word in str(caught.value), caught.value


# --- the hub ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Repositories by name: folders, an exception that the hub answers with, or nothing for an unknown name."""
    repositories: dict[str, Path | Exception] = {}

    def answer(name: str) -> Path:
        found = repositories.get(name)
        if found is None:
            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))
        if isinstance(found, Exception):
            raise found
        return found

    def model_info(self, name: str, timeout: float):
        assert 0 < timeout <= 30
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file.name) for file in answer(name).iterdir()])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(answer(name) / file))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    monkeypatch.chdir(tmp_path)
    return repositories


@pytest.mark.parametrize("name", ["gpt2", "org/some-name_1.0"])
def test_a_name_on_the_hub_is_its_folder(name, hub, trained, tmp_path):
    hub[name] = folder_of(trained / "bert.json", tmp_path / "repository", mask_token="[UNK]")
    (hub[name] / "model.safetensors").write_bytes(b"not downloaded")
    assert load_tokenizer(name).fingerprint == load_tokenizer(str(hub[name])).fingerprint
    assert load_tokenizer(name).mask == 1
    assert load_tokenizer(name).files == (hub[name] / "tokenizer.json", hub[name] / "tokenizer_config.json")


def test_a_folder_of_the_same_name_comes_first(hub, trained, tmp_path):
    hub["gpt2"] = folder_of(trained / "bert.json", tmp_path / "repository")
    folder_of(trained / "gpt.json", tmp_path / "gpt2")
    assert load_tokenizer("gpt2").files == (Path("gpt2/tokenizer.json"),)


def test_what_was_downloaded_serves_without_the_hub(hub, trained, tmp_path, monkeypatch):
    cache = folder_of(trained / "gpt.json", tmp_path / "cache")
    hub["gpt2"] = OSError("no route to host")
    places = {"tokenizer.json": str(cache / "tokenizer.json"), "vocab.json": object()}  # known not to be there
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: places.get(file))
    assert load_tokenizer("gpt2").fingerprint == load_tokenizer(str(cache)).fingerprint


HUB = {
    "unreachable": (
        "gpt2",
        OSError("no route to host"),
        ("hub cannot be reached (no route to host)", "a Hugging Face"),
    ),
    "unreachable without words": ("gpt2", TimeoutError(), ("hub cannot be reached (TimeoutError)",)),
    "unknown": ("no/such", None, ("hub has no such public repository", "hf auth login")),
    "no tokenizer": ("org/images", Path("images"), ("hub has no tokenizer.json",)),
    "no name": ("three/part/name", None, ("no such file; give 'bytes'",)),
    "no name of the hub": ("../gpt2", None, ("no such file; give",)),
    "a missing file": ("folder/tok.json", None, ("no such file; give 'bytes', a tokenizers JSON file",)),
}


@pytest.mark.parametrize("case", HUB)
def test_what_the_hub_has_not_is_refused(case, hub, tmp_path):
    name, answer, words = HUB[case]
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "model.bin").write_bytes(b"x")
    if answer is not None:
        hub[name] = tmp_path / answer if isinstance(answer, Path) else answer
    with pytest.raises(InputError) as caught:
        load_tokenizer(name)
    for word in (f"data.tokenizer={name}:", *words):
        assert word in str(caught.value), caught.value


def test_offline_is_respected(tmp_path):
    """In a process of its own: the hub's library reads the variable where it is imported."""
    code = "from jhpt.training.data.tokenizer import load_tokenizer; load_tokenizer('gpt2')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "InputError: data.tokenizer=gpt2: no such file or folder" in done.stderr, done.stderr
    assert "offline mode is enabled" in done.stderr and "HF_HUB_OFFLINE" in done.stderr
