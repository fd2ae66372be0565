"""Ports for the processes of a run, which nothing else takes before somebody listens there."""

import socket

import pytest
from jax._src.lib import _jax

from jhpt.core import ports
from jhpt.core.ports import free_port, held_port


def test_the_system_itself_gives_no_free_port_away():
    first_of_system = int(ports.OWN_CHOICES.read_text().split()[0])
    for _ in range(20):
        port = free_port()
        assert ports.FIRST <= port < first_of_system
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("text", ["1024 65535", "", None])
def test_where_the_system_chooses_from_all_or_does_not_say_any_port_is_good(monkeypatch, tmp_path, text):
    monkeypatch.setattr(ports, "OWN_CHOICES", tmp_path / "range")
    if text is not None:
        ports.OWN_CHOICES.write_text(text)
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_a_port_at_which_something_listens_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
        probe.close()
        found = iter([taken.getsockname()[1], taken.getsockname()[1], free])
        monkeypatch.setattr(ports, "_outside_the_systems_choices", lambda: next(found))
        assert free_port() == free


def test_nothing_but_jaxs_server_takes_a_held_port():
    """At a port that another holds, jaxlib's server ends the process with a segmentation fault."""
    with held_port() as port:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        server = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", 1)
    client = _jax.get_distributed_runtime_client(f"127.0.0.1:{port}", 0)
    client.connect()
    client.shutdown()
    server.shutdown()
