"""`jhpt import`, `jhpt export` and `jhpt train --init`."""

import json

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import jhpt
from jhpt.cli import main
from jhpt.core.load import load_config
from jhpt.huggingface.files import stored_tensors
from jhpt.interop.huggingface import export_run
from jhpt.models.family import build
from tests.huggingface.shapes import CLASSIFIER, MODELS
from tests.huggingface.written import random_parameters, tensors_of, write_folder

LLAMA = MODELS["llama"].model_copy(update={"vocab_size": 256})
SHORT = {
    "train.steps": 1,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "evaluation.batches": 1,
    "evaluation.sample_tokens": 0,
    "log.tensorboard": False,
}
PLANS = {
    "pipe 2, data 2, tensor 2": {
        "parallel.pipe": 2,
        "parallel.data": 2,
        "parallel.tensor": 2,
        "parallel.micro_batches": 2,
    },
    "ZeRO-3": {"parallel.data": 4, "parallel.zero": 3},
    "offload": {"memory.offload": "both"},
}
NO_UPDATE = {"optimizer.learning_rate": 1e-30, "optimizer.weight_decay": 0.0}
"""Settings with which a step changes no parameter."""


def numbers(folder):
    return {name: np.array(tensor.read()) for name, tensor in stored_tensors(folder).items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


EVERY = {**MODELS, "classifier": CLASSIFIER}


@pytest.mark.parametrize("name", EVERY)
def test_there_and_back(name, tmp_path):
    """Imported and exported again, in shards of another size: bit for bit."""
    params = random_parameters(EVERY[name])
    write_folder(tmp_path / "there", EVERY[name], params)
    assert main(["import", "hf", str(tmp_path / "there"), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again"), "--shard", "30KB"]) == 0
    assert_same(numbers(tmp_path / "again"), tensors_of(EVERY[name], params))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_starts_with_the_weights(plan, tmp_path, corpus):
    """A step that changes nothing saves what it began with, under any plan."""
    params = random_parameters(LLAMA)
    write_folder(tmp_path / "there", LLAMA, params)
    overrides = {**corpus, **SHORT, **NO_UPDATE, **PLANS[plan]}
    jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides=overrides)
    assert main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert_same(numbers(tmp_path / "again"), tensors_of(LLAMA, params))


def test_a_run_starts_with_another_run(tmp_path, corpus):
    """Also with an imported one, which cannot be continued because it has no optimizer state."""
    params = random_parameters(LLAMA)
    write_folder(tmp_path / "there", LLAMA, params)
    main(["import", "hf", str(tmp_path / "there"), "--out", str(tmp_path / "imported")])
    overrides = {**corpus, **SHORT, **NO_UPDATE}
    with pytest.raises(jhpt.InputError, match="start from them with --init"):
        jhpt.train(None, out=tmp_path / "imported", overrides=overrides)
    jhpt.train(None, init=tmp_path / "imported", out=tmp_path / "run", overrides=overrides)
    main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again")])
    assert_same(numbers(tmp_path / "again"), tensors_of(LLAMA, params))


def test_the_head_of_pairs(tmp_path, corpus, capsys):
    """Taken where a run predicts pairs; left out by an import."""
    model = MODELS["bert"].model_copy(update={"vocab_size": 256, "objective": "mlm+nsp"})
    params = random_parameters(model)
    write_folder(tmp_path / "there", model, params)
    overrides = {**corpus, **SHORT, **NO_UPDATE, "model.objective": "mlm+nsp"}
    jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides=overrides)
    assert "fresh" not in capsys.readouterr().out
    assert main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    assert_same(numbers(tmp_path / "again"), tensors_of(model, params))
    assert main(["import", "hf", str(tmp_path / "again"), "--out", str(tmp_path / "imported")]) == 0
    assert "left out" in (said := capsys.readouterr().out) and "cls.seq_relationship.weight" in said
    assert load_config(tmp_path / "imported" / "config.yaml").model.objective == "mlm"


def test_a_folder_is_loaded_without_importing_it(tmp_path):
    """Its model answers as one with these parameters."""
    params = random_parameters(LLAMA)
    write_folder(tmp_path / "there", LLAMA, params)
    loaded = jhpt.load(tmp_path / "there")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    (row,) = loaded.generate(["ab"], tokens=3, temperature=0.0)
    model, seen = build(LLAMA), list(b"ab")
    for token in row.tokens:
        assert token == int(model.apply(params, np.array([seen]))[0, -1].argmax())
        seen.append(token)


def test_what_is_exported_in_fewer_bits_is_rounded(tmp_path):
    import ml_dtypes

    params = random_parameters(LLAMA)
    write_folder(tmp_path / "there", LLAMA, params)
    main(["import", "hf", str(tmp_path / "there"), "--out", str(tmp_path / "run")])
    main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again"), "--dtype", "bfloat16"])
    expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors_of(LLAMA, params).items()}
    assert_same(numbers(tmp_path / "again"), expected)


def test_tokenizer_files_come_along(tmp_path):
    write_folder(tmp_path / "there", LLAMA)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "there" / "tokenizer.json"))
    (tmp_path / "there" / "tokenizer_config.json").write_text('{"eos_token": "</s>", "more": 1}')
    main(["import", "hf", str(tmp_path / "there"), "--out", str(tmp_path / "run")])
    assert load_config(tmp_path / "run" / "config.yaml").data.tokenizer == str(tmp_path / "run")
    main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again")])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "there" / name).read_text()


def test_an_export_names_where_its_text_ends(tmp_path, corpus):
    """Otherwise transformers would stop at the ids of the first released model."""
    files, out = corpus["data.path"], tmp_path / "t.json"
    assert main(["tokenizer", "train", str(files), "--vocab-size", "300", "--out", str(out)]) == 0
    overrides = {**corpus, **SHORT, "data.tokenizer": str(out), "model.num_layers": 1, "model.d_model": 32}
    jhpt.train(None, out=tmp_path / "run", overrides=overrides)
    out.unlink()  # the run keeps its own
    assert main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    config, settings = (
        json.loads((tmp_path / "again" / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    end = jhpt.load(tmp_path / "run").tokenizer.end
    assert end is not None and config["eos_token_id"] == end and config["bos_token_id"] is None
    assert settings["eos_token"] == "<|endoftext|>"
    assert jhpt.load(tmp_path / "again").tokenizer.end == end
    jhpt.train(None, out=tmp_path / "run", overrides={"train.steps": 2})  # goes on with the tokenizer that it keeps


def test_weights_without_a_tokenizer_do_not_read_bytes_by_oversight(tmp_path, corpus):
    write_folder(tmp_path / "there", LLAMA.model_copy(update={"vocab_size": 300}))
    without = {name: value for name, value in corpus.items() if name != "data.tokenizer"}
    with pytest.raises(jhpt.InputError, match=r"the folder has no tokenizer\.json"):
        jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides={**without, **SHORT})
    main(["import", "hf", str(tmp_path / "there"), "--out", str(tmp_path / "imported")])
    with pytest.raises(jhpt.InputError, match="give 'bytes'"):
        jhpt.load(tmp_path / "imported")
    assert jhpt.load(tmp_path / "imported", tokenizer="bytes").tokenizer.vocab_size == 256


@pytest.fixture
def places(tmp_path):
    """A folder of weights, one that is in use, and an empty one."""
    write_folder(tmp_path / "there", LLAMA)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.yaml").write_text("preset: gpt-tiny\n")
    return tmp_path


REFUSED = {
    # arguments, with {} for the folder of `places`: what the message says
    "import hf {}/there --out {}/used": "is not empty",
    "import hf {}/empty --out {}/new": "neither a run",
    "import hf {}/missing --out {}/new": "neither a run",
    "export hf {}/there {}/new": "holds no run",
    "export hf {}/started {}/new": "has no checkpoint yet",
    "train --init {}/empty --out {}/new": "neither a run",
    "train --init {}/started --out {}/new": "without a checkpoint yet",
    "train gpt-tiny --init {}/there --out {}/new": "holds another model",
    "train --init {}/there --out {}/new --model.num_layers 3": "model.num_layers: the weights have 2",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words, places, capsys):
    """One message, exit status 2, nothing written."""
    before = sorted(places.rglob("*"))
    assert main(words.format(*[places] * words.count("{}")).split()) == 2
    error = capsys.readouterr().err
    assert REFUSED[words] in error and "Traceback" not in error
    assert sorted(places.rglob("*")) == before


def test_a_model_of_no_architecture_is_not_exported(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: {norm: rmsnorm}\n")
    with pytest.raises(jhpt.InputError, match=r"no GPT-2, which has no model\.norm=rmsnorm"):
        export_run(tmp_path / "run", tmp_path / "new", print)
    assert not (tmp_path / "new").exists()


def test_jax_is_not_needed_to_refuse(places):
    """A typing mistake is reported before jax is imported."""
    import subprocess
    import sys

    code = (
        "import sys; from jhpt.cli import main; "
        f"assert main(['train', '--init', '{places}/empty']) == 2; assert 'jax' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
