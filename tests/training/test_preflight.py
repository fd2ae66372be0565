"""Runs that cannot fit are refused with bytes, causes and a change that fits, and nothing is written; those that just
fit run; running out of memory all the same is one message."""

import re
import shutil
from types import SimpleNamespace

import jax
import pytest

import jhpt
from jhpt.core.errors import Exit, InputError, OutOfMemory
from jhpt.core.load import load_config
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.measure.device import device_info
from jhpt.training import preflight, programs, room, run
from jhpt.training.compile import compile_step
from jhpt.training.device_step import abstract_state, copies
from jhpt.training.preflight import check_disk, refuse_impossible
from jhpt.training.room import HOUSEKEEPING, DoesNotFit
from jhpt.training.setup import prepare

MIB, GIB = 1 << 20, 1 << 30
ONE, TWO = {"parallel.data": 1}, {"parallel.data": 2}
WORDS = {"model.vocab_size": 50257}


@pytest.fixture
def host(monkeypatch):
    """Sets the bytes of this host that a run may use."""

    def available(size: float) -> None:
        monkeypatch.setattr(room, "available_memory", lambda: int(size) + HOUSEKEEPING)
        monkeypatch.setattr("jhpt.training.runtime.host_memory", lambda: int(size) + HOUSEKEEPING)

    return available


IMPOSSIBLE = {
    "a large model": ("gpt2-1.5b", 8 * GIB, ONE | WORDS | {"data.batch_size": 1}),
    "a very large model": ("gpt-13b", 8 * GIB, WORDS),
    "a model planned with parallel=auto": ("llama-8b", 8 * GIB, {"model.vocab_size": 128256, "parallel": "auto"}),
    "one copy for each device": ("gpt2-124m", 8 * GIB, WORDS),
    "ZeRO on one host": ("gpt2-774m", 8 * GIB, WORDS | {"data.batch_size": 8, "parallel.zero": 3}),
    "offload on one host": ("gpt2-1.5b", 8 * GIB, WORDS | ONE | {"memory.offload": "both"}),
    "a large batch": ("bert-base", 8 * GIB, ONE | {"model.vocab_size": 30522, "data.batch_size": 4096}),
    "a long sequence": ("gpt-tiny", 2 * GIB, ONE | {"model.max_length": 1 << 20, "data.sequence_length": 1 << 20}),
    "a large vocabulary": ("gpt-tiny", 2 * GIB, ONE | {"model.vocab_size": 5_000_000}),
    "a small device": ("gpt-tiny", 8 * GIB, {"memory.budget_bytes": "4MiB"}),
    "a pipeline of small devices": (
        "gpt-tiny",
        8 * GIB,
        ONE | {"parallel.pipe": 4, "parallel.micro_batches": 4, "memory.budget_bytes": "1MiB"},
    ),
    "tensor ranks on a full host": ("gpt2-350m", GIB, WORDS | {"parallel.tensor": 8, "data.batch_size": 8}),
}


@pytest.mark.parametrize(("preset", "size", "settings"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_fit_is_refused_before_anything_is_written(
    preset, size, settings, host, tmp_path, corpus, monkeypatch
):
    """Before text is read, and with a change that the same arithmetic lets pass."""
    host(size)
    monkeypatch.setattr(run, "prepare_run", lambda *arguments, **more: pytest.fail("text was read"))
    out = tmp_path / "new" / "run"
    config = load_config(preset, corpus | settings)
    with pytest.raises(InputError) as caught:
        jhpt.train(config, out=out)
    message = str(caught.value)
    assert "\n" not in message and re.search(r" needs [a-z ]+ [\d.]+ [GM]iB", message)
    assert re.search(r"of which [\d.]+ [GM]iB is available|on each device, which has [\d.]+ [GM]iB", message)
    assert not list(tmp_path.iterdir())
    if preset == "gpt-tiny" and "MiB" in str(settings.get("memory.budget_bytes")):
        assert "use more or larger devices" in message
        return
    advice = message.rpartition("; ")[2]
    assert advice.startswith(("set ", "train the preset ")) and re.search(r": that needs [\d.]+ [GM]iB", advice)
    other = re.match(r"train the preset (\S+)", advice)
    changes = dict(word.split("=") for word in advice.partition(": ")[0].replace(",", "").split() if "=" in word)
    base = load_config(other[1], {"model.vocab_size": config.model.vocab}) if other else config
    changed = load_config(base, {name: _value(text) for name, text in changes.items()})
    refuse_impossible(changed, plan_by_hand(changed, jax.device_count()))


def _value(text: str):
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


JUST_FITS = {
    "one device": ONE,
    "eight devices": {},
    "micro-batches": ONE | {"parallel.micro_batches": 4},
    "recomputed": TWO | {"memory.recompute": "full"},
    "ZeRO-1": TWO | {"parallel.zero": 1},
    "ZeRO-3": {"parallel.zero": 3},
    "tensor": {"parallel.tensor": 2, "parallel.data": 2},
    "pipeline": {"parallel.pipe": 2, "parallel.micro_batches": 2, "parallel.data": 2},
    "offload": ONE | {"memory.offload": "both"},
    "compressed gradients": TWO | {"parallel.gradient_compression": {"bits": 8}},
    "low precision": ONE | {"optimizer.weights": "bfloat16_kahan", "optimizer.moments": "int8"},
    "a long sequence": ONE | {"data.sequence_length": 256, "model.max_length": 256, "data.batch_size": 2},
}
QUICK = ("one device",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in JUST_FITS]
)
@pytest.mark.parametrize("limit", ["host", pytest.param("device", marks=pytest.mark.exhaustive)])
def test_what_just_fits_runs(name, limit, host, tiny, tmp_path, monkeypatch):
    """With every byte that is needed; with one less it is refused.  The bytes are those of the host, or of a device."""
    config = tiny(**JUST_FITS[name] | {"train.steps": 1, "optimizer.warmup_steps": 0})
    monkeypatch.setattr(preflight, "MOST_COMPILED", 0)
    host(8 * GIB)
    enough, refused = _enough(config, limit, host), False
    for size in (enough - 1, enough):
        limited = _limited(config, limit, size, host)
        try:
            result = jhpt.train(limited, out=tmp_path / "run")
        except InputError as error:
            assert size < enough and "needs state" in str(error) and not list(tmp_path.iterdir())
            refused = True
    assert refused and result.step == 1 and (tmp_path / "run" / "checkpoints" / "1").is_dir()


def _limited(config, limit, size, host):
    if limit == "host":
        host(size)
        return config
    return load_config(config, {"memory.budget_bytes": f"{size}B"})


def _enough(config, limit, host) -> int:
    """The bytes that the programs of a run need."""
    size = 1024
    while True:
        try:
            compile_step(prepare(_limited(config, limit, size, host)))
            return size
        except DoesNotFit as error:
            device, beside = sum(error.device.values()), sum(error.host.values())
            if limit == "host":
                return int(error.room.total(device, beside))
            size = int(device)


def test_the_change_that_is_named_is_compiled_first(tiny, tmp_path, host):
    """Two micro-batches fit exactly, and one does not."""
    config = tiny(**ONE | {"model.num_layers": 1, "train.steps": 1, "optimizer.warmup_steps": 0})
    host(0)
    with pytest.raises(DoesNotFit) as caught:
        compile_step(prepare(load_config(config, {"parallel.micro_batches": 2})))
    host(caught.value.room.total(sum(caught.value.device.values()), sum(caught.value.host.values())))
    with pytest.raises(InputError, match=r"set parallel.micro_batches=2, which changes no results: that needs"):
        jhpt.train(config, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_heap_that_keeps_what_is_freed_needs_room(tiny, host, monkeypatch):
    """Where programs come near the host's memory, freed blocks are returned."""
    returned, lowered = [], jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((512, 512), "float32"))
    here = SimpleNamespace(device=device_info(), plan=plan_by_hand(tiny(**ONE), 1))
    monkeypatch.setattr(programs, "return_freed_memory", lambda: returned.append(1))
    host(8 * GIB)
    memory = sum(programs.compiled_within_memory(here, lowered, "a product")[1].values())
    assert not returned and memory >= 2 * MIB
    host(2 * memory)
    programs.compiled_within_memory(here, lowered, "a product")
    assert returned
    with pytest.raises(DoesNotFit, match=r"state 1 MiB \+ temporary 1 MiB: "):
        host(memory - 1)
        programs.compiled_within_memory(here, lowered, "a product")


def test_what_devices_hold_in_common_is_saved_once(tiny):
    """As often as it is copied; of sharded state a process saves all pieces."""
    for settings in ({}, {"parallel.zero": 3}, {"parallel.tensor": 2}):
        setup = prepare(tiny(**settings))
        size = programs.COPIES_TO_SAVE * 12 * setup.config.model.parameter_count().allocated
        assert copies(abstract_state(setup))["copies to save"] == pytest.approx(size, rel=0.01)


def test_a_full_disk_is_refused(tiny, tmp_path, monkeypatch):
    """Before the first checkpoint; those that are kept for good are only warned of."""
    config, said = tiny(**{"checkpoint.every": 1, "checkpoint.keep": 3, "train.steps": 9}), []
    each = 12 * config.model.parameter_count().allocated
    free = lambda size: monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=size))  # noqa: E731
    free(4 * each)
    check_disk(tmp_path / "a" / "run", config, 0, said.append)
    check_disk(tmp_path, load_config(config, {"checkpoint.keep": 90, "train.steps": 4}), 0, said.append)
    assert not said
    free(4 * each - 1)
    with pytest.raises(
        InputError, match=r"3 and the one that is being written.*; set checkpoint.keep=2, or give an --o"
    ):
        check_disk(tmp_path / "run", config, 0, said.append)
    check_disk(tmp_path / "run", config, 8, said.append)  # one more, beside three
    free(each)
    with pytest.raises(InputError, match=r"set checkpoint.every to the number of train.steps"):
        jhpt.train(config, out=tmp_path / "run")
    free(each - 1)
    with pytest.raises(InputError, match=r"give an --out on a larger disk, or free some"):
        check_disk(tmp_path / "run", config, 0, said.append)
    free(5 * each)
    check_disk(tmp_path / "run", load_config(config, {"checkpoint.keep_every": 2}), 0, said.append)
    assert "keeps 4 more checkpoints" in said[0] and not list(tmp_path.iterdir())


def test_running_out_of_memory_is_one_message(tiny, tmp_path, monkeypatch):
    """The run directory keeps what was saved, and the run goes on from there."""
    config = tiny(**ONE | {"model.num_layers": 1, "train.steps": 3, "checkpoint.every": 1, "evaluation.every": 2})

    def fails(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: Error dispatching: Out of memory allocating 4294967296 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr("jhpt.training.loop.evaluate", fails)
        with pytest.raises(OutOfMemory, match=r"4.0 GiB could not be allocated") as caught:
            jhpt.train(config, out=tmp_path / "run")
    message = str(caught.value)
    assert caught.value.status == Exit.MEMORY and "\n" not in message and str(tmp_path / "run") in message
    assert re.search(r"needs state .* \+ temporary .* on each of 1 device, .*; set parallel.micro_batches=", message)
    assert jhpt.train(config, out=tmp_path / "run").step == 3


def test_a_host_that_is_out_of_memory_says_so_too(tiny, tmp_path):
    """Other errors stay what they are."""
    setup = prepare(tiny())
    explained = lambda: preflight.out_of_memory_explained(setup, {"state": MIB, "temporary": GIB}, tmp_path)  # noqa: E731
    with pytest.raises(OutOfMemory, match="memory ran out: a step needs state"), explained():
        raise MemoryError("Unable to allocate 3.00 GiB")
    with pytest.raises(OutOfMemory, match=r"4.77 MiB could not be allocated"), explained():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocator ran out trying to allocate 5000000 bytes")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
