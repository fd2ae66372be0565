"""What `jhpt bench kernels` makes of its samples, and that it times nothing without a GPU."""

import pytest

from jhpt.bench import kernels
from jhpt.kernels.operations import OPERATIONS


def row(operation, competitor, seconds, size=1000, spec="s"):
    return {"operation": operation, "spec": spec, "competitor": competitor, "bytes": size, "samples_s": [seconds] * 3}


def test_claims():
    rows = [
        row("copy", "copy", 1.0, 2000),
        row("segment_quantize", "mosaic", 1.0, 1500),
        row("segment_quantize", "reference", 2.0, 1500),
        row("token_topk", "mosaic", 1.0),
        row("token_topk", "reference", 8.0),
        row("token_topk", "top_k", 3.0),
    ]
    claims = kernels.claims(rows)
    assert claims["segment_quantize[s]"].value == pytest.approx(0.75)
    claim = claims["token_topk_vs_best[s]"]
    assert claim.value == pytest.approx(3.0) and claim.unit.startswith("seconds of top_k /")
    assert len(claims) == 2


def test_bytes_are_those_of_arguments_and_results():
    quantize = OPERATIONS["segment_quantize"]
    spec = quantize.specs.Spec(100, 256, 8, dtype="bfloat16")
    assert kernels.moved(quantize, spec) == 100 * (256 * 2 + 256 + 2 * 2)
    assert kernels.moved(quantize, spec._replace(chosen=10)) == 10 * (256 * 2 + 256 + 2 * 2 + 4)


def test_times_nothing_here(monkeypatch, capsys):
    def missing(cluster):
        raise kernels.NotHere("jax's CUDA plugin is missing")

    monkeypatch.setattr(kernels, "compile_only_devices", missing)
    assert kernels.run(quick=True, json_path=None) == 3
    messages = capsys.readouterr().err
    assert "plugin is missing" in messages and "needs an NVIDIA GPU" in messages
