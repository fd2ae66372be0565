"""What waits on the host: bytes by hand, and the choice against every set of names on the device and on the host."""

import itertools

import pytest

from jhpt.core.errors import InputError
from jhpt.core.families.family import BLOCK_INPUT
from jhpt.core.load import load_config
from jhpt.core.plan import SavedTensors
from jhpt.planner.api import prepare
from jhpt.planner.cost.activations import fullest_host
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.report.alternatives import changed
from jhpt.planner.report.answer import host_table, make_console, summary, to_json
from jhpt.planner.report.causes import stage_causes
from jhpt.planner.search.choice import plainest
from jhpt.planner.search.request import recomputations, request
from jhpt.planner.search.solve import solve
from tests.planner.search.test_recompute import BLOCKS, cluster_of, keeping, one_device, profile_of, with_link
from tests.sharding.plans import piped


def hosts_of(cluster, memory):
    """The cluster, with so many bytes on each host."""
    return cluster.model_copy(
        update={"nodes": tuple(node.model_copy(update={"host_memory": memory}) for node in cluster.nodes)}
    )


def test_bytes_on_a_host():
    """Two stages of two data ranks at degree 2, on nodes of eight devices and of four: the ring of eager-1f1b has
    three slots on both, of three blocks with the first stage and five with the second."""
    profile = profile_of()
    sizes = {one.name: one.bytes for one in profile.kinds["block"].tensors}
    settings = dict(data=2, tensor=2, batch=16, micro_batches=4, recompute=True)
    plan = piped(
        [4, 6],
        2,
        schedule="eager-1f1b",
        **settings,
        saved=SavedTensors(device=("mlp_hidden",), host=(BLOCK_INPUT, "qkv")),
    )
    each = 2 * (sizes[BLOCK_INPUT] + sizes["qkv"] / 2)  # two samples of a micro-batch
    per_block = 3 * 4 * each
    for devices, expected in ((8, [8 * per_block, 8 * per_block]), (4, [3 * per_block, 5 * per_block])):
        cluster = cluster_of()
        nodes = tuple(node.model_copy(update={"devices": devices, "count": 8 // devices}) for node in cluster.nodes)
        stages = evaluate(plan, profile, cluster.model_copy(update={"nodes": nodes})).stages
        assert [stage.host_bytes for stage in stages] == [{"activations": pytest.approx(size)} for size in expected]
    small = hosts_of(cluster_of(), 8 * per_block - 1)
    assert not evaluate(plan, profile, small).fits and evaluate(plan, profile, small).stages[
        0
    ].missing == pytest.approx(1)
    assert (
        evaluate(plan.model_copy(update={"recompute": False, "saved": None}), profile, small).stages[0].host_bytes == {}
    )


def test_the_fullest_host():
    assert fullest_host([1, 2, 3, 4, 5], 2) == 7 and fullest_host([1, 2, 3], 8) == 6


def test_copies_have_a_beginning():
    """Each tensor of each block and micro-batch, there and back, over a link that does nothing else."""
    profile, cluster = profile_of(), with_link(cluster_of(), 1e9)
    link = cluster.nodes[0].host.model_copy(update={"latency": 1.0})
    late = cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"host": link}),)})
    saved = SavedTensors(device=("attention_out", "projection_out"), host=("qkv", "mlp_hidden"))
    plan = piped([BLOCKS + 2], 1, batch=4, micro_batches=2, recompute=True, saved=saved)
    block = BLOCKS * 2 * sum(profile.kinds["block"].seconds(2, 1))
    found = evaluate(plan, profile, late).seconds - evaluate(plan, profile, cluster).seconds
    assert found == pytest.approx(2 * BLOCKS * 2 * 2 - block, rel=0.05)
    in_line = evaluate(plan, profile, late.model_copy(update={"overlap": False}))
    assert in_line.seconds == pytest.approx(evaluate(plan, profile, cluster).seconds + 2 * BLOCKS * 2 * 2, rel=0.01)


def every_kept(profile, names=None):
    """Every tensor that is read on the device, on the host or nowhere, the input on one of both."""
    read = [one.name for one in profile.kinds["block"].tensors[1:] if one.read]
    fates = [(0, 1, 2) if names is None else (1, 2) if name in names else (0,) for name in read]
    for away, chosen in itertools.product((False, True), itertools.product(*fates)):
        device, host = (tuple(n for n, fate in zip(read, chosen, strict=True) if fate == own) for own in (1, 2))
        yield SavedTensors(device=device, host=(*host, BLOCK_INPUT) if away else host)


LONG = 8192


def long_task(memory, how="auto", **changes):
    """One sequence of 8,192 tokens on a device of so many bytes, everything there but what blocks keep."""
    profile = profile_of(length=LONG)
    config = load_config("gpt-6.7b", {"memory.recompute": how, "memory.host_budget_bytes": "200GB"} | changes)
    return profile, one_device(memory), request(1, zero=(0,), **recomputations(config))


def test_the_planner_puts_on_the_host_what_beats_computing_again():
    """Memory of keeping nothing, to the byte: over the link of an H100 copies hide beside the passes."""
    bare = piped([BLOCKS + 2], 1, recompute=True, batch=1)
    profile, _, asked = long_task(80e9)
    needed = evaluate(bare, profile, one_device(1e12)).stages[0].total_bytes
    cluster = hosts_of(one_device(needed + 1), 200e9)
    answer = solve(profile, cluster, asked)
    without = solve(profile, cluster, request(1, zero=(0,)))
    assert answer.plan.saved is not None and answer.plan.saved.host and without.plan.saved is None
    assert answer.plan.seconds < without.plan.seconds and answer.plan.lower_bound <= answer.plan.seconds
    every = [keeping(bare, saved, answer.model) for saved in every_kept(profile)]
    assert answer.plan.seconds == pytest.approx(min(one.seconds for one in every if one.fits), rel=1e-6)
    as_fast = without.plan.model_copy(update={"seconds": answer.plan.seconds})
    assert plainest([answer.plan, as_fast]) == as_fast

    # What waits there is told.
    (stage,) = answer.estimate.stages
    assert stage.host_bytes["activations"] > 0 and stage.host_capacity == 200e9
    lines = [line for line in summary(answer) if line.startswith("offloaded activations")]
    assert len(lines) == 1 and all(name in lines[0] for name in answer.plan.saved.host)
    assert to_json(answer)["stages"][0]["on_host"]["bytes"] == stage.host_bytes
    with make_console().capture():
        make_console().print(host_table(answer))
    (there,) = [each for each in changed(answer) if each.name == "no offloaded activations"]
    assert there.missing > 0 and there.ratio <= 1
    causes = stage_causes(answer.plan, 0, answer.estimate, answer.model)
    assert sum(causes.values()) == pytest.approx(answer.plan.seconds) and causes["copies"] >= 0


def test_plans_fit_that_did_not():
    """A byte less than keeping nothing takes: inputs go to the host.  Without room there, or without leave, nothing."""
    bare = piped([BLOCKS + 2], 1, recompute=True, batch=1)
    profile, _, asked = long_task(80e9)
    needed = evaluate(bare, profile, one_device(1e12)).stages[0].total_bytes
    cluster = hosts_of(one_device(needed - 1e6), 200e9)
    answer = solve(profile, cluster, asked)
    assert answer.plan.saved is not None and BLOCK_INPUT in answer.plan.saved.host and answer.estimate.fits
    for refused in ((cluster, request(1, zero=(0,))), (hosts_of(cluster, 1e6), asked)):
        with pytest.raises(InputError, match="fits no plan"):
            solve(profile, *refused)


def test_given_names_go_to_the_host_where_the_device_is_full():
    bare = piped([BLOCKS + 2], 1, recompute=True, batch=1)
    profile, _, asked = long_task(80e9, "qkv,mlp_hidden")
    needed = evaluate(bare, profile, one_device(1e12)).stages[0].total_bytes
    answer = solve(profile, hosts_of(one_device(needed + 1), 200e9), asked)
    saved = answer.plan.saved
    assert saved is not None and saved.host and {*saved.device, *saved.host} - {BLOCK_INPUT} == {"qkv", "mlp_hidden"}
    roomy = solve(profile, hosts_of(one_device(1e12), 200e9), asked)
    assert roomy.plan.saved == SavedTensors(device=("qkv", "mlp_hidden"))


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, None),
        ({"memory.host_budget_bytes": "1TB"}, True),
        ({"memory.host_budget_bytes": "1TB", "memory.recompute": "qkv"}, True),
        ({"memory.host_budget_bytes": "1TB", "memory.recompute": "full"}, None),
        ({"memory.host_budget_bytes": "1TB", "memory.recompute": "none"}, None),
        ({"memory.recompute": "qkv"}, None),
    ],
)
def test_the_host_is_used_where_the_section_memory_gives_it(settings, host):
    assert recomputations(load_config("gpt-tiny", settings)).get("host") is host


def test_without_a_host_budget_plans_are_what_they_were():
    """Where it changes nothing that is needed a budget changes nothing, either."""
    plain, given = (
        prepare("gpt2-124m", cluster="h100x4x1", batch=8, overrides=how).solve().plan
        for how in ({}, {"memory.host_budget_bytes": "1TB"})
    )
    assert plain == given
