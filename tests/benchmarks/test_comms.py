"""What `jhpt bench comms` makes of its samples, its variants and predictions, and one small run on emulated hosts."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.comms import gradients, tables
from benchmarks.comms import run as comms
from benchmarks.comms.blocks import Blocks, meshes
from benchmarks.comms.costs import REPEATS, predicted, step_bytes, sum_bytes, travel, travel_key
from benchmarks.comms.task import (
    ALL,
    BASELINE,
    FLOAT32,
    FOUR,
    GATHERED,
    LANES,
    MIXED,
    OVERLAP,
    OWN_ALL,
    OWN_SHORT,
    SHORT,
    SHORT_STEPS,
    VARIANTS,
    Shape,
    Task,
)
from benchmarks.comms.worker import staggered
from benchmarks.emulated.entries import numbered
from benchmarks.emulated.launch import rows_of
from benchmarks.netlab import Lab, why_not
from jhpt.core.compression import gathers
from jhpt.models.hooks import Hooks
from jhpt.sharding.partition import MATRICES, path_name
from tests.covers import quick_and_exhaustive

SHAPE = Shape(layers=2, width=128, heads=4, length=8, batch=4)
TASK = Task(
    tag="jhpt-lab-1-1-0",
    cpu=0.5,
    folder="/tmp",
    rates=(1e9,),
    blocks=SHAPE,
    gradients=replace(SHAPE, layers=1, batch=1),
    variants=(SHORT, ALL),
    exchanges=gradients.QUICK,
    lanes=LANES,
    rounds=2,
    parts_rounds=1,
)
BY_NAME = {variant.name: variant for variant in VARIANTS}


def step_row(rate, variant, samples, predicted_s):
    return {"row": "step", "bits_per_s": rate, "variant": variant, "samples_s": samples, "predicted_s": predicted_s}


ROWS = [
    step_row(2e8, BASELINE, [2.0, 4.0, 2.2], 2.2),
    step_row(2e8, OVERLAP, [1.6, 3.2, 1.76], 1.76),
    step_row(2e8, ALL, [0.8, 1.6, 0.88], 0.88),
    step_row(5e8, BASELINE, [1.0, 1.0, 1.0], 1.1),
    step_row(5e8, OVERLAP, [0.9, 0.9, 0.9], 0.9),
    step_row(5e8, ALL, [0.5, 0.5, 0.5], 0.5),
    step_row(5e8, MIXED, [0.625, 0.625, 0.625], 0.5),
    {"row": "bytes", "variant": BASELINE, "counted": 1.005e6, "formula": 1e6},
    {"row": "bytes", "variant": ALL, "counted": 0.98e6, "formula": 1e6},
]


GRADIENT_ROWS = [
    {**step_row(rate, name, samples, predicted_s), "row": "gradient step"}
    for rate, name, samples, predicted_s in (
        (5e8, gradients.FLOAT32, [0.5, 0.5, 0.5], 0.5),
        (5e8, gradients.BASELINE, [0.9, 1.8, 0.99], 0.99),
        (5e8, gradients.BYTES, [0.6, 1.2, 0.66], 0.99),
        (1e9, gradients.BASELINE, [0.6, 0.6, 0.6], 0.6),
        (1e9, gradients.BYTES, [0.5, 0.5, 0.5], 0.5),
    )
] + [{"row": "gradient bytes", "variant": gradients.BYTES, "counted": 1.03e6, "formula": 1e6}]


def test_claims_are_medians_of_ratios_round_by_round():
    claims = comms.claims(ROWS)
    assert claims["all_vs_serial_max"].value == pytest.approx(2.5)  # although the second round was slow
    assert claims["all_vs_serial_max"].setup.startswith("200 Mbit/s")
    assert claims["all_vs_overlap_geomean"].value == pytest.approx((2.0 * 1.8) ** 0.5)
    assert claims["overlap_vs_serial_max"].value == pytest.approx(1.25)
    assert claims["compression_vs_serial_500mbit"].value == pytest.approx(1.6)
    assert claims["all_vs_serial_geomean"].value == pytest.approx(5**0.5)
    assert claims["worst_overlap_vs_serial"].value == pytest.approx(1 / 0.9)
    assert claims["prediction_error_median"].value == pytest.approx(statistics.median([0, 0, 0, 0.1, 0, 0, 0.2]))
    assert claims["prediction_error_max"].value == pytest.approx(0.2)
    assert claims["wire_bytes_error_max"].value == pytest.approx(0.02)


def test_claims_of_gradients():
    """Float32, which compresses nothing, is no variant to win with; errors count with those of tensor parallelism."""
    claims = comms.claims(GRADIENT_ROWS)
    assert {name for name in claims if "vs_" not in name} == {
        "prediction_error_median",
        "prediction_error_max",
        "wire_bytes_error_max",
    }
    name = "gradients_quantize_8_bits_vs_16bit"
    assert claims[f"{name}_geomean"].value == pytest.approx((1.5 * 1.2) ** 0.5)
    assert claims[f"{name}_max"].value == pytest.approx(1.5)
    assert claims[f"{name}_max"].setup.startswith("500 Mbit/s")
    assert gradients.BYTES in claims[f"{name}_max"].unit
    both = comms.claims(ROWS + GRADIENT_ROWS)
    errors = [0, 0, 0, 0.1, 0, 0, 0.2] + [0, 0, 0.5, 0, 0]
    assert both["prediction_error_median"].value == pytest.approx(statistics.median(errors))
    assert both["prediction_error_median"].setup.startswith(f"{len(errors)} steps")
    assert both["wire_bytes_error_max"].value == pytest.approx(0.03)
    assert both["all_vs_serial_max"] == comms.claims(ROWS)["all_vs_serial_max"]


def test_the_share_of_the_wire_is_the_baseline_s_at_its_worst():
    """10 MB in 0.5 s are 160 of 200 Mbit/s; what other variants send does not count."""
    row = {"row": "travel", "bits_per_s": 2e8, "bytes": 1e7, "seconds": 0.5, "baseline": True}
    rows = [row, row | {"seconds": 0.1, "bits_per_s": 1e9}, row | {"seconds": 9.0, "baseline": False}]
    assert comms.claims(rows)["serial_16bit_share_of_wire"].value == pytest.approx(0.8)


def test_claims_are_over_launches():
    """The baseline takes 1.44 times as long in a second launch, its opponents as long as before."""
    slow = [
        {**row, "samples_s": [1.44 * seconds for seconds in row["samples_s"]]}
        if row.get("variant") == BASELINE and "samples_s" in row
        else row
        for row in ROWS
    ]
    claims = comms.claims(numbered(slow, 1) + numbered(ROWS, 0))
    assert claims["all_vs_serial_max"].value == pytest.approx(1.2 * 2.5)
    assert claims["launches_apart_max"].value == pytest.approx(0.44)
    assert claims["launches_apart_median"].value == 0


def test_claims_that_were_not_measured_are_absent():
    assert comms.claims([]) == {}
    slow = comms.claims([row for row in ROWS if row.get("bits_per_s") == 2e8])
    assert "compression_vs_serial_500mbit" not in slow and "wire_bytes_error_max" not in slow


def test_table_is_printed(capsys):
    tables.print_entries(ROWS)
    printed = capsys.readouterr().out
    assert "+10 %" in printed and "0.98" in printed and BASELINE in printed
    tables.print_entries(ROWS + GRADIENT_ROWS, tables.GRADIENTS)
    printed = capsys.readouterr().out
    assert "+50 %" in printed and "1.03" in printed and BASELINE not in printed and gradients.BASELINE in printed


def test_a_task_is_its_text():
    assert Task.parse(TASK.text()) == TASK


def test_variants_differ_in_what_they_are_named_for():
    assert BY_NAME[OVERLAP].sums == BY_NAME[SHORT].sums == BY_NAME[OWN_SHORT].sums != BY_NAME[FLOAT32].sums
    assert BY_NAME[ALL].compression == BY_NAME[MIXED].compression == BY_NAME[OWN_ALL].compression
    assert [variant.name for variant in VARIANTS if variant.lanes > 1] == [OVERLAP, ALL]
    assert [variant.name for variant in VARIANTS if variant.sample_chunks > 1] == [OWN_SHORT, OWN_ALL]
    assert gathers(4, BY_NAME[GATHERED].compression) and not gathers(4, BY_NAME[MIXED].compression)
    assert travel_key(BY_NAME[ALL]) == travel_key(BY_NAME[OWN_ALL]) != travel_key(BY_NAME[MIXED])


def test_bytes_of_a_step():
    """n numbers, t = 4: 2 (t-1)/t n beta / 8 for each of four sums a layer, whatever the lanes."""
    numbers = SHAPE.batch * SHAPE.length * SHAPE.width
    assert step_bytes(SHAPE, 4, BY_NAME[FLOAT32]) == 4 * SHAPE.layers * 1.5 * numbers * 4
    assert step_bytes(SHAPE, 4, BY_NAME[SHORT]) == 4 * SHAPE.layers * 1.5 * numbers * 2
    for name in (SHORT_STEPS, OVERLAP, OWN_SHORT):
        assert step_bytes(SHAPE, 4, BY_NAME[name]) == step_bytes(SHAPE, 4, BY_NAME[SHORT])
    assert step_bytes(SHAPE, 4, BY_NAME[FOUR]) == 4 * SHAPE.layers * 1.5 * numbers * (1 / 2 + 2 / 32)
    mixed = step_bytes(SHAPE, 4, BY_NAME[MIXED])
    assert mixed == 4 * SHAPE.layers * sum_bytes(SHAPE, 4, BY_NAME[MIXED])
    gathered = step_bytes(SHAPE, 4, BY_NAME[GATHERED])
    assert 1.7 * mixed < gathered <= 2 * mixed, "four ranks; two steps pad the rows of every share"


def test_predictions_are_two_streams():
    """In line everything adds up; of two lanes the longer stream stays, and a chunk that is beside nothing."""
    work, seconds = {"forward": 2.0, "both": 6.0}, {"seconds": 1.0, "busy": 0.0}
    layers = SHAPE.layers
    assert predicted(TASK, BY_NAME[SHORT], work, seconds) == pytest.approx(layers * (6 + 4))
    beside = predicted(TASK, BY_NAME[OVERLAP], work, seconds)  # of a lane
    assert beside == pytest.approx(LANES * layers * 6 + 2)  # work, and the last sum forward and backward
    slow = predicted(TASK, BY_NAME[OVERLAP], work, {"seconds": 10.0, "busy": 0.0})
    assert slow == pytest.approx(LANES * layers * 4 * 10 + 1 + 2)  # sums, and the first half block each way
    assert predicted(TASK, BY_NAME[OWN_SHORT], work, seconds) == pytest.approx(LANES * layers * (6 + 4)), "in line"
    busy = predicted(TASK, BY_NAME[OVERLAP], work, {"seconds": 1.0, "busy": 0.05})
    assert busy == pytest.approx(LANES * layers * (6 + 4 * 0.05 / TASK.cpu) + 2)


def hosts_here():
    return jax.devices()[:4]


def one_lane():
    return jax.sharding.Mesh(np.array(hosts_here()), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))


def test_lanes_take_a_device_of_every_host():
    devices = jax.devices()
    (lane, other) = meshes(devices, 1)[:2]
    assert list(lane.devices.flat) == [devices[0]] and list(other.devices.flat) == [devices[1]]


@pytest.mark.parametrize(
    ("name", "layers"),
    quick_and_exhaustive(
        [
            (FLOAT32, 2),
            (MIXED, 1),
            (SHORT, 1),
            (SHORT_STEPS, 2),
            (MIXED, 2),
            (GATHERED, 1),
            (OWN_SHORT, 1),
            (OWN_ALL, 1),
        ],
        [(FLOAT32, 2), (MIXED, 1), (SHORT, 1)],
    ),
)
def test_a_step_is_the_blocks_gradient(name, layers):
    """Against the same blocks on one device."""
    shape = replace(SHAPE, layers=layers)
    blocks = Blocks(shape=shape, hosts=4)
    lowered, arguments = blocks.step(BY_NAME[name], one_lane())
    given = arguments()
    value, (gradients, at_x) = lowered().compile()(*given)
    params, x, error = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), given)
    whole = Blocks(shape=shape, hosts=1)
    run = whole.layers(whole.hooks(BY_NAME[FLOAT32], ()), layers)
    both = jax.jit(jax.value_and_grad(lambda *at: jnp.vdot(run(*at), error), (0, 1)))
    expected, (expected_gradients, expected_x) = both(params, x)
    close = {FLOAT32: 1e-5, SHORT: 2**-8, OWN_SHORT: 2**-8, SHORT_STEPS: 2**-8}.get(name, 0.2)
    pairs = [
        (at_x, expected_x),
        *zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True),
    ]
    for one, other in pairs:
        assert np.linalg.norm(np.asarray(one) - np.asarray(other)) <= close * np.linalg.norm(np.asarray(other))
    assert float(value) == pytest.approx(float(expected), abs=close * float(jnp.linalg.norm(error)))


def test_a_lane_alone_computes_a_layer_of_its_share():
    calls = Blocks(shape=SHAPE, hosts=4).work(BY_NAME[ALL])
    y = calls["forward"]()
    assert y.shape == (SHAPE.batch // LANES, SHAPE.length, SHAPE.width)
    again, (gradients, error) = calls["both"]()
    assert np.array_equal(y, again) and error.shape == y.shape
    assert gradients[0]["attention"]["qkv"]["kernel"].shape == (128, 1, 3, 32)  # a head of four


@pytest.mark.parametrize("name", (FLOAT32, SHORT, ALL, GATHERED))
def test_travelling_is_the_bytes_of_a_sum(name):
    """The sums that are timed alone move what the formula says, four times in a row."""
    lowered, arguments = travel(SHAPE, 4, BY_NAME[name], one_lane())
    (given,) = arguments()
    result = lowered().compile()(given)
    assert result.shape == given.shape
    sent = given.nbytes // 4 * (3 if name == GATHERED else 2 * 3)  # by a rank, of pieces of four
    assert sent // 4 == sum_bytes(SHAPE, 4, BY_NAME[name])


DATA_PARALLEL = gradients.DataParallel(shape=replace(SHAPE, layers=1, batch=1), hosts=4)
EXCHANGES = {one.name: one for one in gradients.EXCHANGES}
CLOSE = {
    gradients.FLOAT32: 1e-6,
    gradients.SHORT: 2**-8,
    gradients.SHORT_STEPS: 2**-8,
    gradients.BYTES: 0.02,
    "quantize, 4 bits": 0.2,
    "top-k": 0.8,
}
"""Norms of errors, of a matrix, relative to its sum's: one rounding to the 8 bits of bfloat16 is 2^-9 at most, and
there are two; of codes and of what top-k leaves for later, bounds that a wrong sum would not meet."""


def test_bytes_of_gradients():
    """n = 12 width^2 numbers in the matrices of a layer, t = 4, and two bytes of a range for every 128 codes."""
    n = 12 * 128**2
    assert sum(DATA_PARALLEL.sizes) == n
    expected = {
        gradients.FLOAT32: 1.5 * n * 4,
        gradients.SHORT: 1.5 * n * 2,
        gradients.SHORT_STEPS: 1.5 * n * 2,
        gradients.BYTES: 1.5 * n * (1 + 2 / 128),
        "quantize, 4 bits": 3 * n * (1 / 2 + 2 / 128),  # gathered: 4 x 4 bits < 32
        "top-k": 3 * n // 1024 * 103 * 4,  # a tenth of a block, rounded up
    }
    assert {name: DATA_PARALLEL.sent(one) for name, one in EXCHANGES.items()} == expected


@pytest.fixture(scope="module")
def plain_sums():
    """Gradients of the matrices from all samples, on one device."""
    _, arguments = DATA_PARALLEL.step(EXCHANGES[gradients.FLOAT32], one_data_lane())
    _, params, x, error = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), arguments())
    run = DATA_PARALLEL.blocks.layers(Hooks(), 1)
    grads = jax.jit(jax.grad(lambda params: jnp.vdot(run(params, x), error)))(params)
    named = jax.tree_util.tree_leaves_with_path(grads)
    return [np.asarray(leaf) for path, leaf in named if MATRICES.search(path_name(path))]


def one_data_lane():
    return gradients.data_mesh(jax.devices()[:4])


@pytest.mark.parametrize("name", EXCHANGES)
def test_sums_are_those_of_all_samples(name, plain_sums):
    """Within what a way to sum rounds; and what is kept is exactly what is missing."""
    lowered, arguments = DATA_PARALLEL.step(EXCHANGES[name], one_data_lane())
    program, (saved, *given) = lowered().compile(), arguments()
    left, (value, sums) = program(saved, *given)
    assert value.shape == (4,) and len(left) == len(saved)
    for total, expected in zip(sums, plain_sums, strict=True):
        assert np.linalg.norm(np.asarray(total) - expected) <= CLOSE[name] * np.linalg.norm(expected)
    assert bool(left) == (name not in (gradients.FLOAT32, gradients.SHORT, gradients.SHORT_STEPS))
    for total, residuals, expected in zip(sums, left, plain_sums, strict=bool(left)):
        missing = np.asarray(residuals).reshape(4, *expected.shape).sum(0)
        assert np.allclose(np.asarray(total) + missing, expected, atol=1e-5 * np.abs(expected).max())


def test_steps_go_on_with_what_was_kept():
    steps = gradients.stepping(lambda saved, given: (saved + given, saved), 1, 2)
    assert [steps() for _ in range(3)] == [(3, 1), (5, 3), (7, 5)]


@pytest.mark.parametrize("name", EXCHANGES)
def test_travelling_is_the_bytes_of_an_exchange(name):
    lowered, arguments = DATA_PARALLEL.travel(EXCHANGES[name], one_data_lane())
    (given,) = arguments()
    assert lowered().compile()(given).shape == given.shape
    piece = given.nbytes // 16  # of a rank's four
    gathered = name in ("quantize, 4 bits", "top-k")
    assert (3 if gathered else 2 * 3) * piece == DATA_PARALLEL.sent(EXCHANGES[name])


def test_gradients_are_predicted_in_line():
    """On one host four devices take 4 s beside the collectives of 4 s / REPEATS."""
    assert DATA_PARALLEL.predicted({"step": 4.0 + 4.0 / REPEATS, "travel": 4.0}, 0.5) == pytest.approx(1.5)


def test_lanes_run_one_after_the_other():
    """However slow the machine is, none starts before its time."""
    began = [0.0] * 3
    calls = [lambda index=index: began.__setitem__(index, time.perf_counter()) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        start = time.perf_counter()
        staggered(calls, 0.05, pool)()
    assert all(at - start >= 0.05 * index for index, at in enumerate(began)) and min(began) > start


def test_says_why_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(comms, "why_not", lambda: "emulated hosts need root")
    assert comms.run(quick=True, json_path=None) == 3
    assert "emulated hosts need root" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_small_run_on_four_hosts(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Lab(hosts=4, cpu=0.25) as lab:
        lab.quota(1.0)
        changes = {"tag": lab.tag, "cpu": 0.25, "folder": str(tmp_path), "blocks": replace(SHAPE, layers=1)}
        task = replace(TASK, **changes)
        rows = rows_of(lab, task, ["-m", "benchmarks.comms.worker"], devices=LANES, limit_s=240)
    for table, names in ((tables.TENSOR, [SHORT, ALL]), (tables.GRADIENTS, list(gradients.QUICK))):
        (entry,) = tables.entries(rows, table)
        assert list(entry.samples) == names
        assert all(len(samples) == 2 and min(samples) > 0 for (samples,) in entry.samples.values())
        for row in tables.counts(rows, table):
            assert row["counted"] + row["waiting"] >= row["formula"]
    kinds = {"work", "bytes", "travel", "step"}
    assert {row["row"] for row in rows} == kinds | {f"gradient {kind}" for kind in kinds}
