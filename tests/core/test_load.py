"""Presets, files, dicts and overrides all end in the same `Config`; mistakes end in one message with a remedy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.config import Config
from jhpt.core.errors import InputError, did_you_mean
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.load import dotted, load_config, preset, run_config, to_yaml
from jhpt.core.presets import DEFAULT, PRESETS

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def refusal(source=None, overrides=None) -> str:
    with pytest.raises(InputError) as caught:
        load_config(source, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_says_what_its_table_says(name):
    config = load_config(name)
    assert config.name == name
    leaves = dotted(config.model_dump())
    assert {key: leaves[key] for key in dotted(PRESETS[name])} == dotted(PRESETS[name])


def test_nothing_means_the_default_preset():
    assert load_config() == load_config(DEFAULT) == load_config({}) == load_config({"preset": DEFAULT})


def test_presets_do_not_share_state():
    preset("gpt-tiny")["model"]["num_layers"] = 99
    assert load_config("gpt-tiny").model.num_layers == 4


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.from_regex(r"[a-zA-Z0-9_.-]{1,20}", fullmatch=True),
            "seed": st.integers(0, 2**32 - 1),
            "model.family": st.sampled_from(["gpt", "bert"]),
            "model.num_layers": st.integers(1, 200),
            "model.dropout": st.floats(0, 1, exclude_max=True),
            "model.d_ff": st.one_of(st.none(), st.integers(1, 1000)),
            "data.path": st.one_of(st.text(), st.lists(st.text(), max_size=3)),
            "data.validation_path": st.one_of(st.none(), st.text()),
            "optimizer.learning_rate": st.floats(1e-30, 1e30),
            "optimizer.clip_norm": st.one_of(st.none(), st.floats(1e-9, 1e9)),
            "evaluation.prompt": st.text(),
            "log.tensorboard": st.booleans(),
        },
    )
)
@PROPERTY
def test_yaml_round_trip(tmp_path_factory, overrides):
    config = load_config(None, overrides)
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    file.write_text(to_yaml(config))
    assert load_config(file) == config


def test_a_file_lists_only_what_differs_from_its_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("preset: gpt2-124m\ntrain: {steps: 7}\nmodel: {num_layers: 3}\n")
    expected = load_config("gpt2-124m", {"train.steps": 7, "model.num_layers": 3})
    assert load_config(file) == load_config(str(file)) == expected
    assert expected.model.d_model == 768


def test_a_dict_is_not_changed_by_loading_it():
    source = {"preset": "bert-tiny", "train": {"steps": 3}}
    load_config(source, {"train.steps": 4})
    assert source == {"preset": "bert-tiny", "train": {"steps": 3}}


def test_overrides_win_over_the_source():
    assert load_config({"seed": 1, "train": {"steps": 3}}, {"train.steps": 4}) == load_config(
        None, {"train.steps": 4, "seed": 1}
    )


def test_another_family_starts_from_its_own_defaults():
    """Nothing of gpt2-124m's model, but its data and training, survive the change to BERT."""
    config = load_config({"preset": "gpt2-124m", "model": {"family": "bert", "max_length": 1024}})
    assert config.model == BERTConfig(max_length=1024)
    assert config.optimizer == load_config("gpt2-124m").optimizer


def test_the_same_family_keeps_the_preset():
    config = load_config({"preset": "gpt2-124m", "model": {"family": "gpt", "num_layers": 2}})
    assert isinstance(config.model, GPTConfig)
    assert (config.model.num_layers, config.model.d_model) == (2, 768)


@pytest.mark.parametrize("names", [("model.family", "model.num_layers"), ("model.num_layers", "model.family")])
def test_overrides_are_one_change_whatever_their_order(names):
    values = {"model.family": "bert", "model.num_layers": 7}
    assert load_config(None, {name: values[name] for name in names}).model == BERTConfig(num_layers=7)


def test_a_run_keeps_its_own_config(tmp_path):
    config = load_config("bert-tiny", {"seed": 5})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert run_config(None, tmp_path) == config
    assert run_config("gpt-tiny", tmp_path) == load_config("gpt-tiny")
    assert run_config(None, tmp_path / "elsewhere") == run_config(None, None) == load_config()


def test_all_faults_are_named_at_once():
    lines = refusal({"train": {"steps": 0}, "model": {"dropout": 2}, "sede": 3}).splitlines()
    assert len(lines) == 3
    assert {line.split("=")[0].split(":")[0] for line in lines} == {"train.steps", "model.dropout", "sede"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"modl": {}}, ["modl: unknown key", "did you mean model?"]),
        ({"optimiser": {"learning_rate": 1}}, ["did you mean optimizer?"]),
        ({"train": {"stepz": 1}}, ["train.stepz", "did you mean train.steps?"]),
        ({"steps": 1}, ["did you mean train.steps?"]),
        ({"model": {"learning_rate": 1}}, ["did you mean optimizer.learning_rate?"]),
        ({"model": {"family": "bert", "type_vocab": 1}}, ["did you mean model.type_vocab_size?"]),
        ({"log": {"zzz": 1}}, ["log.zzz", "known here: log.every, log.tensorboard"]),
        ({"model": {"family": "llama"}}, ["model.family='llama'", "bert, gpt"]),
        ({"model": {"family": ["gpt"]}}, ["model.family", "bert, gpt"]),
        (
            {"model": {"vocab_size": "many"}},
            ["model.vocab_size='many': should be 'auto'", "model.vocab_size='many': should"],
        ),
        ({"model": {"vocab_size": 0}}, ["model.vocab_size=0: should be greater than"]),
        ({"model": 3}, ["model=3", "dictionary"]),
        ({"train": None}, ["train=None", "dictionary"]),
        ({"data": {"path": 3}}, ["data.path=3", "string"]),
        ({1: 2}, ["1=1", "strings"]),
        ({"preset": "gpt-tny"}, ["'gpt-tny'", "did you mean gpt-tiny?", "bert-large"]),
        ({"preset": 5}, ["'5'", "gpt2-124m"]),
        ({"preset": ["gpt-tiny"]}, ["unknown preset", "gpt2-124m"]),
    ],
    ids=str,
)
def test_a_wrong_key_or_value_is_named_with_a_remedy(source, words):
    text = refusal(source)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("name", ["gpt2-124", "bert_base", "lama-8b"])
def test_a_misspelt_preset_is_recognised(name):
    assert f"did you mean {did_you_mean(name, PRESETS).split()[-1]}" in refusal(name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model: [", ["not valid YAML"]),
        (b"- 1\n- 2\n", ["expected sections", "list"]),
        (b"", ["expected sections", "NoneType"]),
        (b"name: \xff\n", ["UTF-8"]),
        (b"name: \x00\n", ["not valid YAML"]),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content, words):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    text = refusal(file)
    for word in [str(file), *words]:
        assert word in text, text


def test_a_folder_is_no_config(tmp_path):
    assert str(tmp_path) in refusal(tmp_path)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers())
@PROPERTY
def test_dotted_names_lead_to_their_leaves(path, value):
    tree = value
    for key in reversed(path):
        tree = {key: tree}
    assert dotted(tree) == {".".join(path): value}


def test_only_a_close_word_is_suggested():
    assert did_you_mean("stepz", ["steps", "seed"]) == "; did you mean steps?"
    assert did_you_mean("wholly different", ["steps", "seed"]) == ""


def test_a_loaded_config_is_complete():
    assert load_config(Config()) == Config()
