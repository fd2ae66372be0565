"""Eight virtual CPU devices, no implicit rank promotion, and a small corpus for every test."""

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Source lines in programs serve whoever reads a program.  Without them tracing and lowering take a sixth less time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import gc
import random
import shutil
import tempfile
from pathlib import Path

import jax
import pytest

from jhpt.core.load import load_config

jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing and compiling make millions of objects, few of them garbage: a tenth of the suite's time went into looking.
gc.set_threshold(100_000, 20, 20)

# Another tenth went into giving memory back to the system after a program and taking it again.  glibc reads these where
# a process starts, so they hold for the workers.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 29))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 25))
os.environ.setdefault("MALLOC_TOP_PAD_", str(1 << 26))

# The same programs, compiled in a third of the time; a small program that is split for 32 threads takes longer on two.
# Where other programs want the processor too, a device may come to a collective late: XLA ends the process when it has
# waited for 40 s.
CPU_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_collective_call_terminate_timeout_seconds=240"
)
if jax.__version_info__ < (0, 11):  # Later versions know no such emitters, and compile no faster with this preset.
    CPU_FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"

WORDS = ["the mesh", "maps every layer", "to a device", "and each step", "adds up", "what the others", "have seen"]


def text(characters: int, seed: int = 0) -> str:
    """Deterministic prose-like text."""
    rng, lines = random.Random(seed), []
    while sum(map(len, lines)) < characters:
        lines.append(" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) + ".\n")
    return "".join(lines)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> dict[str, str]:
    """Overrides that point a config at 64 KiB of text and a cache of its own."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder: Path) -> dict[str, str]:
    """Four files of text and the overrides that point at them."""
    folder.mkdir(exist_ok=True)
    for index in range(4):
        (folder / f"{index}.txt").write_text(text(1 << 14, index))
    return {"data.path": str(folder), "data.cache_dir": str(folder / "cache"), "data.validation_fraction": 0.25}


@pytest.fixture
def tiny(corpus):
    """Makes a config of a tiny model on the small corpus: `tiny("bert-tiny", **{"train.steps": 3})`."""

    def make(preset: str = "gpt-tiny", **overrides):
        return load_config(preset, tiny_overrides(corpus) | overrides)

    return make


def tiny_overrides(corpus: dict[str, str]) -> dict[str, object]:
    """A model whose every dimension 8 divides, a short schedule, a quiet run."""
    return corpus | {
        "model.num_layers": 2,
        "model.d_model": 64,
        "model.num_heads": 8,
        "model.d_ff": 128,
        "model.max_length": 32,
        "data.sequence_length": 32,
        "data.batch_size": 16,
        "train.steps": 4,
        "optimizer.warmup_steps": 2,
        "log.every": 1,
        "log.tensorboard": False,
        "evaluation.sample_tokens": 0,
        "evaluation.batches": 2,
    }


@pytest.fixture
def strict():
    """No implicit promotion of dtypes: for what jhpt computes itself (optax and Flax's bfloat16 norms do promote)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


def pytest_configure(config):
    """CPU, unless the GPU tests are asked for.  Processes that tests start share compiled programs of one device; those
    of eight CPUs are not cached (`jhpt.training.runtime.compile_collectives_anew`)."""
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("XLA_FLAGS", CPU_FLAGS)  # read when the first backend starts
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    folder = os.environ.setdefault("JHPT_TEST_CACHE", tempfile.mkdtemp(prefix="jhpt-tests-"))
    os.environ["XDG_CACHE_HOME"] = folder
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    jax.config.update("jax_enable_compilation_cache", False)


def pytest_runtest_setup(item):
    """A GPU test that ran on a CPU would prove nothing."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail(f"this test needs an NVIDIA GPU, and jax runs on {jax.default_backend()}")


def pytest_unconfigure(config):
    """The controlling process, which is no worker, removes them."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("JHPT_TEST_CACHE"), ignore_errors=True)
