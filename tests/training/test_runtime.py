"""Process-wide settings."""

import jax
import pytest

from jhpt.training.runtime import compile_collectives_anew


@pytest.fixture
def cached():
    """The cache of compiled programs, switched on."""
    jax.config.update("jax_enable_compilation_cache", True)
    yield lambda: jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)


def test_programs_of_several_cpus_are_compiled_anew(cached):
    compile_collectives_anew()
    assert not cached()


@pytest.mark.parametrize("changed", [{"default_backend": "gpu"}, {"device_count": 1}])
def test_others_may_come_from_the_cache(cached, monkeypatch, changed):
    for name, value in changed.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    compile_collectives_anew()
    assert cached()
