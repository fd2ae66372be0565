"""Profiles: what is made of given seconds, and the structure of a measured one.  No timing is asserted."""

import math
from dataclasses import replace

import jax
import pytest

from jhpt.core.cluster import Cluster, Device, Link, Node, load_cluster
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.profile import Timing, load_profile
from jhpt.measure import profile as measured
from jhpt.measure.profile import LayerSeconds, Shallow, depths, layer_seconds, predict_step, whole_seconds
from jhpt.measure.rank import rank_share, tensor_degrees
from jhpt.measure.timer import relative_spread, steady
from jhpt.models.family import build
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.sharding.mesh import Axes
from jhpt.sharding.partition import parameter_spec, path_name
from jhpt.training import profiling
from jhpt.training.profiling import Grid, assemble, cached_profile, default_grid, measure_layers, profile_command
from tests.covers import quick_and_exhaustive

ANY = Device(name="any", peak_flops={"float32": 1e12}, memory=1e9, memory_bandwidth=1e10)


def test_steady_takes_a_slow_round_out_of_differences():
    # One round of three is ten times slower; b - a stays 1 of the typical round.
    seconds = steady({"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0]})
    assert seconds["a"] == pytest.approx(1.0) and seconds["b"] == pytest.approx(2.0)


def test_depths_are_two_and_reach_the_whole_of_a_small_model():
    assert [depths(layers) for layers in (1, 2, 3, 4, 8, 12, 48)] == [
        (1, 2), (1, 2), (1, 3), (2, 4), (2, 5), (2, 8), (2, 8),
    ]  # fmt: skip


def known_model(depth, tensor, batch):
    """10 parameters a block and 7 beside, and calls that `known_seconds` recognises."""
    return Shallow(
        parameters=(10 * depth + 7) // tensor,
        forward=lambda: None,
        step=lambda: None,
        embedding=lambda: None,
        embedding_both=lambda: None,
        update=lambda: None,
    )


def known_seconds(calls, rounds):
    """Embedding 2 + 3, block 5 + 11, head 1 + 4 seconds a sample; update 0.1 a parameter."""
    seconds = {}
    for name in calls:
        *kind, depth, batch = name.split() if name.count(" ") > 1 else (name, "0", "0")
        depth, batch = (int(text) if text.isdigit() else 0 for text in (depth, batch))
        match kind[0].split()[0]:
            case "forward":
                seconds[name] = batch * (3 + 5 * depth)
            case "step":
                seconds[name] = batch * (10 + 16 * depth) + 0.1 * (10 * depth + 7)
            case "update":
                seconds[name] = 0.1 * 67  # of the last model: 6 blocks
            case "embedding":
                size = int(name.split()[-1])
                seconds[name] = size * (5.0 if "both" in name else 2.0)
    return {name: [time] * rounds for name, time in seconds.items()}


def test_seconds_are_split_by_the_equations(monkeypatch):
    monkeypatch.setattr(measured, "interleaved", known_seconds)
    monkeypatch.setattr(measured, "depths", lambda layers: (2, 6))
    seconds = layer_seconds(known_model, 12, (1, 4), (1,), rounds=3)
    expected = {"embedding": (2, 3), "block": (5, 11), "head": (1, 4)}
    assert seconds.update == pytest.approx(0.1)
    for kind, (forward, backward) in expected.items():
        (timing,) = seconds.timings[kind]
        assert timing.batches == (1, 4)
        assert timing.forward == pytest.approx((forward, 4 * forward))
        assert timing.backward == pytest.approx((backward, 4 * backward))


def test_whole_steps_are_divided_by_shares(monkeypatch):
    """Forward 3 seconds a sample, step 10 and the update of 67 parameters."""
    calls = {}

    def known(asked, rounds):
        calls.update(asked)
        sizes = {name: int(name.split()[-1]) for name in asked if name != "update"}
        seconds = {
            name: size * (3 if "forward" in name else 10) + 6.7 * ("step" in name) for name, size in sizes.items()
        }
        return {name: [time] * rounds for name, time in (seconds | {"update": 6.7}).items()}

    monkeypatch.setattr(measured, "interleaved", known)
    shares = {"conv1_1": (1.0, 1.0), "fc2": (2.0, 6.0)}
    seconds = whole_seconds(lambda batch: known_model(6, 1, batch), lambda batch: shares, (1, 4), rounds=3)
    assert set(calls) == {"forward 1", "step 1", "forward 4", "step 4", "update"}
    assert seconds.update == pytest.approx(0.1)
    (conv,), (dense,) = seconds.timings["conv1_1"], seconds.timings["fc2"]
    assert conv.forward == pytest.approx((1, 4)) and dense.forward == pytest.approx((2, 8))
    assert conv.backward == pytest.approx((1, 4)) and dense.backward == pytest.approx((6, 24))


NOISE = {"step 2 1": 4.0, "step 4 1": 12.0, "forward 2 1": 3.0, "forward 4 1": 2.0, "update": 0.0}
NOISE |= {"embedding 1": 1.0, "embedding both 1": 0.5}
"""Twice the blocks took thrice the time: the slope alone would leave less than nothing for the rest."""


def test_noise_leaves_the_time_of_the_deep_model_as_it_is():
    models = {(depth, 1): known_model(depth, 1, 1) for depth in (2, 4)}
    split = measured._split(models, NOISE, 1, 0.0, {name: [time] for name, time in NOISE.items()})
    parts = {kind: timing.at(1) for kind, timing in split.items()}
    assert min(second for part in parts.values() for second in part) >= 0
    assert sum(parts["embedding"]) + 4 * sum(parts["block"]) + sum(parts["head"]) == pytest.approx(12.0)


def test_what_cannot_be_right_is_measured_again_and_never_kept(monkeypatch, capsys):
    """With twice the rounds each time; the third time it is refused."""
    asked = []

    def measure(calls, rounds):
        asked.append(rounds)
        return known_seconds(calls, rounds) if len(asked) > bad else {name: [NOISE[name]] * rounds for name in calls}

    monkeypatch.setattr(measured, "interleaved", measure)
    monkeypatch.setattr(measured, "depths", lambda layers: (2, 4))
    bad = 1
    monkeypatch.setitem(NOISE, "update", 1.0)
    (timing,) = layer_seconds(known_model, 4, (1,), (1,), rounds=3).timings["block"]
    assert asked == [3, 6] and timing.repetitions == 6 and timing.spread == (0.0,)
    assert "a block takes 0 ms forward" in capsys.readouterr().err
    asked, bad = [], 3
    with pytest.raises(InputError, match=r"12 rounds(.|\n)*a block takes 0 ms forward(.|\n)*stop other programs"):
        layer_seconds(known_model, 4, (1,), (1,), rounds=3)
    assert asked == [3, 6, 12]


def test_spread_is_that_of_the_programs_behind_the_seconds(monkeypatch):
    """One of ten repetitions in another world changes neither decile; half of them do."""
    assert relative_spread([1.0]) is None
    assert relative_spread([2.0] * 30 + [9.0]) == 0 and relative_spread([2.0, 3.0] * 10) == pytest.approx(0.4)

    def measure(calls, rounds):
        wide = {"step 2 1": 2.0, "embedding both 1": 3.0}
        same = known_seconds(calls, 1)
        return {name: [times[0], times[0] * wide.get(name, 1)] for name, times in same.items()}

    monkeypatch.setattr(measured, "interleaved", measure)
    monkeypatch.setattr(measured, "timing_faults", lambda timings, update: [])
    monkeypatch.setattr(measured, "depths", lambda layers: (2, 6))
    seconds = layer_seconds(known_model, 12, (1, 4), (1,), rounds=2)
    block, head, embedding = (seconds.timings[kind][0].spread for kind in ("block", "head", "embedding"))
    assert block == pytest.approx((0.8 / 1.5, 0)) and embedding == head == pytest.approx((1.6 / 2, 0))
    assert seconds.update_spread == 0


def test_a_batch_that_does_not_fit_ends_the_row(monkeypatch):
    monkeypatch.setattr(measured, "interleaved", known_seconds)
    monkeypatch.setattr(measured, "depths", lambda layers: (2, 6))
    seconds = layer_seconds(lambda d, t, b: known_model(d, t, b) if b < 4 else None, 12, (1, 2, 4), (1,), rounds=1)
    assert seconds.timings["block"][0].batches == (1, 2)
    with pytest.raises(InputError, match="do not fit"):
        layer_seconds(lambda *_: None, 12, (1,), (1,), rounds=1)


@pytest.mark.parametrize("preset", ["gpt-tiny", "bert-tiny", "llama-8b"])
def test_a_rank_computes_its_share_of_every_divided_parameter(preset):
    """The shapes of a rank's own model are those of the shards that the sharding rules give it."""
    model = load_config(preset).model
    tensor = tensor_degrees(model)[-1]
    axes = Axes(data=("data",), tensor=("tensor",), degree=tensor)
    whole, share = (
        jax.tree_util.tree_leaves_with_path(jax.eval_shape(build(m).init, jax.random.key(0)))
        for m in (model, rank_share(model, tensor))
    )
    for (path, leaf), (own_path, shard) in zip(whole, share, strict=True):
        assert path == own_path
        name = path_name(path)
        spec = parameter_spec(name, leaf.shape, axes, stacked="blocks/" in name, pipe=False, over_data=1)
        assert shard.shape == tuple(size // (tensor if dim else 1) for size, dim in zip(leaf.shape, spec, strict=True))


def test_a_degree_that_divides_nothing_is_refused():
    with pytest.raises(InputError, match="use 1, 2 or 4"):
        rank_share(load_config("gpt-tiny").model, 3)


UNTIED = {"model.tied": False, "model.vocab_size": 300, "model.positions": "rotary"}


MEASURED = [
    ("gpt-tiny", {"model.norm": "rmsnorm", "model.bias": False, "model.dropout": 0.0}, (1,), (1,)),
    ("gpt-tiny", UNTIED, (2,), (1, 2)),
    ("bert-tiny", {}, (1,), (1,)),
]


@pytest.mark.parametrize(("preset", "changes", "batches", "tensors"), quick_and_exhaustive(MEASURED, MEASURED[:1]))
def test_a_measured_profile_is_complete(tiny, tmp_path, monkeypatch, preset, changes, batches, tensors):
    """Whatever one round on a busy machine measures."""
    monkeypatch.setattr(measured, "timing_faults", lambda timings, update: [])
    config = tiny(preset, **changes)
    grid = Grid(batches=batches, tensors=tensors, rounds=1)
    profile = assemble(config, grid, measure_layers(config, grid))
    assert profile.parameters == config.model.parameter_count().allocated
    assert profile.layers == ("embedding", "block", "block", "head") and profile.source.startswith("measured")
    for kind in profile.kinds.values():
        assert [(timing.tensor, timing.batches) for timing in kind.timings] == [(tensor, batches) for tensor in tensors]
        assert all(math.isfinite(s) and s >= 0 for timing in kind.timings for s in timing.forward + timing.backward)
    assert profile.update_seconds > 0 and predict_step(profile, config) > 0

    analytic = analytic_profile(config, ANY, "float32")
    bare = {"timings": ()}
    for name, kind in profile.kinds.items():
        assert kind.model_copy(update=bare) == analytic.kinds[name].model_copy(update=bare)

    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_the_embedding_is_run_both_ways_with_its_dropout(tiny):
    model = build(tiny(**{"model.dropout": 0.5}).model)
    forward, both = profiling._embedding_programs(model, jax.numpy.zeros((2, 8), int))
    params = jax.eval_shape(model.init, jax.random.key(0))["embedding"]
    x, (gradients,) = jax.eval_shape(both, params)
    assert x.shape == jax.eval_shape(forward, params).shape == (2, 8, 64)
    assert jax.tree.map(lambda leaf: leaf.shape, gradients) == jax.tree.map(lambda leaf: leaf.shape, params)


def test_prediction_adds_layers_pieces_and_update(tiny):
    config = tiny(**{"parallel.micro_batches": 4})
    profile = analytic_profile(config, ANY, "float32")
    layers = sum(sum(profile.kinds[name].seconds(4, 1)) for name in profile.layers)
    assert predict_step(profile, config) == pytest.approx(4 * layers + profile.parameters * profile.update_seconds)


@pytest.mark.parametrize(
    "grid",
    [
        {"batches": ()},
        {"batches": (2, 1)},
        {"batches": (0,)},
        {"tensors": (2,)},
        {"tensors": (1, 3)},
        {"rounds": 0},
    ],
)
def test_a_grid_that_cannot_work_is_refused(tiny, grid):
    with pytest.raises(InputError):
        measure_layers(tiny(), replace(default_grid(tiny()), **grid))


def test_default_grid_covers_the_step_on_one_device():
    grid = default_grid(load_config("gpt-tiny", {"parallel.micro_batches": 2}))
    assert grid.batches == (1, 4, 16) and grid.tensors == (1, 2, 4)
    assert default_grid(load_config("gpt-tiny", {"data.batch_size": 1}), quick=True).batches == (1,)


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """An empty cache folder, and measurements that are only counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs = []

    def measure(config, grid):
        configs.append(config)
        timing = Timing(batches=(1.0,), forward=(float(len(configs)),), backward=(10.0,))
        return LayerSeconds(timings=dict.fromkeys(("embedding", "block", "head"), (timing,)), update=1e-9, samples={})

    monkeypatch.setattr(profiling, "measure_layers", measure)
    return configs


def test_the_cache_is_found_again_and_by_what_decides(tiny, tmp_path, counted):
    grid = Grid(batches=(1,), tensors=(1,), rounds=1)
    profile, path, known = cached_profile(tiny(), grid)
    assert not known and path.is_relative_to(tmp_path)
    assert cached_profile(tiny(**{"train.steps": 3, "optimizer.learning_rate": 1.0}), grid) == (profile, path, True)
    assert len(counted) == 1
    others = [tiny(**{"model.d_ff": 64}), tiny(**{"data.sequence_length": 16}), tiny(**{"model.dtype": "bfloat16"})]
    others.append(tiny(**{"optimizer.moments": "int8"}))
    files = {path, *(cached_profile(other, grid)[1] for other in others)}
    assert len(files) == len(counted) == 5
    assert cached_profile(others[-1], grid)[0].state.moments == "int8"
    again, same_path, known = cached_profile(tiny(), grid, again=True)
    assert same_path == path and not known and again != profile


@pytest.mark.parametrize("damage", ["corrupt", "degenerate"])
def test_a_file_of_the_cache_that_is_of_no_use_is_measured_again(tiny, monkeypatch, capsys, counted, damage):
    """It is said, and the file stays if the measurement is refused."""
    grid = Grid(batches=(1,), tensors=(1,), rounds=1)
    profile, path, _ = cached_profile(tiny(), grid)
    none = Timing(batches=(1.0,), forward=(0.0,), backward=(1.0,))
    kinds = profile.kinds | {"block": profile.kinds["block"].model_copy(update={"timings": (none,)})}
    profile.model_copy(update={"kinds": kinds}).save(path)
    if damage == "corrupt":
        path.write_text("{")
    before = path.read_text()

    def refuse(config, grid):
        raise InputError("cannot be right")

    with monkeypatch.context() as patch:
        patch.setattr(profiling, "measure_layers", refuse)
        with pytest.raises(InputError, match="cannot be right"):
            cached_profile(tiny(), grid)
    assert path.read_text() == before and [file.name for file in path.parent.iterdir()] == ["profile.json"]
    capsys.readouterr()
    again, same_path, known = cached_profile(tiny(), grid)
    assert (same_path, known, len(counted)) == (path, False, 2) and cached_profile(tiny(), grid) == (again, path, True)
    said = capsys.readouterr().err
    assert "measured again" in said and str(path) in said and (damage == "corrupt" or "a block takes 0 ms" in said)


def test_the_command_writes_what_is_asked_for(tiny, tmp_path, monkeypatch, capsys, counted):
    monkeypatch.setattr(profiling, "configure_runtime", lambda: None)
    monkeypatch.setattr(profiling, "probe_cluster", lambda rounds: some_cluster())
    config, out = tiny(), tmp_path / "profile.json"
    assert profile_command(config, str(out), str(tmp_path / "cluster.json"), quick=True) == 0
    assert load_profile(out).name == config.name and load_cluster(tmp_path / "cluster.json") == some_cluster()
    said = capsys.readouterr().out
    assert "from the cache" not in said and "machine: spread 2 % in the median" in said and "--again" not in said
    assert profile_command(config, quick=True) == 0
    assert "from the cache" in capsys.readouterr().out and len(counted) == 1
    with pytest.raises(InputError, match="cannot be written"):
        profile_command(config, str(tmp_path / "nowhere" / "profile.json"))


def some_cluster():
    link = Link(bandwidth=1e9, latency=1e-6, spread=0.02, repetitions=3)
    node = Node(device=ANY, devices=1, inside=link, host=link, host_memory=1e9)
    return Cluster(name="one", nodes=(node,), network=link)
