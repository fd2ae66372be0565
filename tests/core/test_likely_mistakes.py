"""Settings that are rarely meant are named, and no others: no preset has a line."""

import pytest

from jhpt.core.families.text import TextConfig
from jhpt.core.likely_mistakes import Text, likely_mistakes
from jhpt.core.load import load_config
from jhpt.core.presets import PRESETS

TEXT = Text(ids=300, sequences=(6400, 640), weights=(1.0, 1.0))

MISTAKES = {
    "optimizer.warmup_steps=100 is not less than train.steps=100": {"train.steps": 100},
    "checkpoint.every=900 is longer than the run of 800 steps": {"checkpoint.every": 900},
    "evaluation.every=801 is longer": {"evaluation.every": 801},
    "log.every=9000 is longer": {"log.every": 9000},
    "optimizer.learning_rate=0.1 is 200 times what is usual with optimizer.name=adamw": {
        "optimizer.learning_rate": 0.1
    },
    "optimizer.learning_rate=1e-06 is a 500th of": {"optimizer.learning_rate": 1e-6},
    "optimizer.learning_rate=0.002 is a 50th of": {"optimizer.name": "sgd"},
    "data.sequence_length=128 is far below model.max_length=1024": {"model.max_length": 1024},
    "model.vocab_size=50,257 is 168 times what data.tokenizer=bytes has, 300": {"model.vocab_size": 50257},
    "data.sources.1 is read 20.0 times": {},
}

NO_MISTAKES = [
    {"train.steps": 101},
    {"train.steps": 400},  # the default interval of checkpoints is longer, but nobody has set it
    {"checkpoint.every": 800, "evaluation.every": 800},
    {"optimizer.learning_rate": 1e-2},
    {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1},
    {"model.max_length": 1024, "model.positions": "rotary"},
    {"model.max_length": 1000},
    {"model.vocab_size": 1024},
]


@pytest.mark.parametrize(("start", "settings"), MISTAKES.items(), ids=lambda value: str(value)[:40])
def test_a_likely_mistake_is_one_line(start, settings):
    lines = likely_mistakes(load_config(None, settings), TEXT if "vocab" in start or not settings else None)
    assert sum(line.startswith(start) for line in lines) == 1
    assert all("\n" not in line for line in lines)
    assert len(lines) == (2 if "vocab" in start else 1)  # with the source that is read too often


@pytest.mark.parametrize("settings", NO_MISTAKES, ids=str)
def test_what_may_be_meant_is_not_named(settings):
    assert not likely_mistakes(load_config(None, settings))


def test_no_preset_has_a_likely_mistake():
    for preset in PRESETS:
        config = load_config(preset)
        enough = config.train.steps * config.data.batch_size // 4
        model = config.model
        vocabulary = {"model.vocab_size": model.vocab} if isinstance(model, TextConfig) else {}
        text = Text(ids=vocabulary.get("model.vocab_size", 256), sequences=(enough,), weights=(1.0,))
        for settings in ({}, vocabulary, {"optimizer.learning_rate": 5e-5}):
            assert not likely_mistakes(load_config(config, settings), text)


def test_labelled_rows_are_read_often_and_trained_with_low_rates():
    settings = {"model.task": "classify", "model.num_classes": 2, "optimizer.learning_rate": 1e-5}
    config = load_config("bert-tiny", settings)
    assert not likely_mistakes(config, Text(ids=256, sequences=(1000,), weights=(1.0,)))
    assert likely_mistakes(load_config(config, {"optimizer.learning_rate": 0.1}))
