"""The benchmark: launches the hosts, prints the table and the claims.

Processes of JAX with Gloo, one for each host of `benchmarks.netlab`, half a core each, at several link speeds.  One
launch for each model measures these competitors, in turn:

    data parallel          a share of the rows on every host, one all-reduce of all gradients
    data parallel again    the same once more, to show how far two measurements of one plan lie apart (A/A)
    gpipe                  a stage of equally many layers on each host, GPipe's schedule and the number of micro-batches
                           (up to 32) that is predicted to be its best; not for VGG, whose stages would not be alike
    plan                   the planner's plan (space=spmd), from layers and links measured on the hosts before
    general                where it is predicted to be faster: the planner's plan of space=general, a program per stage

Another launch has hosts with quotas of 1 : 1 : 0.5 : 0.5 (`benchmarks.hybrid.mixed`).

All data are sent as float32.  No competitor may use ZeRO or recomputation: there is enough memory, and Gloo's
reduce-scatter is slower than its all-reduce.  XLA's CPU backend runs communication in line, which plans take into
account.
"""

import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.emulated.launch import CPU, HOSTS, PLACE, launch
from benchmarks.hybrid.task import BY_SPEED, CHUNKS, MODELS, Task, run_key
from benchmarks.netlab import HostError, LabError, why_not
from jhpt.bench.results import Claim, check_writable, print_claims, print_table, write_json
from jhpt.core.plan import Plan

RATES = (100e6, 500e6, 2000e6)
"""Bits per second."""

RATES_OF = {"vgg": (100e6, 200e6, 500e6, 2000e6)}
"""Of models that have rates of their own."""

MIXED, MIXED_RATES = "gpt", (200e6, 500e6)
"""The model that hosts of different quotas train, and their links."""

MIXED_CPU, SHARES = 0.6, (1.0, 1.0, 0.5, 0.5)
"""Cores of the faster of these hosts, and what each host has of them."""

MIXED_PLACE = "4 emulated hosts of 0.6, 0.6, 0.3 and 0.3 cores"

LIMIT_S = 900.0
"""Seconds for one launch; it takes a third of that on two idle cores."""

UNIT = "time of the competitor / the plan"

AGAIN = "data parallel again"
BASELINES = ("data parallel", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model at one rate: measured and predicted seconds of each competitor's steps, and plans.

    A ratio is the median of the ratios of the rounds, so that it does not depend on how busy the machine is.
    """

    model: str
    rate: float
    samples: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]
    plans: Mapping[str, Plan]

    def __str__(self) -> str:
        return f"{self.model} at {self.rate / 1e6:.0f} Mbit/s"

    def ratio(self, one: str, other: str) -> float:
        """Time of one competitor / time of the other."""
        pairs = zip(self.samples[one], self.samples[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def median(self, name: str) -> float:
        """Typical seconds."""
        return statistics.median(self.samples[name])

    def error(self, name: str) -> float:
        """(predicted - measured) / measured."""
        return self.predicted[name] / self.median(name) - 1

    @property
    def mixed(self) -> bool:
        """Whether its hosts have different quotas."""
        return BY_SPEED in self.samples

    @property
    def planned(self) -> str:
        """The competitor that the others are compared with."""
        return BY_SPEED if self.mixed else "plan"

    @property
    def baseline(self) -> str:
        """The faster of data parallelism and GPipe; on mixed hosts the fastest equal split."""
        names = set(self.samples) - {BY_SPEED} if self.mixed else set(self.samples) & set(BASELINES)
        return min(sorted(names), key=self.median)

    @property
    def spread(self) -> float:
        """The largest relative difference between competitors that run the same: data parallelism twice, and a plan
        that equals a baseline."""
        pairs = itertools.permutations(self.samples, 2)
        return max(self.ratio(one, other) - 1 for one, other in pairs if self.alike(one, other))

    def alike(self, one: str, other: str) -> bool:
        """Whether two competitors run the same."""
        return run_key(self.plans[one]) == run_key(self.plans[other])


def entries(rows: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """The entries of the table, from rows of steps."""
    by_entry: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["row"] == "step":
            by_entry.setdefault((row["model"], row["bits_per_s"]), []).append(row)
    return [
        Entry(
            model=model,
            rate=rate,
            samples={row["competitor"]: row["samples_s"] for row in steps},
            predicted={row["competitor"]: row["predicted_s"] for row in steps},
            plans={row["competitor"]: Plan.model_validate(row["plan"]) for row in steps},
        )
        for (model, rate), steps in by_entry.items()
    ]


def claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, Claim]:
    """The claims that follow from the rows."""
    made, everything = dict[str, Claim](), entries(rows)
    table = [entry for entry in everything if not entry.mixed]
    for name, other in (("vs_data_parallel_max", "data parallel"), ("vs_gpipe_max", "gpipe")):
        measured = [entry for entry in table if other in entry.samples]
        if measured:
            best = max(measured, key=lambda entry: entry.ratio(other, "plan"))
            made[name] = Claim(value=best.ratio(other, "plan"), unit=UNIT, setup=f"{best}, {PLACE}")
    if table:
        worst = max(table, key=lambda entry: entry.ratio("plan", entry.baseline))
        made["worst_vs_best_baseline"] = Claim(
            value=worst.ratio("plan", worst.baseline),
            unit=f"time of the plan / {worst.baseline}",
            setup=f"{worst}, the worst of {len(table)}, {PLACE}",
        )
        widest = max(table, key=lambda entry: entry.spread)
        made["spread_max"] = Claim(
            value=widest.spread, unit="relative, one competitor against itself", setup=f"{widest}, {PLACE}"
        )
    for name, competitors in (("", (*BASELINES, "plan")), ("_baselines", BASELINES), ("_plan", ("plan",))):
        errors = [abs(entry.error(one)) for entry in table for one in competitors if one in entry.samples]
        if errors:
            made[f"prediction_error{name}_median"] = Claim(
                value=statistics.median(errors),
                unit="|predicted - measured| / measured",
                setup=f"{len(errors)} steps, {PLACE}",
            )
    return made | general_claims(table) | mixed_claims(everything) | bubble_claims(rows)


def general_claims(table: Sequence[Entry]) -> dict[str, Claim]:
    """The least gain of a program per stage over the best SPMD plan, over all entries of VGG up to 500 Mbit/s, and the
    error of what was predicted for it."""
    found = [entry for entry in table if "general" in entry.samples]
    made = dict[str, Claim]()
    vgg = [entry for entry in found if entry.model == "vgg" and entry.rate <= 500e6]
    if vgg:
        best = {entry.rate: min((entry.baseline, "plan"), key=entry.median) for entry in vgg}
        least = min(vgg, key=lambda entry: entry.ratio(best[entry.rate], "general"))
        made["general_vgg_gain"] = Claim(
            value=least.ratio(best[least.rate], "general"),
            unit=f"time of {best[least.rate]} / general",
            setup=f"{least}, the least of {len(vgg)} up to 500 Mbit/s, {PLACE}",
        )
    if found:
        made["prediction_error_general_median"] = Claim(
            value=statistics.median(abs(entry.error("general")) for entry in found),
            unit="|predicted - measured| / measured",
            setup=f"{len(found)} steps, {PLACE}",
        )
    return made


def mixed_claims(table: Sequence[Entry]) -> dict[str, Claim]:
    """The least gain of the plan by speed over the best equal split, and its largest prediction error."""
    found = [entry for entry in table if entry.mixed]
    if not found:
        return {}
    least = min(found, key=lambda entry: entry.ratio(entry.baseline, BY_SPEED))
    furthest = max(found, key=lambda entry: abs(entry.error(BY_SPEED)))
    return {
        "mixed_gain": Claim(
            value=least.ratio(least.baseline, BY_SPEED),
            unit=f"time of {least.baseline} / {BY_SPEED}",
            setup=f"{least}, the least of {len(found)}, {MIXED_PLACE}",
        ),
        "mixed_prediction_error": Claim(
            value=abs(furthest.error(BY_SPEED)),
            unit="|predicted - measured| / measured",
            setup=f"{furthest}, the largest of {len(found)}, {MIXED_PLACE}",
        ),
    }


def bubble_claims(rows: Iterable[Mapping[str, Any]]) -> dict[str, Claim]:
    """Idle shares of the pipelines, and the smallest possible ones: (S-1) / (vM + S-1), with v chunks per stage."""
    steps = {row["competitor"]: row for row in rows if row["row"] == "bubble"}
    if not steps:
        return {}
    stages, pieces = steps["1f1b"]["stages"], steps["1f1b"]["micro_batches"]
    setup = f"{stages} stages, {pieces} micro-batches, links without a limit, {PLACE}"
    idle = {
        name: statistics.median(
            1 - work / step for work, step in zip(steps["alone"]["samples_s"], steps[name]["samples_s"], strict=True)
        )
        for name in ("1f1b", "eager-1f1b", "interleaved")
    }
    for name, chunks in (("1f1b", 1), ("interleaved", CHUNKS)):
        idle[f"{name}_ideal"] = (stages - 1) / (chunks * pieces + stages - 1)
    return {
        f"bubble_{name.replace('-', '_')}": Claim(value=share, unit="idle share of a step", setup=setup)
        for name, share in idle.items()
    }


def print_entries(table: Sequence[Entry]) -> None:
    """A line for every competitor."""
    columns = ("model", "Mbit/s", "competitor", "plan", "ms", "quartiles", "predicted", "error", "time / plan")
    lines = []
    for entry in table:
        for name, samples in entry.samples.items():
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
            lines.append(
                (
                    entry.model,
                    f"{entry.rate / 1e6:.0f}",
                    name,
                    in_words(entry.plans[name]),
                    f"{entry.median(name) * 1e3:.0f}",
                    f"{low * 1e3:.0f} - {high * 1e3:.0f}",
                    f"{entry.predicted[name] * 1e3:.0f}",
                    f"{100 * entry.error(name):+.0f} %",
                    f"{entry.ratio(name, entry.planned):.2f}",
                )
            )
    print_table(f"bench hybrid: {HOSTS} emulated hosts, ms of a step", columns, lines, words=4)


def in_words(plan: Plan) -> str:
    """`1f1b x8: 3 | 3 | 2 | 2`: stages between bars; `5 t1 + 3 t4`: five layers of tensor degree 1, three of 4."""
    plain = all(t == 1 for stage in plan.stages for chunk in stage.chunks for t in chunk.tensor)

    def words(stage: Any) -> str:
        return ", ".join(
            " + ".join(f"{run.layers}" if plain else f"{run.layers} t{run.tensor}" for run in chunk.runs)
            for chunk in stage.chunks
        )

    kind = plan.schedule if len(plan.stages) > 1 else "one stage"
    return f"{kind} x{plan.micro_batches}: {' | '.join(words(stage) for stage in plan.stages)}"


def measure(
    models: Sequence[str], *, bubble: bool, rates: Sequence[float], quick: bool, mixed: bool = False
) -> list[dict[str, Any]]:
    """Rows of one launch.  mixed: on hosts of different quotas."""
    task = partial(
        Task,
        models=tuple(models),
        rates=tuple(rates),
        rounds=4 if quick else 12,
        layer_rounds=3 if quick else 7,
        link_rounds=3 if quick else 5,
        bubble=bubble,
        general=mixed or not quick,
    )
    cpu, shares = (MIXED_CPU, SHARES) if mixed else (CPU, None)
    return launch("benchmarks.hybrid.worker", task, cpu=cpu, shares=shares, limit_s=LIMIT_S)


def run(*, quick: bool, json_path: str | None) -> int:
    """Runs the benchmark; returns the exit status."""
    if json_path:
        check_writable(json_path)
    if reason := why_not():
        print(f"jhpt bench hybrid: {reason}", file=sys.stderr)
        return 3
    rates = RATES[1:2] if quick else RATES
    launches = {"mlp, the bubble": partial(measure, ("mlp",), bubble=True, rates=rates)}
    if not quick:
        launches = {"the bubble": partial(measure, (), bubble=True, rates=rates)}
        for model in MODELS:
            launches[model] = partial(measure, (model,), bubble=False, rates=RATES_OF.get(model, rates))
        name = f"{MIXED} on mixed hosts"
        launches[name] = partial(measure, (MIXED,), bubble=False, rates=MIXED_RATES, mixed=True)
    rows: list[dict[str, Any]] = []
    failure = None
    for name, launched in launches.items():
        print(f"measuring {name}", file=sys.stderr)
        try:
            rows += launched(quick=quick)
        except (HostError, LabError, OSError) as error:
            failure = f"{error}"
            print(f"jhpt bench hybrid: {error}", file=sys.stderr)
            break
    print_entries(entries(rows))
    made = claims(rows)
    print_claims(made)
    if json_path:
        settings = {"quick": quick, "hosts": HOSTS, "cpu": CPU, "bits_per_s": list(rates), "failure": failure}
        write_json(json_path, "hybrid", settings, rows, made, device=False)
    return 1 if failure else 0
