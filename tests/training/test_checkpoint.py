import copy

import pytest

import jhpt
from jhpt.core.load import load_config
from jhpt.training.record import check_resumable, make_record

SHAPES = {
    "gpt-tiny": {"model.vocab_size": 256, "model.positions": "rotary"},
    "bert-tiny": {"model.vocab_size": 256},
}


@pytest.mark.parametrize("preset", SHAPES)
def test_a_run_from_before_a_setting_existed_goes_on(preset):
    """Whichever setting its record lacks: it had the default."""
    now = make_record(load_config(preset, SHAPES[preset]), "key", "float32")
    plain = make_record(load_config({"model": {"family": now.config["model"]["family"]}}), "key", "float32")
    for section in ("model", "data", "optimizer"):
        for name, value in now.config[section].items():
            if name == "family" or plain.config[section].get(name) != value:
                continue
            saved = copy.deepcopy(now)
            del saved.config[section][name]
            check_resumable(saved, now, "runs/old")


def test_a_setting_that_the_run_did_not_have_is_refused():
    saved = make_record(load_config("gpt-tiny"), "key", "float32")
    del saved.config["data"]["packing"]
    now = make_record(load_config("gpt-tiny", {"data.packing": "documents"}), "key", "float32")
    with pytest.raises(jhpt.InputError, match=r"data\.packing: the run has 'stream', now 'documents'"):
        check_resumable(saved, now, "runs/old")
