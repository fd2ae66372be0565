"""What is loaded is what was saved, on one device or in shares; what cannot be loaded is refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jhpt
from jhpt.core.load import load_config, to_yaml
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.training.data.tokenizer import ByteTokenizer
from tests.test_cli import TOKENIZER, tree


def saved(run: Path, step: int):
    """The parameters in a checkpoint, read by Orbax alone."""
    manager = ocp.CheckpointManager(run / "checkpoints")
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    manager.close()
    return state["params"]


def leaves(params):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def same_bits(first, second):
    first, second = leaves(first), leaves(second)
    assert first.keys() == second.keys() and len(first) > 8
    for path, leaf in first.items():
        assert leaf.dtype == second[path].dtype
        assert np.asarray(leaf).tobytes() == np.asarray(second[path]).tobytes(), path


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("name", ["gpt", "divided"])
def test_parameters_are_those_of_the_checkpoint_and_the_run_is_left_alone(name, request):
    run = request.getfixturevalue(name)
    before = tree(run)
    loaded = jhpt.load(run)
    assert tree(run) == before
    assert (loaded.step, loaded.source, loaded.config) == (2, run, load_config(run / "config.yaml"))
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    same_bits(loaded.params, saved(run, 2))
    assert {leaf.sharding for leaf in jax.tree.leaves(loaded.params)} == {
        jax.sharding.SingleDeviceSharding(jax.devices()[0])
    }
    kernel = loaded.params["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.dtype == (jnp.bfloat16 if name == "divided" else jnp.float32)


def test_under_a_plan_every_device_has_a_share(gpt, loaded, tmp_path):
    config = load_config(loaded.config, {"parallel": {"data": 2, "tensor": 2, "zero": 3}})
    plan_by_hand(config, 8).save(tmp_path / "plan.json")
    shares = jhpt.load(gpt, plan=tmp_path / "plan.json")
    same_bits(shares.params, loaded.params)
    kernel = shares.params["blocks"]["mlp"]["up"]["kernel"]
    assert len(kernel.sharding.device_set) == 4 and kernel.addressable_shards[0].data.size * 4 == kernel.size
    assert shares.generate(["the mesh"], tokens=8, temperature=0) == loaded.generate(
        ["the mesh"], tokens=8, temperature=0
    )
    with pytest.raises(jhpt.InputError, match="does not fit"):
        jhpt.load(gpt, plan=plan_by_hand(load_config(config, {"model.num_layers": 3}), 8))


def test_products_in_8_bits_are_left_out_where_the_device_has_none(gpt, tmp_path):
    shutil.copytree(gpt, tmp_path / "run")
    config = load_config(gpt / "config.yaml", {"model.matmul_dtype": "float8"})
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    assert jhpt.load(tmp_path / "run").config.model.matmul_dtype == "same"


def no_run(run: Path) -> None:
    (run / "config.yaml").unlink()


def no_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def empty_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "2")


def damaged(run: Path) -> None:
    (run / "checkpoints" / "2" / "state" / "_METADATA").write_text("{")


def no_model(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "config.json").write_text("{}")


def moved_tokenizer(run: Path) -> None:
    config = load_config(run / "config.yaml", {"data.tokenizer": str(run / "moved.json")})
    (run / "config.yaml").write_text(to_yaml(config))


REFUSED = {
    no_run: "is no run directory; give the directory of a run",
    shutil.rmtree: "does not exist",
    no_checkpoints: "has no checkpoint yet; wait",
    empty_checkpoints: "has no checkpoint yet; wait",
    damaged: "no checkpoint in .*checkpoints is whole .2/state/_METADATA has 1 bytes",
    no_model: "model_type=None is not supported",
    moved_tokenizer: "moved.json: no such file.*if it has moved, give its file: --tokenizer FILE",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_loaded_is_refused(change, gpt, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gpt, run)
    change(run)
    before = tree(tmp_path)
    with pytest.raises(jhpt.InputError, match=REFUSED[change]):
        jhpt.load(run)
    assert tree(tmp_path) == before


def test_a_tokenizer_that_has_moved_can_be_given(gpt, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gpt, run)
    moved_tokenizer(run)
    (tmp_path / "t.json").write_text(json.dumps(TOKENIZER))
    assert jhpt.load(run, tokenizer=str(tmp_path / "t.json")).tokenizer.vocab_size == 2
