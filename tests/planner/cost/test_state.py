"""Plans of state in few bits: what they say of it, and the profiles that they take."""

import pytest

from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.profile import load_profile
from jhpt.planner.api import prepare
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.importers import is_of
from jhpt.planner.report.answer import make_console, memory_table, summary, to_json
from jhpt.planner.search.request import request
from jhpt.planner.search.solve import solve

FEW = {"optimizer.weights": "bfloat16_kahan", "optimizer.moments": "int8"}


def test_bytes_are_named_by_what_they_are():
    plain, few = (prepare("gpt2-124m", cluster="h100x8x1", batch=8, overrides=how).solve() for how in ({}, FEW))
    ours = {"weights in bfloat16", "remainders", "moments in int8"}
    for answer, causes in ((plain, {"optimizer"}), (few, ours)):
        (stage,) = answer.estimate.stages
        assert causes == set(stage.bytes) - {
            "weights and gradients",
            "activations",
            "working set",
            "transfers",
            "update",
        }
        columns = {column.header for column in memory_table(answer).columns}
        assert causes <= columns
        assert not stage.bytes.get("update"), "activations are more than what an update decodes"
        console = make_console()
        with console.capture():
            console.print(memory_table(answer))
    assert few.estimate.stages[0].total_bytes < plain.estimate.stages[0].total_bytes
    assert any(line.startswith("state: 6.1") for line in summary(few))
    assert not any(line.startswith("state") for line in summary(plain))
    assert to_json(few)["model"]["state"]["moments"] == "int8" and "state" not in to_json(plain)["model"]


def test_it_decides_what_fits():
    """GPT of 6.7 B on one H100 with nothing on its host: 80 GB do not hold 18 bytes of each parameter, but 8."""
    few = FEW | {"optimizer.weights": "bfloat16_stochastic"}
    forbidden = {"data.batch_size": 2, "memory.offload": "off"}
    with pytest.raises(InputError, match="fits no plan"):
        prepare("gpt-6.7b", cluster="h100x1x1", overrides=forbidden).solve()
    answer = prepare("gpt-6.7b", cluster="h100x1x1", overrides=forbidden | few).solve()
    assert answer.estimate.fits and answer.plan.offload is None


def test_a_profile_is_of_its_state(tmp_path):
    device = find_cluster("h100x8x1").nodes[0].device
    plain, few = (load_config("gpt2-124m", how) for how in ({}, FEW))
    files = tmp_path / "plain.json", tmp_path / "few.json"
    for config, file in zip((plain, few), files, strict=True):
        analytic_profile(config, device).save(file)
    assert load_profile(files[1]).state == analytic_profile(few, device).state
    assert [is_of(load_profile(file), few) for file in files] == [False, True]
    with pytest.raises(InputError, match=r"optimizer\.weights=float32 and optimizer\.moments=float32"):
        prepare(few, cluster="h100x8x1", profile=files[0])
    assert (
        prepare(few, cluster="h100x8x1", profile=files[1], batch=8).solve().plan
        == prepare(few, cluster="h100x8x1", batch=8).solve().plan
    )


def test_one_rank_without_a_copy_in_float32():
    """Weights kept in 16 bits, computation in float32: ZeRO-3 over the one rank has no copy, and fits where others do
    not."""
    cluster = find_cluster("h100x1x1")
    settings = {"model.num_layers": 8, "model.dtype": "float32", "optimizer.weights": "bfloat16_kahan"}
    config = load_config("gpt-6.7b", settings | {"data.sequence_length": 1024, "data.batch_size": 4})
    profile = analytic_profile(config, cluster.nodes[0].device, "float32")
    memory = {}
    for zero in (0, 3):
        found = solve(profile, cluster, request(4, zero=(zero,), recompute=(True,)))
        memory[zero] = found.estimate.stages[0].total_bytes
    assert memory[3] < memory[0]
    device = cluster.nodes[0].device.model_copy(update={"memory": (memory[0] + memory[3]) / 2})
    node = cluster.nodes[0].model_copy(update={"device": device})
    answer = solve(profile, cluster.model_copy(update={"nodes": (node,)}), request(4, recompute=(True,)))
    assert answer.plan.zero == 3 and answer.estimate.fits
