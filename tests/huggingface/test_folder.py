import json

import jax
import numpy as np
import pytest

from jhpt.core.errors import InputError
from jhpt.huggingface.folder import open_folder
from jhpt.models.family import build
from tests.huggingface.shapes import CLASSIFIER, MODELS, settings_of
from tests.huggingface.written import random_parameters, tensors_of, write_folder

EVERY = {**MODELS, "classifier": CLASSIFIER}
GPT, LLAMA, BERT = MODELS["gpt2"], MODELS["llama"], MODELS["bert"]


def read(folder):
    source = open_folder(folder)
    return source, source.parameters(jax.eval_shape(build(source.model).init, jax.random.key(0)))


@pytest.mark.parametrize("name", EVERY)
def test_every_number_is_read(name, tmp_path):
    """From several files, too."""
    params = random_parameters(EVERY[name])
    write_folder(tmp_path, EVERY[name], params, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source, found = read(tmp_path)
    assert settings_of(source.model) == settings_of(EVERY[name]) and not source.notes
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_shares_of_devices_are_read(tmp_path):
    """Every device's share is the slice of the whole."""
    params = random_parameters(LLAMA)
    write_folder(tmp_path, LLAMA, params)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("a", "b")

    def shape(leaf):
        cut = all(size % 2 == 0 for size in leaf.shape[:2]) and leaf.ndim > 1
        place = jax.sharding.NamedSharding(mesh, spec if cut else jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    found = open_folder(tmp_path).parameters(jax.tree.map(shape, params))
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_names_of_bare_and_of_old_models(tmp_path):
    """Released files may lack the prefix, and those from TensorFlow call scales gamma."""
    params = random_parameters(BERT)
    write_folder(tmp_path / "bare", BERT, params, tensors=dict.fromkeys(tensors_of(BERT, params)) | renamed(params))
    source, found = read(tmp_path / "bare")
    assert "head/transform/kernel" in source.fresh and "pooler/kernel" not in source.fresh
    assert "begins fresh" in source.notes[0]
    jax.tree.map(np.testing.assert_array_equal, found["blocks"], params["blocks"])


def renamed(params):
    return {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma"): array
        for name, array in tensors_of(BERT, params).items()
        if not name.startswith("cls.")
    }


def test_weights_without_a_place_are_named(tmp_path):
    """The head for pairs of sentences of `BertForPreTraining`."""
    write_folder(tmp_path, BERT, tensors={"cls.seq_relationship.weight": np.ones((2, 32), np.float32)})
    (note,) = open_folder(tmp_path).notes
    assert "left out" in note and "cls.seq_relationship.weight" in note


@pytest.mark.parametrize("lacks", [[], ["weight", "bias"], ["bias"]])
def test_the_head_of_pairs_is_taken_if_it_is_there(lacks, tmp_path):
    model = BERT.model_copy(update={"objective": "mlm+nsp"})
    params = random_parameters(model)
    write_folder(tmp_path, model, params, tensors={f"cls.seq_relationship.{name}": None for name in lacks})
    if len(lacks) == 1:
        with pytest.raises(InputError, match="lacks tensors"):
            open_folder(tmp_path, pairs=True)
        return
    source = open_folder(tmp_path, pairs=True)
    assert source.fresh == (("head/pair/kernel", "head/pair/bias") if lacks else ()) and not source.left_out
    found = source.parameters(jax.eval_shape(build(source.model).init, jax.random.key(0)))
    if lacks:
        assert found["head"].pop("pair")["kernel"].any() and params["head"].pop("pair")
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_tied_head_may_be_there_twice(tmp_path):
    params = random_parameters(GPT)
    write_folder(tmp_path, GPT, params, tensors={"lm_head.weight": params["embedding"]["tokens"][: GPT.vocab]})
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path)[1], params)


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_shard(folder):
    next(folder.glob("model-00002*")).unlink()


def no_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WIDE = np.zeros((4, 4), np.float32)

BAD = {
    # name: (model, changes of write_folder, what is done to the folder, what the message says)
    "cut short": (GPT, {}, cut_short, "no complete safetensors file"),
    "no weights": (GPT, {}, lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickled weights": (GPT, {}, pickled, "unpickling runs code"),
    "a shard is missing": (GPT, {"shard_bytes": 20_000}, without_shard, "which is not there"),
    "an index of nothing": (GPT, {"shard_bytes": 20_000}, no_map, "no weight_map"),
    "a tensor is missing": (LLAMA, {"tensors": {"model.norm.weight": None}}, None, "lacks tensors"),
    "half a head": (BERT, {"tensors": {"cls.predictions.bias": None}}, None, "lacks tensors"),
    "an unknown tensor": (GPT, {"tensors": {"transformer.h.0.attn.rotary": WIDE}}, None, "tensors that no gpt"),
    "another shape": (GPT, {"tensors": {"transformer.wpe.weight": WIDE}}, None, "it is [24, 32]"),
    "tied, twice, different": (
        GPT,
        {"tensors": {"lm_head.weight": np.zeros((131, 32), np.float32)}},
        None,
        "are one parameter",
    ),
    "whole numbers": (GPT, {"tensors": {"transformer.wpe.weight": np.zeros((24, 32), np.int8)}}, None, "type I8"),
    "config is no JSON": (GPT, {}, lambda folder: (folder / "config.json").write_text("{"), "not readable JSON"),
    "config is a list": (GPT, {}, lambda folder: (folder / "config.json").write_text("[]"), "not an object"),
    "config is missing": (GPT, {}, lambda folder: (folder / "config.json").unlink(), "is not there"),
    "another architecture": (GPT, {"config": {"model_type": "gemma2"}}, None, "model_type='gemma2' is not supported"),
    "no architecture": (GPT, {"config": {"model_type": 3}}, None, "model_type=3 is not supported"),
    "another activation": (GPT, {"config": {"activation_function": "relu"}}, None, "activation_function='relu'"),
    "other scales": (GPT, {"config": {"scale_attn_by_inverse_layer_idx": True}}, None, "scale_attn_by_inverse"),
    "heads do not divide": (GPT, {"config": {"n_head": 5}}, None, "describes no possible model"),
    "a count of text": (GPT, {"config": {"n_layer": "two"}}, None, "n_layer='two' is not a count"),
    "stretched otherwise": (
        LLAMA,
        {"config": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
        None,
        "type 'yarn' are not supported",
    ),
    "heads of another width": (LLAMA, {"config": {"head_dim": 64}}, None, "head_dim=64 is not supported"),
    "biases of all": (LLAMA, {"config": {"attention_bias": True}}, None, "attention_bias=True is not supported"),
    "windows in some layers": (MODELS["qwen2"], {"config": {"use_sliding_window": True}}, None, "use_sliding_window"),
    "relative positions": (
        BERT,
        {"config": {"position_embedding_type": "relative_key"}},
        None,
        "position_embedding_type='relative_key'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders(name, tmp_path):
    model, changes, damage, message = BAD[name]
    write_folder(tmp_path, model, **changes)
    if damage:
        damage(tmp_path)
    with pytest.raises(InputError) as error:
        open_folder(tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_sixteen_bits_are_widened(tmp_path):
    import ml_dtypes

    params = random_parameters(GPT)
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors_of(GPT, params).items()}
    write_folder(tmp_path, GPT, params, tensors=narrow)
    rounded = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path)[1], rounded)


def test_an_index_that_leaves_the_folder_is_refused(tmp_path):
    write_folder(tmp_path / "model", GPT, shard_bytes=20_000)
    index = tmp_path / "model" / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"]["transformer.wpe.weight"] = "../other.safetensors"
    index.write_text(json.dumps(tree))
    with pytest.raises(InputError, match="not there"):
        open_folder(tmp_path / "model")
