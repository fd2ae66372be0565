"""Files of earlier versions are read; an old name beside the new one, or on the command line, is refused by name."""

import json

import pytest

from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.plan import Plan
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.renamed import RENAMED_KEYS, RENAMED_PLAN_KEYS

BEFORE = {now: before for before, now in RENAMED_PLAN_KEYS.items()}


def written_before(plan: Plan) -> dict:
    """The plan's JSON with the keys of the earlier version."""
    tree = plan.model_dump(mode="json", exclude_none=True)
    for now, before in BEFORE.items():
        *sections, key = now.split(".")
        section = tree.get(sections[0], {}) if sections else tree
        if key in section:
            section[before.rpartition(".")[2]] = section.pop(key)
    return tree


@pytest.mark.parametrize("memory", [{"recompute": ["qkv"]}, {"offload": "both"}, {"offload": "optimizer"}, {}])
@pytest.mark.parametrize("clip", ["global", "layer"])
def test_plans_of_the_earlier_version_are_read(tmp_path, memory, clip):
    plan = plan_by_hand(load_config(None, {"memory": memory, "optimizer.clip": clip}), 8)
    tree = written_before(plan)
    assert not memory or any(word in json.dumps(tree) for word in ("kept", "what", "at_once"))
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_both_names_at_once_are_refused(tmp_path):
    plan = plan_by_hand(load_config(None, {"memory.offload": "both"}), 8)
    tree = plan.model_dump(mode="json", exclude_none=True)
    tree["offload"]["what"] = "optimizer"
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match=r"plan.json: offload.what is now called offload.kind.*leave out offload.what"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(("before", "now"), RENAMED_KEYS.items())
def test_an_old_setting_is_refused_with_its_new_name(before, now):
    with pytest.raises(InputError, match=f"{before} is now called {now}; write {now} instead"):
        load_config(None, {before: True})
