"""What a reader of a timeline must find in it."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from jhpt.planner.report import timeline as module
from jhpt.planner.report.simulation import Timeline, simulate
from jhpt.planner.report.timeline import svg_timeline, text_timeline
from tests.covers import quick_and_exhaustive

SVG = "{http://www.w3.org/2000/svg}"


def step(
    schedule="eager-1f1b", devices=2, micro_batches=4, chunks=1, unit=1e-3, cut=0.0, sync=0.0, update=0.0
) -> Timeline:
    """Forwards of one unit, backwards of two."""
    ones = np.full((devices, chunks), unit)
    cuts, syncs, updates = np.full(devices * chunks - 1, cut), np.full(devices, sync), np.full(devices, update)
    return simulate(schedule, micro_batches, ones, 2 * ones, cuts * unit, syncs * unit, updates * unit)


def rows(text: str) -> list[str]:
    return re.findall(r"\|(.*)\|", text)


def bars(svg: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("class") == "bar"]


def hover(bar: ElementTree.Element) -> str:
    return bar.findtext(f"{SVG}title") or ""


def test_text_by_hand():
    # (M + S - 1)(1 + 2) = 9 ms; 63 columns are left of 80 after "device 0 |" and "| 100 %": 7 to a millisecond.
    # Device 0: F0 0..1, F1 1..2, B0 from 4 to 6 (F0 1..2 and B0 2..4 on device 1), B1 7..9.
    text = text_timeline(step(micro_batches=2), width=80)
    assert rows(text) == [
        "0" * 7 + "1" * 7 + "." * 14 + "a" * 14 + "." * 7 + "b" * 14,
        "." * 7 + "0" * 7 + "a" * 14 + "1" * 7 + "b" * 14 + "." * 14,
    ]
    assert text.splitlines()[0] == "eager-1f1b: 9 ms a step, 33.3 % bubble; 2 micro-batches, 2 devices"
    assert "|  67 %" in text


def test_text_of_gradients_and_update():
    # One device, one micro-batch: F 0..1, B 1..3, gradients until 1 + 4 = 5, update until 7; 63 columns again.
    assert rows(text_timeline(step(devices=1, micro_batches=1, sync=4, update=2), width=80)) == [
        "0" * 9 + "a" * 18 + "~" * 18 + "=" * 18
    ]


SIZES = [(devices, micro_batches) for devices in (1, 4, 90) for micro_batches in (8, 4000)]
WIDTHS = (40, 79, 100, 200)
SOME = [(*size, width) for size in SIZES[:3] + SIZES[4:5] for width in WIDTHS] + [(4, 4000, 79), (90, 4000, 200)]


@pytest.mark.parametrize(
    ("devices", "micro_batches", "width"),
    quick_and_exhaustive([(*size, width) for size in SIZES for width in WIDTHS], SOME),
)
def test_text_fits(devices, micro_batches, width):
    if devices == 90 and micro_batches == 4000:
        micro_batches = 100  # enough
    text = text_timeline(step(devices=devices, micro_batches=micro_batches, cut=0.5, sync=3, update=1), width)
    lines = text.splitlines()
    assert text.isascii() and all(len(line) <= width and line == line.rstrip() for line in lines)
    assert len(lines) < 30
    assert len(set(map(len, rows(text)))) == 1
    assert "idle" in text.replace("\n", " ") and re.search(r"^ +[mu]?s +\+0", text, re.MULTILINE)


def test_many_devices_show_the_first_and_the_last():
    text = text_timeline(step(devices=90, micro_batches=4))
    assert "device 0 " in text and "device 11 " in text and "device 89 " in text
    assert "(74 more)" in text and "device 12 " not in text


def test_many_micro_batches_show_the_beginning_and_the_end():
    # An average operation of 1.5 ms has two columns, which show the moments 0.375, 1.125, 1.875, 2.625, ... ms.
    # Device 1 runs F0 in 1..2, B0 in 2..4, F1 in 4..5 and so on until 3001, device 0 its last backward in 3001..3003:
    # there the columns show 3002.625, 3001.875, 3001.125, 3000.375, ...
    text = text_timeline(step(devices=2, micro_batches=1000))
    (_, end), (head, tail) = (row.split(" ... ") for row in rows(text))
    assert head.startswith(".00aa11bb22cc")
    assert end.endswith("jjj") and tail.endswith("99jj...")


@pytest.mark.parametrize(
    ("unit", "found"), [(1.0, "9 s a step"), (1e-3, "9 ms a step"), (1e-6, "9 us a step"), (0.0, "0 s a step")]
)
def test_units(unit, found):
    timeline = step(micro_batches=2, unit=unit)
    assert found in text_timeline(timeline)
    assert found in svg_timeline(timeline, "units")


def test_a_narrow_width_is_refused():
    with pytest.raises(ValueError, match="width=39; use 40"):
        text_timeline(step(), width=39)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("eager-1f1b", 1), ("interleaved", 2)])
def test_svg_has_a_bar_for_everything_that_takes_time(schedule, chunks):
    timeline = step(schedule, devices=3, micro_batches=6, chunks=chunks, cut=0.25, sync=4, update=1)
    svg = svg_timeline(timeline, "a step")
    assert len(bars(svg)) == len([span for span in timeline.spans if span.end > span.start])
    assert "errors sent" in svg and "gradients reduced" in svg
    assert len({bar.get("fill") for bar in bars(svg)}) == 2 * chunks + 4
    assert "device 0: F3, 1 ms from " in svg and "device 0: sends F3" in svg


def test_svg_bars_lie_where_they_belong():
    timeline = step(devices=2, micro_batches=3)
    svg = svg_timeline(timeline, "places")
    page = ElementTree.fromstring(svg)
    spans = [span for span in timeline.spans if span.end > span.start]
    pixels = float(bars(svg)[0].get("width")) / spans[0].seconds
    for bar, span in zip(bars(svg), spans, strict=True):
        assert hover(bar).startswith(f"device {span.device}: {span.label}, ")
        assert float(bar.get("x")) == pytest.approx(float(bars(svg)[0].get("x")) + span.start * pixels, abs=0.1)
        assert float(bar.get("width")) == pytest.approx(span.seconds * pixels, abs=0.1)
        assert float(bar.get("x")) + float(bar.get("width")) <= float(page.get("width"))
        assert float(bar.get("y")) + float(bar.get("height")) <= float(page.get("height"))
    assert "errors sent" not in svg  # no lane of what takes no time


def test_svg_escapes_its_title():
    svg = svg_timeline(step(), "a < b & c \x07")
    assert ElementTree.fromstring(svg).findtext(f"{SVG}title") == "a < b & c "


def test_svg_leaves_the_middle_out(monkeypatch):
    monkeypatch.setattr(module, "MAX_BARS", 60)
    timeline = step(devices=2, micro_batches=100, cut=0.1)
    svg = svg_timeline(timeline, "long")
    assert 50 <= len(bars(svg)) <= 70
    assert any("F0," in hover(bar) for bar in bars(svg)) and any("B99," in hover(bar) for bar in bars(svg))
    assert not any("F50," in hover(bar) for bar in bars(svg))
    assert 'class="gap"' in svg
    monkeypatch.undo()
    assert 'class="gap"' not in svg_timeline(timeline, "long")


def test_the_same_again():
    assert svg_timeline(step(cut=1), "t") == svg_timeline(step(cut=1), "t")
    assert text_timeline(step(cut=1)) == text_timeline(step(cut=1))
