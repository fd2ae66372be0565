"""Published runs: what is read and refused, the plan that is priced, and what the claims are made of."""

import csv
import json

import pytest

from jhpt.bench.published import (
    PricedRun,
    PublishedRun,
    claims_of,
    cluster_of,
    config_of,
    framework_of,
    pairs_in_order,
    plan_of,
    predicted_seconds,
    read_runs,
)
from jhpt.cli import main
from jhpt.core.calibration import figures
from jhpt.core.errors import InputError
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.profiles.analytic import analytic_profile

ROW = {
    "id": "first",
    "source": "a paper, table 1",
    "gpu": "a100",
    "gpus": "16",
    "gpus_per_node": "8",
    "net_gbit": "",
    "net_ports": "",
    "mem_bw_tb": "",
    "family": "gpt",
    "layers": "4",
    "width": "256",
    "heads": "4",
    "kv_heads": "2",
    "ffn": "1024",
    "vocab": "1000",
    "tied": "0",
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "dropout": "0",
    "attention": "flash",
    "seq": "128",
    "global_batch": "32",
    "micro_batch": "2",
    "data": "4",
    "tensor": "2",
    "pipe": "2",
    "chunks": "1",
    "schedule": "1f1b",
    "zero": "1",
    "sequence": "0",
    "recompute": "none",
    "stage_blocks": "",
    "tokens_per_gpu": "1000",
    "group": "",
    "fit": "exact",
    "notes": "for readers",
}


def run_of(**changes: str) -> PublishedRun:
    return PublishedRun.model_validate(
        {name: value for name, value in (ROW | changes).items() if value and name != "notes"}
    )


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_run_is_priced_for_the_plan_that_was_run():
    run = run_of(recompute="full")
    config, cluster = config_of(run, "full"), cluster_of(run, figures())
    plan = plan_of(run, config)
    assert (plan.micro_batches, plan.zero, plan.recompute, plan.batch) == (4, 1, True, 32)
    assert [(stage.devices, stage.chunks[0].tensor[0]) for stage in plan.stages] == [(8, 2), (8, 2)]
    profile = analytic_profile(config, cluster.nodes[0].device, framework=framework_of(run, figures()))
    expected = evaluate(plan, profile, cluster).seconds
    assert predicted_seconds(run) == expected
    assert run.measured == 32 * 128 / 16 / 1000


def test_a_share_of_recomputation_lies_between_none_and_full():
    none, full, share = (predicted_seconds(run_of(recompute=how)) for how in ("none", "full", "share:0.25"))
    assert none < share < full and share == pytest.approx(0.75 * none + 0.25 * full)


def test_links_memory_and_uneven_stages_are_those_of_the_row():
    run = run_of(net_gbit="100", net_ports="4", mem_bw_tb="1.5", stage_blocks="1 3", gpus_per_node="16")
    cluster = cluster_of(run, figures())
    assert (cluster.network.bandwidth, cluster.network.ports) == (100e9 / 8, 4)
    assert cluster.nodes[0].device.memory_bandwidth == 1.5e12
    assert (cluster.num_devices, cluster.num_nodes) == (16, 1)
    chunks = [stage.chunks[0] for stage in plan_of(run, config_of(run, "none")).stages]
    assert [(chunk.first, chunk.stop) for chunk in chunks] == [(0, 2), (2, 6)]
    assert cluster_of(run_of(gpus_per_node="16"), figures()).network.ports == 8, (
        "a DGX-2 has a port for every two devices"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": "sixteen"}, "line 3, gpus"),
        ({"attention": "sparse"}, "line 3, attention"),
        ({"recompute": "most"}, "line 3, recompute"),
        ({"tokens_per_gpu": "0"}, "line 3, tokens_per_gpu"),
    ],
)
def test_a_row_that_is_no_run_is_refused_by_its_line(tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        read_runs(write(tmp_path / "runs.csv", ROW, ROW | changes))


def test_files_that_hold_no_runs_are_refused(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    assert main(["bench", "predict", "--published", str(file)]) == 2
    file.write_text("id,gpu\nfirst,a100\n")
    assert main(["bench", "predict", "--published", str(file)]) == 2
    assert main(["bench", "predict", "--published", str(write(file))]) == 2
    assert main(["bench", "predict", "--published", str(write(file, ROW | {"stage_blocks": "4"}))]) == 2
    assert main(["bench", "predict", "--quick", "--published", str(write(file, ROW))]) == 2
    assert main(["bench", "train", "--published", str(file)]) == 2
    errors = capsys.readouterr().err.splitlines()
    for line, words in zip(
        [line for line in errors if "--published" in line],
        ("cannot be read", "lacks the columns source, gpus", "has no runs", "none of its 1 runs", "--quick", "train"),
        strict=True,
    ):
        assert words in line


def priced(*cases: tuple[str, float, float, str]) -> list[PricedRun]:
    """(kind of device, measured tokens/s, predicted / measured seconds, group)."""
    return [
        PricedRun(run=run, predicted=ratio * run.measured)
        for gpu, speed, ratio, group in cases
        for run in [run_of(gpu=gpu, tokens_per_gpu=str(speed), group=group)]
    ]


def test_claims_are_what_their_names_say():
    runs = priced(
        ("a100", 100, 0.8, ""),
        ("a100", 100, 0.9, ""),
        ("a100", 100, 1.0, ""),
        ("h100", 100, 0.5, ""),
        ("h100", 1, 1, ""),
    )
    claims = claims_of(runs, "here")
    assert claims["published_error_median"].value == pytest.approx(0.1)
    assert claims["published_error_p90"].value == pytest.approx(0.2 + 0.6 * 0.3)
    assert claims["published_bias_max"].value == pytest.approx(0.1), "two H100 are too few"
    assert "published_rank_accuracy" not in claims


def test_a_pair_is_in_order_if_the_faster_plan_is_predicted_to_be():
    runs = priced(
        ("a100", 100, 1.0, "a"),
        ("a100", 120, 1.0, "a"),
        ("a100", 102, 0.1, "a"),
        ("a100", 300, 9.0, "b"),
        ("a100", 90, 1, "b"),
    )
    # 100 < 120 is right, 102 < 120 is wrong (102 / 0.1 > 120), 100 and 102 are alike; 300 / 9 < 90 is wrong.
    assert pairs_in_order(runs) == (1, 3)


def test_noisy_runs_count_nowhere():
    runs = priced(("a100", 100, 2.0, ""))
    assert not claims_of([PricedRun(run=runs[0].run.model_copy(update={"fit": "noisy"}), predicted=1.0)], "here")


def test_the_file_has_every_run_and_the_claims(tmp_path, capsys):
    rows = [ROW, ROW | {"id": "second", "tensor": "4", "data": "2", "group": ""}, ROW | {"id": "third", "layers": "1"}]
    status = main(
        ["bench", "predict", "--published", str(write(tmp_path / "r.csv", *rows)), "--json", str(tmp_path / "p.json")]
    )
    assert status == 0
    report = json.loads((tmp_path / "p.json").read_text())
    assert [row["id"] for row in report["rows"]] == ["first", "second", "third"]
    assert {"published_error_median", "published_error_p90"} <= set(report["claims"])
    first = report["rows"][0]
    assert (
        first["ratio"]
        == first["predicted_s"] / first["measured_s"]
        == predicted_seconds(run_of()) / first["measured_s"]
    )
    assert "cannot be priced" in capsys.readouterr().out
