"""GPT and BERT once more, in float64 NumPy with plain loops over heads: the definition the models are held to."""

import numpy as np
from scipy.special import erf


def layer_norm(x, p, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def rms_norm(x, p, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def linear(x, p):
    kernel = p["kernel"].reshape(p["kernel"].shape[0], -1)
    return x @ kernel + (p["bias"].reshape(-1) if "bias" in p else 0)


def rotate(x, theta):
    """x[S, E]: pair (i, i + E/2) turned by p theta^(-2i/E)."""
    length, width = x.shape
    out = x.copy()
    for i in range(width // 2):
        angle = np.arange(length) * theta ** (-2 * i / width)
        a, b = x[:, i], x[:, i + width // 2]
        out[:, i], out[:, i + width // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(config, p, x, visible, theta=None):
    """x[S, D], visible[S, S] -> [S, D]; query head h reads key head h // group."""
    width, kv_heads = config.head_dim, config.kv_heads
    group = config.num_heads // kv_heads
    qkv = linear(x, p["qkv"]).reshape(len(x), kv_heads, group + 2, width)
    heads = []
    for h in range(config.num_heads):
        q, k, v = qkv[:, h // group, h % group], qkv[:, h // group, group], qkv[:, h // group, group + 1]
        if theta is not None:
            q, k = rotate(q, theta), rotate(k, theta)
        scores = np.where(visible, q @ k.T / np.sqrt(width), -np.inf)
        heads.append(softmax(scores) @ v)
    return linear(np.concatenate(heads, -1), p["projection"])


def gpt(config, params, tokens):
    """tokens[S] -> logits[S, V]."""
    norm = rms_norm if config.norm == "rmsnorm" else layer_norm
    x = params["embedding"]["tokens"][tokens]
    if config.positions == "learned":
        x = x + params["embedding"]["positions"][: len(tokens)]
    theta = config.rope_theta if config.positions == "rotary" else None
    visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for index in range(config.num_layers):
        p = layer(params["blocks"], index)
        x = x + attention(config, p["attention"], norm(x, p["attention_norm"], config.norm_eps), visible, theta)
        h = linear(norm(x, p["mlp_norm"], config.norm_eps), p["mlp"]["up"])
        if config.activation == "swiglu":
            gate, up = h[:, : config.ffn_width], h[:, config.ffn_width :]
            h = gate / (1 + np.exp(-gate)) * up
        else:
            h = gelu_tanh(h)
        x = x + linear(h, p["mlp"]["down"])
    x = norm(x, params["head"]["norm"], config.norm_eps)
    table = params["embedding"]["tokens"] if config.tied else params["head"]["tokens"]
    return (x @ table.T)[:, : config.vocab]


def bert(config, params, tokens, types, length):
    """tokens[S], types[S] -> (logits[S, V], pooled[D])."""
    e, eps = params["embedding"], config.norm_eps
    x = layer_norm(e["tokens"][tokens] + e["positions"][: len(tokens)] + e["types"][types], e["norm"], eps)
    visible = np.broadcast_to(np.arange(len(tokens)) < length, (len(tokens), len(tokens)))
    for index in range(config.num_layers):
        p = layer(params["blocks"], index)
        x = layer_norm(x + attention(config, p["attention"], x, visible), p["attention_norm"], eps)
        h = gelu(linear(x, p["mlp"]["up"]))
        x = layer_norm(x + linear(h, p["mlp"]["down"]), p["mlp_norm"], eps)
    head = params["head"]
    h = layer_norm(gelu(linear(x, head["transform"])), head["norm"], eps)
    logits = h @ e["tokens"].T + head["bias"]
    return logits[:, : config.vocab], np.tanh(linear(x[0], params["pooler"]))


def layer(tree, index):
    """Layer `index` of a stacked tree."""
    return {k: layer(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}
