"""What other training frameworks' programs do, as far as published runs depend on it, by their source code.

A published run is a measurement of hardware and of a framework's program at once.  These facts take the program out, so
that what remains is a property of the hardware (`jhpt.core.calibration`).  None is fitted to a framework's own runs.

    all             stages wait for what they send and receive, as in Megatron-LM's p2p_communication.py
    Megatron-LM     fused softmax, bias and dropout
    DeepSpeed       its BF16_Optimizer casts a gradient, adds and clears it in kernels of their own, all-reduces the
                    float32 sums though ranks need shares, and gathers weights after the update
    FSDP            kernels are PyTorch's own, one per operation, unless torch.compile fuses them
    InternEvo       PyTorch's own kernels; broadcasts the weights of each rank in turn (HybridZeroOptimizer)
    nanotron        PyTorch's own kernels; sums and reduces gradients in float32
    XLA             writes the random bits of dropout to memory; its element-wise traffic is that of programs compiled
                    by jhpt
    llm.c           fused kernels of its own
"""

from typing import Any

from jhpt.core.calibration import ACCUMULATION, DRAW_BYTES, Figures
from jhpt.core.framework import Framework
from jhpt.core.state import FLOAT32

FUSED = ("XLA", "Megatron", "compile", "llm.c", "DDP")
"""Parts of the names of frameworks whose element-wise kernels are fused; the PyTorch DDP runs are FlashAttention's own,
with fused norms, dropout and MLP."""

EAGER = 1.3
"""Element-wise traffic of PyTorch without a compiler, relative to fused kernels: a bias or a residual sum writes what
the next kernel reads again.  Estimated from the kernels of a block: 13 tensors instead of 10."""

XLA_TRAFFIC = 2.45
"""Element-wise traffic of programs of XLA, relative to the least possible: that of jhpt's own steps, compiled for an
H100, while its norms and activations were autodiff's (the
median of 2.13, 2.23, 2.45, 2.70 and 2.74; a sixth, which copied weights most of the time, had 4.8)."""

SEPARATE_KERNELS = 20.0
"""Bytes per parameter and micro-batch of DeepSpeed's BF16_Optimizer: cast 2 + 4, sum 4 + 4 + 4, clear 2."""


def framework_named(name: str, compiled: bool, fitted: Figures, *, flash1: bool) -> Framework:
    """The program of a framework, by a part of its name; an unknown one counts as PyTorch's.

    Args:
      compiled: whether torch.compile fuses its kernels.
      flash1: whether it runs FlashAttention 1.
    """
    fused = compiled or any(part in name for part in FUSED)
    facts: dict[str, Any] = {}
    if "XLA" in name:
        facts = {"draw_bytes": DRAW_BYTES, "traffic": XLA_TRAFFIC}
    elif "DeepSpeed" in name:
        facts = {"accumulation": SEPARATE_KERNELS, "gradient_bytes": FLOAT32, "all_reduces_shares": True}
    elif "InternEvo" in name:
        facts = {"broadcasts_shares": True}
    elif "nanotron" in name:
        facts = {"gradient_bytes": FLOAT32}
    return Framework(
        name=name or "another framework",
        fused_attention=fitted.flash1 if flash1 else 1.0,
        exposed_gathers=fitted.exposed_gathers,
        exposed_gradients=fitted.exposed_gradients,
        exposed_transfers=True,
        **{"accumulation": ACCUMULATION, "traffic": fitted.traffic * (1.0 if fused else EAGER)} | facts,
    )
