"""The real training step of a plan, compiled for a cluster that is not here, and read."""

from jhpt.compiled.deviceless import compile_only_devices, compile_only_info, compiled_for
from jhpt.compiled.modelled import Clock
from jhpt.compiled.program import Reading, read_compiled
from jhpt.core.cluster import Cluster
from jhpt.core.config import Config
from jhpt.core.plan import Plan
from jhpt.core.rules import Choices, check
from jhpt.sharding.compiler_options import compiler_options
from jhpt.training.planning import check_fits_model
from jhpt.training.programs import train_program
from jhpt.training.setup import design_step, fitting_tokenizer


def compiled_step(config: Config, plan: Plan, cluster: Cluster) -> Reading:
    """What the compiler makes of the step that `jhpt.train` would run by this plan on this cluster; needs no data.

    A step that needs more memory than there is is compiled into one that computes more (`Reading`).

    Raises:
      InputError: the plan is none, not for one program, or not for this model or cluster.
      NotHere: what compiling needs is not installed.
    """
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": plan.batch})})
    check_fits_model(plan, config)
    check(Choices(devices=plan.devices, available=cluster.num_devices, place=cluster.name))
    devices = compile_only_devices(cluster)
    design = design_step(config, plan, fitting_tokenizer(config), devices, compile_only_info(cluster))
    sizes = {str(name): int(size) for name, size in design.layout.device_mesh.mesh.shape.items()}
    compiled = compiled_for(train_program(design), compiler_options("gpu", plan))
    return read_compiled(compiled, sizes, Clock(cluster))
