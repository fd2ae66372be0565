"""Configurations, clusters, graphs, text and tokenizers that no mutation makes."""

import json
import random
from pathlib import Path

from tests.malformed.case import TOKENIZER, Case, Valid, command
from tests.malformed.places import one_line
from tests.malformed.register import BY_HAND, LAUGHS, case, file_case
from tests.malformed.spoil import as_json

TRAIN = "train bad.yaml --data.path nothing.txt --out run"
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
