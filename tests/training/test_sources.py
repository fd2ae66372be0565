"""Sources in a run: what is mixed, held out, said in the log, and kept when the run resumes."""

import io
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

import jhpt
from jhpt.core.config import Config, DataConfig, SourceConfig
from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.training import console, loop
from jhpt.training.console import Display, data_text
from jhpt.training.data.sources import data_key
from jhpt.training.record import check_resumable, make_record, without_places
from jhpt.training.setup import check_data, prepare
from tests.conftest import text, tiny_overrides

SMALL = {"model.num_layers": 1, "parallel.data": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources that share no letter."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "low.txt").write_text("abc " * 4000)
    (folder / "high.txt").write_text("XYZ\n" * 1000)
    return folder


def settings(folder, **changes):
    data = {"data.cache_dir": str(folder / "cache"), "data.validation_fraction": 0.25}
    return tiny_overrides(data) | SMALL | changes


def mixed(folder, *weights, **changes):
    sources = [
        {"path": str(folder / f"{name}.txt"), "weight": weight}
        for name, weight in zip(("low", "high"), weights, strict=False)
    ]
    return prepare(load_config("gpt-tiny", settings(folder, **{"data.sources": sources}, **changes)))


def batches(setup, count, first=0):
    return np.stack(list(itertools.islice(loop._batches(setup, first), count)))


def test_a_run_mixes_sources_by_weight_and_resumes_anywhere(folder):
    setup = mixed(folder, 3, 1)
    whole = batches(setup, 6)
    high = np.any(whole == ord("X"), -1)
    assert np.count_nonzero(high, 1).tolist() == [4] * 6  # of 16 rows
    np.testing.assert_array_equal(batches(setup, 4, 2), whole[2:])


def test_held_out_text_is_of_all_sources_by_size(folder):
    setup = mixed(folder, 1, 1)
    held = setup.validation_windows
    rows = np.stack([held[index] for index in range(len(held))])
    high = np.any(rows == ord("X"), -1)
    sizes = [source.cache.validation.size // 32 for source in setup.sources]
    assert sizes[0] > 3 * sizes[1] > 0
    assert abs(np.count_nonzero(high) - sizes[1]) <= 1
    assert np.count_nonzero(high[:25]) in (4, 5, 6)  # a fifth of any stretch
    for source in setup.sources:
        assert source.cache.validation.size == int((source.cache.train.size + source.cache.validation.size) * 0.25)


def test_a_single_source_is_the_same_as_a_path(folder):
    alone = mixed(folder, 5.0)
    path = prepare(load_config("gpt-tiny", settings(folder, **{"data.path": str(folder / "low.txt")})))
    assert data_key(alone.sources) == data_key(path.sources) == path.sources[0].cache.key
    np.testing.assert_array_equal(batches(alone, 3), batches(path, 3))


def test_the_key_of_a_mixture_knows_its_sources_in_order(folder):
    first, second = mixed(folder, 1, 1), mixed(folder, 1, 1)
    assert data_key(first.sources) == data_key(second.sources)
    assert data_key(first.sources[::-1]) != data_key(first.sources) != data_key(first.sources[:1])


def test_the_log_says_what_each_source_holds_and_how_often_it_is_read(folder):
    setup = mixed(folder, 3, 1, **{"train.steps": 10})
    low, high = data_text(setup).splitlines()
    for line, source, words in zip((low, high), setup.sources, ("weight 3 (75.0%", "weight 1 (25.0%"), strict=True):
        assert words in line and source.path in line
        assert f"{source.cache.train.size:,} training" in line and f"{source.cache.validation.size:,} held-out" in line
    windows = (setup.sources[1].cache.train.size - 1) // 32
    assert f"{10 * 16 * 0.25 / windows:.2f} epochs" in high


def test_an_epoch_begins_once_at_the_step_that_reaches_it(folder):
    setup = mixed(folder, 1)
    count, batch = len(setup.train_windows), setup.config.data.batch_size
    begun = {step: epoch for step in range(1, 100) if (epoch := loop._epoch_begun(setup, step)) is not None}
    assert len(begun) > 2
    for step, epoch in begun.items():
        assert step * batch >= (epoch - 1) * count > (step - 1) * batch
    assert list(begun.values()) == list(range(2, len(begun) + 2))
    assert loop._epoch_begun(mixed(folder, 1, 1), min(begun)) is None
    rare = load_config(setup.config, {"log.every": 50})
    assert all(loop._epoch_begun(replace(setup, config=rare), step) is None for step in begun)


def test_a_run_says_when_an_epoch_begins(tmp_path):
    (tmp_path / "a.txt").write_text(text(4000))
    changes = {"data.path": str(tmp_path / "a.txt"), "train.steps": 7, "model.vocab_size": 256}
    jax.config.update("jax_disable_most_optimizations", True)  # seven steps are sooner run than optimised
    try:
        jhpt.train("gpt-tiny", out=tmp_path / "run", overrides=settings(tmp_path, **changes))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    log = (tmp_path / "run" / "train.log").read_text()
    windows = (3001 - 1) // 32  # three quarters, and the end token
    assert f"{7 * 16 / windows:.2f} epochs" in log
    assert f"step {-(-windows // 16)}: epoch 2 begins" in log


def test_progress_is_lines_or_on_a_terminal_a_bar(monkeypatch, capsys):
    with Display(1).tokenising(3 << 20) as advance:
        advance(1 << 20)
        monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", -1)
        advance(1 << 20)
    assert capsys.readouterr().out == "tokenised 2.0 MiB of 3.0 MiB\n"
    terminal = io.StringIO()
    display = Display(1)
    display._console = Console(file=terminal, force_terminal=True, width=120)
    with display.tokenising(4 << 20) as advance:
        advance(4 << 20)
    assert "tokenising" in terminal.getvalue() and "4.2/4.2 MB" in terminal.getvalue()


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.path": "b.txt"}, ["data.path=b.txt", "data.sources", "both"]),
        ({"data.validation_path": "b.txt"}, ["data.validation_path=b.txt", "data.validation_fraction"]),
        ({"data.sources": [{"path": "a.txt", "weight": 0}]}, ["data.sources.0.weight=0"]),
        ({"data.sources": [{"weight": 1}]}, ["data.sources.0.path", "required"]),
        ({"data.sources": [{"path": "a.txt", "wait": 1}]}, ["data.sources.0.wait", "unknown key"]),
    ],
)
def test_sources_that_mean_nothing_are_refused(changes, words):
    with pytest.raises(InputError) as caught:
        load_config(None, {"data.sources": [{"path": "a.txt"}]} | changes)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_or_short_source_is_named(folder):
    (folder / "short.txt").write_text("XYZ")
    sources = [{"path": str(folder / "low.txt")}, {"path": str(folder / "none.txt")}]
    config = load_config("gpt-tiny", settings(folder, **{"data.sources": sources}))
    for call in (check_data, prepare):
        with pytest.raises(InputError, match=r"data\.sources\.1\.path=.*none\.txt: no text found"):
            call(config)
    sources[1]["path"] = str(folder / "short.txt")
    with pytest.raises(InputError, match=r"training \(data\.sources\.1\) text has"):
        prepare(load_config("gpt-tiny", settings(folder, **{"data.sources": sources})))


def with_sources(*sources) -> Config:
    return Config(data=DataConfig(sources=tuple(SourceConfig(path=path, weight=weight) for path, weight in sources)))


def test_a_resumed_run_keeps_weights_but_files_may_have_moved():
    before = make_record(with_sources(("a", 1), ("b", 2)), "key", "float32")
    check_resumable(before, make_record(with_sources(("c", 1), ("d", 2)), "key", "float32"), "here")
    with pytest.raises(InputError, match=r"data\.sources\.weight: the run has \[1\.0, 2\.0\], now \[1\.0, 3\.0\]"):
        check_resumable(before, make_record(with_sources(("a", 1), ("b", 3)), "key", "float32"), "here")
    with pytest.raises(
        InputError, match=r"the run has \['a', 'b'\] with content key, now \['c', 'b'\] with content other"
    ):
        check_resumable(before, make_record(with_sources(("c", 1), ("b", 2)), "other", "float32"), "here")


def test_a_run_from_before_these_settings_resumes():
    now = make_record(Config(), "key", "float32")
    data = {name: value for name, value in now.config["data"].items() if name not in ("sources", "workers")}
    check_resumable(replace(now, config={**now.config, "data": data}), now, "here")
    check_resumable(now, make_record(Config(data=DataConfig(workers=3)), "key", "float32"), "here")


def test_processes_agree_on_weights_but_not_on_paths():
    settings = {
        "data.sources": [{"path": "a", "weight": 2.0}],
        "data.path": "x",
        "data.batch_size": 8,
        "data.workers": 2,
    }
    assert without_places(settings) == {"data.batch_size": 8, "data.sources.weight": [2.0]}
