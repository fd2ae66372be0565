"""How fast a plan trains: steps, tokens and the share of the devices' peak that the model's products take.

    tokens/s = batch * tokens of a sample / seconds of a step
    MFU      = tokens/s * model FLOP per token / (sum of the peaks of all devices of the cluster)

Model FLOP are those of matrix products, causal convention (`ModelConfig.flops_per_token`); what is recomputed does not
count.  Peaks are the catalogue's for the dtype that the model computes in.  Figures per device count idle devices, too.
"""

from dataclasses import dataclass

from jhpt.core.catalogue import device_named, kind_by_driver
from jhpt.core.cluster import Cluster, Device
from jhpt.planner.cost.ranges import case_of, range_of
from jhpt.planner.report.words import devices_word, duration
from jhpt.planner.search.solve import Answer

CPU = "cpu"
"""What the driver calls a CPU, for which nobody states a peak."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rates of all devices together.

    devices: of the cluster, idle ones included.  tokens: per second; None if samples have no tokens.  mfu: None where
    the model's FLOP or a device's peak are not known.
    """

    seconds: float
    devices: int
    samples: float
    tokens: float | None
    mfu: float | None

    @property
    def rate(self) -> tuple[float, str]:
        """(rate, unit): tokens per second, or samples per second if samples have no tokens."""
        return (self.samples, "samples/s") if self.tokens is None else (self.tokens, "tokens/s")

    @property
    def tokens_per_device(self) -> float | None:
        """Tokens per second of a device."""
        return None if self.tokens is None else self.tokens / self.devices


def speed(answer: Answer) -> Speed:
    """How fast the answer's plan trains."""
    profile, cluster = answer.model.profile, answer.model.cluster
    samples = answer.plan.batch / answer.estimate.seconds
    peak = peak_flops(cluster, profile.dtype)
    flops = profile.flops_per_sample
    return Speed(
        seconds=answer.estimate.seconds,
        devices=cluster.num_devices,
        samples=samples,
        tokens=samples * profile.sample_tokens if profile.sample_tokens else None,
        mfu=samples * flops / peak if flops and peak else None,
    )


def peak_flops(cluster: Cluster, dtype: str) -> float | None:
    """Nominal FLOP/s of all devices in this dtype; None where it is not known of one of them."""
    peaks = [(node.count * node.devices, _nominal(node.device, dtype)) for node in cluster.nodes]
    return None if any(peak is None for _, peak in peaks) else sum(count * (peak or 0.0) for count, peak in peaks)


def _nominal(device: Device, dtype: str) -> float | None:
    """The catalogue's peak, or that of the file that describes the device.  What a CPU was measured at is no peak."""
    if (kind := kind_by_driver(device.name)) is not None:
        return device_named(kind).peak_flops.get(dtype)
    return None if device.name == CPU else device.peak_flops.get(dtype)


def seconds_range(answer: Answer) -> tuple[float, float] | None:
    """Seconds of a step between which eight of ten published runs like this one would lie (`planner.cost.ranges`).

    None where no published run is like it: a measured profile, a CPU, a model of images, devices that the catalogue
    does not know, a mixed cluster, CPU offload, compression, 8-bit products, float32 or low-precision state, or a model
    or cluster of another size.
    """
    profile, cluster, plan = answer.model.profile, answer.model.cluster, answer.plan
    measured = any(timing.repetitions for kind in profile.kinds.values() for timing in kind.timings)
    known = not cluster.mixed and all(kind_by_driver(node.device.name) for node in cluster.nodes)
    special = plan.offload or plan.compression.on or answer.model.gradient_compression.on or profile.state.low_precision
    unlike = special or profile.products != "same" or profile.dtype == "float32" or profile.flops_per_sample is None
    if measured or not known or unlike or profile.sample_tokens is None:
        return None
    factors = range_of(case_of(answer.plan, cluster.nodes[0].device.name, profile.parameters))
    if factors is None:
        return None
    return factors.low * answer.estimate.seconds, factors.high * answer.estimate.seconds


def headline(answer: Answer) -> str:
    """In one line: `gpt-13b on h100x8x8: 5,253 tokens/s per GPU, MFU 42.2 % (causal), 390 ms per step (8 of 10 such
    runs: 350 ms to 450 ms)`."""
    found = speed(answer)
    rate, unit = found.rate
    each = rate / found.devices
    convention = "" if found.tokens is None else " (causal)"
    figures = [
        f"{each:,.{0 if each >= 100 else 1 if each >= 10 else 2}f} {unit} per {devices_word(answer.model.cluster)}",
        f"MFU {100 * found.mfu:.1f} %{convention}" if found.mfu is not None else "",
        f"{duration(found.seconds)} per step",
    ]
    if within := seconds_range(answer):
        figures[-1] += f" (8 of 10 such runs: {duration(within[0])} to {duration(within[1])})"
    return f"{answer.model.profile.name} on {answer.model.cluster.name}: {', '.join(filter(None, figures))}"
