"""How each documented command is tested: run with small sizes, run by `.ci/run`, or parsed only."""

import shlex

MODEL = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.d_ff": 32,
    "model.dropout": 0.0,
    "model.max_length": 16,
    "data.sequence_length": 16,
}
MEASURED = MODEL | {"model.num_layers": 3, "model.d_model": 128, "model.d_ff": 512, "model.vocab_size": 256}
"""Blocks whose seconds do not drown in noise."""
STEPS = MODEL | {
    "data.batch_size": 8,
    "train.steps": 2,
    "optimizer.warmup_steps": 1,
    "evaluation.batches": 1,
    "evaluation.sample_tokens": 0,
    "log.every": 1,
    "log.tensorboard": False,
}
ON_CORPUS = {"data.path": "corpus"}
WORDS = {"model.vocab_size": 1024}
"""More than the tokenizers of `workplace` have."""
ONE_DEVICE = {"parallel.data": 1, "parallel.tensor": 1, "parallel.zero": 0, "parallel.micro_batches": 1}


def flags(settings: dict[str, object]) -> str:
    return shlex.join(word for name, value in settings.items() for word in (f"--{name}", str(value)))


STARTED = flags(
    {name: value for name, value in STEPS.items() if not name.startswith("model.")}
    | {"parallel.data": 1, "data.sequence_length": 16}
)
"""For runs whose model is that of weights."""
TINY = flags(STEPS | ON_CORPUS | {"parallel.data": 1})

RUN = {
    "jhpt train": TINY,
    "jhpt train my.yaml --out runs/mine": flags(STEPS | WORDS | ONE_DEVICE),
    "jhpt train --out runs/mine --train.steps 4000": "--train.steps 3",
    "jhpt train my.yaml --plan plan.json --data.batch_size 512": flags(STEPS | WORDS),
    "jhpt plan gpt-13b --cluster h100x8x8": "--model.num_layers 1 --batch 8",
    "jhpt plan my.yaml --cluster cluster.yaml --batch 512 --budget 60GB --out plan.json --svg step.svg": flags(
        MODEL | WORDS
    )
    + " --batch 8",
    "jhpt plan vgg16-cifar --cluster v100x1x4-10gbe --space general --batch 512 --out plan.json": "--micro-batches 8",
    "jhpt plan vgg16 --cluster v100x4x4-10gbe --batch 256": "--micro-batches 1",
    "jhpt plan gpt-13b --cluster h100x8x8 --tokens 260B --price 2.5": (
        "--model.num_layers 1 --batch 8 --micro-batches 1"
    ),
    "jhpt plan llama-8b --clusters h100x8x4,h200x8x4,b200x8x2 --price h100=2.5,h200=3,b200=5": (
        "--model.num_layers 1 --batch 8 --micro-batches 1"
    ),
    "jhpt plan --list-clusters": "",
    "jhpt plan gpt-13b --cluster rented.yaml": "--model.num_layers 1 --batch 8 --micro-batches 1",
    "jhpt plan gpt2-124m": flags(MEASURED),
    "jhpt plan gpt2-124m --cluster h200x1x1 --batch 32": "",
    "jhpt plan gpt2-1.5b --cluster h100x8x1 --optimizer.weights bfloat16_kahan --optimizer.moments int8": (
        "--model.num_layers 4"
    ),
    "jhpt plan gpt2-1.5b --cluster h100x8x1 --optimizer.name lion": "--model.num_layers 4",
    "jhpt plan gpt-6.7b --cluster h100x1x1 --budget 24GiB --batch 16 --svg step.svg": "",
    "jhpt tokenizer train 'corpus/*.txt' --vocab-size 32000 --out tokenizer.json": "--force",
    "jhpt train --init models/mine --data.path 'corpus/*.txt'": STARTED,
    "jhpt train --init models/mine --data.path 'corpus/*.txt' --out runs/tuned": STARTED,
    "jhpt export hf runs/tuned models/tuned": "",
    'jhpt generate runs/mine --prompt "def "': "--tokens 2",
    "jhpt eval runs/mine --data.path 'corpus/*.txt'": "--evaluation.batches 1",
    "jhpt export hf runs/mine models/exported": "",
    "jhpt train bert-tiny --model.task classify --data.path reviews.csv --out runs/reviews": flags(
        STEPS | {"parallel.data": 1}
    ),
    "jhpt train --init models/bert --model.task classify --data.path reviews.csv --out runs/finetuned": STARTED,
    "jhpt eval runs/finetuned --data.path more.csv": "",
    "jhpt export hf runs/finetuned models/reviews": "",
    "jhpt import hf models/mine --out runs/imported": "",
    'jhpt generate runs/tiny --prompt "def "': "",
    'jhpt generate runs/tiny --prompt "def " --prompt "import " --greedy': "",
    "jhpt generate runs/tiny --prompts prompts.txt --top-k 40 --top-p 0.9 --seed 1 --out texts.jsonl": "",
    "jhpt score runs/tiny --tokens tokens.npy --out logits.npy": "",
    "jhpt eval runs/tiny": "",
    "jhpt eval runs/tiny --data.path 'corpus/*.txt' --parallel.tensor 2": "",
    "jhpt eval runs/tiny --documents documents.jsonl --out likelihoods.jsonl": "",
    "jhpt verify runs/tiny": "",
    "jhpt launch --slurm --nodes 4 --out job.sh -- train my.yaml --out runs/mine": "",
    "jhpt train --out runs/tiny": "",
    "jhpt doctor": "",
    "jhpt tokenizer train corpus --vocab-size 32000 --out words.json": "--force",
    "jhpt tokenizer train corpus --kind wordpiece --vocab-size 30522 --out pieces.json": "--force",
    "jhpt bench": "--help",
    "jhpt launch": "--help",
    "jhpt bench predict --published runs.csv": "",
    "python -m benchmarks.reported FILE": "--help",
    "python -m benchmarks.planner.dimensions": "--models gnmt --clusters a100x8x4-200gib",
    "python benchmarks/calibration/fit.py --help": "",
    "python benchmarks/hand_made_bugs/run.py --help": "",
    "python benchmarks/same_results/record.py --help": "",
    "python benchmarks/tokenising.py --help": "",
    "python examples/plan_cluster.py": "",
}
"""Commands that run here, and what is put behind them to make them small."""

SLOW = {
    "jhpt profile gpt2-124m --model.vocab_size 50257": "--quick " + flags(MEASURED),
    "jhpt profile --cluster-out cluster.yaml": "--quick " + flags(MEASURED),
    "jhpt train gpt2-124m --data.path 'corpus/*.txt' --data.tokenizer tokenizer.json": flags(
        STEPS | WORDS | {"parallel.data": 1}
    ),
    "jhpt train gpt2-124m --data.path '[corpus/a.jsonl, \"corpus/*.txt\"]' --data.tokenizer tokenizer.json": flags(
        STEPS | WORDS | {"parallel.data": 1}
    ),
    "JAX_NUM_CPU_DEVICES=8 jhpt train --parallel.pipe 2 --parallel.tensor 2 --parallel.micro_batches 4 "
    "--parallel.zero 1": flags(STEPS | ON_CORPUS | {"model.num_layers": 2}),
    "jhpt train gpt2-124m --data.tokenizer tokenizer.json --optimizer.weights bfloat16_kahan "
    "--optimizer.moments int8": TINY,
    "jhpt train gpt2-124m --data.path corpus --data.tokenizer words.json": flags(STEPS | {"parallel.data": 1}),
    "jhpt train bert-base --data.path corpus --data.tokenizer pieces.json": flags(STEPS | {"parallel.data": 1}),
    "jhpt train vgg16-tiny --out runs/vgg": "--train.steps 2 --parallel.data 1 --evaluation.batches 1",
    "jhpt train two-sources.yaml": flags(STEPS | ONE_DEVICE),
    "jhpt train --optimizer.name muon --optimizer.schedule wsd": TINY,
    "jhpt train bert-tiny --train.steps 2000": TINY,
    "jhpt train bert-tiny --model.objective mlm+nsp --out runs/pairs": TINY,
    "jhpt train gpt2-124m --data.packing documents": TINY,
    "python examples/train_bert.py": "",
    "python examples/train_gpt.py": "",
    "jhpt bench NAME [--quick] [--json FILE]": "--quick",
    "jhpt bench comms": "--quick",
    "jhpt bench convergence": "--quick",
    "jhpt bench faults": "--quick",
    "jhpt bench hybrid": "--quick",
    "jhpt bench hybrid --only mixed --launches 1": "--quick",
    "jhpt bench memory": "--quick",
    "jhpt bench memory --only choices": "--quick",
    "jhpt bench planner": "--quick",
    "jhpt bench precision": "--quick",
    "jhpt bench train": "--quick",
}
"""Commands that run under `-m exhaustive` with what is put behind them; the quick suite parses them as they are."""

PARSED = {
    "jhpt train --parallel auto --parallel.space general --parallel.cluster mixed.yaml": "devices of two kinds; "
    "tests/training/test_kinds.py trains on such a cluster",
    "jhpt launch --processes 2 -- train my.yaml --out runs/mine": "two processes; tests/test_launch.py starts them",
    "jhpt train --out runs/tiny --resume-step 500": "a run of 500 steps; tests/training/test_saving.py goes back",
    "jhpt train --out runs/tiny --resume-step 500 --optimizer.learning_rate 1e-3": "the same; "
    "tests/training/test_new_learning_rate.py changes it",
    "jhpt plan": "a name in a sentence",
    "jhpt profile": "a name in a sentence",
    "pip install -e '.[lm-eval]'": "the harness and PyTorch",
    "jhpt plan --compile": "the extra deviceless; `pytest -m deviceless` compiles",
    "jhpt plan gpt-6.7b --cluster h100x8x1 --compile": "the extra deviceless; `pytest -m deviceless` compiles",
    "jhpt train --plan plan.json": "a name in a sentence; with a configuration it runs",
    "jhpt train gpt2-124m --data.path corpus --data.tokenizer gpt2": "the Hugging Face hub",
    "jhpt train llama-8b --data.tokenizer tokenizer.json --model.matmul_dtype float8": "a GPU with float8",
    "jhpt bench convergence --out FOLDER": "finished cells",
    "pip install -e '.[cuda]'": "an NVIDIA GPU",
    "pip list --format=freeze": "the GPU machine",
    "pytest -m exhaustive tests/sharding": "hours",
    "jhpt bench memory --only bytes": "the extra deviceless; it compiles for half an hour",
    "jhpt bench train --only gpt2-124m": "an NVIDIA GPU",
    "jhpt bench kernels --quick": "an NVIDIA GPU",
    "pytest -m gpu": "an NVIDIA GPU",
    "python3.12 -m benchmarks.gpu.prepare": "downloads for the GPU machine",
    "python3 -m benchmarks.gpu.run STAGE": "an NVIDIA GPU; tests/benchmarks/test_gpu_kit.py runs a stage on a CPU",
}
"""Commands that need what is not here, and what: they are parsed, and all their settings are read."""

CI = {
    "python3 -m venv .venv": '"$1" -m venv "$2"',
    "source .venv/bin/activate": "source .venv/bin/activate",
    "pip install -q -e '.[test]'": 'pip install --quiet --disable-pip-version-check --editable ".[$3]"',
    "pip install -e '.[dev]'": 'environment "$python" .venv dev',
    "pip install -e '.[interop-test]'": 'environment "$python" .venv-interop interop-test torch==2.13.0',
    "pytest -m interop": ".venv-interop/bin/pytest -m interop tests/huggingface",
    "pytest -n 0 -m slurm": ".venv/bin/pytest -n 0 -m slurm tests/slurm",
    "pip install -e '.[deviceless]'": 'environment "$python" .venv-deviceless test,deviceless',
    ".ci/run": "#!/usr/bin/env bash",
    "pytest": "pytest",
    "pytest -m deviceless": '.venv-deviceless/bin/pytest -m "deviceless and not exhaustive"',
    "ruff check .": "ruff check .",
    "ruff format .": "ruff format --check .",
    "mypy": "mypy",
    "lint-imports": "lint-imports",
}
"""Commands that `.ci/run` runs, and the line, or a part of it, that does."""
