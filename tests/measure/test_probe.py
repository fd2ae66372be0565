"""The probe: structure only; no rate is asserted."""

import jax
import pytest

from jhpt.core.cluster import load_cluster
from jhpt.core.errors import InputError
from jhpt.measure import probe
from jhpt.measure.probe import probe_cluster


@pytest.fixture
def small(monkeypatch):
    """Probes of a few kilobytes and megaflops."""
    monkeypatch.setattr(probe, "PRODUCTS", {False: (8, 16), True: (8, 16)})
    monkeypatch.setattr(probe, "CHAIN_FLOP", {False: 1e4, True: 1e4})
    monkeypatch.setattr(probe, "STREAM_BYTES", {False: 1 << 12, True: 1 << 12})
    monkeypatch.setattr(probe, "SIZES", (1 << 12, 1 << 13))


def test_the_machine_is_a_cluster_of_one_node(small, tmp_path):
    cluster = probe_cluster(rounds=1)
    (node,) = cluster.nodes
    assert cluster.num_devices == jax.local_device_count() and cluster.num_nodes == 1
    assert set(node.device.peak_flops) == {"bfloat16", "float32"}
    assert node.device.efficiency.sizes == (2 * 8**3, 2 * 16**3) and max(node.device.efficiency.values) == 1
    assert node.host.measured.sizes == (1 << 12, 1 << 13)
    assert node.inside.measured.sizes == ((1 << 12) / 8, (1 << 13) / 8)  # messages of a ring of 8
    assert node.device.seconds(1e9, 0, "float32") > 0
    cluster.save(tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster


def test_sources_name_what_was_measured_and_what_was_not(small):
    sources = probe_cluster(rounds=1).sources
    assert all(sources[name].startswith("measured 2") for name in ("peak_flops", "memory_bandwidth", "host", "inside"))
    assert sources["network"].startswith("not measured")


def test_links_are_latency_and_rate():
    # 1 ms for next to nothing; 3 ms for 4 MB: 2 MB/ms beyond the latency.  The last one is all latency: a tenth counts.
    link = probe._link({1e3: 1e-3, 4e6: 3e-3})
    assert link.latency == 1e-3 and link.rate(4e6) == pytest.approx(2e9) and link.bandwidth == link.rate(4e6)
    assert probe._link({1e3: 1e-3, 1e6: 1e-3}).bandwidth == pytest.approx(1e10)


def test_a_link_that_cannot_be_right_is_measured_again(monkeypatch, capsys):
    """64 MiB that arrive before 1 KiB; then a link, with the spread of its worst size."""
    rounds, tries = [], [[1e-6, 1e-6], [1.0, 1.5]]

    def measure(calls, number):
        rounds.append(number)
        return {1e3: [1e-3, 1e-3], 1e8: tries[len(rounds) - 1]}

    monkeypatch.setattr(probe, "_timed", measure)
    link = probe.ring_link([jax.devices()[:2]], 2)
    assert rounds == [2, 4] and link.spread == pytest.approx(0.4 / 1.25) and link.repetitions == 2
    assert "which cannot be right" in capsys.readouterr().err
    tries = [[0.0, 0.0]] * 6
    with pytest.raises(InputError, match="all-reduce over 2 devices: 3 tries"):
        probe.ring_link([jax.devices()[:2]], 2)


def test_no_rounds_are_refused():
    with pytest.raises(InputError, match="rounds=0"):
        probe_cluster(rounds=0)
