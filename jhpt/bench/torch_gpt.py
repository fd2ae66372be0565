"""The same GPT-2 and AdamW step in PyTorch, as a yardstick; needs the package `torch`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from jhpt.core.config import GPTConfig


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.d_model
        self.heads = config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.ffn_width), nn.Linear(config.ffn_width, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with a tied head, padded vocabulary as in jhpt."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab, config.d_model)
        self.positions = nn.Parameter(torch.zeros(config.max_length, config.d_model))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of windows[B, S + 1]."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_step(config: GPTConfig, *, compiled: bool) -> Callable[[np.ndarray], Any]:
    """One training step on numpy windows; on a GPU compiled, in bfloat16 under autocast, else eager in float32."""
    device = "cuda" if compiled else "cpu"
    torch.manual_seed(0)
    model: Any = GPT(config).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model

    def step(windows: np.ndarray) -> Any:
        batch = torch.from_numpy(windows).long().to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=compiled):
            loss = forward(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
