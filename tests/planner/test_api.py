"""What a user names, as a task: clusters of one device and of several kinds."""

import pytest

from jhpt.core.calibration import ours
from jhpt.core.catalogue import cluster_named, device_named
from jhpt.core.cluster import Cluster
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.planner.api import common_dtype, dtype_of, prepare
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.report.answer import summary, to_json


def mixed(*names: str) -> Cluster:
    clusters = [cluster_named(name) for name in names]
    nodes = tuple(node for cluster in clusters for node in cluster.nodes)
    return clusters[0].model_copy(
        update={"name": "mixed", "nodes": nodes, "network": cluster_named("h100x8x2").network}
    )


ORDERS = (("h100x2x1", "v100x2x1"), ("v100x2x1", "h100x2x1"))


def test_every_kind_has_its_own_roofline():
    tasks = [prepare("gpt2-124m", cluster=mixed(*names), space="general", batch=8) for names in ORDERS]
    config = load_config("gpt2-124m")
    for task in tasks:
        assert task.profile == analytic_profile(config, device_named("h100"))
        (own,) = task.others.values()
        assert own == analytic_profile(config, device_named("v100"))
    answers = [task.solve() for task in tasks]
    assert len({answer.estimate.seconds for answer in answers}) == 1
    for answer, first in zip(answers, (0, 2), strict=True):
        assert answer.plan.stages[0].device == first
        lines = summary(answer)
        assert "Tesla V100-SXM2-32GB: analytic: roofline of Tesla V100-SXM2-32GB, bfloat16" in lines
        assert "2 of 2 NVIDIA H100 80GB HBM3" in lines[-1]
        tree = to_json(answer)["model"]
        assert [other["device"] for other in tree["other_profiles"]] == ["Tesla V100-SXM2-32GB"]
        assert tree["approximations"] == []


def test_blocks_of_a_single_device_are_in_no_loop():
    """Whose kernels move more bytes; so its passes are predicted to be shorter."""
    one, two = (prepare("gpt2-124m", cluster=f"h100x{devices}x1", batch=8).profile for devices in (1, 2))
    assert (one.framework, two.framework) == (ours(alone=True), ours())
    assert one.kinds["block"].seconds(8, 1) < two.kinds["block"].seconds(8, 1)


def test_a_given_profile_holds_for_its_own_device():
    own = analytic_profile(load_config("gpt2-124m"), device_named("v100"))
    answer = prepare("gpt2-124m", cluster=mixed(*ORDERS[0]), space="general", batch=8, profile=own).solve()
    (note,) = to_json(answer)["model"]["approximations"]
    assert note.startswith("NVIDIA H100 80GB HBM3 has no profile of its own") and note in summary(answer)


def test_the_dtype_is_one_that_all_devices_have():
    new, old = device_named("h100"), device_named("v100")
    half = old.model_copy(update={"peak_flops": {"float16": 2.0, "float32": 1.0}})
    assert (common_dtype("auto", [new, old]), common_dtype("auto", [new, half])) == ("bfloat16", "float16")
    assert dtype_of("auto", half) == "float16"
    with pytest.raises(
        InputError, match=r"model.dtype=bfloat16: Tesla V100.* has no rate for it; use model.dtype=float"
    ):
        common_dtype("bfloat16", [new, half])
    single = old.model_copy(update={"peak_flops": {"float32": 1.0}})
    bare = new.model_copy(update={"peak_flops": {"bfloat16": 1.0}})
    with pytest.raises(InputError, match=r"no dtype that all devices of the cluster have a rate for .*NVIDIA H100"):
        common_dtype("auto", [bare, single])


def test_logits_are_priced_as_they_are_stored():
    """In 16 bits: half the bytes of logits, and a profile of others is refused."""
    stored = {"model.logits_dtype": "same"}
    float32, same = (
        prepare("gpt2-124m", cluster=cluster_named("h100x1x1"), space="spmd", batch=8, overrides=changes)
        for changes in ({}, stored)
    )
    head, half = (task.profile.kinds["head"] for task in (float32, same))
    assert half.activation_bytes == head.activation_bytes / 2
    assert half.timings[0].forward[-1] < head.timings[0].forward[-1]
    one, other = (task.solve().estimate.stages[0].bytes for task in (float32, same))
    padded = 1024 * load_config("gpt2-124m", {"model.vocab_size": 50257}).model.padded_vocab
    assert sum(one.values()) - sum(other.values()) == pytest.approx(8 * padded * 2)
    with pytest.raises(InputError, match=r"stores a logit in 4 bytes, .* in 2 \(model.logits_dtype\)"):
        prepare("gpt2-124m", cluster=cluster_named("h100x1x1"), batch=8, profile=float32.profile, overrides=stored)
