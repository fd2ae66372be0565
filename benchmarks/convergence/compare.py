"""Cells against uncompressed ones of the same seeds: groups, gaps, lines of a table, claims."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.convergence.cells import DATA, HEADLINE, SHARES, TENSOR, Cell, in_words, kind_of
from jhpt.bench.results import Claim

Result = Mapping[str, Any]
"""The content of a cell's file."""

COLUMNS = ("preset", "compressed", "seeds", "validation loss", "against plain", "as trained")


def lines(results: Mapping[Cell, Result]) -> list[Sequence[str]]:
    """A line for every kind of cell, means over its seeds."""
    rows: list[Sequence[str]] = []
    for group in groups(results).values():
        first, of_group = group[0], [results[cell] for cell in group]
        rows.append(
            (
                first.preset,
                kind_of(first),
                str(len(group)),
                f"{fmean(result['validation'] for result in of_group):.4f}",
                "" if first.plain else f"{100 * gap(results, group):+.2f} %",
                f"{fmean(result['own'] for result in of_group):.4f}",
            )
        )
    return rows


LEAK_COLUMNS = ("trained with", "chosen by, the rest at", "largest move", "root mean square", "positions", "spread")


def leak_lines(results: Mapping[Cell, Result]) -> list[Sequence[str]]:
    """A line for every measured leak: how far earlier logits move when later tokens change."""
    return [
        (
            kind_of(cell),
            rule,
            *(f"{leak[name]:.3g}" for name in ("logits", "rms")),
            f"{leak['positions']:.0%}",
            f"{leak['spread']:.3g}",
        )
        for cell, result in results.items()
        for rule, leak in result.get("leaks", {}).items()
    ]


def groups(results: Mapping[Cell, Result]) -> dict[tuple[str, str], list[Cell]]:
    """Cells that differ in their seeds alone, by preset and what is compressed."""
    by_kind: dict[tuple[str, str], list[Cell]] = {}
    for cell in results:
        by_kind.setdefault((cell.preset, kind_of(cell)), []).append(cell)
    return by_kind


def gap(results: Mapping[Cell, Result], group: Sequence[Cell], key: str = "validation") -> float:
    """Mean loss of these cells / mean loss of the uncompressed ones of the same seeds - 1."""
    plain = {(cell.preset, cell.seed): results[cell]["validation"] for cell in results if cell.plain}
    return fmean(results[cell][key] for cell in group) / fmean(plain[cell.preset, cell.seed] for cell in group) - 1


def claims_of(results: Mapping[Cell, Result]) -> dict[str, Claim]:
    """Claims about the cells that have been measured."""
    by_kind = groups(results)
    headline = in_words(HEADLINE)
    wanted = {
        "headline_loss_gap": ("gpt-tiny", headline, f"tensor {TENSOR}"),
        "bert_loss_gap": ("bert-tiny", headline, f"tensor {TENSOR}"),
        "gradient_loss_gap": ("gpt-tiny", "gradients: 8 bits", f"data {DATA}"),
        "topk_loss_gap": ("gpt-tiny", f"gradients: the largest {SHARES[0]:.0%}", f"data {DATA}"),
    }
    claims = {}
    for name, (preset, kind, layout) in wanted.items():
        if (preset, kind) in by_kind:
            group = by_kind[preset, kind]
            claims[name] = Claim(
                value=gap(results, group),
                unit="validation loss, compression off, / that of uncompressed training - 1",
                setup=f"{preset}, {layout}, {kind}, {group[0].changes['train.steps']} steps, {len(group)} seed(s)",
            )
    return claims
