"""Backward passes of a stage of four replicas, compiled for H100 that are not here: what of the sums over replicas runs
beside matrix products."""

import jax
import pytest

from jhpt.compiled.deviceless import compile_only_devices, compiled_for
from jhpt.compiled.modelled import Clock
from jhpt.compiled.program import read_compiled
from jhpt.core.cluster_file import find_cluster
from jhpt.core.load import load_config
from jhpt.models.family import Rows
from jhpt.sharding.stages.batches import chunk_batch
from jhpt.sharding.stages.execution import StagesExecution
from jhpt.sharding.stages.layout import place_stages
from jhpt.training.setup import execution, prepare
from tests.sharding.plans import batch
from tests.sharding.stages.plans import general

pytestmark = pytest.mark.deviceless

BATCH, BLOCKS = 32, 8


def test_the_last_backward_pass_hides_the_sums_of_blocks():
    cluster = find_cluster("h100x8x1")
    shape = {"num_layers": BLOCKS, "d_model": 1024, "num_heads": 16, "max_length": 1024}
    data = {"data.sequence_length": 1024, "data.batch_size": BATCH}
    setup = prepare(load_config("gpt-tiny", {f"model.{name}": value for name, value in shape.items()} | data))
    plan = general([6, 4], [4, 4], [1] * (BLOCKS + 2), batch=BATCH, micro_batches=2)
    ends = {"shared": setup.model.head_reads, "rules": setup.model.partition_rules}
    layout = place_stages(plan, compile_only_devices(cluster), BLOCKS, alike=True, **ends)
    made = [execution(setup.config, setup.model, chunk.layout, setup.tokenizer, train=True) for chunk in layout.chunks]
    shapes, rows = jax.eval_shape(setup.model.init, jax.random.key(0)), Rows(batch(setup, BATCH))
    stages = StagesExecution(layout=layout, executions=tuple(made), params=shapes, rows=rows)

    programs, chunk = stages.route.programs[0], layout.chunks[0]
    parts = next(iter(made[0].parts.values()))
    of_chunk = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), chunk_batch(chunk, parts, rows))
    given = of_chunk, jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), "int32")
    params, totals = (jax.eval_shape(each, stages.stored[0]) for each in (programs.read, programs.zeros))
    y, saved = jax.eval_shape(programs.forward, params, None, *given)

    def read(program):
        compiled = compiled_for(program.lower(totals, params, saved, y, *given))
        mesh = chunk.device_mesh.mesh
        return read_compiled(compiled, dict(mesh.shape), Clock(cluster))

    assert read(programs.backward).hidden_shares() == {}
    (hidden,) = read(programs.last_backward).hidden_shares().values()
    assert hidden > 0.8  # of five blocks; what the loop computes last is summed after it
