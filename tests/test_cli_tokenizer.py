"""`jhpt tokenizer train`, what it writes and refuses, and runs that take their vocabulary from a tokenizer."""

import json
import shlex
import shutil

import pytest

from jhpt.cli import main
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.presets import PRESETS
from jhpt.training.data.tokenizer import load_tokenizer
from jhpt.training.record import check_resumable, make_record
from jhpt.training.setup import fitting_tokenizer, with_vocabulary
from tests.conftest import text
from tests.test_cli import make_places, status_of, tree


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `text.txt` and `tokenizer.json`, made by the command line."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(text(4000))
    arguments = ["tokenizer", "train", str(folder / "text.txt"), "--vocab-size", "300"]
    assert main([*arguments, "--out", str(folder / "tokenizer.json")]) == 0
    return folder


# --- the command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "size", "preset"),
    [("", 280, "gpt2-124m"), ("--kind wordpiece", 60, "bert-base"), ("--kind wordpiece --lowercase", 60, "bert-base")],
)
def test_it_says_what_it_made_and_what_comes_next(flags, size, preset, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.txt").write_text(text(2000))
    (tmp_path / "c.jsonl").write_text(json.dumps({"body": text(2000, seed=1)}))
    command = f"tokenizer train 'a b.txt' c.jsonl --vocab-size {size} --out mine.json --text-key body {flags}"
    assert main(shlex.split(command)) == 0
    made, following = capsys.readouterr().out.splitlines()
    assert made.startswith(f"mine.json: {size} ids, ") and made.endswith(" bytes per token of the text")
    assert 1 < float(made.split()[-7]) < 8
    assert load_tokenizer("mine.json").vocab_size == size
    assert {path.name for path in tmp_path.iterdir()} == {"a b.txt", "c.jsonl", "mine.json"}

    arguments = shlex.split(following.removeprefix("next: jhpt train "))
    assert arguments[0] == preset
    settings = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert settings["--data.tokenizer"] == "mine.json" and settings["--data.text_key"] == "body"
    assert settings["--data.path"] == "[a b.txt, c.jsonl]"


def test_it_says_where_the_text_ends_first(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the mesh the mesh\n")
    assert main(shlex.split("tokenizer train a.txt --vocab-size 9000")) == 0
    made, following = capsys.readouterr().out.splitlines()
    assert "ids (the text has no more pairs for 9,000)" in made
    assert following.endswith("--data.path a.txt --data.tokenizer tokenizer.json")


def test_force_writes_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(text(500))
    (tmp_path / "tokenizer.json").write_text("mine")
    assert main(shlex.split("tokenizer train a.txt --vocab-size 260 --force")) == 0
    assert load_tokenizer("tokenizer.json").vocab_size == 260


BAD = {
    "no verb": ("", ("jhpt tokenizer train FILES",)),
    "another verb": ("trian a.txt", ("jhpt tokenizer train FILES",)),
    "no files": ("train --vocab-size 300", ("FILES", "name text")),
    "no size": ("train a.txt", ("--vocab-size",)),
    "no file of that name": ("train no.txt --vocab-size 300", ("FILES=no.txt", "no text found")),
    "an empty file": ("train empty.txt --vocab-size 300", ("empty.txt is empty",)),
    "no text": ("train blank.jsonl --vocab-size 300", ("no text in blank.jsonl",)),
    "text of another encoding": ("train latin.txt --vocab-size 300", ("latin.txt is not UTF-8",)),
    "another kind": ("train a.txt --vocab-size 300 --kind unigram", ("unigram", "wordpiece")),
    "bytes in lower case": ("train a.txt --vocab-size 300 --lowercase", ("lowercase is for wordpiece",)),
    "fewer than bytes": ("train a.txt --vocab-size 256", ("--vocab-size 256 is too small", "use 257 or more")),
    "fewer than characters": ("train a.txt --vocab-size 9 --kind wordpiece", ("too small", "characters need")),
    "out is there": ("train a.txt --vocab-size 300 --out b.txt", ("--out b.txt is there already", "--force")),
    "out is a folder": ("train a.txt --vocab-size 300 --out d --force", ("--out d cannot be written", "folder")),
    "out below a file": ("train a.txt --vocab-size 300 --out b.txt/t", ("--out b.txt/t cannot be written",)),
    "out in no folder": ("train a.txt --vocab-size 300 --out no/t", ("--out no/t cannot be written", "exists")),
    "out where nobody can write": ("train a.txt --vocab-size 300 --out /proc/t", ("--out /proc/t cannot be written",)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_refused(case, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name, content in {
        "a.txt": text(500).encode(),
        "b.txt": b"kept",
        "empty.txt": b"",
        "blank.jsonl": b"\n\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "latin.txt").write_bytes("é\n".encode("latin-1"))
    before = tree(tmp_path)
    status = status_of(["tokenizer", *shlex.split(arguments)])
    out, error = capsys.readouterr()
    assert status == 2, out + error
    for word in words:
        assert word in error, error
    assert "Traceback" not in out + error
    assert tree(tmp_path) == before


# --- the vocabulary of a run -----------------------------------------------------------------------------------

MADE_FOR = {"gpt2-124m": 50257, "gpt-13b": 50257, "llama-8b": 128256, "bert-base": 30522, "bert-large": 30522}


@pytest.mark.parametrize("preset", [name for name in PRESETS if load_config(name).model.reads == "text"])
def test_presets_are_planned_with_what_they_are_made_for_and_trained_with_the_tokenizer(preset, trained):
    config = load_config(preset)
    assert config.model.vocab_size == "auto" and config.model.vocab == MADE_FOR.get(preset, config.model.vocab)
    if not config.model.masked:
        sized = with_vocabulary(load_config(config, {"data.tokenizer": str(trained / "tokenizer.json")}))
        assert sized.model.vocab_size == sized.model.vocab == 300
        assert fitting_tokenizer(sized).vocab_size == 300
        assert with_vocabulary(sized) == sized


def test_a_tiny_model_reads_bytes_as_they_are():
    assert with_vocabulary(load_config("gpt-tiny")).model.vocab_size == 256


@pytest.mark.parametrize("preset", MADE_FOR)
def test_bytes_in_a_model_for_words_take_an_explicit_size(preset):
    with pytest.raises(InputError) as caught:
        with_vocabulary(load_config(preset))
    kind = " --kind wordpiece" if preset.startswith("bert") else ""
    for word in (
        f"{preset} is made for a vocabulary of {MADE_FOR[preset]:,} ids",
        f"jhpt tokenizer train FILES{kind} --vocab-size {MADE_FOR[preset]} --out tokenizer.json",
        "model.vocab_size=256",
    ):
        assert word in str(caught.value)
    for size in (256, MADE_FOR[preset]):
        assert with_vocabulary(load_config(preset, {"model.vocab_size": size})).model.vocab_size == size


def test_the_size_that_the_tokenizer_decides_must_go_with_the_other_settings(trained):
    """Of 300 ids the table has 384 rows."""
    settings = {"model.num_heads": 5, "model.d_model": 60, "model.d_ff": 60, "parallel.tensor": 5}
    config = load_config("gpt-tiny", settings | {"data.tokenizer": str(trained / "tokenizer.json")})
    with pytest.raises(InputError, match=r"padded to 384, is not divisible by parallel\.tensor=5"):
        with_vocabulary(config)


@pytest.mark.parametrize("command", ["train", "profile"])
def test_commands_refuse_bytes_in_a_model_for_words(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, "gpt2-124m"]) == 2
    assert "jhpt tokenizer train FILES --vocab-size 50257" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plan_says_which_vocabulary_it_is_for(capsys):
    plan = ["plan", "gpt2-124m", "--cluster", "h100x1x1", "--batch", "1", "--model.num_layers", "1"]
    assert main(plan) == 0
    plain = capsys.readouterr()
    assert main([*plan, "--data.tokenizer", "not-here.json"]) == 0
    told = capsys.readouterr()
    assert plain.err == "" and "planned with the 50,257 token ids that gpt2-124m is made for" in told.err
    assert plain.out == told.out
    assert main([*plan, "--data.tokenizer", "not-here.json", "--model.vocab_size", "50257"]) == 0
    assert capsys.readouterr() == plain


def test_a_run_of_before_there_was_auto_resumes():
    """Its checkpoint knows the vocabulary's size, and nothing of what a preset is made for."""
    before, now = (make_record(with_vocabulary(load_config("gpt-tiny")), "key", "float32") for _ in range(2))
    del before.config["model"]["nominal_vocab"]
    check_resumable(before, now, "here")
    other = make_record(load_config("gpt-tiny", {"model.vocab_size": 300}), "key", "float32")
    with pytest.raises(InputError, match=r"model\.vocab_size: the run has 256, now 300"):
        check_resumable(before, other, "here")


def test_a_run_keeps_its_tokenizer_and_another_run_takes_it(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = make_places(tmp_path / "here", trained)
    shutil.copy(trained / "tokenizer.json", "mine.json")
    tiny = ["train", str(places.here / "tiny.yaml")]
    assert main([*tiny, "--data.tokenizer", "mine.json", "--out", "run"]) == 0
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()
    assert load_config("run/config.yaml").model.vocab_size == 300
    assert not list((tmp_path / "run").glob("*.partial"))
    (tmp_path / "mine.json").unlink()
    capsys.readouterr()
    # Resuming compares content, so that the copy is as good as the file.
    assert main(["train", "--out", "run", "--data.tokenizer", "run"]) == 0
    assert "nothing to do" in capsys.readouterr().out
