"""Two figures as SVG: losses during training, and the cost of every setting at the end."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.convergence.cells import Cell
from benchmarks.convergence.compare import gap, groups

Result = Mapping[str, Any]
Line = Mapping[int, float]

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 50, 40
COLOURS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
SHOWN = ("plain", "headline", "gradients")
"""Groups with a curve."""
ROW, LABELS, BARS, DIGITS = 22, 400, 240, 70
"""Sizes of a bar: its height, and the widths of the label before it, of itself, and of a figure on either side."""


def pages(results: Mapping[Cell, Result]) -> dict[str, str]:
    """File name -> picture."""
    drawn = {f"{preset}-loss.svg": curves(results, preset) for preset in {cell.preset: None for cell in results}}
    return drawn | {"gaps.svg": bars(results)}


def curves(results: Mapping[Cell, Result], preset: str) -> str:
    """Training loss by step of a preset's kinds of cells, means over their seeds."""
    lines = {
        kind: _mean([results[cell]["training"] for cell in group])
        for (of_preset, kind), group in groups(results).items()
        if of_preset == preset and group[0].group in SHOWN
    }
    steps = [step for line in lines.values() for step in line]
    losses = [loss for line in lines.values() for loss in line.values()]
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps)  # noqa: E731
    low, high = min(losses), max(losses)
    y = lambda loss: TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / ((high - low) or 1)  # noqa: E731

    body = []
    for part in range(5):
        loss, step = low + (high - low) * part / 4, max(steps) * part // 4
        body.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        body.append(_words(LEFT - 8, y(loss) + 4, f"{loss:.2f}", "end"))
        body.append(_words(x(step), HEIGHT - BOTTOM + 18, str(step), "middle"))
    for index, (kind, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(line.items()))
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        body.append(_words(WIDTH - RIGHT, TOP + 14 + 16 * index, kind, "end", colour))
    return _page(f"{preset}: training loss, nats per predicted token", WIDTH, HEIGHT, body)


def bars(results: Mapping[Cell, Result]) -> str:
    """Validation loss with compression off against uncompressed training, percent."""
    gaps = {
        f"{preset}, {kind}": 100 * gap(results, group)
        for (preset, kind), group in groups(results).items()
        if not group[0].plain
    }
    least, most = min(0.0, *gaps.values()), max(0.0, *gaps.values())
    scale = BARS / ((most - least) or 1)
    zero = LABELS + DIGITS - least * scale
    body = [f'<path d="M{zero:.1f} {TOP}V{TOP + ROW * len(gaps)}" stroke="#222"/>']
    for index, (name, value) in enumerate(gaps.items()):
        y = TOP + ROW * index
        left, width = min(zero, zero + value * scale), abs(value * scale)
        body.append(f'<rect x="{left:.1f}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" fill="{COLOURS[1]}"/>')
        body.append(_words(LABELS, y + 15, name, "end"))
        side = 6 if value >= 0 else -6
        body.append(_words(zero + value * scale + side, y + 15, f"{value:+.2f} %", "start" if value >= 0 else "end"))
    title = "validation loss, compression off, against uncompressed training"
    return _page(title, LABELS + BARS + 2 * DIGITS, TOP + ROW * len(gaps) + 20, body)


def _mean(lines: Sequence[Mapping[str, float]]) -> Line:
    return {int(step): fmean(line[step] for line in lines) for step in lines[0]}


def _words(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _page(title: str, width: int, height: int, body: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
            *body,
            "</svg>\n",
        ]
    )
