"""Weights in other layouts, runs, checkpoints, and the disks that they lie on."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.malformed.case import Case, Mount, Valid, agree, command
from tests.malformed.places import full_folder, pipe
from tests.malformed.register import BY_HAND, case
from tests.malformed.spoil import as_json


def header_case(name: str, change: Callable[[dict], object], words: str = "import hf hf --out out") -> None:
    """A safetensors file whose header lies."""

    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        path = valid.copied("hf", here) / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        change(header)
        new = as_json(header).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])
        return command(words)

    BY_HAND[name] = made


def of_first(**changes: object) -> Callable[[dict], object]:
    return lambda header: header[min(header)].update(changes)


header_case("offsets_beyond_the_file", of_first(data_offsets=[0, 1 << 40]))
header_case("offsets_that_overlap", lambda header: [entry.update(data_offsets=[0, 64]) for entry in header.values()])
header_case("a_type_of_no_numbers", of_first(dtype="Q7"))
header_case("shapes_of_10^18", of_first(shape=[10**9, 10**9]))
header_case("shapes_below_nothing", of_first(shape=[-1, 16]))
header_case("a_tensor_of_another_name", lambda header: header.update(zzz=header.pop(min(header))))
header_case("no_tensors", lambda header: header.clear())


def settings_case(name: str, **changes: object) -> None:
    """A `config.json` that lies."""

    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        path = valid.copied("hf", here) / "config.json"
        path.write_text(as_json(json.loads(path.read_text()) | changes))
        return command("import hf hf --out out")

    BY_HAND[name] = made


settings_case("layers_of_10^9", n_layer=10**9, num_hidden_layers=10**9)
settings_case("a_width_of_10^18", n_embd=10**18, hidden_size=10**18)
settings_case("a_vocabulary_of_10^400", vocab_size=10**400)
settings_case("heads_of_nothing", n_head=0, num_attention_heads=0)
settings_case("norms_of_10^400", layer_norm_epsilon=10**400, rms_norm_eps=10**400)
settings_case("positions_of_10^15", n_positions=10**15, max_position_embeddings=10**15)
settings_case("an_architecture_of_no_name", architectures=[[]], model_type=[])


def step_case(name: str, change: Callable[[Path], object], words: str = "generate run --prompt def --tokens 1") -> None:
    """The checkpoint of a run, changed."""

    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        change(valid.copied("run", here) / "checkpoints" / "2")
        return command(words)

    BY_HAND[name] = made


def with_manifest(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def changed(step: Path) -> None:
        tree = json.loads((step / "manifest.json").read_text())
        change(tree)
        (step / "manifest.json").write_text(as_json(tree))

    return changed


def with_record(content: str) -> Callable[[Path], object]:
    def changed(step: Path) -> None:
        (step / "record.json").write_text(content)
        agree(step)

    return changed


ENTRY = {"bytes": 1, "sha256": "0" * 64}
step_case(
    "a_manifest_that_leads_upwards", with_manifest(lambda tree: tree["files"].update({"../../../../etc/passwd": ENTRY}))
)
step_case(
    "a_manifest_that_leads_elsewhere",
    with_manifest(lambda tree: tree["files"].update({"/dev/zero": ENTRY})),
    "verify run",
)
step_case(
    "a_manifest_of_sizes_of_10^400", with_manifest(lambda tree: tree["files"].update({"a": ENTRY | {"bytes": 10**400}}))
)
step_case("a_manifest_of_nothing", with_manifest(lambda tree: tree["files"].clear()), "verify run")
step_case("a_manifest_that_is_a_list", lambda step: (step / "manifest.json").write_text("[1]"), "verify run")
step_case(
    "a_manifest_that_is_a_pipe",
    lambda step: ((step / "manifest.json").unlink(), os.mkfifo(step / "manifest.json")),
    "verify run",
)
step_case("a_record_of_a_list", with_record("[]"))
step_case("a_record_of_nothing", with_record("{}"))
step_case(
    "a_record_of_another_config",
    with_record('{"config": [], "data_key": 1, "dtype": [], "versions": []}'),
    "train --out run",
)
step_case(
    "a_record_of_no_settings",
    with_record('{"config": {}, "data_key": "", "dtype": "float32", "versions": {}}'),
    "train --out run --train.steps 3",
)
step_case("a_step_with_an_enormous_name", lambda step: step.rename(step.with_name("9" * 200)))
step_case("a_step_in_another_script", lambda step: shutil.copytree(step, step.with_name("٣")))
step_case("a_step_that_is_a_circle", lambda step: (shutil.rmtree(step), step.symlink_to("2")))
step_case("a_link_upwards_in_a_step", lambda step: (step / "up").symlink_to(".."), "verify run")
step_case("a_pipe_in_a_step", lambda step: os.mkfifo(step / "pipe"), "verify run")


def replaced_by(make: Callable[[Path], None], file: str) -> Callable[[Path], object]:
    """Something else in the place of a file of the run."""

    def changed(step: Path) -> None:
        place = step.parents[1] / file
        place.unlink(missing_ok=True)
        make(place)

    return changed


for _file in ("metrics.jsonl", "train.log", "config.yaml", "plan.json", ".lock", "checkpoints/pinned.json"):
    for _make in (pipe, full_folder):
        for _words in ("train --out run", "generate run --prompt def --tokens 1", "verify run"):
            _name = f"{_make.__name__}_as_{_file.replace('/', '_')}_of_{_words.split()[0]}"
            step_case(_name, replaced_by(_make, _file), _words)


step_case(
    "pinned_steps_of_nothing", lambda step: (step.parent / "pinned.json").write_text('{"a": [1e999]}'), "verify run"
)
step_case("a_step_without_its_arrays", lambda step: (shutil.rmtree(step / "state"), agree(step)))
step_case("arrays_of_another_step", lambda step: (shutil.rmtree(step / "state" / "d", ignore_errors=True), agree(step)))
step_case(
    "metrics_that_are_binary",
    lambda step: (step.parent.parent / "metrics.jsonl").write_bytes(bytes(range(256)) * 4000),
    "train --out run",
)
step_case("metrics_without_an_end", lambda step: sparse_at(step.parent.parent / "metrics.jsonl"), "train --out run")
step_case(
    "metrics_of_enormous_steps",
    lambda step: (
        shutil.rmtree(step),
        (step.parent.parent / "metrics.jsonl").write_text('{"step": 1' + "0" * 4000 + "}\n"),
    ),
    "train --out run",
)
step_case(
    "a_plan_of_another_model",
    lambda step: shutil.copyfile(step.parents[2].parent.parent / "valid" / "plan.json", step.parents[1] / "plan.json"),
    "train --out run",
)


def sparse_at(path: Path) -> None:
    with path.open("ab") as stream:
        stream.truncate(1 << 30)


@case
def a_profile_of_negative_seconds(rng: random.Random, here: Path, valid: Valid) -> Case:
    text = (valid.folder / "profile.json").read_text()
    (here / "profile.json").write_text(text.replace('"forward": [', '"forward": [-'))
    return command("plan --profile profile.json --cluster h100x2x1 --batch 4")


@case
def a_profile_of_nan(rng: random.Random, here: Path, valid: Valid) -> Case:
    tree = valid.tree("profile.json")
    tree["update_seconds"] = float("nan")
    (here / "profile.json").write_text(as_json(tree))
    return command("plan --profile profile.json --cluster h100x2x1 --batch 4")


@case
def a_plan_of_another_model_for_training(rng: random.Random, here: Path, valid: Valid) -> Case:
    for name in ("tiny.yaml", "text.txt", "plan.json"):
        valid.copied(name, here)
    return command("train tiny.yaml --plan plan.json --out out")


@case
def tokens_that_are_objects(rng: random.Random, here: Path, valid: Valid) -> Case:
    valid.copied("run", here)
    np.save(here / "t.npy", np.array([[object()]], dtype=object) if False else np.array([{"a": 1}]), allow_pickle=True)
    return command("score run --tokens t.npy --out l.npy")


@case
def tokens_of_a_shape_of_10_18(rng: random.Random, here: Path, valid: Valid) -> Case:
    valid.copied("run", here)
    np.save(here / "t.npy", np.zeros((2, 4), np.int32))
    content = (here / "t.npy").read_bytes()
    (here / "t.npy").write_bytes(content.replace(b"(2, 4), }          ", b"(1000000000, 4), } "))
    return command("score run --tokens t.npy --out l.npy")


def mounted(name: str, words: str, *, bytes: int | None = None, holds: str | None = None) -> None:
    """The folder `disk` is read-only, or a small file system; then `holds` does not lie there."""

    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        for each in ("tiny.yaml", "text.txt", "hf", "run"):
            valid.copied(each, here)
        (here / "disk").mkdir()
        if holds is not None:
            (here / holds).rename(here / "disk" / holds)
        return Case(arguments=words.split(), mounts=(Mount(folder=here / "disk", bytes=bytes),))

    BY_HAND[name] = made


mounted("a_read_only_disk_for_a_run", "train tiny.yaml --out disk/run")
mounted("a_read_only_run", "train --out disk/run --train.steps 4", holds="run")
mounted("a_read_only_run_that_is_finished", "train --out disk/run", holds="run")
mounted("a_read_only_run_that_is_read", "generate disk/run --prompt def --tokens 1", holds="run")
mounted("a_read_only_run_that_is_verified", "verify disk/run", holds="run")
mounted("a_read_only_disk_for_weights", "import hf hf --out disk/run")
mounted("a_read_only_disk_for_a_tokenizer", "tokenizer train text.txt --vocab-size 300 --out disk/t.json")
mounted("a_read_only_cache", "train tiny.yaml --data.cache_dir disk --out out")
mounted("a_disk_too_small_for_a_run", "train tiny.yaml --out disk/run", bytes=65536)
mounted("a_disk_too_small_for_weights", "import hf hf --out disk/run", bytes=65536)
mounted("a_disk_too_small_for_exported_weights", "export hf run disk/hf", bytes=16384)
mounted("a_disk_too_small_for_a_tokenizer", "tokenizer train text.txt --vocab-size 300 --out disk/t.json", bytes=4096)
mounted("a_disk_too_small_for_tokens", "train tiny.yaml --data.cache_dir disk --out out", bytes=4096)
mounted(
    "a_disk_too_small_for_a_plan",
    "plan gpt-tiny --cluster h100x2x1 --model.num_layers 1 --out disk/plan.json",
    bytes=4096,
)


@case
def a_program_cache_of_rubbish(rng: random.Random, here: Path, valid: Valid) -> Case:
    """jax's compiled programs, damaged: they are compiled again."""
    valid.copied("run", here)
    programs = here.parent / "cache" / "jhpt" / "programs"
    source = valid.folder.parent / "making" / "cache" / "jhpt" / "programs"
    shutil.copytree(source, programs)
    for path in programs.iterdir():
        path.write_bytes(rng.randbytes(100))
    return command("generate run --prompt def --tokens 1")
