"""A classifier starts with the encoder of other weights: what they lack begins fresh, what it lacks is left out."""

import json
import random

import jax
import numpy as np
import pytest

import jhpt
from jhpt.cli import main
from jhpt.core.load import load_config
from jhpt.huggingface.files import stored_tensors
from jhpt.models.family import build
from jhpt.sharding.partition import path_name
from jhpt.training.checkpoint import FOLDER, Checkpoints, newest
from jhpt.training.step import RandomStream, random_key
from tests.covers import quick_and_exhaustive
from tests.huggingface.shapes import CLASSIFIER, MODELS
from tests.huggingface.written import random_parameters, tensors_of, write_folder

BERT = MODELS["bert"].model_copy(update={"vocab_size": 256})
SHORT = {
    "train.steps": 1,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "evaluation.batches": 1,
    "log.tensorboard": False,
    "optimizer.learning_rate": 1e-30,
    "optimizer.weight_decay": 0.0,
}
"""A step that changes nothing, so that a run saves what it began with."""
ONE = {"parallel.data": 1}
PLANS = {
    "one device": ONE,
    "pipe 2, tensor 2": {"parallel.pipe": 2, "parallel.tensor": 2, "parallel.data": 1, "parallel.micro_batches": 2},
    "offload": ONE | {"memory.offload": "both"},
}


def labelled(folder, labels="xyz"):
    """Settings that point at texts with labels."""
    rng = random.Random(0)
    rows = [{"text": "".join(rng.choices("abc", k=9)), "label": labels[number % len(labels)]} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model.task": "classify", "data.path": str(folder / "rows.jsonl")}


def parameters(run):
    """By path, from the newest checkpoint."""
    model = build(load_config(run / "config.yaml").model)
    with Checkpoints(run / FOLDER, load_config().checkpoint) as checkpoints:
        tree = checkpoints.parameters(newest(run), jax.eval_shape(model.init, jax.random.key(0)))
    return by_path(tree)


def by_path(tree):
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def begun(run):
    """The notes of a run."""
    return (run / "train.log").read_text()


def fresh(run):
    config = load_config(run / "config.yaml")
    init = jax.jit(build(config.model).init_embedding_and_head)
    return by_path(init(random_key(config.seed, RandomStream.INIT)))


def check(found, expected, begins):
    """found: as expected, but for what begins fresh."""
    assert {name for name in found if name not in expected} <= begins.keys()
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, begins.get(name, expected.get(name)), rtol=0, atol=1e-20, err_msg=name)


HEAD = {"head/classifier/kernel", "head/classifier/bias"}
POOLER = {"pooler/kernel", "pooler/bias"}


@pytest.mark.parametrize("plan", quick_and_exhaustive(PLANS, ["pipe 2, tensor 2"]))
def test_a_classifier_starts_with_a_pretrained_folder(tmp_path, plan):
    params = random_parameters(BERT)
    write_folder(tmp_path / "there", BERT, params)
    overrides = SHORT | labelled(tmp_path) | PLANS[plan]
    jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides=overrides)
    begins = {name: leaf for name, leaf in fresh(tmp_path / "run").items() if name in HEAD}
    assert begins["head/classifier/kernel"].any()
    check(parameters(tmp_path / "run"), by_path(params), begins)
    notes = begun(tmp_path / "run")
    assert "begins fresh, because the weights lack it: head/classifier/bias, head/classifier/kernel" in notes
    assert "left out, because the model has no place for it: head/bias, head/norm/bias" in notes


@pytest.mark.exhaustive
def test_a_bare_folder_lacks_the_pooler(tmp_path):
    params = random_parameters(BERT)
    without = {name: None for name in tensors_of(BERT, params) if name.startswith(("cls.", "bert.pooler"))}
    write_folder(tmp_path / "there", BERT, params, tensors=without)
    jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides=SHORT | labelled(tmp_path) | ONE)
    found, notes = parameters(tmp_path / "run"), begun(tmp_path / "run")
    kept = {name: leaf for name, leaf in found.items() if name not in HEAD | POOLER}
    check(kept, by_path(params), {})
    assert "pooler/kernel" in notes and "head/transform" not in notes
    assert found["pooler/kernel"].any() and not np.array_equal(found["pooler/kernel"], params["pooler"]["kernel"])


def test_a_classifier_starts_with_a_run(tmp_path, tiny):
    """With one in pre-training; and with itself for other classes, where only the classifier begins fresh."""
    first = tiny("bert-tiny", **ONE | {"model.num_layers": 1, "train.steps": 1})
    jhpt.train(first, out=tmp_path / "first")
    overrides = SHORT | ONE | labelled(tmp_path)
    jhpt.train(None, init=tmp_path / "first", out=tmp_path / "second", overrides=overrides)
    begins = {name: leaf for name, leaf in fresh(tmp_path / "second").items() if name in HEAD}
    check(parameters(tmp_path / "second"), parameters(tmp_path / "first"), begins)

    with pytest.raises(jhpt.InputError, match=r"the label 'p' is none of the classes \(x, y, z\)"):
        again = overrides | labelled(tmp_path, "pq")
        jhpt.train(None, init=tmp_path / "second", out=tmp_path / "third", overrides=again)
    again |= {"model.num_classes": "auto", "model.class_names": None, "seed": 1}
    jhpt.train(None, init=tmp_path / "second", out=tmp_path / "third", overrides=again)
    begins = {name: leaf for name, leaf in fresh(tmp_path / "third").items() if name in HEAD}
    assert begins["head/classifier/kernel"].shape[1] == 2
    check(parameters(tmp_path / "third"), parameters(tmp_path / "second"), begins)


@pytest.mark.exhaustive
def test_a_classifier_is_exported_with_its_labels(tmp_path):
    """And read again, number by number."""
    write_folder(tmp_path / "there", BERT)
    jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides=SHORT | labelled(tmp_path) | ONE)
    assert main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tree["architectures"] == ["BertForSequenceClassification"]
    assert tree["id2label"] == {"0": "x", "1": "y", "2": "z"} and tree["label2id"] == {"x": 0, "y": 1, "z": 2}
    found, tensors = parameters(tmp_path / "run"), stored_tensors(tmp_path / "out")
    np.testing.assert_array_equal(tensors["classifier.weight"].read(), found["head/classifier/kernel"].T)
    np.testing.assert_array_equal(tensors["classifier.bias"].read(), found["head/classifier/bias"])
    assert not [name for name in tensors if name.startswith("cls.")]
    overrides = SHORT | ONE | labelled(tmp_path)
    jhpt.train(None, init=tmp_path / "out", out=tmp_path / "again", overrides=overrides)
    check(parameters(tmp_path / "again"), found, {})
    assert load_config(tmp_path / "again" / "config.yaml").model.class_names == ("x", "y", "z")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a"}}, "does not name two or more classes from 0 on"),
        ({"id2label": {"0": "a", "2": "b", "3": "c"}}, "does not name two or more classes from 0 on"),
        ({"problem_type": "regression"}, "problem_type='regression' is not supported"),
        ({"id2label": {"0": "a", "1": "b"}}, r"classifier\.bias is \[3\], and by config.json it is \[2\]"),
    ],
    ids=str,
)
def test_folders_of_other_classifiers_are_refused(tmp_path, changes, message):
    write_folder(tmp_path / "there", CLASSIFIER, config=changes)
    overrides = SHORT | ONE | labelled(tmp_path, "ab") | {"model.class_names": ["a", "b"], "model.num_classes": 2}
    with pytest.raises(jhpt.InputError, match=message):
        jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides=overrides)
