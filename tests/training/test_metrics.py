"""Records survive kills and resumes: each step once, nothing half."""

import json
import os

import pytest

from jhpt.training.metrics import MetricsWriter, read_metrics


def write(folder, steps, first=0, tensorboard=False):
    writer = MetricsWriter(folder, first, tensorboard)
    for step in steps:
        writer.write(step, {"loss": step / 3})
    writer.close()


def steps(folder):
    return [record["step"] for record in read_metrics(folder)]


def test_records_come_back_in_order_and_exactly(tmp_path):
    writer = MetricsWriter(tmp_path, 0, False)
    writer.write(1, {"loss": 0.1 + 0.2, "mfu": None})
    writer.write(1, {"validation_loss": 1e-300})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.1 + 0.2}, {"step": 1, "validation_loss": 1e-300}]


def test_a_record_is_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path, 0, False)
    writer.write(1, {"loss": 2.0})
    assert steps(tmp_path) == [1]
    writer.close()


def test_no_run_has_no_records(tmp_path):
    assert read_metrics(tmp_path) == []


def test_records_beyond_the_restored_step_are_dropped(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 7), first=4)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_kept_records_keep_their_values(tmp_path):
    write(tmp_path, range(1, 8))
    before = read_metrics(tmp_path)
    write(tmp_path, [], first=7)
    assert read_metrics(tmp_path) == before


@pytest.mark.parametrize("left", [1, 7, 20])
def test_a_half_written_line_is_dropped_and_the_rest_kept(tmp_path, left):
    """As a machine that lost power leaves it; the next run must neither fail nor glue its first record to the half."""
    write(tmp_path, [1, 2, 3])
    file = tmp_path / "metrics.jsonl"
    last = len(file.read_bytes().splitlines(keepends=True)[-1])
    os.truncate(file, file.stat().st_size - last + left)
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, [3, 4], first=2)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_last_line_without_its_end_is_whole(tmp_path):
    write(tmp_path, [1, 2])
    file = tmp_path / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 1)
    write(tmp_path, [3], first=2)
    assert steps(tmp_path) == [1, 2, 3]


def test_what_is_not_finite_is_left_out_because_json_cannot_say_it(tmp_path):
    writer = MetricsWriter(tmp_path, 0, False)
    writer.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "skipped": 1})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "skipped": 1}]


def test_the_log_is_continued(tmp_path):
    for line in ("first ✓", "second"):
        writer = MetricsWriter(tmp_path, 0, False)
        writer.log(line)
        writer.close()
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == "first ✓\nsecond\n"


@pytest.mark.parametrize("tensorboard", [True, False])
def test_events_are_written_where_they_are_wanted(tmp_path, tensorboard):
    write(tmp_path, [1, 2], tensorboard=tensorboard)
    events = list((tmp_path / "tensorboard").glob("events.*"))
    assert len(events) == int(tensorboard)
    assert all(b"loss" in file.read_bytes() for file in events)


def test_each_line_is_an_object_of_its_own(tmp_path):
    write(tmp_path, [1, 2, 3])
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
