"""From a plan to its compiled step, for the devices here or for a cluster that is not attached."""

from typing import Any

import jax

from jhpt.compiled.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.compiled.modelled import Clock
from jhpt.compiled.program import Reading, read_compiled
from jhpt.core.cluster import Cluster
from jhpt.core.config import Config
from jhpt.core.plan import Plan
from jhpt.core.rules import Choices, check
from jhpt.sharding.compiler_options import compiler_options
from jhpt.sharding.mesh import check_runnable
from jhpt.training import device_step, offloaded_step
from jhpt.training.device_step import compile_device_step, lower_device_step
from jhpt.training.offloaded_step import compile_offloaded_step, lower_offloaded_step
from jhpt.training.planning import check_fits_model
from jhpt.training.programs import Step
from jhpt.training.replicas import Replicas
from jhpt.training.setup import Design, design_step, fitting_tokenizer
from jhpt.training.stages_setup import AnySetup, StagesSetup
from jhpt.training.stages_step import compile_stages_step
from jhpt.training.step_folders import Say


def compile_step(setup: AnySetup) -> Step[Any]:
    """The step that the plan needs, compiled with everything that might not fit: evaluating and saving, too.

    Raises:
      InputError: a device or this host has less memory than is needed.
    """
    if isinstance(setup, StagesSetup):
        return compile_stages_step(setup)
    return compile_offloaded_step(setup) if setup.plan.offload else compile_device_step(setup)


def lower_step(design: Design) -> jax.stages.Lowered:
    """The training step `(state, windows [B, W]) -> (state, metrics)` that the plan needs, to be compiled.

    The state is donated.  Devices need not be attached to this machine.
    """
    return lower_offloaded_step(design) if design.plan.offload else lower_device_step(design)


def replicas_of(setup: AnySetup, say: Say) -> Replicas | None:
    """The comparison of copies that the configuration asks for; None: it asks for none.

    Raises:
      InputError: there are no copies.
    """
    if isinstance(setup, StagesSetup) or setup.config.guards.replicas_every is None:
        return None
    module = offloaded_step if setup.plan.offload else device_step
    mesh = setup.layout.device_mesh.mesh
    return Replicas(like=module.abstract_state(setup), mesh=mesh, guards=setup.config.guards, say=say)


def host_copies(design: Design) -> dict[str, float]:
    """Bytes of host memory that a process needs beside its devices and offloaded rows, by cause."""
    if design.plan.offload:
        return offloaded_step.copies(offloaded_step.offloaded_training(design))
    return device_step.copies(device_step.abstract_state(design))


def compiled_step(config: Config, plan: Plan, cluster: Cluster) -> Reading:
    """The compiled form of the step that `jhpt.train` would run under this plan on this cluster; needs no data.

    If a step needs more memory than there is, the compiler makes it compute some products twice (`Reading`).

    Raises:
      InputError: the plan is invalid, needs several programs, or is not for this model or cluster.
      NotHere: a package that compiling needs is not installed.
    """
    compiled, sizes = compile_for(config, plan, cluster)
    return read_compiled(compiled, sizes, Clock(cluster))


def compile_for(config: Config, plan: Plan, cluster: Cluster) -> tuple[jax.stages.Compiled, dict[str, int]]:
    """(the compiled step, sizes of the mesh's axes, outermost first); arguments and errors are those of
    `compiled_step`."""
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": plan.batch})})
    check_fits_model(plan, config)
    check_runnable(plan)
    check(Choices(devices=plan.devices, available=cluster.num_devices, place=cluster.name))
    devices = compile_only_devices(cluster)
    design = design_step(config, plan, fitting_tokenizer(config), devices, compile_only_info(cluster))
    sizes = {str(name): int(size) for name, size in design.layout.device_mesh.mesh.shape.items()}
    return compiled_for(lower_step(design), compiler_options("gpu", plan)), sizes
