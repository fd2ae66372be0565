"""The benchmark: launches the hosts, prints the tables and the claims.

Processes of JAX with Gloo, one for each host of `benchmarks.netlab`, half a core each, at several link speeds.  A step
is the loss and the gradients of GPT blocks, in float32, without an optimizer.  One launch measures tensor parallelism
over all four hosts in these variants (`benchmarks.comms.task`), in turn:

    serial, float32          XLA's all-reduce, computation and communication in line
    serial, 16 bits          the baseline: the same in float16, a ring that fills the wire (`*_share_of_wire`)
    overlap, 16 bits         the same on several lanes (`benchmarks.comms.blocks`): the second baseline
    16 bits in two steps     the runtime's own: all-to-all of bfloat16, sum in float32, rounded, all-gather
    tokens                   16 bits for the important tokens, nothing for the others
    quantization             8 bits, or 4
    tokens + quantization    8 bits for the important tokens, 4 for the others; or gathered, as steps=auto does
    all                      the same on several lanes
    sample chunks            the runtime's own overlap (`parallel.sample_chunks`), in 16 bits and with compression

and, in the same launch, data parallelism over all four, whose gradients are reduced in the ways of
`benchmarks.comms.gradients`, in turn.

XLA's CPU backend widens bfloat16 in collectives, so payloads of 16 bits are sent as integers, and sums are of float16.
It runs the collectives of a program in line, so only lanes, which are programs of their own, overlap anything: `sample
chunks` shows what cutting costs there, not what overlap gains on GPUs.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.comms import gradients, task
from benchmarks.comms.costs import relative
from benchmarks.comms.gradients import EXCHANGES, Exchange
from benchmarks.comms.tables import GRADIENTS, TABLES, TENSOR, Entry, counts, entries, print_entries
from benchmarks.comms.task import (
    ALL,
    BASELINE,
    FOUR,
    GATHERED,
    LANES,
    MIXED,
    OVERLAP,
    OWN_ALL,
    OWN_SHORT,
    SHORT_STEPS,
    VARIANTS,
    Shape,
    Task,
    Variant,
)
from benchmarks.emulated.entries import numbered
from benchmarks.emulated.launch import CPU, HOSTS, PLACE, launch
from benchmarks.netlab import HostError, LabError, why_not
from jhpt.bench.ratios import ratio_unit, speed_claim, speed_claims
from jhpt.bench.results import Claim, check_writable, print_claims, write_json

RATES = (200e6, 500e6, 1000e6)
"""Bits per second."""

COMPARED = (
    ("all_vs_serial", ALL, BASELINE),
    ("all_vs_overlap", ALL, OVERLAP),
    ("overlap_vs_serial", OVERLAP, BASELINE),
    ("compression_vs_serial", MIXED, BASELINE),
    ("four_bits_vs_serial", FOUR, BASELINE),
    ("steps_auto_vs_serial", GATHERED, BASELINE),
    ("two_steps_vs_serial", SHORT_STEPS, BASELINE),
    ("sample_chunks_vs_serial", OWN_SHORT, BASELINE),
    ("sample_chunks_all_vs_serial", OWN_ALL, BASELINE),
)
"""Claims of tensor parallelism: (name, variant, what it is compared with)."""

EXCHANGED = tuple(one.name for one in EXCHANGES if one.name not in (gradients.BASELINE, gradients.FLOAT32))
"""Ways to reduce gradients that are compared with the baseline."""

COMPRESSION_RATE = "500 Mbit/s"
"""The rate of the claim for compression alone."""

SHAPE = Shape(layers=2, width=128, heads=4, length=64, batch=256)
"""Tensor-parallel blocks, with a head for each host.  An all-reduce of two million numbers takes long compared with the
10 ms of a quota's period."""

GRADIENTS_SHAPE = Shape(layers=2, width=384, heads=4, length=64, batch=6)
"""Data-parallel blocks, with the batch of a host: n = 3.5 million numbers in matrices, one bucket.  At 500 Mbit/s the 3
n bytes of 16 bits take n x 0.07 us, because Gloo fills 70 % of the wire.  384 tokens are 6 x 384 n FLOP, of which half
a core computes 30 to 40 G a second (a core of a busy machine 60 to 85 G in this step): n x 0.06 to 0.08 us, about as
long."""

QUICK_SHAPE, QUICK_GRADIENTS = replace(SHAPE, layers=1, batch=64), replace(GRADIENTS_SHAPE, layers=1, width=256)
"""Shapes of `--quick`, which also measures only one rate, few rounds, and the variants of the claims."""

QUICK_LANES = 2
"""Few, because each lane is one more program to compile."""

LAUNCHES = 2
"""How often the hosts are launched, unless an option says otherwise; with `--quick` once."""

LIMIT_S = 900.0
"""Seconds for a launch."""


def claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, Claim]:
    """The claims that follow from the rows."""
    made, tensor, exchanged = dict[str, Claim](), entries(rows, TENSOR), entries(rows, GRADIENTS)
    for name, variant, baseline in COMPARED:
        known = [entry for entry in tensor if {variant, baseline} <= entry.samples.keys()]
        gains = {str(entry): entry.gain(variant, baseline) for entry in known}
        unit = ratio_unit(baseline, variant)
        made |= speed_claims(name, gains, unit=unit, place=PLACE)
        if variant == MIXED and (gain := gains.get(COMPRESSION_RATE)):
            made[f"{name}_500mbit"] = speed_claim(gain, unit=unit, setup=f"{COMPRESSION_RATE}, {PLACE}")
    for way in EXCHANGED:
        gains = {str(entry): entry.gain(way) for entry in exchanged if way in entry.samples}
        unit = ratio_unit(gradients.BASELINE, way)
        made |= speed_claims(f"gradients_{_word(way)}_vs_16bit", gains, unit=unit, place=PLACE)
    made |= _shares_of_wire(rows)
    errors = [abs(error) for entry in (*tensor, *exchanged) for name in entry.samples for error in entry.errors(name)]
    for statistic, value in (("median", statistics.median), ("max", max)) if errors else ():
        made[f"prediction_error_{statistic}"] = Claim(
            value=value(errors),
            unit="|predicted - measured| / measured",
            setup=f"{len(errors)} steps, {PLACE}",
        )
    made |= _apart_claims((*tensor, *exchanged))
    counted = [row for table in TABLES for row in counts(rows, table)]
    if counted:
        worst = max(counted, key=lambda row: relative(row["counted"], row["formula"]))
        made["wire_bytes_error_max"] = Claim(
            value=relative(worst["counted"], worst["formula"]),
            unit="|counted - formula| / formula",
            setup=f"bytes at the interface, headers included, {worst['variant']}, the worst of {len(counted)}",
        )
    return made


def _shares_of_wire(rows: Sequence[Mapping[str, Any]]) -> dict[str, Claim]:
    """Bytes of the baselines' exchanges over what the wire would carry in their seconds, at the worst rate."""
    made = dict[str, Claim]()
    for name, kind in (("serial_16bit_share_of_wire", ""), ("gradients_16bit_share_of_wire", "gradient ")):
        shares = {
            row["bits_per_s"]: 8 * row["bytes"] / row["seconds"] / row["bits_per_s"]
            for row in rows
            if row["row"] == f"{kind}travel" and row.get("baseline")
        }
        if shares:
            rate = min(shares, key=lambda one: shares[one])
            setup = f"an exchange alone, {rate / 1e6:.0f} Mbit/s, {PLACE}"
            made[name] = Claim(value=shares[rate], unit="of the wire's rate", setup=setup)
    return made


def _word(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_").replace("-", "_")


def _apart_claims(table: Sequence[Entry]) -> dict[str, Claim]:
    """How far launches lie apart; nothing of one launch."""
    apart = {f"{name}, {entry}": entry.apart(name) for entry in table if entry.launches > 1 for name in entry.samples}
    if not apart:
        return {}
    widest, unit = max(apart, key=apart.__getitem__), "largest median / smallest - 1"
    setup = f"{table[0].launches} launches, {PLACE}"
    return {
        "launches_apart_median": Claim(value=statistics.median(apart.values()), unit=unit, setup=setup),
        "launches_apart_max": Claim(value=apart[widest], unit=unit, setup=f"{widest}, {setup}"),
    }


def _names(known: Sequence[Variant] | Sequence[Exchange], few: tuple[str, ...], *, quick: bool) -> tuple[str, ...]:
    return few if quick else tuple(one.name for one in known)


def measure(*, quick: bool, rates: Sequence[float]) -> list[dict[str, Any]]:
    """The rows of a launch."""
    task_of = partial(
        Task,
        rates=tuple(rates),
        rounds=2 if quick else 5,
        parts_rounds=2 if quick else 3,
        blocks=QUICK_SHAPE if quick else SHAPE,
        gradients=QUICK_GRADIENTS if quick else GRADIENTS_SHAPE,
        variants=_names(VARIANTS, task.QUICK, quick=quick),
        exchanges=_names(EXCHANGES, gradients.QUICK, quick=quick),
        lanes=QUICK_LANES if quick else LANES,
    )
    return launch("benchmarks.comms.worker", task_of, devices=max(LANES, HOSTS), limit_s=LIMIT_S)


def run(*, quick: bool, json_path: str | None, launches: int | None = None) -> int:
    """Runs the benchmark; returns the exit status.  launches: how often; None: `LAUNCHES`, with quick once."""
    if json_path:
        check_writable(json_path)
    if reason := why_not():
        print(f"jhpt bench comms: {reason}", file=sys.stderr)
        return 3
    rates = RATES[1:2] if quick else RATES
    launches = launches or (1 if quick else LAUNCHES)
    rows, failure = list[dict[str, Any]](), None
    for number in range(launches):
        print(f"launch {number + 1} of {launches}", file=sys.stderr)
        try:
            rows += numbered(measure(quick=quick, rates=rates), number)
        except (HostError, LabError, OSError) as error:
            failure = f"{error}"
            print(f"jhpt bench comms: {error}", file=sys.stderr)
            break
    for table in TABLES:
        print_entries(rows, table)
    made = claims(rows)
    print_claims(made)
    if json_path:
        settings = {
            "quick": quick,
            "launches": launches,
            "hosts": HOSTS,
            "cpu": CPU,
            "bits_per_s": list(rates),
            "lanes": QUICK_LANES if quick else LANES,
            "blocks": asdict(QUICK_SHAPE if quick else SHAPE),
            "variants": _names(VARIANTS, task.QUICK, quick=quick),
            "gradient_blocks": asdict(QUICK_GRADIENTS if quick else GRADIENTS_SHAPE),
            "gradient_variants": _names(EXCHANGES, gradients.QUICK, quick=quick),
            "failure": failure,
        }
        write_json(json_path, "comms", settings, rows, made, device=False)
    return 1 if failure else 0
