"""Kinds of malformed input: a valid file, or a list of flags, and one mutation of it.

Harmless mutations exist, so a case may end with status 0.
"""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.malformed.case import TEXT, TOKENIZER, Case, Valid, agree, command
from tests.malformed.spoil import VALUES, as_json, as_yaml, mutated_bytes, mutated_tree, spoiled

NO_TEXT = ["--data.path", "nothing.txt", "--out", "run"]
"""There is no such text, so a run that is not refused before is refused then."""

RENTED = {"device": "h100", "nodes": "2 x 8", "inside": "900 GB/s", "network": "400 Gbit/s", "host_memory": "1TB"}


def config(rng: random.Random, here: Path, valid: Valid) -> Case:
    (here / "mine.yaml").write_bytes(spoiled(rng, valid.tree("tiny.yaml"), as_yaml))
    return command("plan mine.yaml --cluster h100x2x1 --micro-batches 1")


def trained_config(rng: random.Random, here: Path, valid: Valid) -> Case:
    (here / "mine.yaml").write_bytes(spoiled(rng, valid.tree("tiny.yaml"), as_yaml))
    return command("train mine.yaml", *NO_TEXT)


def config_as_json(rng: random.Random, here: Path, valid: Valid) -> Case:
    (here / "mine.json").write_bytes(spoiled(rng, valid.tree("tiny.yaml"), as_json))
    return command("train mine.json", *NO_TEXT)


def cluster(rng: random.Random, here: Path, valid: Valid) -> Case:
    content = spoiled(rng, RENTED, as_yaml) if rng.random() < 0.5 else spoiled(rng, valid.tree("cluster.json"), as_json)
    (here / "cluster.yaml").write_bytes(content)
    return command("plan gpt-tiny --cluster cluster.yaml --micro-batches 1 --model.num_layers 1")


def plan(rng: random.Random, here: Path, valid: Valid) -> Case:
    (here / "plan.json").write_bytes(spoiled(rng, valid.tree("plan.json"), as_json))
    return command("train gpt-tiny --model.num_layers 1 --plan plan.json", *NO_TEXT)


def profile(rng: random.Random, here: Path, valid: Valid) -> Case:
    (here / "profile.json").write_bytes(spoiled(rng, valid.tree("profile.json"), as_json))
    return command("plan --profile profile.json --cluster h100x2x1 --batch 4 --micro-batches 1")


def pipedream(rng: random.Random, here: Path, valid: Valid) -> Case:
    """PipeDream's graph, whose format is text."""
    costs = "forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, parameter_size=32.0"
    lines = [f"node{n} -- {'Linear' if n > 1 else 'Input0'} -- {costs}" for n in range(1, 6)]
    lines += [f"\tnode{n} -- node{n + 1}" for n in range(1, 5)]
    (here / "graph.txt").write_bytes(mutated_bytes(rng, "\n".join(lines).encode()))
    return command("plan --profile graph.txt --cluster h100x2x1 --batch 4 --micro-batches 1")


def piper(rng: random.Random, here: Path, valid: Valid) -> Case:
    cost = {"id": "vanilla", "timePerSample": 0.5, "parameterSize": 64.0, "memoryUsageA": 8.0, "memoryUsageB": 64.0}
    nodes = [{"id": n, "name": f"layer {n}", "TMPCs": {"1": [cost], "2": [cost]}} for n in range(4)]
    edges = [{"sourceId": n, "destId": n + 1, "communicationCost": 16.0} for n in range(3)]
    (here / "piper.json").write_bytes(spoiled(rng, {"nodes": nodes, "edges": edges}, as_json))
    return command("plan --profile piper.json --cluster h100x2x1 --batch 4 --micro-batches 1")


PLANNED = ["train.steps", "model.num_layers", "model.d_model", "data.batch_size", "data.sequence_length", "seed"]
PLANNED += ["optimizer.learning_rate", "model.vocab_size", "parallel.tensor", "memory.budget_bytes", "batch", "price"]
PLANNED += ["cluster", "budget", "tokens", "out", "svg", "optimizer.eps", "model.dropout", "evaluation.prompt"]
PLANNED += ["micro-batches", "profile", "clusters", "schedule", "space", "model.d_ff", "model.num_heads"]
TRAINED = [*PLANNED[:10], "out", "plan", "init", "resume-step", "coordinator", "process-id", "num-processes", "wait"]
TRAINED += ["data.path", "data.cache_dir", "data.tokenizer", "data.sources", "checkpoint.every", "checkpoint.keep"]
TRAINED += ["peers.heartbeat_seconds", "peers.stall_seconds", "checkpoint.mirror", "memory.offload", "log.every"]
TRAINED += ["optimizer.warmup_steps", "optimizer.name", "model.family", "parallel.auto", "parallel.compression"]
LAUNCHED = ["nodes", "gpus", "time", "image", "name", "max-restarts", "pause", "out", "processes", "min-processes"]


def flagged(rng: random.Random, names: list[str]) -> list[str]:
    """A few flags with values; what no command line can hold is left out."""
    words = []
    for name in rng.choices(names, k=rng.choice([1, 2, 3])):
        value = str(rng.choice([value for value in VALUES if not (isinstance(value, int) and abs(value) > 10**300)]))
        words += [f"--{name}", value] if rng.random() < 0.7 else [f"--{name}={value}"]
    # Of what is no UTF-8, Python makes surrogates from U+DC80 on.
    return [word.replace("\ud800", "\udcff") for word in words if "\0" not in word]


def plan_flags(rng: random.Random, here: Path, valid: Valid) -> Case:
    return command("plan gpt-tiny --cluster h100x2x1 --micro-batches 1", *flagged(rng, PLANNED))


def train_flags(rng: random.Random, here: Path, valid: Valid) -> Case:
    valid.copied("tiny.yaml", here)
    return command("train tiny.yaml --data.path nothing.txt", *flagged(rng, TRAINED), *NO_TEXT[:2])


def launch_flags(rng: random.Random, here: Path, valid: Valid) -> Case:
    kind = rng.choice(["--slurm", "--kubernetes"])
    return command("launch --out job", kind, *flagged(rng, LAUNCHED), "--", "train", "gpt-tiny", "--out", "run")


def generate_flags(rng: random.Random, here: Path, valid: Valid) -> Case:
    valid.copied("run", here)
    names = ["tokens", "temperature", "top-k", "top-p", "seed", "stop", "stop-tokens", "batch", "out", "tokenizer"]
    return command("generate run --prompt def", *flagged(rng, [*names, "plan", "prompts"]))


LINES = [{"text": line} for line in TEXT.splitlines()[:40]]


def lines_of(records: list[dict]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def tokenizer_text(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Text that a tokenizer is to be made of."""
    suffix = rng.choice([".jsonl", ".txt", ".jsonl.gz", ".parquet", ".jsonl.zst", ".arrow"])
    content = mutated_bytes(rng, lines_of(LINES))
    if suffix.endswith("gz"):
        content = gzip.compress(content)
        content = content[: rng.randrange(1, len(content) + 1)]
    (here / f"text{suffix}").write_bytes(content)
    kind = rng.choice(["bpe", "wordpiece"])
    return command(f"tokenizer train text{suffix} --vocab-size 300 --kind {kind} --out made.json")


def parquet(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A Parquet file with a fault behind its first bytes."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(LINES)
    pyarrow.parquet.write_table(table, here / "text.parquet", compression=rng.choice(["none", "snappy", "zstd"]))
    content = bytearray((here / "text.parquet").read_bytes())
    for _ in range(rng.choice([1, 4])):
        content[rng.randrange(4, len(content) - 4)] = rng.randrange(256)
    (here / "text.parquet").write_bytes(content)
    return command("tokenizer train text.parquet --vocab-size 300 --out made.json")


def tokenizer(rng: random.Random, here: Path, valid: Valid) -> Case:
    """The text is too short for a sequence, so a run with a valid tokenizer is refused, too."""
    (here / "t.json").write_bytes(spoiled(rng, TOKENIZER, as_json))
    (here / "short.txt").write_text("ab" * 3)
    valid.copied("tiny.yaml", here)
    return command("train tiny.yaml --data.tokenizer t.json --data.path short.txt --out run")


def tokenizer_folder(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A Hugging Face folder with a vocabulary."""
    folder = here / "vocabulary"
    folder.mkdir()
    pieces = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    files = {"vocab.json": as_json(pieces).encode(), "merges.txt": b"#version: 0.2\na b\n"}
    files |= {"special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}', "added_tokens.json": b'{"<x>": 4}'}
    if rng.random() < 0.4:
        files = {
            "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##b\n",
            "tokenizer_config.json": b'{"do_lower_case": true}',
        }
    name = rng.choice(sorted(files))
    if name.endswith("json"):
        files[name] = spoiled(rng, json.loads(files[name]), as_json)
    else:
        files[name] = mutated_bytes(rng, files[name])
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (here / "short.txt").write_text("ab" * 3)
    valid.copied("tiny.yaml", here)
    return command("train tiny.yaml --data.tokenizer vocabulary --data.path short.txt --out run")


def hugging_face(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A folder in Hugging Face's layout, whose files lie."""
    folder = valid.copied("hf", here)
    if rng.random() < 0.4:
        (folder / "config.json").write_bytes(spoiled(rng, json.loads((folder / "config.json").read_text()), as_json))
    else:
        (folder / "model.safetensors").write_bytes(_other_header(rng, (folder / "model.safetensors").read_bytes()))
    return rng.choice([command("import hf hf --out run"), command("generate hf --prompt def --tokens 1")])


def _other_header(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file with a length, a JSON header or numbers that are others."""
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    how = rng.choice(["length", "tree", "bytes", "numbers", "offsets"])
    if how == "length":
        return rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, length + 8]).to_bytes(8, "little") + content[8:]
    if how == "numbers":
        return content[: rng.randrange(len(content))]
    if how == "offsets":
        name = rng.choice([name for name in header if name != "__metadata__"])
        header[name]["data_offsets"] = rng.choice([[-8, 0], [0, 2**62], [8, 0], [2**64, 2**65], ["0", "4"], [], [0]])
    new = as_json(mutated_tree(rng, header) if how == "tree" else header).encode(errors="surrogatepass")
    if how == "bytes":
        new = mutated_bytes(rng, new)
    return len(new).to_bytes(8, "little") + new + numbers


def shards(rng: random.Random, here: Path, valid: Valid) -> Case:
    """The index of a Hugging Face folder with several files."""
    folder = valid.copied("hf", here)
    content = (folder / "model.safetensors").read_bytes()
    names = [name for name in json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]) if "meta" not in name]
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "one.safetensors")}
    (folder / "model.safetensors.index.json").write_bytes(spoiled(rng, index, as_json))
    return command("import hf hf --out run")


READERS = ["generate run --prompt def --tokens 1", "train --out run", "export hf run exported", "verify run"]
READERS += [
    "eval run --data.path text.txt",
    "train --init run --data.path nothing.txt --out other",
    "score run --tokens t.npy --out l.npy",
]


def reader(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A command that reads the run."""
    valid.copied("text.txt", here)
    np.save(here / "t.npy", np.zeros((1, 4), np.int32))
    return command(rng.choice(READERS))


def run_files(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A run directory: one of its descriptions."""
    run = valid.copied("run", here)
    path = run / rng.choice(["config.yaml", "plan.json", "metrics.jsonl"])
    path.write_bytes(
        mutated_bytes(rng, path.read_bytes())
        if rng.random() < 0.5 or path.suffix == ".jsonl"
        else spoiled(rng, valid.tree(f"run/{path.name}"), as_json)
    )
    return reader(rng, here, valid)


def checkpoint(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Any file of a checkpoint; in half of the cases its manifest says that this is what was written."""
    step = valid.copied("run", here) / "checkpoints" / "2"
    path = rng.choice(sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size))
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    if rng.random() < 0.5:
        agree(step)
    return reader(rng, here, valid)


def checkpoint_record(rng: random.Random, here: Path, valid: Valid) -> Case:
    """The record of a checkpoint, with a manifest that agrees."""
    step = valid.copied("run", here) / "checkpoints" / "2"
    (step / "record.json").write_bytes(spoiled(rng, json.loads((step / "record.json").read_text()), as_json))
    agree(step)
    return reader(rng, here, valid)


def checkpoint_metadata(rng: random.Random, here: Path, valid: Valid) -> Case:
    """What Orbax and its array format write of an item, with a manifest that agrees."""
    step = valid.copied("run", here) / "checkpoints" / "2"
    path = rng.choice(
        sorted(
            path
            for path in step.rglob("*")
            if path.name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "array_metadatas")
        )
    )
    if path.is_dir():
        path = next(path.iterdir())
    path.write_bytes(spoiled(rng, json.loads(path.read_text()), as_json))
    agree(step)
    return reader(rng, here, valid)


def checkpoint_manifest(rng: random.Random, here: Path, valid: Valid) -> Case:
    step = valid.copied("run", here) / "checkpoints" / "2"
    (step / "manifest.json").write_bytes(spoiled(rng, json.loads((step / "manifest.json").read_text()), as_json))
    return reader(rng, here, valid)


def checkpoint_files(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Files that are missing, renamed, there twice, or are folders."""
    step = valid.copied("run", here) / "checkpoints" / "2"
    path = rng.choice(sorted(path for path in step.rglob("*") if path.is_file()))
    how = rng.choice(["remove", "rename", "folder", "link", "twice"])
    if how == "rename":
        path.rename(path.with_name("other"))
    elif how == "twice":
        shutil.copyfile(path, path.with_name("other"))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to(path.name)
    if rng.random() < 0.3 and how not in ("link", "folder"):
        agree(step)
    return reader(rng, here, valid)


def documents(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Documents, prompts or tokens for a run."""
    valid.copied("run", here)
    records = [{"text": "def f"}, {"context": "def", "continuation": " f"}]
    (here / "d.jsonl").write_bytes(mutated_bytes(rng, lines_of(records)))
    (here / "p.txt").write_bytes(mutated_bytes(rng, b"def f\nimport os\n"))
    np.save(here / "t.npy", np.zeros((2, 4), np.int32))
    (here / "t.npy").write_bytes(mutated_bytes(rng, (here / "t.npy").read_bytes()))
    read = ["eval run --documents d.jsonl", "generate run --prompts p.txt --tokens 1", "score run --tokens t.npy"]
    return command(f"{rng.choice(read)} --out out.file")


def labelled(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Rows of texts with labels.  Where they are fine, the run is refused: another one lies in its directory."""
    valid.copied("run", here)
    rows = [{"text": f"the mesh {n}", "label": n % 2} for n in range(4)]
    as_csv = "text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows)
    name, content = rng.choice([("rows.csv", as_csv.encode()), ("rows.jsonl", lines_of(rows))])
    (here / name).write_bytes(mutated_bytes(rng, content))
    return command(f"train bert-tiny --data.path {name} --model.task classify --out run")


def published(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Published runs, in CSV."""
    columns = "id,source,gpu,gpus,gpus_per_node,family,layers,width,heads,kv_heads,ffn,vocab,tied,attention,seq"
    columns += ",global_batch,micro_batch,data,tensor,pipe,chunks,schedule,zero,sequence,recompute,tokens_per_gpu"
    row = "a,b,h100,8,8,gpt,2,64,4,4,128,512,true,flash,64,8,1,8,1,1,1,1f1b,0,false,none,100000"
    (here / "runs.csv").write_bytes(mutated_bytes(rng, f"{columns}\n{row}\n".encode()))
    return command("bench predict --published runs.csv --json out.json")


def data_set(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A Hugging Face data set that was saved to disk."""
    valid.copied("run", here)
    folder = here / "saved"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "data.arrow").write_bytes(rng.randbytes(64) + bytes(rng.choice([0, 4])))
    (folder / "state.json").write_bytes(spoiled(rng, {"_data_files": [{"filename": "data.arrow"}]}, as_json))
    return command("eval run --data.path saved")


def token_cache(rng: random.Random, here: Path, valid: Valid) -> Case:
    """A cache of tokens: what is not damaged beyond use is evaluated, the rest made again or refused."""
    valid.copied("run", here)
    folder = here.parent / "cache" / "jhpt" / "tokens"
    shutil.copytree(valid.folder.parent / "making" / "cache" / "jhpt" / "tokens", folder)
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    return command("eval run --data.path", str(valid.folder / "text.txt"))


def program_cache(rng: random.Random, here: Path, valid: Valid) -> Case:
    """The programs that jax has compiled and kept."""
    valid.copied("run", here)
    folder = here.parent / "cache" / "jhpt" / "programs"
    shutil.copytree(valid.folder.parent / "making" / "cache" / "jhpt" / "programs", folder)
    for path in folder.iterdir():
        if path.stat().st_size:
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    return command("generate run --prompt def --tokens 1")


def environment(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Variables that launchers set."""
    valid.copied("tiny.yaml", here)
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK"]
    names += ["OMPI_COMM_WORLD_SIZE", "JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_BIND_ADDRESS", "JHPT_TRACEBACK"]
    values = ["", "x", "-1", "9" * 30, "1e3", "\N{ARABIC-INDIC DIGIT THREE}", "0"]
    given = {name: rng.choice(values) for name in rng.sample(names, 3)}
    return Case(arguments=["train", "tiny.yaml", "--data.path", "nothing.txt", "--wait", "2"], environment=given)


Kind = Callable[[random.Random, Path, Valid], Case]

KINDS: dict[Kind, int] = {
    config: 60,
    trained_config: 40,
    config_as_json: 40,
    cluster: 60,
    plan: 60,
    profile: 60,
    pipedream: 30,
    piper: 40,
    plan_flags: 60,
    train_flags: 60,
    launch_flags: 30,
    generate_flags: 20,
    tokenizer_text: 50,
    parquet: 30,
    tokenizer: 40,
    tokenizer_folder: 40,
    hugging_face: 40,
    shards: 15,
    run_files: 30,
    checkpoint: 40,
    checkpoint_record: 20,
    checkpoint_metadata: 20,
    checkpoint_manifest: 20,
    checkpoint_files: 20,
    documents: 30,
    labelled: 30,
    published: 20,
    data_set: 15,
    token_cache: 15,
    environment: 20,
    program_cache: 20,
}
"""How many cases of each there are."""
