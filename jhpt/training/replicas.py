"""Copies of the state that devices hold, compared bit for bit: which device differs, and its repair from the majority.

Whatever a plan does not cut over an axis of the mesh is there once for each rank of the axis, and every step computes
the same for all of these.  A device whose memory or arithmetic is faulty may hold something else from then on, which no
loss shows.  So, every `guards.replicas_every` steps and before each save, one program

    digest     adds up the bits of every array on each device where they are (`training.digests`), 8 bytes an array
    all-gather gives the sums of all devices to every process, which all come to the same conclusion

Residuals of compressed gradients and offloaded rows are left out: every rank has its own.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jhpt.core.config import GuardsConfig
from jhpt.core.errors import Exit, InputError, JhptError
from jhpt.sharding.partition import names_of
from jhpt.sharding.types import PyTree
from jhpt.training.digests import BITS, sums_of_bits
from jhpt.training.watch import watch

OWN = ("feedback", "rows", "pending")
"""Fields of states that are no copies."""

PARAMETERS = ("params/", "embedding_and_head/")
"""Their paths begin with one of these."""

S = TypeVar("S")


class ReplicasDiffer(JhptError):
    """Devices hold different copies of the state, and which is right is not known, or was not asked for."""

    status = Exit.REPLICAS


class Difference(NamedTuple):
    """Copies of one array, or of one shard of it, that differ.  Devices are numbers of their places in the mesh.

    group: the devices that hold a copy.  devices: those that differ from most of them; all, if no copy is held by most.
    source: one that holds what most do; None: there is none.
    """

    array: int
    group: tuple[int, ...]
    devices: tuple[int, ...]
    source: int | None


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The comparison of one run's state.  like: its shapes with their shardings, all on this mesh."""

    like: Any
    mesh: Mesh
    guards: GuardsConfig
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        """Refuses a state of which there are no copies.

        Raises:
          InputError: nothing would be compared.
        """
        if not any(self.shares.values()):
            raise InputError(
                f"guards.replicas_every={self.guards.replicas_every}: every device holds a part of its own of the "
                "state, so there is nothing to compare; leave it out"
            )

    @property
    def shares(self) -> dict[str, float]:
        """The share of the bytes of parameters, and of all else, of which there are copies."""
        sizes, copied = Counter[str](), Counter[str]()
        for leaf, name, groups in zip(self._leaves, self._names, self._groups, strict=True):
            if leaf.ndim:
                kind = "parameters" if name.startswith(PARAMETERS) else "optimizer state"
                sizes[kind] += leaf.size * leaf.dtype.itemsize
                copied[kind] += leaf.size * leaf.dtype.itemsize * any(len(group) > 1 for group in groups)
        return {kind: copied[kind] / size for kind, size in sizes.items()}

    @property
    def summary(self) -> str:
        """What is compared, and how often."""
        parts = " and ".join(f"{share:.0%} of {kind}" for kind, share in self.shares.items())
        return f"copies are compared every {self.guards.replicas_every} steps and before each save: {parts}"

    def due(self, step: int, *, saving: bool) -> bool:
        """Whether the copies are compared after this step."""
        return saving or step % (self.guards.replicas_every or 1) == 0

    def checked(self, step: int, state: S) -> S:
        """The state after this step, of which all copies are the same.  It is donated.  All processes must call this.

        Raises:
          ReplicasDiffer: they were not, and are not repaired.
        """
        with watch.phase(f"comparing copies of step {step}"):
            found = self.differences(state)
            if not found:
                return state
            text = f"step {step}: {self._text(found)}"
            unknown = any(one.source is None for one in found)
            if unknown or not self.guards.repair_replicas:
                remedy = "" if unknown else ", or set guards.repair_replicas=true to go on with what most of them hold"
                raise ReplicasDiffer(
                    f"{text}; a device that computes or stores wrong numbers should be replaced. Start again with the "
                    f"same --out, which goes on from the newest checkpoint, whose copies were the same{remedy}"
                )
            self.say(f"warning: {text}; repaired")
            return self.repaired(state, found)

    def differences(self, state: Any) -> list[Difference]:
        """What differs; the same answer on every process."""
        sums = np.asarray(self._digest(_copied(state)).addressable_data(0))
        found = []
        for array, groups in enumerate(self._groups):
            for group in groups:
                values = [sums[device, array].tobytes() for device in group]
                if len(set(values)) > 1:
                    found.append(_difference(array, group, values))
        return found

    def repaired(self, state: Any, found: Sequence[Difference]) -> Any:
        """The state with every copy that differs overwritten by one that most devices hold.  The state is donated."""
        chosen = np.zeros((self.mesh.size, len(self._leaves)), np.bool_)
        for array, groups in enumerate(self._groups):
            for group in groups:
                chosen[group[0], array] = True
        for one in found:
            chosen[list(one.group), one.array] = False
            chosen[one.source, one.array] = True
        return replace(state, **self._spread(_copied(state), chosen))

    def _text(self, found: Sequence[Difference]) -> str:
        """`device 5 of process 1 holds other numbers than 3 others in params/blocks/norm/scale and 4 more arrays`."""
        arrays = sorted(
            {self._names[one.array] for one in found}, key=lambda name: (not name.startswith(PARAMETERS), name)
        )
        where = arrays[0] + (f" and {len(arrays) - 1} more arrays" if len(arrays) > 1 else "")
        places = sorted({device for one in found for device in one.devices})
        names = [self._name(one) for one in self.mesh.devices.flat[places]]
        who = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        if any(one.source is None for one in found):
            return f"{who} hold different numbers in {where}, and there is no majority that says which are right"
        same = min(len(one.group) - len(one.devices) for one in found)
        return f"{who} {'holds' if len(names) == 1 else 'hold'} other numbers than {same} others in {where}"

    def _name(self, device: jax.Device) -> str:
        """By its number in its process: ids of CPU devices begin anew at 2048 for each process."""
        process = device.process_index
        ids = sorted(one.id for one in self.mesh.devices.flat if one.process_index == process)
        return f"device {ids.index(device.id)} of process {process}"

    @cached_property
    def _paths(self) -> list[tuple[Any, jax.ShapeDtypeStruct]]:
        return jax.tree_util.tree_flatten_with_path(_copied(self.like))[0]

    @cached_property
    def _leaves(self) -> list[jax.ShapeDtypeStruct]:
        return [leaf for _, leaf in self._paths]

    @cached_property
    def _names(self) -> list[str]:
        return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in self._paths]

    @cached_property
    def _groups(self) -> list[list[list[int]]]:
        """For each array, the devices that hold the same shard of it, by their places in the mesh."""
        place = {device: at for at, device in enumerate(self.mesh.devices.flat)}
        found = []
        for leaf in self._leaves:
            groups = defaultdict[str, list[int]](list)
            assert leaf.sharding is not None
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                groups[str(index)].append(place[device])
            found.append([sorted(group) for group in groups.values()])
        return found

    @cached_property
    def _specs(self) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, _copied(self.like))

    @cached_property
    def _digest(self) -> Callable[[PyTree], jax.Array]:
        """Copied parts of a state -> [devices, arrays, 2], on every device."""

        def run(parts: PyTree) -> jax.Array:
            own = jnp.stack([sums_of_bits(leaf) for leaf in jax.tree.leaves(parts)])
            return jax.lax.all_gather(own, self.mesh.axis_names)

        return self._mapped(run, (self._specs,), PartitionSpec())

    @cached_property
    def _spread(self) -> Callable[[PyTree, np.ndarray], Mapping[str, Any]]:
        """(copied parts of a state, [devices, arrays] which copies are taken) -> the parts, all copies the same."""

        def run(parts: PyTree, chosen: jax.Array) -> PyTree:
            mine = chosen[jax.lax.axis_index(self.mesh.axis_names)]
            leaves, tree = jax.tree.flatten(parts)
            specs = jax.tree.leaves(self._specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
            spread = [self._spread_one(*each) for each in zip(leaves, specs, mine, strict=True)]
            return jax.tree.unflatten(tree, spread)

        return self._mapped(run, (self._specs, PartitionSpec()), self._specs, donate=0)

    def _spread_one(self, leaf: jax.Array, spec: PartitionSpec, taken: jax.Array) -> jax.Array:
        """The copy of the one rank, along the axes that do not cut the leaf, whose copy is taken: a sum of bits in
        which all others are zero."""
        cut = {name for axes in spec for name in names_of(axes)}
        axes = tuple(name for name in self.mesh.axis_names if name not in cut)
        bits = jax.lax.bitcast_convert_type(leaf, BITS[leaf.dtype.itemsize])
        total = jax.lax.psum(jnp.where(taken, bits, 0).astype(jnp.uint32), axes) if axes else bits
        return jax.lax.bitcast_convert_type(total.astype(bits.dtype), leaf.dtype)

    def _mapped(self, run: Callable[..., Any], inputs: Any, outputs: Any, donate: int | None = None) -> Any:
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(mapped, donate_argnums=() if donate is None else donate)


def _copied(state: Any) -> dict[str, Any]:
    """The parts of a state, or of its shapes, of which devices may hold copies."""
    return {each.name: getattr(state, each.name) for each in fields(state) if each.name not in OWN}


def _difference(array: int, group: Sequence[int], values: Sequence[bytes]) -> Difference:
    """Of the devices of a group, which hold these values."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(group):
        return Difference(array, tuple(group), tuple(group), None)
    others = tuple(device for device, held in zip(group, values, strict=True) if held != value)
    return Difference(array, tuple(group), others, group[values.index(value)])
