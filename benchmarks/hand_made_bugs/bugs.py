"""The bugs: one line of the program each, changed as a tired programmer might, and the tests that have to fail."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bug:
    """`right` stands once in `file`, and `wrong` takes its place.  tests: arguments of pytest."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


BUGS = (
    Bug(
        name="planner: bytes of a data-parallel all-reduce without (n - 1) / n",
        file="jhpt/planner/cost/traffic.py",
        right="rounds * (ranks - 1) / ranks * times * size",
        wrong="rounds * times * size",
        tests=("tests/planner/cost/test_traffic.py",),
    ),
    Bug(
        name="planner: a bound that is no bound prunes cuts that may be the best",
        file="jhpt/planner/search/grids.py",
        right="for at in np.flatnonzero(bounds < self.incumbent.cutoff):",
        wrong="for at in np.flatnonzero(1.05 * bounds < self.incumbent.cutoff):",
        tests=("tests/planner/search/test_search.py", "-k", "almost_as_fast"),
    ),
    Bug(
        name="planner: a stage does not wait for the exchange with the stage before it",
        file="jhpt/planner/cost/schedule.py",
        right="over = np.maximum(done, done[self.before])",
        wrong="over = done",
        tests=("tests/planner/report/test_simulation.py",),
    ),
    Bug(
        name="planner: saved activations of one micro-batch in flight are forgotten",
        file="jhpt/core/schedule.py",
        right="return min(micro_batches * chunks, ahead + 1)",
        wrong="return min(micro_batches * chunks, ahead)",
        tests=("tests/core/test_schedule.py",),
    ),
    Bug(
        name="schedule: interleaved 1F1B begins its backward passes one tick early",
        file="jhpt/core/schedule.py",
        right="else stages * (chunks - 1))",
        wrong="else stages * (chunks - 1) - (chunks > 1))",
        tests=("tests/core/test_schedule.py",),
    ),
    Bug(
        name="sharding: no all-reduce in the backward pass of f (tensor parallelism)",
        file="sharding/tensor.py",
        right="lambda axes, _, gradient: (jax.lax.psum(gradient, axes),))\nreduce_over_tensor_axis",
        wrong="lambda axes, _, gradient: (gradient,))\nreduce_over_tensor_axis",
        tests=("tests/sharding/test_parity.py", "-k", "overlapped_loops"),
    ),
    Bug(
        name="sharding: ZeRO averages gradients that are sums already",
        file="sharding/zero.py",
        right="done[index] = jax.lax.psum_scatter(wire, self.data, scatter_dimension=dim, tiled=True)",
        wrong="done[index] = jax.lax.psum_scatter(wire, self.data, scatter_dimension=dim, tiled=True) / 2",
        tests=("tests/sharding/test_parity.py", "-k", "overlapped_loops"),
    ),
    Bug(
        name="sharding: the last micro-batch but one is not accumulated",
        file="sharding/accumulation.py",
        right="stop = count - 1 if reduces_in_last else count",
        wrong="stop = count - 1 - (count > 2)",
        tests=("tests/sharding/test_parity.py", "-k", "overlapped_loops"),
    ),
    Bug(
        name="compression: what was not sent of the residual is lost",
        file="sharding/compression/gradients.py",
        right="residual = wanted - decoded([piece[None] for piece in sent]).reshape(wanted.shape)",
        wrong="residual = 0.5 * (wanted - decoded([piece[None] for piece in sent]).reshape(wanted.shape))",
        tests=("tests/sharding/compression/test_gradients.py",),
    ),
    Bug(
        name="offload: the last layer's rows are never fetched",
        file="sharding/offload/stream.py",
        right="at = jnp.clip(jnp.asarray(step, jnp.int32), 0, count - 1)",
        wrong="at = jnp.clip(jnp.asarray(step, jnp.int32), 0, count - 2)",
        tests=("tests/sharding/offload/test_stream.py",),
    ),
    Bug(
        name="offload: bias correction of the update after",
        file="jhpt/training/offloaded_training.py",
        right="(1 - decay ** count.astype(jnp.float32))",
        wrong="(1 - decay ** (1 + count.astype(jnp.float32)))",
        tests=("tests/training/test_offloaded_step.py", "-k", "steps_are_those_of_a_plain_run"),
    ),
    Bug(
        name="data: a process's batches advance by its own rows instead of the whole batch",
        file="jhpt/training/data/batches.py",
        right="first = step * batch_size",
        wrong="first = step * (local.stop - local.start)",
        tests=("tests/training/data/test_batches.py",),
    ),
    Bug(
        name="data: the last target of a sequence is missing from its window",
        file="jhpt/training/data/windows.py",
        right="self.tokens[first : first + self.stride + self.overlap]",
        wrong="self.tokens[first : first + self.stride]",
        tests=("tests/training/data/test_windows.py",),
    ),
    Bug(
        name="documents: the end of a document is not predicted, and the first token of the next one is",
        file="jhpt/models/gpt.py",
        right="rows.windows[:, :-1] != objective.end",
        wrong="rows.windows[:, 1:] != objective.end",
        tests=("tests/training/test_documents.py", "-k", "sum_of_its_documents"),
    ),
    Bug(
        name="documents: every sample chunk reads the documents of the first one",
        file="sharding/sample_chunks.py",
        right="leaf[stop - size : stop]",
        wrong="leaf[:size]",
        tests=("tests/training/test_documents.py", "-k", "interleaved"),
    ),
    Bug(
        name="data: shards that a killed run has finished are written again",
        file="jhpt/training/data/workers.py",
        right="if (folder / shard.name).is_file():",
        wrong="if False:",
        tests=("tests/training/data/test_workers.py",),
    ),
    Bug(
        name="data: a part of a Parquet file begins with the file",
        file="jhpt/training/data/columns.py",
        right="[first:last]",
        wrong="[:last]",
        tests=("tests/training/data/test_shards.py",),
    ),
    Bug(
        name="checkpoint: another optimizer than the run's goes unnoticed",
        file="jhpt/training/checkpoint.py",
        right="before = defaults | before",
        wrong="before = before | defaults",
        tests=("tests/training/test_precision.py", "-k", "resumes"),
    ),
    Bug(
        name="checkpoint: residuals of compressed gradients are not restored",
        file="jhpt/training/checkpoint.py",
        right="return replace(state, feedback=feedback)",
        wrong="return replace(state, feedback=jax.tree.map(jnp.zeros_like, feedback))",
        tests=("tests/training/test_gradient_compression.py", "-k", "resumed"),
    ),
    Bug(
        name="generating: a token does not see the one before it",
        file="jhpt/models/decoding.py",
        right="return keys <= queries",
        wrong="return (keys <= queries) & (keys != queries - 1)",
        tests=("tests/models/test_decoding.py",),
    ),
    Bug(
        name="generating: the nucleus ends one token early",
        file="jhpt/models/drawing.py",
        right="inside = (before < nucleus)",
        wrong="inside = (before + probabilities < nucleus)",
        tests=("tests/models/test_drawing.py",),
    ),
    Bug(
        name="generating: random numbers depend on the place of a row in its batch",
        file="jhpt/interop/rows.py",
        right="tokens = jnp.where(going, drawn(_fold_each(keys, positions)",
        wrong="tokens = jnp.where(going, drawn(_fold_each(keys, jnp.arange(len(keys)))",
        tests=("tests/interop/test_generate.py", "-k", "any_batch"),
    ),
    Bug(
        name="evaluating: the last window of a long document begins one token late",
        file="jhpt/interop/likelihood.py",
        right="begin = max(stop - longest - 1, 0)",
        wrong="begin = max(stop - longest, 0)",
        tests=("tests/interop/test_evaluate.py", "-k", "windows"),
    ),
    Bug(
        name="data: lines that stand in the held-out text stay in the default training text",
        file="jhpt/training/data/cache.py",
        right="return data.path in (STDLIB, (STDLIB,)) and data.validation_path is None",
        wrong="return False",
        tests=("tests/training/data/test_duplicates.py", "-k", "default_text"),
    ),
    Bug(
        name="data: pieces across a line that was left out are not looked at",
        file="jhpt/training/data/duplicates.py",
        right="found = _across_gaps(kept, np.where(left_out, 0, sizes), pieces)",
        wrong="found = found[:0]",
        tests=("tests/training/data/test_duplicates.py", "-k", "shares_nothing"),
    ),
    Bug(
        name="bench convergence: held-out text in the training text is not refused",
        file="benchmarks/convergence/held_out.py",
        right="return shared_pieces(np.asarray(text.train), np.asarray(text.validation))",
        wrong="return 0 * shared_pieces(np.asarray(text.train), np.asarray(text.validation))",
        tests=("tests/benchmarks/test_convergence.py", "-k", "held_out"),
    ),
    Bug(
        name="bench convergence: the probe for leaks replaces nothing",
        file="benchmarks/convergence/leak.py",
        right="np.roll(windows, 1, 0)[:, half:]",
        wrong="windows[:, half:]",
        tests=("tests/benchmarks/test_convergence.py", "-k", "probe"),
    ),
    Bug(
        name="bench convergence: random choices of tokens are those of the rule",
        file="benchmarks/convergence/choices.py",
        right="operators.important_tokens = rule if control is None else",
        wrong="operators.important_tokens = rule if control != LEAST else",
        tests=("tests/benchmarks/test_convergence.py", "-k", "controls"),
    ),
)
