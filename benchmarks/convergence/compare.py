"""Cells against uncompressed ones of the same seeds: groups, gaps, lines of a table, claims."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.convergence.cells import DATA, HEADLINE, SHARES, TENSOR, Cell, in_words, kind_of
from jhpt.bench.results import Claim

Found = Mapping[str, Any]
"""What a cell's file says."""

COLUMNS = ("preset", "compressed", "seeds", "validation loss", "against plain", "as trained")


def lines(found: Mapping[Cell, Found]) -> list[Sequence[str]]:
    """A line for every kind of cell, means over its seeds."""
    rows: list[Sequence[str]] = []
    for group in groups(found).values():
        first, results = group[0], [found[cell] for cell in group]
        rows.append(
            (
                first.preset,
                kind_of(first),
                str(len(group)),
                f"{fmean(result['validation'] for result in results):.4f}",
                "" if first.plain else f"{100 * gap(found, group):+.2f} %",
                f"{fmean(result['own'] for result in results):.4f}",
            )
        )
    return rows


LEAK_COLUMNS = ("trained with", "chosen by, the rest at", "largest move", "root mean square", "positions", "spread")


def leak_lines(found: Mapping[Cell, Found]) -> list[Sequence[str]]:
    """Of how far past logits move when later tokens change."""
    return [
        (
            kind_of(cell),
            rule,
            *(f"{leak[name]:.3g}" for name in ("logits", "rms")),
            f"{leak['positions']:.0%}",
            f"{leak['spread']:.3g}",
        )
        for cell, result in found.items()
        for rule, leak in result.get("leaks", {}).items()
    ]


def groups(found: Mapping[Cell, Found]) -> dict[tuple[str, str], list[Cell]]:
    """Cells that differ in their seeds alone, by preset and what is compressed."""
    together: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        together.setdefault((cell.preset, kind_of(cell)), []).append(cell)
    return together


def gap(found: Mapping[Cell, Found], group: Sequence[Cell], which: str = "validation") -> float:
    """Mean loss of these cells / mean loss of the uncompressed ones of the same seeds - 1."""
    plain = {(cell.preset, cell.seed): found[cell]["validation"] for cell in found if cell.plain}
    return fmean(found[cell][which] for cell in group) / fmean(plain[cell.preset, cell.seed] for cell in group) - 1


def claims_of(found: Mapping[Cell, Found]) -> dict[str, Claim]:
    """Only of what has been measured."""
    by_kind = groups(found)
    headline = in_words(HEADLINE)
    wanted = {
        "headline_loss_gap": ("gpt-tiny", headline, f"tensor {TENSOR}"),
        "bert_loss_gap": ("bert-tiny", headline, f"tensor {TENSOR}"),
        "gradient_loss_gap": ("gpt-tiny", "gradients: 8 bits", f"data {DATA}"),
        "topk_loss_gap": ("gpt-tiny", f"gradients: the largest {SHARES[0]:.0%}", f"data {DATA}"),
    }
    claims = {}
    for name, (preset, kind, where) in wanted.items():
        if (preset, kind) in by_kind:
            own = by_kind[preset, kind]
            claims[name] = Claim(
                value=gap(found, own),
                unit="validation loss, compression off, / that of uncompressed training - 1",
                setup=f"{preset}, {where}, {kind}, {own[0].changes['train.steps']} steps, {len(own)} seed(s)",
            )
    return claims
