"""How fast every kind of device of a cluster computes a model's layers.

A profile holds for the devices of one name.  On a cluster of one kind of device it counts, whatever it is called there.
On any other cluster each kind of device has

    its own profile     if there is one
    that of another     times a ratio of datasheet figures: of the peak FLOP/s at the profile's dtype for passes, and of
                        the memory bandwidth for updates

The other one is the kind that the profile names, or the fastest kind if it names none of them.  A ratio of peaks knows
neither the sizes at which a device is efficient nor what waits for its memory, so the report names such kinds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jhpt.core.cluster import Device
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a model's layers on one kind of device: those of `profile`, times two ratios.

    compute: factor on the seconds of passes.  update: factor on those of the optimizer.  note: what is approximate in
    them; empty if the profile is the device's own.
    """

    profile: ModelProfile
    compute: float = 1.0
    update: float = 1.0
    note: str = ""


def paces(profile: ModelProfile, others: Mapping[str, ModelProfile], kinds: Sequence[Device]) -> tuple[Pace, ...]:
    """The pace of every kind of device.

    Args:
      others: profiles of the same model on further kinds of devices, by `Device.rates`.
      kinds: the fastest first.

    Raises:
      InputError: on a cluster of several kinds, a device has no rate for the profile's dtype, or its profile is of
        another model.
    """
    if len(kinds) == 1:
        return (Pace(profile=profile),)
    _check_dtypes(profile, kinds)
    rest = [device for device in kinds if device.rates not in others]
    known = next((device for device in rest if device.name == profile.device), rest[0] if rest else None)
    return tuple(
        Pace(profile=_checked(others[device.rates], profile))
        if known is None or device.rates in others
        else _estimated(profile, known, device)
        for device in kinds
    )


def notes(all_paces: Sequence[Pace]) -> Iterator[str]:
    """What is approximate in the seconds of each kind of device."""
    return (pace.note for pace in all_paces if pace.note)


def _estimated(profile: ModelProfile, known: Device, device: Device) -> Pace:
    """The pace of `device` if the profile's seconds are those of `known`."""
    if device is known:
        renamed = device.name != profile.device
        note = f"{device.name} has no profile of its own, so it counts as {profile.device}, the profile's device"
        return Pace(profile=profile, note=note if renamed else "")
    compute = known.peak_flops[profile.dtype] / device.peak_flops[profile.dtype]
    update = known.memory_bandwidth / device.memory_bandwidth
    note = (
        f"{device.name} has no profile of its own, so its seconds are approximate: those of {known.name}, passes times "
        f"{compute:.3g} (peak {profile.dtype} FLOP/s), updates times {update:.3g} (memory bandwidth)"
    )
    return Pace(profile=profile, compute=compute, update=update, note=note)


def _check_dtypes(profile: ModelProfile, kinds: Sequence[Device]) -> None:
    """Refuses a device that cannot compute in the profile's dtype."""
    lacking = [device.name for device in kinds if profile.dtype not in device.peak_flops]
    if lacking:
        common = [name for name in kinds[0].peak_flops if all(name in device.peak_flops for device in kinds)]
        use = f"use a profile in {one_of(common)}, or " if common else ""
        raise InputError(
            f"{' and '.join(dict.fromkeys(lacking))} has no rate for dtype={profile.dtype} of the profile "
            f"{profile.name}; {use}take {'it' if len(lacking) == 1 else 'them'} out of the cluster"
        )


def _checked(own: ModelProfile, profile: ModelProfile) -> ModelProfile:
    """A further profile, if it is of the same model."""
    alike = ("layers", "dtype", "products", "bytes_per_weight", "state_bytes", "state")
    different = [name for name in alike if getattr(own, name) != getattr(profile, name)]
    if different or own.kinds.keys() != profile.kinds.keys():
        raise InputError(
            f"the profiles of {own.device} and {profile.device} differ in {one_of(different or ['kinds'])}, so they "
            "are not of one model and configuration; make both with the same configuration"
        )
    return own
