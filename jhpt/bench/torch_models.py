"""The same models and AdamW step in PyTorch, for comparison; needs the package `torch`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from jhpt.core.config import DataConfig
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.family import masked_positions
from jhpt.core.families.gpt import GPTConfig
from jhpt.training.data.tokenizer import Tokenizer


class Block(nn.Module):
    """Attention and MLP; normalised before each half (GPT) or after it (BERT)."""

    def __init__(self, config: GPTConfig | BERTConfig):
        super().__init__()
        d = config.d_model
        self.heads, self.causal, self.rate = config.num_heads, isinstance(config, GPTConfig), config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(d, config.norm_eps), nn.LayerNorm(d, config.norm_eps)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.ffn_width), nn.Linear(config.ffn_width, d)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """x[B, S, D] -> [B, S, D]."""
        batch, length, d = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, d)), self.rate)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """x[B, S, D] -> [B, S, D]."""
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh" if self.causal else "none")), self.rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class GPT(nn.Module):
    """GPT-2 with a tied head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab, config.d_model)
        self.positions = nn.Parameter(torch.zeros(config.max_length, config.d_model))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of windows[B, S + 1]."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class BERT(nn.Module):
    """BERT with its masked-LM head on the predicted positions, masking on the device as in jhpt."""

    def __init__(self, config: BERTConfig, data: DataConfig, tokenizer: Tokenizer):
        super().__init__()
        d = config.d_model
        self.rate, self.fraction, self.tokenizer = config.dropout, data.mask_fraction, tokenizer
        self.tokens = nn.Embedding(config.padded_vocab, d)
        self.positions = nn.Parameter(torch.zeros(config.max_length, d))
        self.types = nn.Parameter(torch.zeros(config.type_vocab_size, d))
        self.norm = nn.LayerNorm(d, config.norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.transform, self.head_norm = nn.Linear(d, d), nn.LayerNorm(d, config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean masked-LM loss of tokens[B, S]."""
        batch, length = tokens.shape
        count = masked_positions(length, self.fraction)
        positions = torch.rand(batch, length - 2, device=tokens.device).topk(count).indices.sort().values + 1
        targets = tokens.gather(1, positions)
        kind = torch.rand(targets.shape, device=tokens.device)
        random = torch.randint_like(targets, self.tokenizer.vocab_size)
        masked = torch.where(kind < 0.8, self.tokenizer.mask, torch.where(kind < 0.9, random, targets))
        x = self.tokens(tokens.scatter(1, positions, masked)) + self.positions[:length] + self.types[0]
        x = F.dropout(self.norm(x), self.rate)
        for block in self.blocks:
            x = block(x)
        x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        x = self.head_norm(F.gelu(self.transform(x)))
        logits = F.linear(x, self.tokens.weight, self.bias.to(x.dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_step(
    config: GPTConfig | BERTConfig, data: DataConfig, tokenizer: Tokenizer, *, compiled: bool
) -> Callable[[np.ndarray], Any]:
    """One training step on numpy windows: on a GPU compiled, in bfloat16 under autocast; otherwise eager, in
    float32."""
    device = "cuda" if compiled else "cpu"
    torch.manual_seed(0)
    model: Any = (GPT(config) if isinstance(config, GPTConfig) else BERT(config, data, tokenizer)).to(device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
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
