"""What jhpt changes in Orbax: no stack traces, and none of the calls of tensorstore that leak."""

import asyncio
import sys

import jax.numpy as jnp
import pytest
import tensorstore
from orbax.checkpoint._src import serialization

from jhpt.core.load import load_config
from jhpt.training.checkpoint import Checkpoints
from jhpt.training.orbax_changes import _Spec, leaks, leave_out_leaks, leave_out_stack_traces
from jhpt.training.record import make_record
from jhpt.training.step import TrainState


def test_writes_that_end_after_another_has_failed_leave_no_stack_trace(monkeypatch):
    """tensorstore tells an event loop that Orbax has closed; other failures in callbacks are reported as ever."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: reported.append(str(failure.exc_value)))
    leave_out_stack_traces.__wrapped__()
    end, write = tensorstore.Promise.new()
    loop = asyncio.new_event_loop()

    async def wait():
        await write

    waiting = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    write.add_done_callback(lambda _: 1 / 0)
    end.set_result(None)
    assert not waiting.done() and reported == ["division by zero"]


@pytest.mark.skipif(not leaks(), reason="the installed tensorstore does not leak, so that nothing is left out")
def test_a_save_asks_tensorstore_for_nothing_that_leaks(tmp_path, monkeypatch):
    config, asked = load_config("gpt-tiny"), []
    zero = jnp.int32(0)
    state = TrainState(step=zero, skipped=zero, bad_steps=zero, params={"w": jnp.ones((2, 3))}, optimizer=())
    with Checkpoints(tmp_path, config.checkpoint) as checkpoints:
        monkeypatch.setattr(tensorstore.KvStore.Spec, "to_json", lambda spec: asked.append(spec))
        monkeypatch.setattr(tensorstore, "experimental_collect_matching_metrics", lambda prefix: asked.append(prefix))
        checkpoints.save(1, state, make_record(config, "key", "float32"))
    assert checkpoints.latest == 1 and not asked


def test_an_orbax_that_is_arranged_differently_is_left_as_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint._src.serialization.tensorstore_utils", None)
    monkeypatch.delattr(serialization, "tensorstore_utils")
    leave_out_leaks.__wrapped__()


@pytest.mark.parametrize(
    "given",
    [
        {"driver": "file", "path": "/folder/it's/"},
        {"driver": "file", "path": "/folder/", "file_io_sync": False},
        {"driver": "ocdbt", "base": "file:///folder/", "config": {"max_inline_value_bytes": 10}},
        {"driver": "memory", "path": "folder/"},
    ],
)
def test_specs_are_completed_as_by_tensorstore(given):
    assert _Spec(given).to_json() == tensorstore.KvStore.Spec(given).to_json()
