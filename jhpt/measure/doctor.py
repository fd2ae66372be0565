"""`jhpt doctor`: the abilities of this machine, and its fallbacks."""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp

from jhpt.core.amounts import gib
from jhpt.core.cluster import HOST_SHARE
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.host import host_memory
from jhpt.core.load import load_config
from jhpt.measure.device import device_info
from jhpt.models.attention import choose_attention
from jhpt.models.products import obstacle_to_8_bits

PACKAGES = ("jhpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def diagnose() -> str:
    """A report with one finding per line; lines about limits start with "!"."""
    info = device_info()
    gpu = load_config("gpt2-124m").model
    assert isinstance(gpu, GPTConfig)
    dtype = jnp.dtype("bfloat16" if info.is_gpu else "float32")
    attention = choose_attention(gpu, info.platform, dtype, info.capability)
    obstacle = obstacle_to_8_bits(info.platform, info.capability)
    lines = [
        f"  python       {sys.version.split()[0]}",
        *(f"  {name:<12} {_version(name)}" for name in PACKAGES),
        f"  devices      {jax.device_count()} x {info.kind} ({info.platform})",
        f"  cpu cores    {os.cpu_count()}",
        f"  host memory  {gib(host_memory())}, of which offloaded blocks may take {100 * HOST_SHARE:.0f} %",
        f"  compute      {dtype.name} by default",
        f"  attention    {attention.implementation}: {attention.reason}",
        f"  float8       {f'no: {obstacle}' if obstacle else 'products of blocks, with model.matmul_dtype=float8'}",
        *_limits(info.is_gpu),
    ]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _limits(is_gpu: bool) -> list[str]:
    limits = []
    if not is_gpu and shutil.which("nvidia-smi"):
        limits.append(
            "! this machine has an NVIDIA driver, but jax sees no GPU: install jhpt[cuda] (Python 3.12 or newer)"
        )
    elif not is_gpu:
        limits.append("! no GPU: training runs on the CPU, in float32, with XLA attention; MFU is not reported")
    if sys.version_info < (3, 12):
        limits.append("! Python 3.11: jax 0.10.2 is the newest for it; the extra jhpt[cuda] needs Python 3.12 or newer")
    if is_gpu and device_info().peak_bf16_flops is None:
        limits.append(f"! the peak rate of {device_info().kind} is unknown: MFU is not reported")
    return limits
