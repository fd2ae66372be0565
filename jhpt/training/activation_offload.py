"""Activations on the host, before a run relies on them."""

from collections.abc import Callable

import jax

from jhpt.core.amounts import gib
from jhpt.core.cluster import Device
from jhpt.core.config import Config
from jhpt.core.errors import InputError
from jhpt.core.plan import Plan, SavedTensors
from jhpt.measure.device import device_info
from jhpt.measure.offload import offload_is_right
from jhpt.planner.cost.activation_offload import fullest_host, waiting, waiting_bytes
from jhpt.planner.profiles.analytic import analytic_profile
from jhpt.training.processes import processes_here, raise_on_all_processes, same_everywhere
from jhpt.training.runtime import host_budget
from jhpt.training.setup import compute_dtype


def with_tried_offload(plan: Plan, say: Callable[[str], None], right: Callable[[], bool] = offload_is_right) -> Plan:
    """The plan, or where it offloads activations and a device here gets gradients wrong by that, one that does not.

    What was to be on the host is then computed again, and blocks' inputs stay on the device: computing takes time, and
    memory for it may not be there.  All processes must call; one device that fails is enough.
    """
    if plan.saved is None or not plan.saved.host:
        return plan
    found = right()
    if same_everywhere(str(found)) and found:
        return plan
    say(
        f"warning: gradients of offloaded activations are wrong on this device, so {' and '.join(plan.saved.host)} does "
        "not go to the host but is computed again, which takes longer; another version of jax may do better"
    )
    return plan.model_copy(update={"saved": SavedTensors(device=plan.saved.device)})


def check_host_room(plan: Plan, config: Config) -> None:
    """Refuses a plan whose activations need more of a host than there is for them.  All processes must call.

    Raises:
      InputError: with both numbers and what to do.
    """
    saved = waiting(plan)
    if not saved.host or plan.offload is not None:
        return
    dtype = compute_dtype(config, device_info()).name
    nominal = Device(name=device_info().kind, peak_flops={dtype: 1.0}, memory=1.0, memory_bandwidth=1.0)
    by_device = waiting_bytes(plan, analytic_profile(config, nominal, dtype), saved)
    need, room = fullest_host(by_device, jax.local_device_count() * processes_here()), host_budget(config.memory)
    with raise_on_all_processes():
        _refuse(saved, need, room)


def _refuse(saved: SavedTensors, need: float, room: float) -> None:
    if need > room:
        raise InputError(
            f"{' and '.join(saved.host)} of all blocks need {gib(need)} on each host, which has "
            f"{gib(room)} for them (memory.host_budget_bytes); give a plan that keeps fewer names there or "
            "has more micro_batches, such as `jhpt plan` makes with this host budget, or use more hosts"
        )
