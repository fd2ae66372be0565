"""Flags and their values."""

import random
from pathlib import Path

from tests.malformed.case import Case, Valid, command
from tests.malformed.register import BY_HAND, LAUGHS


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
