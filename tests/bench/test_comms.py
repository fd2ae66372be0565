"""What `jhpt bench comms` makes of its samples, its variants and predictions, and one small run on emulated hosts."""

import statistics
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.bench.comms import run as comms
from jhpt.bench.comms.blocks import Blocks, meshes
from jhpt.bench.comms.costs import predicted, step_bytes, sum_bytes, travel, travel_key
from jhpt.bench.comms.task import ALL, BASELINE, FLOAT32, LANES, MIXED, OVERLAP, SHORT, VARIANTS, Task
from jhpt.bench.comms.worker import together
from jhpt.bench.emulated.launch import rows_of
from jhpt.bench.netlab import Lab, why_not

TASK = Task(
    tag="jhpt-lab-1-1-0",
    cpu=0.5,
    folder="/tmp",
    rates=(1e9,),
    layers=2,
    width=128,
    heads=4,
    length=8,
    batch=4,
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


def test_claims_are_medians_of_ratios_round_by_round():
    claims = comms.claims(ROWS)
    assert claims["all_vs_serial_max"].value == pytest.approx(2.5)  # although the second round was slow
    assert claims["all_vs_serial_max"].setup.startswith("200 Mbit/s")
    assert claims["overlap_vs_serial_max"].value == pytest.approx(1.25)
    assert claims["compression_vs_serial_500mbit"].value == pytest.approx(1.6)
    assert claims["prediction_error_median"].value == pytest.approx(statistics.median([0, 0, 0, 0.1, 0, 0, 0.2]))
    assert claims["wire_bytes_error_max"].value == pytest.approx(0.02)


def test_claims_that_were_not_measured_are_absent():
    assert comms.claims([]) == {}
    slow = comms.claims([row for row in ROWS if row.get("bits_per_s") == 2e8])
    assert "compression_vs_serial_500mbit" not in slow and "wire_bytes_error_max" not in slow


def test_table_is_printed(capsys):
    comms.print_entries(comms.entries(ROWS), {ROWS[-1]["variant"]: ROWS[-1]})
    printed = capsys.readouterr().out
    assert "+10 %" in printed and "0.98" in printed and BASELINE in printed


def test_a_task_is_its_text():
    assert Task.parse(TASK.text()) == TASK


def test_variants_differ_in_what_they_are_named_for():
    assert BY_NAME[OVERLAP].how == BY_NAME[SHORT].how and BY_NAME[ALL].how == BY_NAME[MIXED].how
    assert [variant.name for variant in VARIANTS if variant.lanes > 1] == [OVERLAP, ALL]
    assert BY_NAME[FLOAT32].how is None and not BY_NAME[SHORT].how.on
    assert travel_key(BY_NAME[ALL]) == f"{MIXED} / {LANES}" and travel_key(BY_NAME[SHORT]) == f"{SHORT} / 1"


def test_bytes_of_a_step():
    """n numbers, t = 4: 2 (t-1)/t n beta / 8 for each of four sums a layer, whatever the lanes."""
    numbers = TASK.batch * TASK.length * TASK.width
    assert step_bytes(TASK, 4, BY_NAME[FLOAT32]) == 4 * TASK.layers * 1.5 * numbers * 4
    assert step_bytes(TASK, 4, BY_NAME[SHORT]) == 4 * TASK.layers * 1.5 * numbers * 2
    assert step_bytes(TASK, 4, BY_NAME[OVERLAP]) == step_bytes(TASK, 4, BY_NAME[SHORT])
    mixed = step_bytes(TASK, 4, BY_NAME[MIXED])
    assert mixed == 4 * TASK.layers * sum_bytes(TASK, 4, BY_NAME[MIXED].how, TASK.batch)


def test_predictions_are_two_streams():
    """In line everything adds up; of two lanes the longer stream stays, and a chunk that is beside nothing."""
    work, seconds = {"forward": 2.0, "both": 6.0}, {"seconds": 1.0, "busy": 0.0}
    layers = TASK.layers
    assert predicted(TASK, BY_NAME[SHORT], work, seconds) == pytest.approx(layers * (6 + 4))
    beside = predicted(TASK, BY_NAME[OVERLAP], work, seconds)  # of a lane
    assert beside == pytest.approx(LANES * layers * 6 + 2)  # work, and the last sum forward and backward
    slow = predicted(TASK, BY_NAME[OVERLAP], work, {"seconds": 10.0, "busy": 0.0})
    assert slow == pytest.approx(LANES * layers * 4 * 10 + 1 + 2)  # sums, and the first half block each way
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


@pytest.mark.parametrize("name", (FLOAT32, SHORT, MIXED))
def test_a_step_is_the_blocks_gradient(name):
    """Against the same blocks on one device."""
    blocks = Blocks(task=TASK, hosts=4)
    lowered, arguments = blocks.step(BY_NAME[name], one_lane())
    given = arguments()
    value, (gradients, at_x) = lowered().compile()(*given)
    params, x, error = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), given)
    whole = Blocks(task=TASK, hosts=1)
    run = whole.layers(whole.hooks(BY_NAME[FLOAT32], ()), TASK.layers)
    expected, (expected_gradients, expected_x) = jax.value_and_grad(lambda *at: jnp.vdot(run(*at), error), (0, 1))(
        params, x
    )
    close = {FLOAT32: 1e-5, SHORT: 0.02, MIXED: 0.3}[name]
    pairs = [
        (at_x, expected_x),
        *zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True),
    ]
    norm = max(np.linalg.norm(np.asarray(want)) for _, want in pairs)
    assert all(np.linalg.norm(np.asarray(found) - np.asarray(want)) <= close * norm for found, want in pairs)
    assert float(value) == pytest.approx(float(expected), abs=close * float(jnp.linalg.norm(error)))


def test_a_lane_alone_computes_a_layer_of_its_share():
    calls = Blocks(task=TASK, hosts=4).work(BY_NAME[ALL])
    y = calls["forward"]()
    assert y.shape == (TASK.batch // LANES, TASK.length, TASK.width)
    again, (gradients, error) = calls["both"]()
    assert np.array_equal(y, again) and error.shape == y.shape
    assert gradients[0]["attention"]["qkv"]["kernel"].shape == (128, 1, 3, 32)  # a head of four


@pytest.mark.parametrize("name", (FLOAT32, SHORT, ALL))
def test_travelling_is_the_bytes_of_a_sum(name):
    """The sums that are timed alone move what the formula says, four times in a row."""
    lowered, arguments = travel(TASK, 4, BY_NAME[name], one_lane())
    (given,) = arguments()
    result = lowered().compile()(given)
    assert result.shape == given.shape
    words = given.nbytes // 4  # of a rank
    batch = TASK.batch // BY_NAME[name].lanes
    assert 2 * 3 * words // 4 == sum_bytes(TASK, 4, BY_NAME[name].how, batch)


def test_lanes_run_one_after_the_other():
    order = []
    calls = [lambda index=index: order.append(index) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together(calls, 0.05, pool)()
    assert sorted(order) == [0, 1, 2]


def test_says_why_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(comms, "why_not", lambda: "emulated hosts need root")
    assert comms.run(quick=True, json_path=None) == 3
    assert "emulated hosts need root" in capsys.readouterr().err


SMALL = """
from jhpt.bench.comms import task, worker
worker.VARIANTS = tuple(one for one in task.VARIANTS if one.name in (task.SHORT, task.ALL))
worker.take_part(worker.Task, worker.run)
"""


def test_small_run_on_four_hosts(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Lab(hosts=4, cpu=0.25) as lab:
        lab.quota(1.0)
        changes = {"tag": lab.tag, "cpu": 0.25, "folder": str(tmp_path), "layers": 1}
        task = Task(**(vars(TASK) | changes))
        rows = rows_of(lab, task, ["-c", SMALL], devices=LANES, limit_s=240)
    (entry,) = comms.entries(rows)
    assert list(entry.samples) == [SHORT, ALL]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in entry.samples.values())
    assert {row["row"] for row in rows} == {"work", "bytes", "travel", "step"}
    assert all(row["counted"] >= row["formula"] for row in rows if row["row"] == "bytes")
