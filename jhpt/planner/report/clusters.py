"""Several clusters compared for the same step, and the clusters that are known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jhpt.core.catalogue import (
    cluster_named,
    kinds,
    most_devices,
    network_named,
    networks,
    sources_of,
    usual_network,
)
from jhpt.core.cluster import Cluster
from jhpt.planner.report.answer import FORMAT, column_table
from jhpt.planner.report.rent import Prices, Rent, money, rent
from jhpt.planner.report.speed import speed
from jhpt.planner.report.words import duration, long_duration, shape_text
from jhpt.planner.search.solve import Answer


@dataclass(frozen=True, kw_only=True)
class Option:
    """A cluster that one could rent: the answer for it, or why there is none."""

    cluster: Cluster
    answer: Answer | None
    reason: str = ""
    rent: Rent | None = None

    @property
    def fullest(self) -> float | None:
        """Share of the usable memory that the plan takes on its fullest devices."""
        stages = self.answer.estimate.stages if self.answer else ()
        return max((stage.total_bytes / stage.capacity for stage in stages), default=None)


def ranked(options: Sequence[Option], tokens: float | None, prices: Prices | None) -> list[Option]:
    """The cheapest option first, or the fastest without prices; last those that fit no plan."""
    with_rent = [
        Option(cluster=each.cluster, answer=each.answer, reason=each.reason, rent=rent(each.answer, tokens, prices))
        if each.answer
        else each
        for each in options
    ]

    def order(option: Option) -> tuple[float, float]:
        if option.answer is None:
            return math.inf, math.inf
        each = option.rent.per_token if option.rent and option.rent.per_token is not None else 0.0
        return each, option.answer.estimate.seconds

    return sorted(with_rent, key=order)


def print_options(console: Console, options: Sequence[Option]) -> None:
    """Prints the table, and below it the plans, and why nothing fits."""
    found = next((option.answer for option in options if option.answer), None)
    if found:
        samples = f"{found.plan.batch} sample{'s' if found.plan.batch > 1 else ''}"
        order = "cheapest" if options[0].rent and options[0].rent.per_token is not None else "fastest"
        profile = found.model.profile
        line = f"{profile.name}: {samples} per step, each {profile.sample}; {order} first"
        console.print(line, markup=False)
    console.print(options_table(options))
    plans = column_table("cluster", "plan", title="plans")
    for option in options:
        plan = shape_text(option.answer.plan) if option.answer else "none fits, see below"
        plans.add_row(escape(option.cluster.name), plan)
    console.print(plans)
    for option in options:
        if option.answer is None:
            name = "" if option.cluster.name in option.reason else f"{option.cluster.name}: "
            console.print(f"\n{name}{option.reason}", markup=False)


def options_table(options: Sequence[Option]) -> Table:
    """A row for each cluster.  A column without a figure is left out."""
    rows = [_figures(option) for option in options]
    columns = [name for name in max(rows, key=len) if any(row.get(name) for row in rows)]
    table = column_table("cluster", *columns, title="", numbers=1)
    table.columns[0].no_wrap = True
    for option, row in zip(options, rows, strict=True):
        table.add_row(escape(option.cluster.name), *(row.get(name) or "-" for name in columns))
    return table


def _figures(option: Option) -> dict[str, str]:
    """The cells of a row by the names of their columns; empty where a figure is not known."""
    count = f"{option.cluster.num_devices:,}"
    if option.answer is None:
        return {"GPUs": count}
    found, paid = speed(option.answer), option.rent
    if idle := found.devices - option.answer.plan.devices:
        count += f" ({idle} idle)"
    rate, unit = found.rate
    each = rate / found.devices
    figures = {
        "GPUs": count,
        "step": duration(found.seconds),
        f"{unit} per GPU": f"{each:,.{0 if each >= 100 else 2}f}",
        "MFU": "" if found.mfu is None else f"{100 * found.mfu:.1f} %",
        "memory full": f"{100 * (option.fullest or 0.0):.0f} %",
    }
    if paid and paid.seconds is not None:
        figures |= {"time": long_duration(paid.seconds), "GPU-hours": f"{paid.device_hours or 0.0:,.0f}"}
    if paid and paid.cost is not None:
        figures["cost"] = money(paid.cost)
    if paid and paid.per_token is not None:
        figures["per billion tokens"] = money(1e9 * paid.per_token)
    return figures


def options_json(options: Sequence[Option]) -> dict[str, Any]:
    """Every option in bytes and seconds, in the order of the table."""
    return {"format": FORMAT, "clusters": [_option_json(option) for option in options]}


def _option_json(option: Option) -> dict[str, Any]:
    about = {"cluster": option.cluster.name, "devices": option.cluster.num_devices}
    if option.answer is None:
        return about | {"plan": None, "why": option.reason}
    found = speed(option.answer)
    return about | {
        "idle": option.cluster.num_devices - option.answer.plan.devices,
        "plan": option.answer.plan.model_dump(mode="json", exclude_none=True),
        "seconds": found.seconds,
        "samples_per_second": found.samples,
        "tokens_per_second": found.tokens,
        "tokens_per_second_per_device": found.tokens_per_device,
        "mfu": found.mfu,
        "memory_full": option.fullest,
        "gap": option.answer.gap,
        **({"rent": option.rent.to_json()} if option.rent else {}),
    }


def print_catalogue(console: Console) -> None:
    """Prints the kinds of devices, and the networks between nodes."""
    table = column_table(
        "kind", "memory", "16-bit peak", "memory rate", "in a node", "to the host", "node", "host memory", "network",
        title="kinds, for KINDxDEVICESxNODES[-NETWORK]", numbers=1,
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for kind in kinds():
        node = cluster_named(f"{kind}x{most_devices(kind)}x1").nodes[0]
        device = node.device
        table.add_row(
            kind,
            f"{device.memory / 1e9:.0f} GB",
            f"{device.peak_flops['bfloat16'] / 1e12:,.0f} TFLOP/s",
            f"{device.memory_bandwidth / 1e12:.2f} TB/s",
            f"{node.inside.bandwidth / 1e9:.0f} GB/s" if most_devices(kind) > 1 else "",
            f"{node.host.bandwidth / 1e9:.0f} GB/s",
            f"{most_devices(kind)} GPU{'s' if most_devices(kind) > 1 else ''}",
            f"{node.host_memory / 1e12:.2f} TB",
            usual_network(kind),
        )
    console.print(table)
    links = column_table("network", "one port", "first byte", "ports of a node", title="networks", numbers=1)
    links.columns[-1].justify = "left"
    for network in networks():
        link, wide = network_named(network, None, 1), network_named(network, None, 8)
        ports = "by the kind: one per GPU, per two GPUs or per node" if wide.ports > 1 else "one"
        links.add_row(network, f"{8e-9 * link.bandwidth:.1f} Gbit/s", duration(link.latency), ports)
    console.print(links)
    console.print(
        "\nMemory is what a program can allocate; rates are of one direction; no product reaches the peak.\n"
        "The share that products reach, and the source of every figure: --json.\n"
        "Other machines: a short YAML file, docs/concepts/cluster.md.",
        markup=False,
    )


def catalogue_json() -> dict[str, Any]:
    """Kinds, each as a full node with its usual network, and networks, with the source of every figure."""

    def entry(kind: str) -> dict[str, Any]:
        cluster = cluster_named(f"{kind}x{most_devices(kind)}x1")
        node = cluster.nodes[0].model_dump(mode="json", exclude_none=True)
        return node | {"network": usual_network(kind), "sources": cluster.sources}

    def link(network: str) -> dict[str, Any]:
        sources = sources_of(kinds()[0], network)
        return {
            key: {"value": getattr(network_named(network, None, 1), key), "source": sources[f"network.{key}"]}
            for key in ("bandwidth", "latency")
        }

    return {
        "format": FORMAT,
        "kinds": {kind: entry(kind) for kind in kinds()},
        "networks": {network: link(network) for network in networks()},
    }
