"""Graphs cut by hand; random ones against the definition; PipeDream's own files."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhpt.core.errors import InputError
from jhpt.core.profile import LayerKind, ModelProfile, Timing
from jhpt.planner.profiles.importers import graph, pipedream, read_profile

PROFILES = Path(__file__).parent / "pipedream"
"""PipeDream's own, under its licence."""


def line(name, forward=1.0, backward=2.0, activation=8, parameters=4, description="Op()"):
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={activation}, parameter_size={parameters}"
    )


def edge(pair):
    return f"\t{pair[0]} -- {pair[1]}"


def text(nodes, edges):
    """`nodes`: name -> arguments of `line`; `edges`: pairs of one-letter names, e.g. "ab bc"."""
    return "\n".join([line(name, **given) for name, given in nodes.items()] + [edge(pair) for pair in edges.split()])


@pytest.fixture
def write(tmp_path):
    def write(content, name="model.graph.txt"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def cut(nodes, edges):
    """[(nodes of a layer, boundary bytes)] of a graph as in `text`."""
    parsed = pipedream.without_inputs(pipedream.parse_graph(text(nodes, edges), Path("graph.txt")))
    return [("".join(segment.nodes), segment.boundary) for segment in graph.segments(parsed)]


FREE = dict(forward=0, backward=0, parameters=0)


@pytest.mark.parametrize(("size", "parameters"), [(4, 1), (6, 2), (0.4, 1), ("[2.0; 4.0]", 2), (0, 0)])
def test_parameters_of_other_widths_are_rounded_up_to_float32(write, size, parameters):
    """A weight and a half of float32 may be three of 16 bits."""
    profile = read_profile(write(line("a", parameters=size)))
    assert profile.kinds["a Op"].parameters == parameters


def test_chain_is_a_layer_per_node_in_seconds_and_scalars(write):
    nodes = dict(b=dict(forward=3, backward=5, activation=16, parameters=40), a=dict(activation="[8.0; 4.0]"))
    profile = read_profile(write(text(nodes, "ab")))
    assert profile.layers == ("a Op", "b Op")
    a, b = (profile.kinds[name] for name in profile.layers)
    # Milliseconds become seconds, bytes of float32 scalars, and a list of outputs its sum.
    assert (a.seconds(1, 1), a.parameters, a.boundary_bytes, a.activation_bytes) == ((0.001, 0.002), 1, 12, 12)
    # Nothing crosses a cut after the last layer.
    assert (b.seconds(1, 1), b.parameters, b.boundary_bytes, b.activation_bytes) == ((0.003, 0.005), 10, 0, 16)
    assert b.seconds(2, 1) == (0.006, 0.010)
    assert (profile.name, profile.bytes_per_weight, profile.state_bytes, profile.dtype) == ("model", 4, 16, "float32")
    assert all(kind.max_tensor == 1 for kind in profile.kinds.values())


def test_diamond_carries_the_fork_until_both_branches_have_read_it():
    #   a -> b -> c -> e,  a -> d -> e:  the longer branch first, then d.  After a: a (1).  After b: a + b = 1 + 2.
    #   After c: a + c = 1 + 4.  After d: c + d = 4 + 8.
    nodes = {name: dict(activation=size) for name, size in zip("abcde", (1, 2, 4, 8, 16), strict=True)}
    assert cut(nodes, "ab ad bc ce de") == [("a", 1), ("b", 3), ("c", 5), ("d", 12), ("e", 0)]


def test_skip_connection_is_carried_past_what_it_skips():
    #   a -> b -> c -> d,  a -> c:  after b: a + b = 1 + 2.  c separates what is before it from what is after.
    nodes = {name: dict(activation=size) for name, size in zip("abcd", (1, 2, 4, 8), strict=True)}
    assert cut(nodes, "ab bc ac cd") == [("a", 1), ("b", 3), ("c", 4), ("d", 0)]


def test_tensor_with_several_readers_crosses_once():
    #   a is read by b, c and d: after a just a; after b: a + b, not 2 a + b.
    nodes = {name: dict(activation=size) for name, size in zip("abcd", (1, 2, 4, 8), strict=True)}
    assert cut(nodes, "ab ac ad bc cd") == [("a", 1), ("b", 3), ("c", 5), ("d", 0)]


def test_short_branch_starts_just_before_the_join():
    #   a -> b -> c -> e,  d -> e:  d, first in the file, is made when e needs it and not carried from the start.
    nodes = {name: dict(activation=size) for name, size in zip("dabce", (1, 2, 4, 8, 16), strict=True)}
    assert cut(nodes, "de ab bc ce") == [("a", 2), ("b", 4), ("c", 8), ("d", 9), ("e", 0)]


def test_side_output_follows_its_producer():
    #   a -> b -> c -> d,  a -> h (a second output): h right after a, so that a is not carried to the end for it.
    nodes = {name: dict(activation=size) for name, size in zip("habcd", (1, 2, 4, 8, 16), strict=True)}
    assert cut(nodes, "ah ab bc cd") == [("a", 2), ("h", 2), ("b", 4), ("c", 8), ("d", 0)]


def test_free_nodes_join_the_side_where_the_cut_is_cheapest():
    #   a (9) -> v (3) -> w (5) -> b:  of the cuts behind a, v and w the one of 3 bytes stays.
    nodes = dict(a=dict(activation=9), v=dict(activation=3, **FREE), w=dict(activation=5, **FREE), b={})
    assert cut(nodes, "av vw wb") == [("av", 3), ("wb", 0)]


def test_selections_of_an_output_move_up_to_it():
    #   a (9) -> s (1) -> b -> c,  a -> t (2) -> c,  a -> u (6), unread:  s and t replace a before b runs.
    nodes = dict(
        a=dict(activation=9), s=dict(activation=1, **FREE), t=dict(activation=2, **FREE),
        u=dict(activation=6, **FREE), b=dict(activation=4), c={},
    )  # fmt: skip
    assert cut(nodes, "as at au sb bc tc") == [("astu", 3), ("b", 6), ("c", 0)]


def test_inputs_are_dropped_with_their_time_and_bytes():
    nodes = dict(i=dict(description="Input", forward=500), j=dict(description="Input0"), a={}, b={})
    assert cut(nodes, "ia ib ja ab") == [("a", 8), ("b", 0)]
    # What only starts like one, or reads something, is a layer.
    nodes = dict(a=dict(description="InputConv(3)"), b=dict(description="Input"))
    assert cut(nodes, "ab") == [("a", 8), ("b", 0)]


def test_equal_layers_share_a_kind(write):
    profile = read_profile(write(text(dict(a={}, b={}, c={}, d={}), "ab bc cd")))
    assert profile.layers == ("a Op", "a Op", "a Op", "d Op")


def test_stage_of_a_plan_is_ignored_and_folders_name_graphs(write, tmp_path):
    (tmp_path / "vgg16").mkdir()
    assert read_profile(write(line("a") + " -- stage_id=1\n", "vgg16/graph.txt")).name == "vgg16"


@st.composite
def dags(draw):
    """Connected: every node but the first reads an earlier one, or is read by a later one through the last."""
    count = draw(st.integers(1, 9))
    names = [f"n{index}" for index in draw(st.permutations(range(count)))]
    edges = {
        (names[draw(st.integers(0, index - 1))], names[index]): None for index in range(1, count) if draw(st.booleans())
    }
    edges |= {(name, names[-1]): None for name in names[:-1] if not any(name in edge for edge in edges)}
    pairs = [(a, b) for index, a in enumerate(names) for b in names[index + 1 :]]
    edges |= dict.fromkeys(draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else [])
    size, milliseconds = st.integers(0, 50), st.sampled_from([0, 0, 1, 2.5])
    nodes = {
        name: dict(
            forward=draw(milliseconds), backward=draw(milliseconds), activation=draw(size), parameters=4 * draw(size)
        )
        for name in sorted(names)
    }
    return nodes, list(edges)


def naive_boundary(done, nodes, edges):
    """The sum over the nodes in `done` that a node outside reads."""
    return sum(nodes[name]["activation"] for name in done if any(a == name and b not in done for a, b in edges))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dags())
def test_random_graphs_lose_nothing_and_pay_for_every_live_tensor(case):
    nodes, edges = case
    content = "\n".join([line(name, **costs) for name, costs in nodes.items()] + [edge(pair) for pair in edges])
    parsed = pipedream.parse_graph(content, Path("graph.txt"))
    cuts = graph.segments(parsed)
    order = [name for segment in cuts for name in segment.nodes]
    assert sorted(order) == sorted(nodes)
    assert all(order.index(a) < order.index(b) for a, b in edges)
    done: set[str] = set()
    for segment in cuts:
        done |= set(segment.nodes)
        assert segment.boundary == naive_boundary(done, nodes, edges)
    costly = [name for name, one in nodes.items() if one["forward"] or one["backward"] or one["parameters"]]
    assert len(cuts) == max(1, len(costly))
    if not costly:
        return
    kinds, row = graph.layers(parsed, Path("graph.txt"))
    for measure, column, unit in [
        (lambda kind: kind.seconds(1, 1)[0], "forward", 1e-3),
        (lambda kind: kind.seconds(1, 1)[1], "backward", 1e-3),
        (lambda kind: kind.parameters, "parameters", 1 / 4),
        (lambda kind: kind.activation_bytes, "activation", 1),
    ]:
        assert sum(measure(kinds[name]) for name in row) == pytest.approx(
            unit * sum(one[column] for one in nodes.values())
        )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(dags())
def test_a_node_comparable_to_all_splits_the_order(case):
    nodes, edges = case
    parsed = pipedream.parse_graph(text(nodes, "") + "\n" + "\n".join(map(edge, edges)), Path("graph.txt"))
    above = {name: set() for name in nodes}
    for _ in nodes:
        for a, b in edges:
            above[b] |= above[a] | {a}
    order = graph.sequence(parsed)
    for name in nodes:
        below = {other for other in nodes if name in above[other]}
        if len(above[name]) + len(below) == len(nodes) - 1:
            assert set(order[: order.index(name)]) == above[name]


def test_long_chains_need_no_recursion():
    count = 3000
    kind = LayerKind(boundary_bytes=0, activation_bytes=1, timings=(Timing(batches=(1,), forward=(1,), backward=(1,)),))
    names = [f"n{index}" for index in range(count)]
    chain = graph.Graph(nodes=dict.fromkeys(names, kind), edges=dict.fromkeys(pairwise(names), 1.0))
    graph.check(chain, Path("graph.txt"))
    assert graph._with_ancestors(names[-1], chain.before, set()) == names


def configuration(seconds, weights=8.0, a=80.0, b=16.0, name="vanilla"):
    return dict(id=name, timePerSample=seconds, parameterSize=weights, memoryUsageA=a, memoryUsageB=b,
                syncTimeFw={}, syncTimeBw={})  # fmt: skip


def piper(nodes, edges):
    """`nodes`: id -> TMPCs; `edges`: (source, destination, bytes)."""
    return {
        "maxDevices": 8, "bandwidth": 1e9, "maxMemoryPerDevice": 1e9, "mbsInBatch": 4,
        "nodes": [{"id": name, "name": "Block", "TMPCs": tmpcs} for name, tmpcs in nodes.items()],
        "edges": [dict(sourceId=a, destId=b, communicationCost=size) for a, b, size in edges],
    }  # fmt: skip


def test_piper_block(write):
    block = {
        "1": [configuration(3.0), configuration(4.25, name="activation recomp")],
        "2": [configuration(2.0, weights=5.0, a=50.0), configuration(2.5, name="activation recomp")],
        # 8 is listed without 4, so it is not offered.
        "8": [configuration(1.0, a=30.0)],
    }
    profile = read_profile(write(piper({1: block, 2: block, 3: block}, [(1, 2, 10.0), (2, 3, 10.0)]), "bert.json"))
    assert profile.layers == ("1 Block", "1 Block", "3 Block")
    kind = profile.kinds["1 Block"]
    # A recomputed forward pass takes 4.25 - 3 = 1.25 at one device and 0.5 at two.
    assert kind.seconds(1, 1) == (1.25, 1.75) and kind.seconds(1, 2) == (0.5, 1.5)
    # split + replicated = 80, split / 2 + replicated = 50.
    assert (kind.activation_bytes, kind.replicated_bytes, kind.max_tensor) == (60, 20, 2)
    assert (kind.parameters, kind.boundary_bytes, profile.parameters) == (2, 10, 6)
    assert (profile.name, profile.state_bytes) == ("bert", 4 * 16 / 8)


def test_piper_edges_of_one_node_are_its_largest_and_degrees_are_common(write):
    #   1 -> 2 (10), 1 -> 3 (30), 2 -> 3 (5):  after 1: max(10, 30); after 2: 30 + 5.
    one = {"1": [configuration(3.0)]}
    both = one | {"2": [configuration(2.0)], "4": []}
    profile = read_profile(write(piper({1: both, 2: one, 3: both}, [(1, 2, 10), (1, 3, 30), (2, 3, 5)]), "p.json"))
    kinds = [profile.kinds[name] for name in profile.layers]
    assert [kind.boundary_bytes for kind in kinds] == [30, 35, 0]
    assert [kind.max_tensor for kind in kinds] == [2, 1, 2]
    # Without a recomputing configuration the forward pass is a third.
    assert kinds[1].seconds(1, 1) == (1.0, 2.0)


def test_piper_free_nodes_restrict_the_layer_they_join(write):
    #   A mask, free and for one device only, is read by both blocks: it joins the first.
    mask = {"1": [configuration(0.0, weights=0.0, a=7.0, b=0.0)]}
    block = {"1": [configuration(3.0)], "2": [configuration(2.0)]}
    profile = read_profile(write(piper({0: mask, 1: block, 2: block}, [(0, 1, 7), (0, 2, 7), (1, 2, 5)]), "p.json"))
    first, second = (profile.kinds[name] for name in profile.layers)
    assert (first.boundary_bytes, first.max_tensor, first.activation_bytes + first.replicated_bytes) == (12, 1, 87)
    assert second.max_tensor == 2


def test_own_profiles_as_json_and_yaml(write, tmp_path):
    profile = read_profile(write(text(dict(a={}, b={}), "ab")))
    profile.save(tmp_path / "own.json")
    assert read_profile(tmp_path / "own.json") == profile
    yaml = """
name: small
device: none
source: by hand
kinds: {block: {boundary_bytes: 1, activation_bytes: 2, timings: [{batches: [1], forward: [1e-05], backward: [2]}]}}
layers: [block, block]
"""
    small = read_profile(write(yaml, "own.yaml"))
    assert isinstance(small, ModelProfile) and small.kinds["block"].seconds(1, 1) == (1e-5, 2)


ONE = {"1": [configuration(1.0)]}

REFUSALS = {
    "empty": ("\n \n", "is empty"),
    "no profile": ("just words", "is not a profile: it holds a str"),
    "a list": ([1, 2], "is not a profile: it holds a list"),
    "other keys": ({"name": "x", "network": {}}, "holds the keys .'name', 'network'."),
    "broken": ('{"nodes": [', "not valid JSON"),
    "mixed": (piper({1: ONE}, []) | {"kinds": {}, "layers": []}, "mixes a jhpt profile"),
    "own, faulty": ({"kinds": {}, "layers": ["x"]}, "is no ModelProfile file"),
    "malformed": (line("a") + "\nb - Conv - 3", "line 2: 'b - Conv - 3' is neither an edge"),
    "graph and JSON": (line("a") + '\n{"nodes": []}', "line 2"),
    "missing column": (line("a").replace(", parameter_size=4", ""), "line 1: .* is neither"),
    "no number": (line("a", forward="fast"), "line 1: forward_compute_time=fast is no number"),
    "negative time": (line("a") + "\n" + line("b", backward=-1), "line 2: backward_compute_time=-1 must be"),
    "not finite": (line("a", activation="nan"), "line 1: activation_size=nan must be"),
    "negative in a list": (line("a", activation="[1.0; -2.0]"), "line 1: activation_size=.* must be"),
    "twice": (line("a") + "\n" + line("a"), "line 2: a is described twice"),
    "dangling": (text(dict(a={}, b={}), "ab bx ya"), "does not describe: x, y"),
    "edges only": ("\ta -- b", "does not describe: a, b"),
    "cycle": (text(dict(a={}, b={}, c={}), "ab bc ca"), "has a cycle: . <- . <- . <- ."),
    "loop": (text(dict(a={}), "aa"), "has a cycle: a <- a"),
    "apart": (text(dict(a={}, b={}, c={}), "ab"), "no edge joins c to the other nodes"),
    "no edges": (text({name: {} for name in "abcdefghijk"}, ""), "no edge joins b, .* and 2 more"),
    "nothing costs": (text(dict(a=FREE, b=FREE), "ab"), "no node takes time"),
    "inputs only": (line("a", description="Input"), "no node takes time"),
    "Piper, negative": (
        piper({1: {"1": [configuration(-1.0)]}}, []),
        "no Piper file:\nnodes.0.TMPCs.1.0.timePerSample",
    ),
    "Piper, no nodes": (piper({}, []), "no Piper file:\nnodes"),
    "Piper, field": ({"nodes": [{"id": 1}], "edges": []}, "nodes.0.TMPCs: Field required"),
    "Piper, one device": (piper({1: {"2": [configuration(1.0)]}}, []), "node 1 has no TMPC for 1 device"),
    "Piper, same id": (piper({1: ONE}, []) | {"nodes": 2 * piper({1: ONE}, [])["nodes"]}, "two nodes have the id 1"),
    "Piper, same edge": (piper({1: ONE, 2: ONE}, 2 * [(1, 2, 1)]), "from 1 to 2 is listed twice"),
    "Piper, dangling": (piper({1: ONE}, [(1, 2, 1)]), "does not describe: 2"),
    "Piper, cycle": (piper({1: ONE, 2: ONE}, [(1, 2, 1), (2, 1, 1)]), "has a cycle"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(write, name):
    content, message = REFUSALS[name]
    with pytest.raises(InputError, match=message):
        read_profile(write(content))


def test_refuses_what_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(InputError, match="cannot be read"):
            read_profile(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_profile(tmp_path / "binary")


# Layers, parameters (those of the published networks; 61 100 840 is torchvision's AlexNet), milliseconds without input.
PUBLISHED = {
    "alexnet": (18, 61_100_840, 85.321),
    "vgg16": (36, 138_357_544, 672.535),
    "resnet50": (158, 25_557_032, 443.419),
    "gnmt": (17, 193_765_952, 89.416),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles(name):
    profile = read_profile(PROFILES / f"{name}.graph.txt")
    num_layers, parameters, milliseconds = PUBLISHED[name]
    seconds = sum(sum(profile.kinds[layer].seconds(1, 1)) for layer in profile.layers)
    assert (profile.name, profile.num_layers, profile.parameters) == (name, num_layers, parameters)
    assert seconds == pytest.approx(milliseconds / 1e3, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "before", "boundary"),
    [
        # The first layer of each later stage, and the bytes the stage before sends.
        ("alexnet", ["node18 Linear"], [9_437_184]),
        ("vgg16", ["node19 Conv2d"], [102_760_448]),
        # Dropout and its input; the first and third output of the attention; two dropped or added states and the third.
        (
            "gnmt",
            ["node11 LSTM", "node28 Dropout", "node44 LSTM"],
            [2 * 6_291_456, 6_160_384 + 131_072, 2 * 6_160_384],
        ),
    ],
)
def test_published_partitions_are_among_the_cuts(name, before, boundary):
    profile = read_profile(PROFILES / f"{name}.graph.txt")
    cuts = [profile.layers.index(layer) for layer in before]
    assert [profile.kinds[profile.layers[index - 1]].boundary_bytes for index in cuts] == boundary
