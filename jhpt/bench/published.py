"""`jhpt bench predict --published FILE.csv`: predicted speeds compared with those that others have measured.

Every row of the file is one training run: a model, a plan, the devices, and the tokens/s that its source states.  The
run is priced for that very plan, without any device: its model as a configuration, its plan by hand, on the catalogue's
cluster with the row's links.  Only the columns of `PublishedRun` are read; others may tell where a figure comes from.

    error of a run        |predicted / measured - 1|, of the seconds of a step
    bias of a device      the median of predicted / measured - 1
    rank accuracy         of the pairs of plans of one `group` whose measured speeds differ by 3 % or more, the share
                          whose faster plan is predicted to be the faster one
    coverage              the share of runs whose seconds lie in the range of their prediction (`planner.cost.ranges`)

What the framework's own program does is told apart from the hardware (`jhpt.bench.frameworks`).

Runs whose source gives a spread of 40 % (`fit` is noisy) are priced, and count nowhere.
"""

import csv
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from jhpt.bench.frameworks import framework_named
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json
from jhpt.core.calibration import Figures, figures
from jhpt.core.catalogue import cluster_named, device_named
from jhpt.core.cluster import Cluster
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.framework import Framework
from jhpt.core.load import validate
from jhpt.core.plan import Chunk, Plan, Run, Stage
from jhpt.core.plan_by_hand import plan_by_hand
from jhpt.core.section import NonNegative, Positive, Section
from jhpt.core.text_files import bounded_lines, check_file
from jhpt.planner.cost.estimate import evaluate
from jhpt.planner.cost.ranges import Case, architecture_of, parallelism, range_of
from jhpt.planner.profiles.analytic import analytic_profile

DTYPE = "bfloat16"
"""The catalogue gives V100, which has none, the rate of float16."""

MARGIN = 0.03
"""Plans whose measured speeds differ by less have no order that could be right."""

SEVERAL = 3
"""Runs that a device needs at least for its bias to count."""

NODE = 8
"""Devices of a usual node; a DGX-2 has twice as many, and a port for every two."""

BERT_POSITIONS = {128: 20, 512: 80}
"""Predicted positions by sequence length, as BERT's published code masks them; other lengths: the default share."""

PRICED_AS = {"gpipe": "gpipe", "1f1b": "eager-1f1b", "interleaved": "1f1b"}
"""The schedule of a published run -> the one that it is priced as.  By hand several chunks make 1f1b interleaved.  With
one chunk transfers run beside passes; the constants of the calibration were fitted with these ticks."""

Number = Field(ge=1)


class PublishedRun(Section):
    """A row of the file; an empty cell is an absent value."""

    id: str = Field(description="name; it ends in -compile where torch.compile fused the kernels of a framework")
    source: str = Field(description="repository and path, or paper")
    framework: str = Field("", description="what ran it (`jhpt.bench.frameworks`)")
    gpu: str = Field(description="kind of device in the catalogue")
    gpus: int = Number
    gpus_per_node: int = Number
    net_gbit: Positive | None = Field(None, description="Gbit/s of a port of the network; absent: the catalogue's")
    net_ports: int | None = Field(None, ge=1, description="ports of a node, given together with net_gbit")
    mem_bw_tb: Positive | None = Field(None, description="TB/s of the device's memory; absent: the catalogue's")
    power_w: Positive | None = Field(None, description="power limit of the device; absent: the kind's")
    family: Literal["gpt", "bert"]
    layers: int = Number
    width: int = Number
    heads: int = Number
    kv_heads: int = Number
    ffn: int = Number
    vocab: int = Number
    tied: bool
    positions: Literal["learned", "rotary"] = "learned"
    norm: str = "layernorm"
    activation: str = "gelu"
    dropout: NonNegative = 0.0
    attention: Literal["flash", "flash1", "plain"]
    seq: int = Number
    global_batch: int = Field(ge=1, description="sequences of a step")
    micro_batch: int = Field(ge=1, description="sequences of a data rank and micro-batch")
    data: int = Number
    tensor: int = Number
    pipe: int = Number
    chunks: int = Number
    schedule: Literal["gpipe", "1f1b", "interleaved"]
    zero: Literal["0", "1", "3"]
    sequence: bool
    recompute: str = Field(pattern=r"^(none|full|share:0?\.\d+)$", description="share:x lies between none and full")
    stage_blocks: str | None = Field(
        None, pattern=r"^[1-9]\d*( [1-9]\d*)*$", description="blocks of every stage, where they are not even"
    )
    tokens_per_gpu: Positive = Field(description="measured tokens/s of a device")
    group: str = Field("", description="plans of one model on the same devices, for ranks")
    fit: Literal["exact", "approx", "noisy"] = "exact"

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return self.global_batch * self.seq / self.gpus / self.tokens_per_gpu

    @property
    def parameters(self) -> float:
        """Parameters of the model's matrices and table."""
        kv, gates = self.width * self.kv_heads / self.heads, 2 if self.activation == "swiglu" else 1
        block = 2 * self.width * (self.width + kv) + (1 + gates) * self.width * self.ffn
        return self.layers * block + self.vocab * self.width * (2 - self.tied)

    @property
    def kinds(self) -> str:
        """The kinds of parallelism, as `jhpt.planner.cost.ranges.parallelism` names those of a plan."""
        return parallelism(self.data, self.tensor, self.pipe, int(self.zero))

    @property
    def recomputed(self) -> tuple[tuple[str, float], ...]:
        """(setting of `memory.recompute`, weight): which plans the run lies between."""
        share = {"none": 0.0, "full": 1.0}.get(self.recompute)
        share = float(self.recompute.partition(":")[2]) if share is None else share
        return tuple((name, weight) for name, weight in (("none", 1 - share), ("full", share)) if weight)


def read_runs(path: str | Path) -> tuple[PublishedRun, ...]:
    """The runs of a CSV file with a header.

    Raises:
      InputError: an unreadable file, a missing column, or a row that is no run; the message names every fault.
    """
    try:
        check_file(path)
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(bounded_lines(file))
            rows, columns = list(reader), set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--published {path} cannot be read: {error}") from None
    fields = PublishedRun.model_fields
    if missing := [name for name, field in fields.items() if field.is_required() and name not in columns]:
        raise InputError(f"--published {path} lacks the columns {', '.join(missing)}; its first line has to name them")
    if not rows:
        raise InputError(f"--published {path} has no runs below its first line")
    runs, faults = [], []
    for line, row in enumerate(rows, 2):
        try:
            runs.append(PublishedRun.model_validate({name: row[name] for name in fields if row.get(name)}))
        except ValidationError as error:
            faults += [f"line {line}, {'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    if faults:
        raise InputError(f"--published {path} has rows that are no runs:\n" + "\n".join(faults))
    return tuple(runs)


def config_of(run: PublishedRun, recompute: str) -> Config:
    """The run's model, batch and plan."""
    model: dict[str, Any] = {
        "family": run.family,
        "vocab_size": run.vocab,
        "num_layers": run.layers,
        "d_model": run.width,
        "num_heads": run.heads,
        "d_ff": run.ffn,
        "max_length": run.seq,
        "dropout": run.dropout,
        "attention": "xla" if run.attention == "plain" else "auto",
    }
    data: dict[str, Any] = {"sequence_length": run.seq, "batch_size": run.global_batch}
    if run.family == "gpt":
        model |= {
            "num_kv_heads": run.kv_heads,
            "positions": run.positions,
            "norm": run.norm,
            "activation": run.activation,
            "tied": run.tied,
            "bias": run.norm == "layernorm",
        }
    elif run.seq in BERT_POSITIONS:
        data["mask_fraction"] = BERT_POSITIONS[run.seq] / (run.seq - 2)
    micro_batches, rest = divmod(run.global_batch, run.data * run.micro_batch)
    if rest:
        raise InputError(f"{run.global_batch} sequences are not micro-batches of {run.data} x {run.micro_batch}")
    parallel = {
        "data": run.data,
        "tensor": run.tensor,
        "pipe": run.pipe,
        "zero": int(run.zero),
        "micro_batches": micro_batches,
        "schedule": PRICED_AS[run.schedule],
        "chunks": run.chunks,
        "sequence": run.sequence,
    }
    name = "".join(run.id.split())
    return validate(
        {"name": name, "model": model, "data": data, "parallel": parallel, "memory": {"recompute": recompute}}
    )


def cluster_of(run: PublishedRun, fitted: Figures) -> Cluster:
    """The catalogue's nodes, with the run's number of devices, links, power limit and memory bandwidth."""
    if run.gpus % run.gpus_per_node:
        raise InputError(f"{run.gpus} devices do not fill nodes of {run.gpus_per_node}")
    base = cluster_named(f"{run.gpu}x{min(run.gpus_per_node, NODE)}x1", fitted)
    node, network = base.nodes[0], base.network
    if run.net_gbit is not None and run.net_ports is not None:
        network = network.model_copy(update={"bandwidth": run.net_gbit * 1e9 / 8, "ports": run.net_ports})
    elif run.net_gbit is not None or run.net_ports is not None:
        raise InputError("net_gbit and net_ports belong together: give both or neither")
    elif run.gpus_per_node > NODE:
        network = network.model_copy(update={"ports": run.gpus_per_node // 2})
    device = device_named(run.gpu, power=run.power_w, fitted=fitted)
    if run.mem_bw_tb is not None:
        device = device.model_copy(update={"memory_bandwidth": run.mem_bw_tb * 1e12})
    changes = {"devices": run.gpus_per_node, "count": run.gpus // run.gpus_per_node, "device": device}
    return base.model_copy(update={"name": run.id, "nodes": (node.model_copy(update=changes),), "network": network})


def plan_of(run: PublishedRun, config: Config) -> Plan:
    """The plan by hand; where the run says how many blocks every stage holds, with those."""
    plan = plan_by_hand(config, run.gpus)
    if run.stage_blocks is None:
        return plan
    if run.chunks > 1:
        raise InputError("stage_blocks say nothing about chunks; leave them out of an interleaved run")
    counts = [int(count) for count in run.stage_blocks.split()]
    if sum(counts) != run.layers or len(counts) != len(plan.stages):
        raise InputError(f"stage_blocks={run.stage_blocks} are not {run.layers} blocks of {len(plan.stages)} stages")
    edges = [0, *(1 + count for count in itertools.accumulate(counts[:-1])), run.layers + 2]
    stages = tuple(
        Stage(
            device=stage.device,
            devices=stage.devices,
            chunks=(Chunk(first=first, runs=(Run(layers=stop - first, tensor=run.tensor),)),),
        )
        for stage, first, stop in zip(plan.stages, edges[:-1], edges[1:], strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def framework_of(run: PublishedRun, fitted: Figures) -> Framework:
    """The program that ran it."""
    compiled = run.id.endswith("-compile")
    return framework_named(run.framework, compiled, fitted, flash1=run.attention == "flash1")


def predicted_seconds(run: PublishedRun, fitted: Figures | None = None) -> float:
    """Predicted seconds of the run's step, in the framework that ran it.

    Args:
      fitted: what hardware reaches; None: the figures that come with jhpt.

    Raises:
      InputError: jhpt cannot express the run.
    """
    fitted = fitted or figures()
    cluster, seconds = cluster_of(run, fitted), 0.0
    framework = framework_of(run, fitted)
    for recompute, weight in run.recomputed:
        config = config_of(run, recompute)
        profile = analytic_profile(config, cluster.nodes[0].device, DTYPE, framework)
        seconds += weight * evaluate(plan_of(run, config), profile, cluster).seconds
    return seconds


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A run and the predicted seconds of its step."""

    run: PublishedRun
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted / measured seconds of a step."""
        return self.predicted / self.run.measured

    @property
    def range(self) -> tuple[float, float] | None:
        """Seconds between which eight of ten runs like this one lie; None where no run is like it."""
        run = self.run
        case = Case(architecture=architecture_of(run.gpu), devices=run.gpus, parameters=run.parameters, kinds=run.kinds)
        if (factors := range_of(case)) is None:
            return None
        return factors.low * self.predicted, factors.high * self.predicted

    @property
    def covered(self) -> bool:
        """Whether the measured seconds lie in the range.  A run that none is like does not: it has no range."""
        found = self.range
        return found is not None and found[0] <= self.run.measured <= found[1]


def price_runs(runs: Sequence[PublishedRun]) -> tuple[tuple[PricedRun, ...], dict[str, str]]:
    """(the runs with their predictions, why others cannot be priced by their id)."""
    priced, refused = [], {}
    for run in runs:
        try:
            priced.append(PricedRun(run=run, predicted=predicted_seconds(run)))
        except InputError as error:
            refused[run.id] = str(error)
    return tuple(priced), refused


def pairs_in_order(priced: Sequence[PricedRun]) -> tuple[int, int]:
    """(pairs whose predicted order is the measured one, all pairs at least `MARGIN` apart) within groups."""
    right = total = 0
    for one, other in itertools.combinations(priced, 2):
        measured = one.run.tokens_per_gpu / other.run.tokens_per_gpu
        if one.run.group and one.run.group == other.run.group and abs(measured - 1) >= MARGIN:
            total += 1
            right += (measured > 1) == (_speed(one) > _speed(other))
    return right, total


def _speed(one: PricedRun) -> float:
    """Predicted tokens/s of a device."""
    return one.run.tokens_per_gpu / one.ratio


def claims_of(priced: Sequence[PricedRun], setup: str) -> dict[str, Claim]:
    """The claims of this benchmark; those for which the file has no runs are left out."""
    sure = [one for one in priced if one.run.fit != "noisy"]
    if not sure:
        return {}
    errors = [abs(one.ratio - 1) for one in sure]
    unit = "|predicted / measured - 1| of a step's seconds"
    claims = {
        "published_error_median": Claim(value=statistics.median(errors), unit=unit, setup=setup),
        "published_error_p90": Claim(value=float(np.quantile(errors, 0.9)), unit=unit, setup=setup),
    }
    claims["published_coverage"] = Claim(
        value=statistics.fmean(one.covered for one in sure), unit="share of runs inside their range", setup=setup
    )
    biases = {gpu: statistics.median(ratios) - 1 for gpu, ratios in _by_device(sure).items() if len(ratios) >= SEVERAL}
    if biases:
        worst = max(biases, key=lambda gpu: abs(biases[gpu]))
        claims["published_bias_max"] = Claim(
            value=abs(biases[worst]),
            unit="|median of predicted / measured - 1|, of the device where it is largest",
            setup=f"{setup}; {worst}",
        )
    right, pairs = pairs_in_order(sure)
    if pairs:
        claims["published_rank_accuracy"] = Claim(
            value=right / pairs, unit="share of pairs in the right order", setup=f"{setup}; {right} of {pairs} pairs"
        )
    return claims


def _by_device(priced: Sequence[PricedRun]) -> Mapping[str, list[float]]:
    """Ratios by kind of device."""
    return {gpu: [one.ratio for one in priced if one.run.gpu == gpu] for gpu in sorted({one.run.gpu for one in priced})}


def run_published(path: str, *, json_path: str | None) -> int:
    """Prices all runs of a file, prints what became of them; returns the exit status.

    Raises:
      InputError: the file holds no runs, or none that jhpt can express.
    """
    if json_path:
        check_writable(json_path)
    runs = read_runs(path)
    priced, refused = price_runs(runs)
    for name, reason in refused.items():
        print(f"cannot be priced: {name}: {reason}")
    if not priced:
        raise InputError(f"--published {path}: jhpt can express none of its {len(runs)} runs")
    claims = claims_of(priced, f"{len(priced)} of {len(runs)} runs of {Path(path).name}, datasheets of the catalogue")
    _print_devices(priced)
    print_claims(claims)
    if json_path:
        rows = [_row(one) for one in priced] + [{"id": name, "refused": reason} for name, reason in refused.items()]
        write_json(json_path, "predict", {"published": Path(path).name}, rows, claims, device=False)
    return 0


def _row(one: PricedRun) -> dict[str, Any]:
    run = one.run
    return {
        "id": run.id,
        "source": run.source,
        "gpu": run.gpu,
        "gpus": run.gpus,
        "group": run.group,
        "fit": run.fit,
        "predicted_s": one.predicted,
        "measured_s": run.measured,
        "range_s": one.range,
        "ratio": one.ratio,
    }


def _print_devices(priced: Sequence[PricedRun]) -> None:
    lines = []
    for gpu, ratios in _by_device([one for one in priced if one.run.fit != "noisy"]).items():
        low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        lines.append((gpu, f"{len(ratios)}", f"{median:.2f}", f"{low:.2f} - {high:.2f}"))
    columns = ("device", "runs", "median", "10th - 90th percentile")
    print_table("predicted / measured seconds of a step", columns, lines)
