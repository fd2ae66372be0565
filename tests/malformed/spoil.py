"""Mutations: of the bytes of a file, and of a value somewhere in a tree."""

import json
import random

import yaml

ENORMOUS = [10**12, -(10**12), 2**63, 10**40, 10**400, 1e400, float("nan"), -1, 0, 1e-300, 0.5]
VALUES = [
    *ENORMOUS,
    None,
    True,
    "",
    " ",
    "text",
    "\x00",
    "\x1b[2J\r\b",
    "\ud800",
    "\N{ARABIC-INDIC DIGIT THREE}",
    "\N{BYTE ORDER MARK}1",
    "9" * 400,
    "9" * 5000,
    "x" * 100_000,
    "../../../../etc/passwd",
    "/proc/self/mem",
    "2026-13-01",
    "1_000",
    "0x10",
    "1:30",
    "yes",
    "1TB",
    "h100x8x99999999999999",
    [],
    {},
    [[]],
    [0] * 10_000,
    {"a": {}},
]
INSERTED = [
    b"\xff\xfe",
    b"\0",
    b"{",
    b"]",
    b"\t",
    b"\r\n",
    b": :",
    b"\xef\xbb\xbf",
    b"\xc2\x85\xe2\x80\xa8",
    b"&a [*a]",
    b"*unknown",
    b"!!python/none",
    b"!!python/object/apply:os.getcwd []",
    b"<<: *a",
    b"1e999",
    b"9" * 5000,
    b"NaN",
]


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Spoils the bytes of a file."""
    kind = rng.choice(
        ["flip", "cut", "insert", "double", "empty", "encoding", "deep", "long", "zeros", "tail", "shuffle", "random"]
    )
    place = rng.randrange(len(content))
    match kind:
        case "flip":
            return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        case "cut":
            return content[:place]
        case "insert":
            return content[:place] + rng.choice(INSERTED) + content[place:]
        case "double":
            return content + content
        case "encoding":
            return content.decode(errors="replace").encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case "deep":
            return rng.choice([b"[", b'{"a":', b"- ", b"((", b"? "]) * rng.choice([90, 1000, 100_000])
        case "long":
            return content + rng.choice([b"x", b"x ", b"\n"]) * rng.choice([300_000, 3_000_000])
        case "zeros":
            return bytes(len(content))
        case "tail":
            return content + bytes(4096)
        case "shuffle":
            lines = content.splitlines(keepends=True)
            rng.shuffle(lines)
            return b"".join(lines)
        case "random":
            return rng.randbytes(len(content))
    return b""


def mutated_tree(rng: random.Random, value):
    """Spoils one value, somewhere in a tree."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        how = rng.random()
        if how < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if how < 0.2:
            return value | {rng.choice(["zzz", 7, ""]): value[key]}
        return value | {key: mutated_tree(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], mutated_tree(rng, value[place]), *value[place + 1 :]]
    return rng.choice(VALUES)


def spoiled(rng: random.Random, valid: dict | list, dump) -> bytes:
    """A file with this tree, spoiled before or after it is written."""
    if rng.random() < 0.5:
        return mutated_bytes(rng, dump(valid).encode())
    return dump(mutated_tree(rng, valid)).encode(errors="surrogatepass")


def as_yaml(value) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def as_json(value) -> str:
    """JSON; the digits of an integer are as many as it takes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {as_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return json.dumps(value)
