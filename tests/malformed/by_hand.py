"""Input that no mutation makes: links, pipes and folders in the place of files, and what is enormous."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.malformed.case import TOKENIZER, Case, Mount, Valid, agree, command
from tests.malformed.spoil import as_json

Make = Callable[[random.Random, Path, Valid], Case]

BY_HAND: dict[str, Make] = {}


def case(make: Make) -> Make:
    BY_HAND[make.__name__] = make
    return make


# --- what is no file, in the place of every file ---------------------------------------------------------------

READ_AS: dict[str, str] = {
    "config": "train bad.yaml --data.path nothing.txt --out run",
    "planned": "plan bad.yaml --cluster h100x2x1",
    "cluster": "plan gpt-tiny --cluster bad.yaml",
    "profile": "plan --profile bad.json --cluster h100x2x1 --batch 4",
    "plan_file": "train tiny.yaml --plan bad.json --out out",
    "text": "train tiny.yaml --data.path bad.txt --out out",
    "training_text": "tokenizer train bad.txt --vocab-size 300 --out made.json",
    "tokenizer_file": "train tiny.yaml --data.tokenizer bad.json --out out",
    "init": "train --init bad --data.path nothing.txt --out out",
    "imported": "import hf bad --out out",
    "exported": "export hf bad out",
    "run_directory": "generate bad --prompt def",
    "verified": "verify bad",
    "prompts": "generate run --prompts bad.txt --out out.file",
    "documents_file": "eval run --documents bad.jsonl --out out.file",
    "tokens": "score run --tokens bad.npy --out out.file",
    "labelled_rows": "train bert-tiny --data.path bad.csv --model.task classify --out out",
    "published_runs": "bench predict --published bad.csv --json out.json",
    "data_cache": "train tiny.yaml --data.cache_dir bad --out out",
    "out": "train tiny.yaml --out bad",
    "out_of_plan": "plan gpt-tiny --cluster h100x2x1 --model.num_layers 1 --out bad",
    "svg_of_plan": "plan gpt-tiny --cluster h100x2x1 --model.num_layers 1 --svg bad",
    "out_of_import": "import hf hf --out bad",
    "out_of_export": "export hf run bad",
    "out_of_tokenizer": "tokenizer train text.txt --vocab-size 300 --out bad",
    "out_of_generate": "generate run --prompt a --prompt b --tokens 1 --out bad",
    "out_of_launch": "launch --slurm --out bad -- train gpt-tiny --out run",
}
"""What a command calls `bad`, or `bad` with a suffix."""

FOLDERS = (
    "init",
    "imported",
    "exported",
    "run_directory",
    "verified",
    "data_cache",
    "out",
    "out_of_import",
    "out_of_export",
)
"""Where a folder is what is expected."""


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        listening.bind(path.name)
        os.chdir(here)


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("kept")


def empty(path: Path) -> None:
    path.touch()


def zeros(path: Path) -> None:
    path.write_bytes(bytes(100_000))


def not_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x80" * 30_000)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


def one_line(path: Path) -> None:
    """100 MB without a space."""
    with path.open("wb") as stream:
        for _ in range(100):
            stream.write(b"x" * 1_000_000)


WRITTEN = ("out", "out_of_plan", "svg_of_plan", "out_of_generate", "out_of_launch", "data_cache")
"""Where an empty file, folder or place to write to is fine."""


def in_place(make: Callable[[Path], None], words: str) -> Make:
    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        for name in ("tiny.yaml", "text.txt", "run", "hf"):
            if name.split(".")[0] in words:
                valid.copied(name, here)
        bad = next(word for word in words.split() if word.startswith("bad"))
        make(here / bad)
        return command(words)

    return made


for _make in (loop, dangling, pipe, unix_socket, full_folder, empty, zeros, not_utf8, sparse, one_line):
    for _name, _words in READ_AS.items():
        enormous = _make in (sparse, one_line) and (_name in FOLDERS or _name.startswith(("out", "svg")))
        writes = _name in WRITTEN and _make in (empty, full_folder, dangling, zeros, not_utf8)
        if not enormous and not writes:
            BY_HAND[f"{_make.__name__}_as_{_name}"] = in_place(_make, _words)


# --- files -----------------------------------------------------------------------------------------------------


def file_case(name: str, file: str, content: bytes | str | Callable[[], str], words: str, *copied: str) -> None:
    """A file with this content, which is made when it is needed if it is large, and a command that reads it."""

    def case_of(rng: random.Random, here: Path, valid: Valid) -> Case:
        for each in copied:
            valid.copied(each, here)
        made = content() if callable(content) else content
        (here / file).write_bytes(made if isinstance(made, bytes) else made.encode())
        return command(words)

    BY_HAND[name] = case_of


TRAIN = "train bad.yaml --data.path nothing.txt --out run"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
)
file_case("billion_laughs", "bad.yaml", LAUGHS, TRAIN)
file_case("billion_laughs_as_cluster", "bad.yaml", LAUGHS, "plan gpt-tiny --cluster bad.yaml")
file_case("anchor_of_itself", "bad.yaml", "train: &a {steps: *a}\n", TRAIN)
file_case("merge_of_itself", "bad.yaml", "train: &a\n  <<: *a\n", TRAIN)
file_case("two_documents", "bad.yaml", "train: {}\n---\ntrain: {}\n", TRAIN)
file_case("key_twice", "bad.yaml", "train: {steps: 1}\ntrain: {steps: 2}\n", TRAIN)
file_case("key_twice_in_json", "bad.yaml", '{"train": {"steps": 1}, "train": {"steps": 2}}', TRAIN)
file_case("keys_that_are_lists", "bad.yaml", "? [1, 2]\n: 3\n", TRAIN)
file_case("byte_order_mark", "bad.yaml", "\N{BYTE ORDER MARK}train: {stepz: 2}\n", TRAIN)
file_case("carriage_returns", "bad.yaml", "train:\r  stepz: 2\r\n", TRAIN)
file_case("tabs", "bad.yaml", "train:\n\tsteps: 2\n", TRAIN)
file_case("control_characters", "bad.yaml", "name: \x1b[2J\x07\n", TRAIN)
file_case("escapes_in_a_name", "bad.yaml", 'name: "\\e[2J\\a"\nzzz: 1\n', TRAIN)
file_case("digits_of_another_script", "bad.yaml", "train: {steps: ٣}\n", TRAIN)
file_case("a_number_with_400_digits", "bad.yaml", f"train: {{steps: 1{'0' * 400}}}\n", TRAIN)
file_case("a_number_with_5000_digits", "bad.yaml", f"train: {{steps: 1{'0' * 5000}}}\n", TRAIN)
file_case("a_number_with_5000_digits_in_json", "bad.yaml", f'{{"train": {{"steps": 1{"0" * 5000}}}}}', TRAIN)
file_case("sexagesimal", "bad.yaml", "train: {steps: 1:30:59:59:59:59:59}\n", TRAIN)
file_case("python_objects", "bad.yaml", "train: !!python/object/apply:os.system ['touch owned']\n", TRAIN)
file_case("a_long_yaml", "bad.yaml", lambda: "- {a: 1}\n" * 1_000_000, TRAIN)
file_case("a_long_yaml_of_scalars", "bad.yaml", "x: " + "'" * 1_000_000, TRAIN)
file_case("a_long_json", "bad.yaml", lambda: '{"a": [' + "0, " * 10_000_000 + "0]}", TRAIN)
file_case("many_empty_lists", "bad.yaml", lambda: '{"a": [' + "[]," * 15_000_000 + "[]]}", TRAIN)
file_case("many_unknown_keys", "bad.yaml", "".join(f"key{n}: 1\n" for n in range(5000)), TRAIN)
file_case("deep_mappings", "bad.yaml", "{a: " * 5000, TRAIN)
file_case("a_model_of_no_family", "bad.yaml", "model: {family: [gpt]}\n", TRAIN)
file_case("a_preset_that_is_a_list", "bad.yaml", "preset: [gpt-tiny]\n", TRAIN)
file_case(
    "sources_of_sources", "bad.yaml", "data: {sources: [{path: a, weight: .nan}, {path: b, weight: -1}]}\n", TRAIN
)
file_case(
    "a_cluster_of_10^14_devices",
    "bad.yaml",
    "device: h100\nnodes: 100000000 x 1000000\n",
    "plan gpt-tiny --cluster bad.yaml",
)
file_case(
    "a_cluster_of_many_kinds",
    "bad.yaml",
    "nodes:\n" + "- {device: h100, devices: 8}\n" * 2000,
    "plan gpt-tiny --cluster bad.yaml --space general",
)
file_case(
    "a_graph_of_many_nodes",
    "graph.txt",
    "".join(
        f"node{n} -- x -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n"
        for n in range(50_000)
    )
    + "".join(f"\tnode{n} -- node{n + 1}\n" for n in range(49_999)),
    "plan --profile graph.txt --cluster h100x2x1 --batch 4",
)
file_case(
    "a_graph_in_a_circle",
    "graph.txt",
    "".join(
        f"node{n} -- x -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n"
        for n in range(3)
    )
    + "".join(f"\tnode{n} -- node{(n + 1) % 3}\n" for n in range(3)),
    "plan --profile graph.txt --cluster h100x2x1 --batch 4",
)


# --- text ------------------------------------------------------------------------------------------------------

MAKE = "tokenizer train bad.txt --vocab-size 300 --out made.json"
PIECES = "tokenizer train bad.txt --vocab-size 300 --kind wordpiece --out made.json"
file_case("one_word_of_3_mb", "bad.txt", "x" * 3_000_000, MAKE)
file_case("one_word_of_3_mb_for_wordpiece", "bad.txt", "x" * 3_000_000, PIECES)
file_case("words_of_one_letter", "bad.txt", "x " * 1_500_000, MAKE)
file_case("spaces_alone", "bad.txt", " " * 3_000_000, MAKE)
file_case("line_ends_alone", "bad.txt", "\n" * 3_000_000, MAKE)
file_case("combining_accents_alone", "bad.txt", "\N{COMBINING ACUTE ACCENT}" * 300_000, PIECES)
file_case("every_character", "bad.txt", "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x30000)])), PIECES)
file_case(
    "jsonl_of_one_line",
    "bad.jsonl",
    lambda: '{"text": "' + "x" * 100_000_000 + '"}',
    "tokenizer train bad.jsonl --vocab-size 300 --out made.json",
)
file_case(
    "jsonl_with_half_a_pair",
    "bad.jsonl",
    '{"text": "\\ud800"}\n',
    "tokenizer train bad.jsonl --vocab-size 300 --out made.json",
)
file_case(
    "jsonl_without_text", "bad.jsonl", '{"text": [1]}\n', "tokenizer train bad.jsonl --vocab-size 300 --out made.json"
)
file_case("utf16_without_a_mark", "bad.txt", "the mesh maps".encode("utf-16-le"), MAKE)
file_case("gzip_bomb_of_zeros", "bad.txt.gz", b"", "tokenizer train bad.txt.gz --vocab-size 300 --out made.json")
file_case(
    "a_prompt_of_100_mb",
    "bad.txt",
    lambda: "x" * 100_000_000,
    "generate run --prompts bad.txt --tokens 1",
    "run",
)


@case
def a_tokenizer_reads_a_line_of_100_mb(rng: random.Random, here: Path, valid: Valid) -> Case:
    """Refused, after it has been read: the model has other ids than the tokenizer."""
    for name in ("tiny.yaml",):
        valid.copied(name, here)
    (here / "t.json").write_text(json.dumps(TOKENIZER))
    one_line(here / "bad.txt")
    return command(
        "train tiny.yaml --data.path bad.txt --data.tokenizer t.json --data.sequence_length 1000000000 --out out"
    )


def compressed(zeros: int) -> bytes:
    import gzip

    return gzip.compress(bytes(zeros))


BY_HAND["gzip_bomb_of_zeros"] = lambda rng, here, valid: (
    (here / "bad.jsonl.gz").write_bytes(compressed(1 << 29))
    and command("tokenizer train bad.jsonl.gz --vocab-size 300 --out made.json")
)


# --- tokenizers ------------------------------------------------------------------------------------------------


def tokenizer_case(name: str, **changes: object) -> None:
    """A tokenizer of this kind with other parts; the text is too short for a sequence."""

    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        valid.copied("tiny.yaml", here)
        (here / "t.json").write_text(as_json(TOKENIZER | changes))
        (here / "short.txt").write_text("ab" * 3)
        return command("train tiny.yaml --data.tokenizer t.json --data.path short.txt --out out")

    BY_HAND[name] = made


BPE = TOKENIZER["model"]
tokenizer_case("ids_beyond_32_bits", model=BPE | {"vocab": {"a": 2**40}})
tokenizer_case("ids_of_4_billion", model=BPE | {"vocab": {"a": 2**32 - 1, "b": 1, "ab": 2}})
tokenizer_case("negative_ids", model=BPE | {"vocab": {"a": -1}})
tokenizer_case("two_tokens_with_one_id", model=BPE | {"vocab": {"a": 0, "b": 0, "ab": 0}})
tokenizer_case("no_vocabulary", model=BPE | {"vocab": {}, "merges": []})
tokenizer_case("merges_of_unknown_tokens", model=BPE | {"merges": ["x y"]})
tokenizer_case(
    "a_regular_expression_that_is_none",
    pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False},
)
tokenizer_case(
    "a_regular_expression_that_backtracks",
    pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|a|b|b|ab)*c"}, "behavior": "Isolated", "invert": False},
)
tokenizer_case("unigram_without_an_unknown", model={"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]})
tokenizer_case("unigram_with_nan", model={"type": "Unigram", "unk_id": 0, "vocab": [["a", float("nan")]]})
tokenizer_case(
    "wordpiece_without_an_unknown",
    model={
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"x": 0},
    },
)
tokenizer_case("wordlevel_without_an_unknown", model={"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"x": 0}})
tokenizer_case(
    "padding_to_10^9",
    padding={
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    },
)
tokenizer_case(
    "truncation_to_nothing", truncation={"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}
)
tokenizer_case(
    "a_normalizer_that_repeats", normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "aaaa"}
)
tokenizer_case("a_model_of_no_type", model={"type": "Nothing"})
tokenizer_case("a_model_that_is_a_list", model=[])
tokenizer_case(
    "a_prefix_that_is_a_number",
    model={"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": 7},
)
file_case(
    "json_that_is_no_tokenizer", "t.json", '{"a": 1}', "train tiny.yaml --data.tokenizer t.json --out out", "tiny.yaml"
)


# --- flags -----------------------------------------------------------------------------------------------------


def flag_case(name: str, words: str, *copied: str, last: str = "") -> None:
    def made(rng: random.Random, here: Path, valid: Valid) -> Case:
        for each in ("tiny.yaml", "text.txt", *copied):
            valid.copied(each, here)
        (here / "a_file").write_text("kept")
        return command(words, *([last] if last else []))

    BY_HAND[name] = made


flag_case("steps_of_10^18", "train tiny.yaml --train.steps 1000000000000000000 --data.path nothing.txt --out out")
flag_case("a_hundred_thousand_layers", "train tiny.yaml --model.num_layers 100000 --data.path nothing.txt --out out")
flag_case("a_hundred_thousand_layers_with_text", "train tiny.yaml --model.num_layers 100000 --out out")
flag_case("planned_hundred_thousand_layers", "plan gpt-tiny --model.num_layers 100000 --cluster h100x8x1")
flag_case("a_width_of_10^12", "train tiny.yaml --model.d_model 1000000000000 --out out")
flag_case("a_vocabulary_of_10^12", "train tiny.yaml --model.vocab_size 1000000000000 --out out")
flag_case("sequences_of_nothing", "train tiny.yaml --data.sequence_length 0 --out out")
flag_case("sequences_below_nothing", "train tiny.yaml --data.sequence_length -16 --out out")
flag_case(
    "sequences_of_10^9", "train tiny.yaml --data.sequence_length 1000000000 --model.max_length 1000000000 --out out"
)
flag_case(
    "planned_sequences_of_10^9",
    "plan gpt-tiny --data.sequence_length 1000000000 --model.max_length 1000000000 --cluster h100x8x1",
)
flag_case("a_batch_of_10^12", "train tiny.yaml --data.batch_size 1000000000000 --out out")
flag_case("planned_batch_of_10^15", "plan gpt-tiny --batch 1000000000000000 --cluster h100x8x1")
flag_case(
    "planned_micro_batches_of_10^9", "plan gpt-tiny --batch 1000000000 --micro-batches 1000000000 --cluster h100x8x1"
)
flag_case("a_prime_batch", "plan gpt-tiny --batch 1000000007 --cluster h100x8x1")
flag_case("devices_of_10^14", "plan gpt-13b --cluster h100x8x100000000000000")
flag_case("a_million_devices", "plan gpt-13b --cluster h100x8x131072")
flag_case("many_clusters", "plan gpt-tiny --clusters " + ",".join(f"h100x8x{n}" for n in range(1, 3000)))
flag_case("parallel_over_10^9", "train tiny.yaml --parallel.data 1000000000 --out out")
flag_case("a_hundred_tensor_ranks_of_zero", "train tiny.yaml --parallel.tensor 0 --out out")
flag_case("out_is_a_file", "train tiny.yaml --out a_file")
flag_case("out_below_a_file", "train tiny.yaml --out a_file/run")
flag_case("out_in_proc", "train tiny.yaml --out /proc/jhpt")
flag_case("out_in_sys", "train tiny.yaml --out /sys/jhpt")
flag_case("out_is_a_device", "generate run --prompt a --prompt b --tokens 1 --out /dev/null", "run")
flag_case("plan_in_proc", "plan gpt-tiny --cluster h100x2x1 --model.num_layers 1 --out /proc/plan.json")
flag_case("tokenizer_in_proc", "tokenizer train text.txt --vocab-size 300 --out /proc/t.json")
flag_case("import_in_proc", "import hf hf --out /proc/run", "hf")
flag_case("export_in_proc", "export hf run /proc/hf", "run")
flag_case("import_below_a_file", "import hf hf --out a_file/run", "hf")
for _command in (
    "train tiny.yaml",
    "plan gpt-tiny --cluster h100x2x1",
    "tokenizer train text.txt --vocab-size 300",
    "import hf hf",
    "generate run --prompt a --prompt b",
    "launch --slurm",
):
    _verb = _command.split()[0]
    flag_case(f"empty_out_of_{_verb}", f"{_command} --out=", "run", "hf")
    flag_case(f"out_of_{_verb}_is_a_space", f"{_command} --out", "run", "hf", last=" ")
    flag_case(f"out_of_{_verb}_is_too_long", f"{_command} --out", "run", "hf", last="x" * 5000)
    flag_case(f"out_of_{_verb}_is_no_unicode", f"{_command} --unknown --out", "run", "hf", last="\udcff")
flag_case("a_flag_twice", "train tiny.yaml --train.steps 1 --train.steps x --out out")
flag_case("a_flag_of_100_000_characters", "train tiny.yaml --data.path nothing.txt", last="--" + "x" * 100_000)
flag_case("a_config_of_100_000_characters", "train", last="x" * 100_000)
flag_case("a_path_of_5000_characters", "train tiny.yaml --out out --data.path", last="x" * 5000)
flag_case("a_path_that_is_no_unicode", "train tiny.yaml --out out --data.path", last="\udcff")
flag_case("a_tokenizer_of_5000_characters", "train tiny.yaml --out out --data.tokenizer", last="x/" * 2500)
flag_case("an_init_of_5000_characters", "train --out out --init", last="x" * 5000)
flag_case("a_profile_of_5000_characters", "plan --cluster h100x2x1 --batch 4 --profile", last="x" * 5000)
flag_case("a_cluster_of_5000_characters", "plan gpt-tiny --cluster", last="x" * 5000)
flag_case("a_run_of_5000_characters", "generate --prompt a", last="x" * 5000)
flag_case("laughs_in_a_flag", "train tiny.yaml --out out --data.sources", last="[" + LAUGHS.replace("\n", ", ") + "]")
flag_case("deep_brackets_in_a_flag", "train tiny.yaml --out out --train.steps", last="[" * 50_000)
flag_case("a_glob_of_everything", "train tiny.yaml --out out --data.path", last="/proc/[0-9]*/task/*/nothing*")
flag_case("a_glob_that_is_none", "train tiny.yaml --out out --data.path", last="[" * 200)
flag_case("a_learning_rate_beyond_float32", "train tiny.yaml --out out --optimizer.learning_rate 1e60")
flag_case("a_resumed_step_of_nothing", "train tiny.yaml --out out --resume-step -1")
flag_case("no_port", "train tiny.yaml --out out --coordinator localhost --process-id 0 --num-processes 2 --wait 2")
flag_case(
    "a_port_beyond_ports",
    "train tiny.yaml --out out --coordinator localhost:99999 --process-id 0 --num-processes 2 --wait 2",
)
flag_case(
    "a_host_that_is_none", "train tiny.yaml --out out --coordinator a..b:1234 --process-id 1 --num-processes 2 --wait 2"
)
flag_case("verify_of_proc", "verify /proc/self")
flag_case("prices_of_nan", "plan gpt-tiny --cluster h100x2x1 --tokens nan --price nan --micro-batches 1")
flag_case(
    "tokens_of_10^400", "plan gpt-tiny --cluster h100x2x1 --price 1 --micro-batches 1 --tokens", last="1" + "0" * 400
)
flag_case("a_budget_of_nothing", "plan gpt-tiny --cluster h100x2x1 --budget -5GB --micro-batches 1")
flag_case("generated_tokens_of_10^9", "generate run --prompt def --tokens 1000000000", "run")
flag_case("a_prompt_of_100_000_characters", "generate run --tokens 1 --prompt", "run", last="x" * 100_000)
flag_case("a_temperature_of_nan", "generate run --prompt def --tokens 1 --temperature nan", "run")
flag_case("launched_10^9_times", "launch --processes 1000000000 -- train tiny.yaml")
flag_case("launched_below_nothing", "launch --processes -1 -- train tiny.yaml")
flag_case("a_job_with_a_newline", "launch --slurm --out job.sh --nodes 0 --name", last="a\nb")


# --- weights and checkpoints -----------------------------------------------------------------------------------


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
