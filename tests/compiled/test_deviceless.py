"""What a compiler that lacks a library says is told from what it says of other faults."""

import jax
import pytest

from jhpt.compiled import deviceless
from jhpt.core.cluster_file import find_cluster
from jhpt.core.errors import NotHere

ABSENT = {
    "cuDNN not found.": "cuDNN",
    "UNIMPLEMENTED: DNN library is not found.": "cuDNN",
    "FAILED_PRECONDITION: cuDNN could not be found or could not be loaded.": "cuDNN",
    "Could not load library libcudnn_graph.so.9: cannot open shared object file: No such file or directory": "cuDNN",
    "UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink nor nvjtlink is available. Details: \n"
    " - Driver compilation is enabled: 0\n"
    " - ptxas_path: Couldn't find a suitable version of ptxas. The following locations were considered: /bin": "ptxas",
    "INTERNAL: libdevice not found at ./libdevice.10.bc": "libdevice",
    "Can't find libdevice directory ${CUDA_DIR}/nvvm/libdevice.": "libdevice",
}

OTHERS = (
    "INTERNAL: cuDNN graph failed to build: CUDNN_STATUS_NOT_SUPPORTED",
    "INTERNAL: ptxas exited with non-zero error code 2, output: ptxas fatal : Memory allocation failure",
    "INTERNAL: a custom call to __cudnn$fmhaSoftmax was rewritten\nNOT_FOUND: no operand, buffer not found",
    "RESOURCE_EXHAUSTED: out of memory",
    "",
)


class Failing:
    """A program that fails to compile."""

    def __init__(self, message):
        self.message = message

    def compile(self, compiler_options):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize("message", ABSENT)
def test_a_missing_library_is_named_with_the_remedy_and_what_was_said(message):
    with pytest.raises(NotHere) as caught:
        deviceless.compiled_for(Failing(message))
    assert f"does not find {ABSENT[message]} ({message.splitlines()[0]}); " in str(caught.value)
    assert "jhpt[deviceless]" in str(caught.value)


@pytest.mark.parametrize("message", OTHERS)
def test_other_faults_stay_what_they_are(message):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        deviceless.compiled_for(Failing(message))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("error", "words"),
    [(RuntimeError(""), "RuntimeError"), (NotImplementedError("\nno topology\nat all"), "no topology")],
)
def test_a_plugin_that_cannot_be_used_says_why(error, words, monkeypatch):
    def refuse(**_):
        raise error

    monkeypatch.setattr(deviceless, "PLUGINS", ("json",))
    monkeypatch.setattr(deviceless.topologies, "get_topology_desc", refuse)
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with pytest.raises(NotHere, match=rf"cannot compile here \({words}\); install"):
        deviceless.compile_only_devices(find_cluster("h100x8x1"))
