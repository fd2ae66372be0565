"""Activations on the host, before a run relies on them."""

from collections.abc import Callable

from jhpt.core.plan import Kept, Plan
from jhpt.measure.offload import offload_is_right
from jhpt.training.processes import same_everywhere


def with_tried_offload(plan: Plan, say: Callable[[str], None], right: Callable[[], bool] = offload_is_right) -> Plan:
    """The plan, or where it offloads activations and a device here gets gradients wrong by that, one that does not.

    What was to be on the host is then computed again, and blocks' inputs stay on the device: computing takes time, and
    memory for it may not be there.  All processes must call; one device that fails is enough.
    """
    if plan.kept is None or not plan.kept.host:
        return plan
    found = right()
    if same_everywhere(str(found)) and found:
        return plan
    say(
        f"warning: gradients of offloaded activations are wrong on this device, so {' and '.join(plan.kept.host)} does "
        "not go to the host but is computed again, which takes longer; another version of jax may do better"
    )
    return plan.model_copy(update={"kept": Kept(device=plan.kept.device)})
