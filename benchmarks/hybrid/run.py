"""The benchmark: launches the hosts, prints the table and the claims.

Processes of JAX with Gloo, one for each host of `benchmarks.netlab`, half a core each.  One launch for each model
measures these competitors, in turn; `--launches` repeats all launches, each of which measures and plans anew:

    data parallel          a share of the rows on every host, one all-reduce of all gradients
    data parallel again    the same once more, to show how far two measurements of one plan lie apart (A/A)
    data parallel 16 bits  the same with gradients of 16 bits, which changes the numbers (`short_sums`)
    gpipe                  a stage of equally many layers on each host, GPipe's schedule; not for VGG, whose stages
                           would not be alike
    3-D grid               stages x tensor ranks x replicas of equal layers, the vocabulary divided over the tensor
                           ranks (Megatron-LM)
    one host               all rows on the first host, which needs no link
    spmd                   the plan of one program that the planner predicts to be the best, from layers and links
                           measured on the hosts before
    general                the same of plans with a program for each stage; not with `--quick`
    plan                   what `parallel: auto` trains with `space: both` and `trials: 4` (`jhpt.training.trials`): of
                           four plans, predicted to be the best, unlike ones first, and of those near the fastest, with
                           half and twice their number of micro-batches, the one that trials decide for

Baselines are tried before the rounds, with several numbers of micro-batches or shapes (`baselines`), and the fastest
one as measured enters the rounds; rows of kind "trial" have the samples, those of kind "nearby" the second part of the
plan's trial.

All entries are named in advance, whatever comes out of them: vgg at 100, 200, 500 and 2,000 Mbit/s; mlp, gpt, bert,
gpt2-like and bert-like at 100, 500 and 2,000.

Another launch has hosts with quotas of 1 : 1 : 0.5 : 0.5 (`benchmarks.hybrid.mixed`).

Unless a competitor says otherwise, all data are sent as float32.  No competitor may use ZeRO or recomputation: there is
enough memory, and Gloo's reduce-scatter is slower than its all-reduce.  XLA's CPU backend runs communication in line,
which plans take into account.
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from benchmarks.emulated.entries import Measured, column, grouped, in_every_launch, numbered, percent_apart
from benchmarks.emulated.launch import CPU, HOSTS, PLACE, launch
from benchmarks.hybrid.task import (
    BY_SPEED,
    CHUNKS,
    DATA_PARALLEL,
    GENERAL,
    GPIPE,
    GRID,
    MODELS,
    ONE_HOST,
    PLAN,
    SAMPLES,
    SHORT,
    SPMD,
    WIDTHS,
    Task,
    run_key,
)
from benchmarks.netlab import HostError, LabError, why_not
from jhpt.bench.ratios import ratio_unit, speed_claims
from jhpt.bench.results import Claim, check_writable, chosen, print_claims, print_table, write_json
from jhpt.core.plan import Plan

TRIAL_ROUNDS = 5
"""How often every candidate of a trial is timed: as often as `jhpt train` does (`jhpt.training.trials.TIMED`)."""

OFTEN = 3
"""How often the plan, data parallelism and GPipe run in every round.  With 8 runs of each, two measurements of data
parallelism lay 0.7 % apart on one machine, root mean square, and 2 % on two others (docs/reports/hybrid.md), too much
to tell 0.97 from 1."""

RATES = (100e6, 500e6, 2000e6)
"""Bits per second."""

RATES_OF = {"vgg": (100e6, 200e6, 500e6, 2000e6)}
"""Of models that have rates of their own."""

VERSUS = {
    "vs_data_parallel": DATA_PARALLEL,
    "vs_gpipe": GPIPE,
    "vs_3d_grid": GRID,
    "vs_one_host": ONE_HOST,
    "vs_data_parallel_16_bits": SHORT,
}
"""Claims about the plan against one competitor."""

MIXED, MIXED_RATES = "gpt", (200e6, 500e6, 2000e6)
"""The model that hosts of different quotas train, and their links."""

MIXED_CPU, SHARES = 0.6, (1.0, 1.0, 0.5, 0.5)
"""Cores of the faster of these hosts, and what each host has of them."""

MIXED_PLACE = "4 emulated hosts of 0.6, 0.6, 0.3 and 0.3 cores"

BUBBLE_CPU = 0.3
"""Cores of the hosts on which bubbles are measured: two of them leave 0.4 of the core that they share.  With 0.5 each,
a host computed faster while the other waited, and 1f1b seemed to idle less than it can (docs/reports/hybrid.md)."""

BUBBLE, MIXED_HOSTS = "bubble", "mixed"
PARTS = (BUBBLE, *MODELS, MIXED_HOSTS)
"""What can be measured alone: the bubble, each model, and the hosts of different quotas."""

LIMIT_S = 5400.0
"""Seconds for one launch; that of bert-like, the longest, has taken 52 minutes on the slowest machine so far."""

LAUNCHES = 2
"""How often everything is launched, unless an option says otherwise; with `--quick` once."""

BASELINES = (DATA_PARALLEL, GPIPE)
"""Of which the faster one counts as the best baseline."""


@dataclass(frozen=True, kw_only=True)
class Entry(Measured):
    """A model at one rate.  plans: of every competitor, in every launch."""

    model: str
    rate: float
    plans: Mapping[str, Sequence[Plan]]

    def __str__(self) -> str:
        return f"{self.model} at {self.rate / 1e6:.0f} Mbit/s"

    @property
    def mixed(self) -> bool:
        """Whether its hosts have different quotas."""
        return BY_SPEED in self.samples

    @property
    def planned(self) -> str:
        """The competitor that the others are compared with."""
        return BY_SPEED if self.mixed else PLAN

    @property
    def baseline(self) -> str:
        """The faster of data parallelism and GPipe; on mixed hosts the fastest equal split."""
        names = set(self.samples) - {BY_SPEED, SAMPLES} if self.mixed else set(self.samples) & set(BASELINES)
        return min(sorted(names), key=self.median)

    def ratios(self, other: str, ours: str) -> list[float]:
        """Seconds of one competitor / seconds of the other, of every launch; 1 where both ran the same program, whose
        two measurements are part of `spread`."""
        measured = super().ratios(other, ours)
        return [1.0 if self.alike(other, ours, launch) else ratio for launch, ratio in enumerate(measured)]

    @property
    def spread(self) -> float:
        """The largest relative difference, within a launch, between measurements of one program: of data parallelism
        twice, and of a plan that equals a baseline."""
        pairs = itertools.permutations(self.samples, 2)
        return max(
            ratio - 1
            for one, other in pairs
            for launch, ratio in enumerate(Measured.ratios(self, one, other))
            if self.alike(one, other, launch)
        )

    def alike(self, one: str, other: str, launch: int) -> bool:
        """Whether two competitors ran the same in a launch."""
        return run_key(one, self.plans[one][launch]) == run_key(other, self.plans[other][launch])


def entries(rows: Iterable[Mapping[str, Any]], predicted: str = "predicted_s") -> list[Entry]:
    """The entries of the table, from rows of steps.  A competitor that a launch did not have is left out.

    predicted: the column of predictions: for the machine during the steps, or `planned_s`, for that minutes before.
    """
    steps = (row for row in rows if row["row"] == "step")
    plans = TypeAdapter(list[Plan])
    groups = grouped(steps, lambda row: (row["model"], row["bits_per_s"]))
    return [
        Entry(
            model=model,
            rate=rate,
            samples=column(group, "competitor", "samples_s"),
            predicted=column(group, "competitor", predicted),
            plans={name: plans.validate_python(each) for name, each in column(group, "competitor", "plan").items()},
        )
        for (model, rate), group in ((key, in_every_launch(its, "competitor")) for key, its in groups.items())
    ]


def claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, Claim]:
    """The claims that follow from the rows."""
    made, everything = dict[str, Claim](), entries(rows)
    table = [entry for entry in everything if not entry.mixed]
    for name, other in VERSUS.items():
        ratios = {str(entry): entry.ratio(other, PLAN) for entry in table if other in entry.samples}
        made |= speed_claims(name, ratios, unit=ratio_unit(other, "the plan"), place=PLACE)
    ratios = {f"{entry} against {entry.baseline}": entry.ratio(entry.baseline, PLAN) for entry in table}
    made |= speed_claims("vs_best_baseline", ratios, unit=ratio_unit("the faster baseline", "the plan"), place=PLACE)
    made |= _spread_claims(table) | _error_claims(table, "") | general_claims(table) | mixed_claims(everything)
    if table and all("planned_s" in row for row in rows if row["row"] == "step"):
        made |= _error_claims([one for one in entries(rows, "planned_s") if not one.mixed], "_when_planned")
    return made | exchange_claims(rows) | bubble_claims(rows)


def _spread_claims(table: Sequence[Entry]) -> dict[str, Claim]:
    """How far measurements of the same lie apart: within a launch, and over launches."""
    if not table:
        return {}
    widest = max(table, key=lambda entry: entry.spread)
    unit = "relative, one competitor against itself"
    made = {"spread_max": Claim(value=widest.spread, unit=unit, setup=f"within a launch, {widest}, {PLACE}")}
    apart = {(str(entry), name): entry.apart(name) for entry in table if entry.launches > 1 for name in entry.samples}
    if apart:
        entry, name = max(apart, key=apart.__getitem__)
        setup = f"{table[0].launches} launches, {PLACE}"
        made["launches_apart_median"] = Claim(
            value=statistics.median(apart.values()), unit="largest median / smallest - 1", setup=setup
        )
        made["launches_apart_max"] = Claim(
            value=apart[entry, name], unit="largest median / smallest - 1", setup=f"{name}, {entry}, {setup}"
        )
    return made


def _error_claims(table: Sequence[Entry], when: str) -> dict[str, Claim]:
    """Prediction errors.  when: what their names say of the moment that predictions are for."""
    made = dict[str, Claim]()
    for name, competitors in (("", (*BASELINES, PLAN)), ("_baselines", BASELINES), ("_plan", (PLAN,))):
        errors = [
            abs(error) for entry in table for one in competitors if one in entry.samples for error in entry.errors(one)
        ]
        for statistic, value in (("median", statistics.median), ("max", max)) if errors else ():
            made[f"prediction_error{when}{name}_{statistic}"] = Claim(
                value=value(errors), unit="|predicted - measured| / measured", setup=f"{len(errors)} steps, {PLACE}"
            )
    return made


def general_claims(table: Sequence[Entry]) -> dict[str, Claim]:
    """The gain of a program per stage over the fastest plan of one program, also of one host, over all entries of VGG
    up to 500 Mbit/s, and the error of what was predicted for it."""
    found = [entry for entry in table if GENERAL in entry.samples]
    gains = dict[str, float]()
    for entry in found:
        if entry.model == "vgg" and entry.rate <= 500e6:
            others = entry.samples.keys() & {entry.baseline, GRID, ONE_HOST, SPMD}
            others |= {PLAN} if all(plan.space == "spmd" for plan in entry.plans[PLAN]) else set()
            best = min(sorted(others), key=entry.median)
            gains[f"{entry} against {best}"] = entry.ratio(best, GENERAL)
    made = speed_claims(
        "general_vs_spmd", gains, unit=ratio_unit("the best SPMD plan", "the general plan"), place=PLACE
    )
    errors = [abs(error) for entry in found for error in entry.errors(GENERAL)]
    for statistic, value in (("median", statistics.median), ("max", max)) if errors else ():
        made[f"prediction_error_general_{statistic}"] = Claim(
            value=value(errors), unit="|predicted - measured| / measured", setup=f"{len(errors)} steps, {PLACE}"
        )
    return made


def mixed_claims(table: Sequence[Entry]) -> dict[str, Claim]:
    """The gain of the plan by speed over the best equal split, that of samples by speed over data parallelism, and the
    largest prediction errors."""
    found = [entry for entry in table if entry.mixed]
    gains = {f"{entry} against {entry.baseline}": entry.ratio(entry.baseline, BY_SPEED) for entry in found}
    unit = ratio_unit("the best equal split", "the plan by speed")
    made = speed_claims("mixed_vs_equal", gains, unit=unit, place=MIXED_PLACE)
    dealt = [entry for entry in found if SAMPLES in entry.samples]
    gains = {f"{entry} against {DATA_PARALLEL}": entry.ratio(DATA_PARALLEL, SAMPLES) for entry in dealt}
    unit = ratio_unit(DATA_PARALLEL, SAMPLES)
    made |= speed_claims("samples_by_speed_vs_data_parallel", gains, unit=unit, place=MIXED_PLACE)
    for name, competitor, entries in (("mixed", BY_SPEED, found), ("samples_by_speed", SAMPLES, dealt)):
        if errors := [abs(error) for entry in entries for error in entry.errors(competitor)]:
            made[f"{name}_prediction_error_max"] = Claim(
                value=max(errors),
                unit="|predicted - measured| / measured",
                setup=f"the largest of {len(errors)}, {MIXED_PLACE}",
            )
    return made


def bubble_claims(rows: Iterable[Mapping[str, Any]]) -> dict[str, Claim]:
    """Idle shares of the pipelines, and the smallest possible ones: (S-1) / (vM + S-1), with v chunks per stage.

    None is given for zb-h1: (S-1) / (3 M + S-1) would need all gradients of weights to wait, and its memory holds
    the operands of some.
    """
    by_width = grouped((row for row in rows if row["row"] == "bubble"), lambda row: row.get("width", WIDTHS[0]))
    made: dict[str, Claim] = {}
    for width, of_width in by_width.items():
        suffix, setup = ("", "") if width == WIDTHS[0] else (f"_width_{width}", f", blocks of width {width}")
        made |= _idle_shares(grouped(of_width, lambda row: row["competitor"]), suffix, setup)
    return made


def _idle_shares(bubbles: Mapping[str, Sequence[Mapping[str, Any]]], suffix: str, widths: str) -> dict[str, Claim]:
    """Claims of one width.  bubbles: rows by competitor.  suffix, widths: what names and set-ups say of the width."""
    first = bubbles["1f1b"][0]
    stages, pieces = first["stages"], first["micro_batches"]
    place = f"{stages} emulated hosts of {first.get('cpu', CPU):g} cores"
    steps = {name: [seconds for row in launches for seconds in row["samples_s"]] for name, launches in bubbles.items()}
    of_blocks = f" of {first['blocks']} blocks" if "blocks" in first else ""
    setup = f"{stages} stages{of_blocks}, {pieces} micro-batches, links without a limit{widths}, {place}"
    idle: dict[str, float] = {
        name: statistics.median(1 - work / step for work, step in zip(steps["alone"], steps[name], strict=True))
        for name in ("1f1b", "zb-h1", "eager-1f1b", "interleaved")
        if name in steps
    }
    for name, chunks in (("1f1b", 1), ("interleaved", CHUNKS)):
        if name in steps:
            idle[f"{name}_ideal"] = (stages - 1) / (chunks * pieces + stages - 1)
    return {
        f"bubble_{name.replace('-', '_')}{suffix}": Claim(value=share, unit="idle share of a step", setup=setup)
        for name, share in idle.items()
    }


def exchange_claims(rows: Iterable[Mapping[str, Any]]) -> dict[str, Claim]:
    """How many times as long as one message two take that cross."""
    ratios = [
        statistics.median(row["samples_s"]["both ways"]) / statistics.median(row["samples_s"]["one way"])
        for row in rows
        if row["row"] == "exchange"
    ]
    if not ratios:
        return {}
    setup = f"median of {len(ratios)} launches, {PLACE}"
    return {
        "exchange_both_ways": Claim(value=statistics.median(ratios), unit="times as long as one message", setup=setup)
    }


def print_entries(table: Sequence[Entry]) -> None:
    """A line for every competitor."""
    columns = (
        "model",
        "Mbit/s",
        "competitor",
        "plan",
        "ms",
        "quartiles",
        "launches apart",
        "predicted",
        "error",
        "it / plan",
    )
    lines = []
    for entry in table:
        for name in entry.samples:
            low, _, high = statistics.quantiles(entry.rounds(name), n=4, method="inclusive")
            lines.append(
                (
                    entry.model,
                    f"{entry.rate / 1e6:.0f}",
                    name,
                    "; ".join(dict.fromkeys(in_words(plan) for plan in entry.plans[name])),
                    f"{entry.median(name) * 1e3:.0f}",
                    f"{low * 1e3:.0f} - {high * 1e3:.0f}",
                    percent_apart(entry, name),
                    f"{statistics.median(entry.predicted[name]) * 1e3:.0f}",
                    f"{100 * entry.error(name):+.0f} %",
                    f"{entry.ratio(name, entry.planned):.2f}",
                )
            )
    print_table(f"bench hybrid: {HOSTS} emulated hosts, ms of a step", columns, lines, words=4)


def in_words(plan: Plan) -> str:
    """`1f1b x8: 3 | 3 | 2 | 2`: stages between bars; `5 t1 + 3 t4`: five layers of tensor degree 1, three of 4;
    `6, samples 11/5`: by data rank."""
    plain = all(t == 1 for stage in plan.stages for chunk in stage.chunks for t in chunk.tensor)

    def words(stage: Any) -> str:
        return ", ".join(
            " + ".join(f"{run.layers}" if plain else f"{run.layers} t{run.tensor}" for run in chunk.runs)
            for chunk in stage.chunks
        )

    kind = plan.schedule if len(plan.stages) > 1 else "one stage"
    samples = f", samples {'/'.join(map(str, plan.stages[0].samples))}" if plan.stages[0].samples else ""
    return f"{kind} x{plan.micro_batches}: {' | '.join(words(stage) for stage in plan.stages)}{samples}"


def measure(
    models: Sequence[str], *, bubble: bool, rates: Sequence[float], quick: bool, mixed: bool = False
) -> list[dict[str, Any]]:
    """Rows of one launch.  mixed: on hosts of different quotas."""
    task = partial(
        Task,
        models=tuple(models),
        rates=tuple(rates),
        rounds=4 if quick else 12 if bubble else 8,
        often=1 if quick or mixed else OFTEN,
        trial_rounds=3 if quick else TRIAL_ROUNDS,
        layer_rounds=3 if quick else 5,
        link_rounds=3 if quick else 5,
        bubbles=(WIDTHS[:1] if quick else WIDTHS) if bubble else (),
        general=mixed or not quick,
    )
    cpu = MIXED_CPU if mixed else BUBBLE_CPU if bubble and not models else CPU
    shares = SHARES if mixed else None
    return launch("benchmarks.hybrid.worker", task, cpu=cpu, shares=shares, limit_s=LIMIT_S)


def _groups(parts: Sequence[str], rates: Sequence[float]) -> dict[str, Callable[..., list[dict[str, Any]]]]:
    """What is launched for each part."""
    groups: dict[str, Callable[..., list[dict[str, Any]]]] = {
        name: partial(measure, (name,), bubble=False, rates=RATES_OF.get(name, rates)) for name in MODELS
    }
    groups |= {
        BUBBLE: partial(measure, (), bubble=True, rates=rates),
        MIXED_HOSTS: partial(measure, (MIXED,), bubble=False, rates=MIXED_RATES, mixed=True),
    }
    return {part: groups[part] for part in parts}


def run(*, quick: bool, json_path: str | None, launches: int | None = None, only: Sequence[str] = ()) -> int:
    """Runs the benchmark; returns the exit status.

    Args:
      launches: how often; None: `LAUNCHES`, with quick once.
      only: these of `PARTS` alone; none: all, with quick mlp and the bubble.
    """
    if json_path:
        check_writable(json_path)
    if reason := why_not():
        print(f"jhpt bench hybrid: {reason}", file=sys.stderr)
        return 3
    rates = RATES[1:2] if quick else RATES
    groups = _groups(chosen(PARTS, only), rates)
    if quick and not only:
        groups = {"mlp, the bubble": partial(measure, ("mlp",), bubble=True, rates=rates)}
    launches = launches or (1 if quick else LAUNCHES)
    rows: list[dict[str, Any]] = []
    failure = None
    for number, (what, launched) in itertools.product(range(launches), groups.items()):
        print(f"launch {number + 1} of {launches}: measuring {what}", file=sys.stderr)
        try:
            rows += numbered(launched(quick=quick), number)
        except (HostError, LabError, OSError) as error:
            failure = f"{error}"
            print(f"jhpt bench hybrid: {error}", file=sys.stderr)
            break
    print_entries(entries(rows))
    made = claims(rows)
    print_claims(made)
    if json_path:
        settings = {
            "quick": quick,
            "launches": launches,
            "parts": list(groups),
            "hosts": HOSTS,
            "cpu": CPU,
            "bits_per_s": list(rates),
            "failure": failure,
        }
        write_json(json_path, "hybrid", settings, rows, made, device=False)
    return 1 if failure else 0
