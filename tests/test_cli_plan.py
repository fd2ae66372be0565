"""`jhpt plan` and `jhpt.plan`: what they print and write, what they refuse, and that they need no jax."""

import inspect
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import jhpt
from jhpt import cli
from jhpt.core.cluster_file import find_cluster
from jhpt.core.config import Compression
from jhpt.core.folders import cache_folder
from jhpt.core.load import load_config
from jhpt.planner.api import Options
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.planner.profiles.networks import TABLES
from tests.test_cli import status_of, tree

SMALL = "gpt-tiny --cluster a100x2x1 --batch 4"


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    """A working folder, and a cache in which nothing has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def plan(arguments: str) -> int:
    return status_of(["plan", *shlex.split(arguments)])


def test_the_table_has_every_stage_and_the_plan_is_saved(capsys):
    assert plan(f"{SMALL} --out plan.json --svg step.svg") == 0
    saved, out = jhpt.Plan.load("plan.json"), capsys.readouterr().out
    for position, stage in enumerate(saved.stages):
        assert f"\n{position}      {stage.device}" in out
    for words in ("optimal", "data parallel", "best 3-D grid", "milliseconds", "capacity"):
        assert words in out
    assert ElementTree.parse("step.svg").getroot().tag.endswith("svg")


def test_json_is_all_there_is_on_stdout_and_holds_the_plan(tmp_path, capsys):
    assert plan(f"{SMALL} --json --out plan.json") == 0
    out, error = capsys.readouterr()
    assert error == ""
    (tmp_path / "copy.json").write_text(json.dumps(json.loads(out)["plan"]))
    assert jhpt.Plan.load(tmp_path / "copy.json") == jhpt.Plan.load("plan.json")


def test_the_answer_begins_with_what_one_rents_for(capsys):
    assert plan(f"{SMALL} --tokens 260B --price 2.5") == 0
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    for words in ("tokens/s per GPU", "MFU", "(causal)", "per step"):
        assert words in first
    for words in ("260 B tokens", "days", "GPU-hours", "cost"):
        assert words in second
    assert "all 2 GPUs" in third and "2.5 per GPU-hour" in third
    assert plan(f"{SMALL} --tokens 260B --price 2.5 --json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["rent"]["cost"] == pytest.approx(2.5 * tree["rent"]["device_hours"])
    assert tree["tokens_per_second_per_device"] == tree["tokens_per_second"] / 2


def test_clusters_are_compared(capsys):
    assert plan("gpt-tiny --clusters a100x2x1,h100x2x1 --batch 4 --price a100=1,h100=3 --json") == 0
    compared = json.loads(capsys.readouterr().out)["clusters"]
    assert plan(f"{SMALL} --price 1 --json") == 0
    alone = json.loads(capsys.readouterr().out)
    (same,) = (each for each in compared if each["cluster"] == "a100x2x1")
    for key in ("plan", "seconds", "mfu", "tokens_per_second", "rent"):
        assert same[key] == alone[key]
    costs = [each["rent"]["cost_per_billion_tokens"] for each in compared]
    assert costs == sorted(costs)
    assert plan("vgg16 --clusters a100x2x1,h100x2x1 --batch 4 --micro-batches 1") == 0
    assert "samples/s per GPU" in capsys.readouterr().out


def test_the_catalogue_is_listed(capsys):
    assert plan("--list-clusters") == 0
    assert "gb200" in capsys.readouterr().out
    assert plan("--list-clusters --json") == 0
    assert "GPU" not in json.loads(capsys.readouterr().out)["kinds"]["h100"]["device"]["name"]


def test_a_dtype_by_its_usual_name_in_a_cluster_file(tmp_path, capsys):
    """Peaks under names that programs do not have were a traceback."""
    (tmp_path / "here" / "card.yaml").write_text(
        "device: {name: card, peak_flops: {bf16: 1e14}, memory: 20GB, memory_bandwidth: 1TB/s}\n"
        "nodes: 1 x 2\ninside: pcie4\nhost: pcie4\nhost_memory: 100GB\n"
    )
    assert plan("gpt-tiny --cluster card.yaml --batch 4 --json") == 0
    assert json.loads(capsys.readouterr().out)["model"]["dtype"] == "bfloat16"
    assert plan("vgg16 --cluster card.yaml --batch 4 --micro-batches 1") == 0
    assert plan("gpt-tiny --cluster card.yaml --batch 4 --model.dtype float32") == 2
    assert "card has no rate for dtype=float32; use bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--parallel.compression auto", "--parallel.compression.auto true"])
def test_compression_is_the_planners_where_it_is_told(words, capsys):
    """Two devices that have to share a model, on a link of 1 MB/s."""
    cluster = find_cluster("a100x2x1")
    node = cluster.nodes[0]
    slow = {"inside": node.inside.model_copy(update={"bandwidth": 1e6, "measured": None})}
    cluster.model_copy(update={"nodes": (node.model_copy(update=slow),)}).save("slow.json")
    options = "gpt-tiny --cluster slow.json --batch 1 --schedule 1f1b --micro-batches 1 --json"
    assert plan(f"{options} {words}") == 0
    chosen = json.loads(capsys.readouterr().out)["plan"]
    assert plan(f"{options} --parallel.compression off") == 0
    plain = json.loads(capsys.readouterr().out)["plan"]
    assert jhpt.Plan.model_validate(plain).compression == Compression()
    assert chosen["seconds"] <= plain["seconds"]
    assert plan(f"{options} --parallel.compression.bits 4") == 0
    given = jhpt.Plan.model_validate(json.loads(capsys.readouterr().out)["plan"])
    assert given.compression == (Compression(bits=4) if given.degrees[-1] > 1 else Compression())


@pytest.mark.parametrize("name", TABLES)
def test_classic_networks_have_no_settings_but_plans(name, capsys):
    assert plan(f"{name} --cluster v100x2x1 --batch 4 --micro-batches 1") == 0
    assert "samples/s" in capsys.readouterr().out
    assert name in cli.USAGE


def test_python_and_the_command_line_agree(capsys):
    assert plan(f"{SMALL} --out plan.json --model.num_layers 3") == 0
    same = jhpt.plan("gpt-tiny", cluster="a100x2x1", batch=4, overrides={"model.num_layers": 3})
    assert same == jhpt.Plan.load("plan.json")
    assert jhpt.plan({"model": {"num_layers": 3}}, cluster=find_cluster("a100x2x1"), batch=4) == same
    assert jhpt.plan(load_config(None, {"model.num_layers": 3}), cluster="a100x2x1", batch=4) == same


def test_the_request_is_obeyed():
    plan = jhpt.plan("gpt-tiny", cluster="a100x2x1", batch=8, micro_batches=4, schedule="gpipe")
    assert (plan.batch, plan.micro_batches) == (8, 4)
    assert plan.schedule == "gpipe" or len(plan.stages) == 1
    assert jhpt.plan("gpt-tiny", cluster="a100x2x1", batch=4, space="general").space == "general"


def test_unknown_arguments_are_refused_by_name():
    with pytest.raises(TypeError, match="'buget'; did you mean budget"):
        jhpt.plan("gpt-tiny", cluster="a100x2x1", buget="1GiB")
    with pytest.raises(TypeError) as error:
        jhpt.plan("gpt-tiny", cluster="a100x2x1", micro_batch=2, xyz=None)
    first, second = str(error.value).splitlines()
    assert first.endswith("'micro_batch'; did you mean micro_batches?")
    assert "'xyz'; use cluster" in second and "overrides" in second


def test_every_argument_is_documented():
    arguments = re.findall(r"^  (\w+): ", inspect.getdoc(jhpt.plan).split("Raises:")[0], re.MULTILINE)
    assert arguments == ["config", *Options.__annotations__]


def test_a_smaller_budget_is_never_faster():
    seconds = [jhpt.plan("gpt-tiny", cluster="a100x1x1", batch=32, budget=b).seconds for b in ("1GiB", "30MiB")]
    assert seconds[0] <= seconds[1]


def test_a_profile_takes_the_place_of_a_configuration(tmp_path, capsys):
    cluster = find_cluster("a100x2x1")
    analytic_profile(load_config("gpt-tiny"), cluster.nodes[0].device).save("own.json")
    assert plan("--profile own.json --cluster a100x2x1 --batch 4 --out plan.json") == 0
    assert jhpt.Plan.load("plan.json").stages == jhpt.plan("gpt-tiny", cluster=cluster, batch=4).stages
    assert plan("gpt-tiny --profile own.json --cluster a100x2x1 --batch 4") == 0


def test_what_was_measured_on_this_machine_is_used(monkeypatch, capsys):
    monkeypatch.setattr("platform.node", lambda: "here")
    cluster = find_cluster("a100x2x1")
    for name, host in (("one", "elsewhere"), ("two", "here")):
        folder = cache_folder() / "clusters" / name
        folder.mkdir(parents=True)
        cluster.model_copy(update={"name": f"{host}: 2 x A100"}).save(folder / "cluster.json")
    config, device = load_config("gpt-tiny"), cluster.nodes[0].device
    for preset in ("gpt-tiny", "bert-tiny"):
        folder = cache_folder() / "profiles" / preset
        folder.mkdir(parents=True)
        profile = analytic_profile(load_config(preset), device)
        profile.model_copy(update={"source": f"measured: {preset}"}).save(folder / "profile.json")
    (cache_folder() / "profiles" / "old").mkdir()
    (cache_folder() / "profiles" / "old" / "profile.json").write_text("{}")
    assert plan("gpt-tiny --batch 4") == 0
    out = capsys.readouterr().out
    assert "here: 2 x A100" in out and "measured: gpt-tiny" in out
    changed = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 2})})
    assert jhpt.plan(changed, batch=4).model == "gpt-tiny"
    assert plan("gpt-tiny --batch 4 --model.num_layers 2") == 0
    assert "analytic" in capsys.readouterr().out


BAD = {
    "nothing measured": ("gpt-tiny", "jhpt profile", "--cluster", "h100x8x8"),
    "unknown cluster": ("gpt-tiny --cluster h10x8x8", "'h10'", "did you mean h100?", "networks: "),
    "no cluster's name": ("gpt-tiny --cluster h100", "'h100'", "KINDxDEVICESxNODES", "h100x8x4"),
    "missing cluster file": ("gpt-tiny --cluster no.json", "no.json", "cannot be read"),
    "unknown preset": ("gpt2-124 --cluster a100x2x1", "gpt2-124:", "did you mean gpt2-124m?", "bert-large", "vgg16"),
    "misspelt network": ("vgg61 --cluster a100x2x1", "did you mean vgg16?"),
    "network without a batch": ("vgg16 --cluster a100x2x1", "vgg16", "--batch 256"),
    "profile without a batch": ("--profile p.json --cluster a100x2x1", "--batch"),
    "settings of a network": ("vgg16 --cluster a100x2x1 --batch 4 --model.num_layers 3", "--model.num_layers"),
    "micro-batches": (f"{SMALL} --micro-batches 3", "micro_batches=3", "batch=4", "use 1, 2 or 4"),
    "micro-batches by their old name": (f"{SMALL} --microbatches 2", "--microbatches is now", "--micro-batches"),
    "no number of tokens": (f"{SMALL} --tokens lots", "tokens='lots'", "260B"),
    "no price": (f"{SMALL} --price cheap", "price=cheap", "2.5"),
    "price of another kind": (f"{SMALL} --price h100=2", "no price for a100", "a100=PRICE"),
    "tokens of a network": (
        "vgg16 --cluster a100x2x1 --batch 4 --tokens 1B",
        "vgg16",
        "no tokens",
        "leave out tokens",
    ),
    "one cluster and several": ("gpt-tiny --cluster a100x2x1 --clusters a100x2x1,h100x2x1", "--cluster is for one"),
    "files of several clusters": ("gpt-tiny --clusters a100x2x1,h100x2x1 --svg step.svg", "--svg is for one"),
    "compiling for several clusters": ("gpt-tiny --clusters a100x2x1,h100x2x1 --compile", "--compile is for one"),
    "one cluster to compare": ("gpt-tiny --clusters a100x2x1", "two or more", "h100x8x1,a100x8x2"),
    "an unknown cluster to compare": ("gpt-tiny --clusters a100x2x1,h10x2x1", "'h10'", "did you mean h100?"),
    "a profile for several kinds": ("--profile p.json --batch 4 --clusters a100x2x1,h100x2x1", "p.json", "one kind"),
    "nothing fits any": (
        "gpt-tiny --clusters v100x1x1,a10gx1x1 --batch 1 --budget 1MiB --memory.offload off",
        "fits no plan on v100x1x1",
        "fits no plan on a10gx1x1",
    ),
    "more than a list": ("gpt-tiny --list-clusters --batch 4", "leave out --batch and gpt-tiny", "only --json"),
    "no batch": ("gpt-tiny --cluster a100x2x1 --batch 0", "batch=0", "at least one"),
    "wrong type": ("gpt-tiny --cluster a100x2x1 --batch many", "many"),
    "wrong setting": (f"{SMALL} --model.d_model 3", "model.d_model=3"),
    "unknown space": (f"{SMALL} --space all", "'all'", "general"),
    "unknown schedule": (f"{SMALL} --schedule pipe", "'pipe'", "gpipe"),
    "interleaved stages of any size": (f"{SMALL} --space general --schedule interleaved", "interleaved", "space=spmd"),
    "nothing fits": (
        "gpt-6.7b --cluster v100x1x1 --batch 1",
        "fits no plan on v100x1x1",
        "1 device of 28.3 GiB, of which plans leave 3 % free",
        "it would fit with",
        "such devices",
    ),
    "nothing fits the budget": (f"{SMALL} --micro-batches 1 --budget 1MiB", "fits no plan", "it would fit with"),
    "budget without a number": (f"{SMALL} --budget lots", "budget='lots'", "24GiB"),
    "budget in another unit": (f"{SMALL} --budget 24GHz", "budget='24GHz'"),
    "budget of nothing": (f"{SMALL} --budget 0GiB", "budget='0GiB'"),
    "out in no folder": (
        f"{SMALL} --out no/plan.json",
        "--out no/plan.json",
        "cannot be written",
        "folder that exists",
    ),
    "out is a folder": (f"{SMALL} --out .", "--out .", "cannot be written"),
    "svg in no folder": (f"{SMALL} --svg no/step.svg", "--svg no/step.svg", "cannot be written"),
    "out where nobody can write": (f"{SMALL} --out /proc/jhpt.json", "--out /proc/jhpt.json", "cannot be written"),
    "compiling a network": ("vgg16 --cluster h100x8x1 --batch 8 --compile", "vgg16", "--compile", "GPT or BERT"),
    "compiling a profile": ("--profile p.json --cluster h100x8x1 --batch 8 --compile", "--compile", "GPT or BERT"),
    "compiling stages of any size": (f"{SMALL} --space general --compile", "space=general", "--space spmd"),
    "compiling for what has no bfloat16": ("gpt-tiny --cluster v100x2x1 --batch 4 --compile", "V100", "h100", "a100"),
    "missing profile": (f"{SMALL} --profile no.json", "no.json", "cannot be read"),
    "malformed profile": (f"{SMALL} --profile bad.json", "bad.json"),
    "profile of another model": (f"bert-tiny {SMALL[8:]} --profile p.json", "has 6 layers", "bert-tiny has 4"),
}


@pytest.fixture(scope="module")
def profile():
    return analytic_profile(load_config("gpt-tiny"), find_cluster("a100x2x1").nodes[0].device)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_refused(name, profile, tmp_path, capsys):
    (tmp_path / "here" / "bad.json").write_text('{"kinds": ')
    profile.save("p.json")
    before = tree(tmp_path)
    arguments, *words = BAD[name]
    has_file = any(flag in arguments for flag in ("--out", "--svg", "-clusters"))
    assert plan(arguments + ("" if has_file else " --out plan.json")) == 2
    out, error = capsys.readouterr()
    for word in words:
        assert word in error, error
    assert (out, "Traceback" in error) == ("", False)
    assert tree(tmp_path) == before


def test_planning_imports_no_jax(tmp_path):
    program = """
import contextlib, io, sys
import jhpt, jhpt.cli

with contextlib.redirect_stdout(io.StringIO()):
    assert jhpt.cli.main("plan gpt-tiny --cluster a100x2x1 --batch 4 --json --svg step.svg".split()) == 0
    assert jhpt.cli.main("plan gpt-tiny --cluster a100x2x1 --batch 4".split()) == 0
jhpt.plan("gpt-tiny", cluster="a100x2x1", batch=4)
print(sorted({"jax", "jaxlib", "flax", "optax"} & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_likely_mistake_is_named_beside_the_plan(capsys):
    assert plan(f"{SMALL} --model.vocab-size 50257") == 0
    assert "warning: model.vocab_size=50,257 is 196 times" in capsys.readouterr().err
