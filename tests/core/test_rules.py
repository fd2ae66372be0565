"""Each rule once: who asks hears the same, in the words that he knows; and what nothing reads is named."""

import re
from dataclasses import replace

import pytest

from jhpt.core.errors import InputError
from jhpt.core.load import load_config
from jhpt.core.rules import RULES, SETTINGS, Choices, check, conflict
from jhpt.core.unused import UNUSED, check_plan_alone, unused_settings

BROKEN = {
    "only one SPMD program": Choices(space="general", compression=True),
    "ZeRO-2 in one SPMD program": Choices(space="general", zero=2),
    "hybrid sharding of something": Choices(zero_ranks=4, zero=0),
    "whole states and sequences in programs of stages": Choices(space="general", runs=True, zero=1),
    "clipping by layer in programs of stages": Choices(space="general", runs=True, clip="layer"),
    "weight passes by hand": Choices(schedule="zb-h1"),
    "weight passes and recomputation": Choices(schedule="zb-h1", stages=2, chunks=1, recompute=True),
    "no search of these schedules with stages of any size": Choices(space="general", schedule="interleaved"),
    "one SPMD program on equal devices": Choices(mixed=True, place="h100+a100"),
    "devices": Choices(devices=8, available=4, place="h100x4x1"),
    "compression and sequence parallelism": Choices(compression=True, sequence=True),
    "compression of tokens": Choices(compression=True, sample="one image"),
    "activations that are cut by token": Choices(sample="an image", sample_chunks=(2,)),
    "compression and documents": Choices(compression=True, documents=True),
    "compressed gradients and ZeRO-2 or ZeRO-3": Choices(gradient_compression=True, zero=3),
    "chunks need stages": Choices(stages=1, chunks=2),
    "chunks are interleaved": Choices(stages=2, chunks=2, schedule="gpipe", micro_batches=2),
    "interleaved micro-batches": Choices(stages=2, chunks=2, schedule="interleaved", micro_batches=3),
    "batch and micro-batches": Choices(batch=32, micro_batches=3),
    "blocks of one shape in an SPMD pipeline": Choices(stages=2, alike=False, place="vgg16-tiny"),
    "CPU offload alone": Choices(offload="both", tensor=(2,)),
    "CPU offload of equal blocks": Choices(offload="both", block_kinds=("conv", "fc"), place="vgg16"),
    "CPU offload in float32": Choices(offload="both", storage=("bfloat16_kahan", "int8")),
    "CPU offload of an optimizer that can stream": Choices(offload="both", optimizer="lion", optimizer_offloads=False),
    "update in backward and clipping": Choices(
        offload="both", update_in_backward=True, clip="global", clip_allows_update_in_backward=False
    ),
    "saved activations need recomputation": Choices(saved=True, recompute=False),
    "blocks that save more need recomputation in the others": Choices(other_blocks=True, recompute=False),
    "equal blocks in a pipeline": Choices(other_blocks=True, stages=2),
    "equal blocks where any are offloaded": Choices(other_blocks=True, saved_in_host_memory=("qkv",)),
    "one tensor degree in a pipeline": Choices(stages=2, tensor=(1, 2)),
    "one number of sample chunks in a pipeline": Choices(stages=2, sample_chunks=(1, 2)),
    "tensor degrees share a mesh": Choices(tensor=(2, 3)),
    "tied layers": Choices(tied=(1, 2)),
    "sequence parallelism in equal pieces": Choices(sequence=True, tensor=(4,), sequence_length=30),
}
"""Choices that break this rule and no earlier one."""


def test_every_rule_has_its_case():
    assert [rule.name for rule in RULES] == list(BROKEN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_refuses_with_a_remedy(rule):
    choices = BROKEN[rule.name]
    assert [other.name for other in RULES if other.broken_by(choices)] == [rule.name]
    with pytest.raises(InputError, match=re.escape(rule.message(choices))):
        check(choices)
    assert re.search(r"; .*(use|set|leave|take|plan|change|choose)", rule.message(choices)), rule.message(choices)


def test_what_is_still_open_breaks_no_rule():
    assert conflict(Choices()) is None and conflict(Choices(names=SETTINGS)) is None


def test_choices_have_the_names_that_the_user_knows():
    choices = BROKEN["compressed gradients and ZeRO-2 or ZeRO-3"]
    assert conflict(choices).endswith("use zero=1 or leave out gradient_compression")
    assert conflict(replace(choices, names=SETTINGS)).endswith(
        "use parallel.zero=1 or leave out parallel.gradient_compression"
    )


def test_offload_names_all_that_it_does_not_go_with():
    choices = Choices(offload="both", stages=2, tensor=(4,), sequence=True, saved=True, saved_in_host_memory=("qkv",))
    assert "2 pipeline stages and tensor parallelism (tensor=4) and sequence parallelism" in conflict(choices)
    assert "saved activations in host memory (qkv)" in conflict(choices)


NOT_USED = {
    "parallel.cluster": {"parallel.cluster": "h100x8x1"},
    "parallel.space": {"parallel.space": "general"},
    "parallel.trials": {"parallel.trials": 3},
    "parallel.sequence": {"parallel.sequence": True},
    "parallel.compression": {"parallel.compression": {"bits": 8}},
    "parallel.schedule": {"parallel.schedule": "gpipe"},
    "memory.recompute_blocks": {"memory.recompute_blocks": 1},
    "parallel.compression.importance": {"parallel.compression.importance": "own"},
    "parallel.compression.rest_bits": {"parallel.compression.rest_bits": 0},
    "data.mask_fraction": {"data.mask_fraction": 0.3},
    "data.whole_words": {"data.whole_words": True},
    "data.pair_key": {"data.pair_key": "other"},
    "data.label_key": {"data.label_key": "gold"},
    "data.packing": {"model.family": "bert", "model.task": "classify", "data.packing": "documents"},
    "data.cache_dir": {"model.family": "bert", "model.task": "classify", "data.cache_dir": "cache"},
    "data.sources": {"model.family": "bert", "model.task": "classify", "data.sources": [{"path": "a.csv"}]},
    "data.workers": {"model.family": "bert", "model.task": "classify", "data.workers": 2},
    "data.path": {"model.family": "vgg", "data.path": "texts"},
    "data.validation_path": {"model.family": "vgg", "data.validation_path": "texts"},
    "data.text_key": {"model.family": "vgg", "data.text_key": "body"},
    "data.tokenizer": {"model.family": "vgg", "data.tokenizer": "gpt2"},
    "data.sequence_length": {"model.family": "vgg", "data.sequence_length": 64},
    "data.images": {"data.images": 100},
    "data.noise": {"data.noise": 2.0},
    "evaluation.prompt": {"model.family": "bert", "evaluation.prompt": "once"},
    "optimizer.decay_fraction": {"optimizer.decay_fraction": 0.2},
    "optimizer.final_fraction": {"optimizer.final_fraction": 0.2, "optimizer.schedule": "constant"},
    "optimizer.b1": {"optimizer.name": "sgd", "optimizer.b1": 0.8},
    "optimizer.b2": {"optimizer.name": "adafactor", "optimizer.b2": 0.999},
    "optimizer.eps": {"optimizer.name": "lion", "optimizer.eps": 1e-6},
    "optimizer.momentum": {"optimizer.momentum": 0.8},
    "optimizer.nesterov": {"optimizer.name": "lion", "optimizer.nesterov": False},
    "guards.rewind_steps": {"guards.rewind_steps": 50},
    "guards.max_rewinds": {"guards.max_rewinds": 2, "guards.spike": "skip"},
    "guards.repair_replicas": {"guards.repair_replicas": True},
}
USED = {
    "parallel.cluster": {"parallel.auto": True},
    "parallel.space": {"parallel.auto": True},
    "parallel.trials": {"parallel.auto": True},
    "parallel.sequence": {"parallel.tensor": 2},
    "parallel.compression": {"parallel.tensor": 2},
    "parallel.schedule": {"parallel.pipe": 2, "parallel.micro_batches": 2},
    "memory.recompute_blocks": {"memory.recompute": "full"},
    "parallel.compression.importance": {"parallel.tensor": 2, "parallel.compression.tokens": 0.5},
    "parallel.compression.rest_bits": {"parallel.tensor": 2, "parallel.compression.tokens": 0.5},
    "data.mask_fraction": {"model.family": "bert"},
    "data.whole_words": {"model.family": "bert"},
    "data.pair_key": {"model.family": "bert", "model.task": "classify"},
    "data.label_key": {"model.family": "bert", "model.task": "classify"},
    "data.packing": {"model.task": "pretrain"},
    "data.cache_dir": {"model.task": "pretrain"},
    "data.sources": {"model.task": "pretrain"},
    "data.workers": {"model.task": "pretrain"},
    **{f"data.{name}": {"model.family": "gpt"} for name in ("path", "validation_path", "text_key", "tokenizer")},
    "data.sequence_length": {"model.family": "gpt"},
    **{f"data.{name}": {"model.family": "vgg"} for name in ("images", "noise")},
    "evaluation.prompt": {"model.family": "gpt"},
    "optimizer.decay_fraction": {"optimizer.schedule": "wsd"},
    "optimizer.final_fraction": {"optimizer.schedule": "linear"},
    "optimizer.b1": {"optimizer.name": "lion"},
    "optimizer.b2": {"optimizer.name": "muon"},
    "optimizer.eps": {"optimizer.name": "adamw"},
    "optimizer.momentum": {"optimizer.name": "muon"},
    "optimizer.nesterov": {"optimizer.name": "sgd"},
    "guards.rewind_steps": {"guards.spike": "rewind"},
    "guards.max_rewinds": {"guards.spike": "rewind"},
    "guards.repair_replicas": {"guards.replicas_every": 100},
}


@pytest.mark.parametrize("rule", UNUSED, ids=lambda rule: rule.setting)
def test_a_setting_that_nothing_reads_is_named(rule):
    (line,) = unused_settings(load_config(None, NOT_USED[rule.setting]))
    assert line.startswith(f"{rule.setting}=") and "leave it out" in line
    assert not unused_settings(load_config(None, NOT_USED[rule.setting] | USED[rule.setting]))


def test_defaults_are_never_unused():
    for preset in ("gpt-tiny", "bert-tiny", "gpt-13b"):
        assert not unused_settings(load_config(preset))
        assert not unused_settings(load_config(preset, {"parallel": "auto"}))
        assert not unused_settings(load_config(preset, {"optimizer.schedule": "constant"})), "the preset set the rest"


def test_a_plan_stands_alone():
    check_plan_alone(["train.steps", "parallelism"])
    with pytest.raises(InputError, match=r"parallel.tensor and parallel.zero would not be read; leave out"):
        check_plan_alone(["train.steps", "parallel.zero", "parallel.tensor"])
