"""Draws a simulated step: as text for a terminal, and as SVG for a browser."""

import math
import textwrap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from jhpt.planner.report.simulation import Span, Timeline

MIN_WIDTH = 40
TEXT_ROWS = 16  # most devices with a row; of more devices only the first and the last are shown
MAX_BARS = 20_000  # browsers still scroll this many smoothly

GAP = " ... "
PASSES = {"forward": "0123456789", "backward": "abcdefghij", "weights": "ABCDEFGHIJ"}
GRADIENTS, UPDATE, IDLE = "~", "=", "."
LEGEND = (
    "0-9 forward of micro-batch n mod 10; a-j its backward; A-J its weights (zb-h1); ~ waiting for the gradients' "
    "reduction; = update; . idle. A column shows what ran in its middle."
)

# Okabe and Ito's colours, which colour-blind readers can tell apart, and two greys.
COLOURS = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "weights": "#f0e442",
    "forward link": "#a6a6a6",
    "backward link": "#5c5c5c",
    "gradients": "#cc79a7",
    "update": "#009e73",
    "fetch": "#56b4e9",
    "write": "#d55e00",
}
LEFT, RIGHT, TOP = 90, 30, 84  # pixels: device names, margin, title and legend
LANE = 8  # pixels of the lane of a link or of the gradients; the lane of compute is three times as high
OPERATION = 26  # pixels of an average operation, as far as the limits of the width allow
NARROWEST, WIDEST = 900, 12_000
BREAK = 40  # pixels of the gap that marks time left out


def text_timeline(timeline: Timeline, width: int = 100) -> str:
    """One row per device, no line longer than `width`, plain ASCII.

    If a column would stand for more than an average operation, only the beginning and the end of the step are shown,
    with two columns to an operation and dots between them.  Of many devices only the first and the last are shown.
    Chunks look alike.  The share after a row is the part of the step in which the device computes.

    Raises:
      ValueError: `width` is less than 40.
    """
    if width < MIN_WIDTH:
        raise ValueError(f"width={width}; use {MIN_WIDTH} or more")
    name = len(str(timeline.devices - 1)) + len("device ")
    columns = width - name - len(" || 100 %")
    pieces = _text_pieces(timeline, columns)
    facts = (
        f"{timeline.schedule}: {_time(timeline.seconds)} a step, {100 * timeline.bubble:.1f} % bubble; "
        f"{_count(timeline.micro_batches, 'micro-batch', 'micro-batches')}, {_count(timeline.devices, 'device')}"
    )
    lines = textwrap.wrap(facts + (f" of {timeline.chunks} chunks" if timeline.chunks > 1 else ""), width)
    shown, skipped = _rows_shown(timeline.devices)
    for device in shown:
        if skipped and device == skipped.stop:
            lines.append(f"{'...':<{name}} {f'({len(skipped)} more)':^{columns + 2}}".rstrip())
        spans = timeline.rows[device]
        row = GAP.join(_text_row(spans, piece) for piece in pieces)
        lines.append(f"{f'device {device}':<{name}} |{row}| {100 * timeline.busy(device):3.0f} %")
    unit, factor = _unit(pieces[-1].stop)
    scale = (" " * len(GAP)).join(_text_scale(piece, factor) for piece in pieces)
    lines.append(f"{unit:>{name}}  {scale}".rstrip())
    return "\n".join(lines + textwrap.wrap(LEGEND, width))


def svg_timeline(timeline: Timeline, title: str) -> str:
    """An SVG page.

    Every device has a lane for compute and update.  Thin lanes show what it sends forward and backward, the reduction
    of gradients, and what comes from the host and goes there, if there is any of it.  Later chunks are lighter.
    Pointing at a bar tells what it is.  With more than `MAX_BARS` bars the middle of the step is left out.
    """
    bars = [span for span in timeline.spans if span.end > span.start]
    lanes = _lanes(bars)
    row = sum(height for _, height in lanes.values()) + 10
    pieces = _svg_pieces(timeline, bars)
    right, bottom = pieces[-1].right, TOP + row * timeline.devices
    body = [*_svg_legend(timeline, bars), *_svg_axis(pieces, bottom)]
    for device in range(timeline.devices):
        y = TOP + row * device
        body.append(f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">device {device}</text>')
        body += (
            f'<rect x="{piece.left:.1f}" y="{y}" width="{piece.right - piece.left:.1f}" height="{3 * LANE}" '
            f'fill="#f2f2f2"/>'
            for piece in pieces
        )
    for span in bars:
        offset, height = lanes["compute" if span.stream == "update" else span.stream]
        y = TOP + row * span.device + offset
        for piece in pieces:
            body += _svg_bar(span, piece, y, height, timeline.chunks)
    if len(pieces) > 1:
        x, middle = (pieces[0].right + pieces[1].left) / 2, (TOP + bottom) / 2
        body.append(f'<text class="gap" x="{x:.1f}" y="{middle:.1f}" text-anchor="middle" font-size="20">...</text>')
    facts = (
        f"{timeline.schedule}, {_count(timeline.micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{_time(timeline.seconds)} a step, {100 * timeline.bubble:.1f} % bubble"
    )
    page, height = math.ceil(right + RIGHT), bottom + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{page}" height="{height}" '
            f'viewBox="0 0 {page} {height}" font-family="sans-serif" font-size="12" fill="#222">',
            f"<title>{_xml(title)}</title>",
            f'<rect width="{page}" height="{height}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="16" font-weight="bold">{_xml(title)}</text>',
            f'<text x="{LEFT}" y="41">{facts}</text>',
            *body,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True)
class _Piece:
    """A stretch of time, `[start, stop]` seconds, drawn over `[left, right]` columns or pixels."""

    start: float
    stop: float
    left: float
    right: float

    def at(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * (seconds - self.start) / (self.stop - self.start)


def _average(spans: tuple[Span, ...]) -> float:
    """Seconds of an average forward or backward pass; 0 if none takes time."""
    lengths = [span.seconds for span in spans if span.stream == "compute" and span.seconds > 0]
    return math.fsum(lengths) / len(lengths) if lengths else 0.0


def _rows_shown(devices: int) -> tuple[list[int], range | None]:
    """The devices with a row, and the devices without."""
    if devices <= TEXT_ROWS:
        return list(range(devices)), None
    skipped = range(TEXT_ROWS * 3 // 4, devices - TEXT_ROWS // 4)
    return [device for device in range(devices) if device not in skipped], skipped


def _text_pieces(timeline: Timeline, columns: int) -> list[_Piece]:
    total = timeline.seconds or 1.0
    average = _average(timeline.spans)
    if not average or total <= average * columns:
        return [_Piece(0.0, total, 0, columns)]
    tail = (columns - len(GAP)) // 2
    head = columns - len(GAP) - tail
    column = average / 2
    return [_Piece(0.0, column * head, 0, head), _Piece(total - column * tail, total, 0, tail)]


def _text_row(spans: tuple[Span, ...], piece: _Piece) -> str:
    columns = round(piece.right)
    row = [IDLE] * columns
    # Later streams overwrite earlier ones: computation hides the reduction beside it.
    for stream in ("gradients", "update", "compute"):
        ran = [span for span in spans if span.stream == stream and span.end > span.start]
        starts = [span.start for span in ran]
        for column in range(columns):
            moment = piece.start + (column + 0.5) / columns * (piece.stop - piece.start)
            index = bisect_right(starts, moment) - 1
            if index >= 0 and moment < ran[index].end:
                row[column] = _character(ran[index])
    return "".join(row)


def _character(span: Span) -> str:
    if span.micro_batch is None:
        return GRADIENTS if span.kind == "gradients" else UPDATE
    return PASSES[span.kind][span.micro_batch % 10]


def _text_scale(piece: _Piece, factor: float) -> str:
    """`+` at every tick, followed by its number."""
    columns = round(piece.right)
    scale = [" "] * columns
    step = _tick_step(piece.stop - piece.start, factor, max(columns // 14, 2))
    for tick in _ticks(piece, step):
        mark, column = "+" + _number(tick, step, factor), int(piece.at(tick))
        if column + len(mark) <= columns and not "".join(scale[max(column - 1, 0) : column + len(mark)]).strip():
            scale[column : column + len(mark)] = mark
    return "".join(scale)


def _svg_pieces(timeline: Timeline, bars: list[Span]) -> list[_Piece]:
    total = timeline.seconds or 1.0
    average = _average(timeline.spans) or total
    pixels = min(max(total / average * OPERATION, NARROWEST), WIDEST)
    if len(bars) <= MAX_BARS:
        return [_Piece(0.0, total, LEFT, LEFT + pixels)]
    head = bars[MAX_BARS // 2].start
    tail = sorted(span.end for span in bars)[-MAX_BARS // 2]
    if head <= 0 or tail >= total or head >= tail:  # a few operations last almost the whole step
        return [_Piece(0.0, total, LEFT, LEFT + pixels)]
    shown = head + total - tail
    pixels = min(max(shown / average * OPERATION, NARROWEST), WIDEST)
    left = LEFT + pixels * head / shown
    return [_Piece(0.0, head, LEFT, left), _Piece(tail, total, left + BREAK, LEFT + pixels + BREAK)]


def _lanes(bars: list[Span]) -> dict[str, tuple[int, int]]:
    """Offset and height of every lane in use within a device's row."""
    offset = 3 * LANE
    lanes = {"compute": (0, offset)}
    streams = {span.stream for span in bars}
    for stream in ("forward link", "backward link", "gradients", "fetch", "write"):
        if stream in streams:
            lanes[stream] = (offset, LANE)
            offset += LANE
    return lanes


def _svg_bar(span: Span, piece: _Piece, y: int, height: int, chunks: int) -> Iterator[str]:
    """The part of a bar inside `piece`, with its label if there is room."""
    start, stop = max(span.start, piece.start), min(span.end, piece.stop)
    if start >= stop:
        return
    x, width = piece.at(start), piece.at(stop) - piece.at(start)
    label = {"forward link": "sends ", "backward link": "sends "}.get(span.stream, "") + span.label
    hover = f"device {span.device}: {label}, {_time(span.seconds)} from {_time(span.start)} to {_time(span.end)}"
    stroke = ' stroke="white" stroke-width="0.5"' if width > 3 else ""
    yield (
        f'<rect class="bar" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{_colour(span, chunks)}"{stroke}><title>{hover}</title></rect>'
    )
    if height > LANE and span.micro_batch is not None and width > 7 * len(span.label) + 2:
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="11" '
            f'pointer-events="none">{span.label}</text>'
        )


def _svg_legend(timeline: Timeline, bars: list[Span]) -> Iterator[str]:
    names = {"forward link": "activations sent", "backward link": "errors sent", "gradients": "gradients reduced"}
    names |= {"fetch": "from the host", "write": "to the host"}
    used = {span.kind if span.stream == "compute" else span.stream for span in bars} | {"forward", "backward"}
    x = LEFT
    for key, colour in COLOURS.items():
        if key in used:
            name = names.get(key, key)
            yield f'<rect x="{x}" y="54" width="12" height="12" fill="{_lighter(colour, _SOFT.get(key, 0.0))}"/>'
            yield f'<text x="{x + 17}" y="64">{name}</text>'
            x += 40 + 7 * len(name)
    if timeline.chunks > 1:
        yield f'<text x="{x}" y="64">later chunks are lighter</text>'


def _svg_axis(pieces: list[_Piece], bottom: int) -> Iterator[str]:
    name, factor = _unit(pieces[-1].stop)
    pixels = sum(piece.right - piece.left for piece in pieces)
    step = _tick_step(sum(piece.stop - piece.start for piece in pieces), factor, max(int(pixels / 110), 2))
    for piece in pieces:
        for tick in _ticks(piece, step):
            x = f"{piece.at(tick):.1f}"
            yield f'<line x1="{x}" y1="{TOP - 4}" x2="{x}" y2="{bottom}" stroke="#ccc" stroke-width="1"/>'
            yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{_number(tick, step, factor)} {name}</text>'


_SOFT = {"forward": 0.35, "backward": 0.25, "weights": 0.25}  # black text stays readable on a bar


def _colour(span: Span, chunks: int) -> str:
    if span.stream != "compute":
        return COLOURS[span.stream]
    return _lighter(COLOURS[span.kind], _SOFT[span.kind] + 0.45 * (span.chunk or 0) / max(chunks - 1, 1))


def _lighter(colour: str, share: float) -> str:
    """`colour` mixed with `share` of white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def _tick_step(seconds: float, factor: float, count: int) -> float:
    """The least of 1, 2, 5, 10, ... units that puts at most `count` steps into `seconds`, in seconds."""
    least = seconds * factor / count
    power = 10.0 ** math.floor(math.log10(least))
    return next(multiple * power for multiple in (1, 2, 5, 10, 20) if multiple * power >= least * (1 - 1e-9)) / factor


def _ticks(piece: _Piece, step: float) -> Iterator[float]:
    first = math.ceil(piece.start / step - 1e-9)
    last = math.floor(piece.stop / step + 1e-9)
    return (number * step for number in range(first, last + 1))


def _number(seconds: float, step: float, factor: float) -> str:
    """`seconds` in the unit, with as many decimals as the steps between ticks need."""
    return f"{seconds * factor:.{max(0, -math.floor(math.log10(step * factor) + 1e-9))}f}"


def _unit(seconds: float) -> tuple[str, float]:
    """The unit that suits a length of time, and how many of this unit make a second."""
    return next((unit for unit in (("s", 1.0), ("ms", 1e3)) if seconds * unit[1] >= 1 - 1e-9), ("us", 1e6))


def _time(seconds: float) -> str:
    unit, factor = _unit(seconds) if seconds else ("s", 1.0)
    return f"{seconds * factor:.4g} {unit}"


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _xml(text: str) -> str:
    """The text escaped, without the control characters that XML forbids."""
    printable = "".join(character for character in text if character.isprintable() or character in "\t\n")
    return escape(printable, quote=False)
