"""The section `memory`: how much memory may be used, and what is done where a step needs more."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from jhpt.core.errors import did_you_mean
from jhpt.core.families.family import BLOCK_INPUT, known_tensors
from jhpt.core.families.transformer import NAMED_TENSORS
from jhpt.core.plan import OffloadKind
from jhpt.core.section import Bytes, Count, Section


class MemoryConfig(Section):
    """How much memory may be used, and what is done where a step needs more.

    With `auto` the planner chooses.  If `parallel` lays a step out by hand, `auto` changes nothing as long as the step
    fits or the device is not known.
    """

    budget_bytes: Literal["auto"] | Bytes = Field(
        "auto",
        description="memory of each device that may be used, such as 24GiB; plans leave 3 % of it free; auto: all "
        "device memory, and no limit on CPU",
    )
    host_budget_bytes: Literal["auto"] | Bytes = Field(
        "auto",
        description="memory of each host for CPU offload, never more than it has; where it is set, saved activations "
        "may be offloaded too; auto: nine tenths of what the host has",
    )
    offload: Literal["auto", "off", OffloadKind] = Field(
        "auto",
        description="CPU offload of blocks: their weights and gradients (parameters), their optimizer state "
        "(optimizer), or both. The planner offloads as many blocks as is fastest; a layout by hand offloads all",
    )
    recompute: Literal["auto", "none", "full"] | tuple[str, ...] = Field(
        "auto",
        description="recomputation (activation checkpointing); full: save only the input of every block, compute the "
        "rest again; none: save all activations; or the names of the activations that are saved beside the input, of "
        f"{', '.join(NAMED_TENSORS[1:])}",
    )

    recompute_blocks: Count | None = Field(
        None,
        description="with recompute: how many blocks do that, the first ones; the others save everything; null: all. "
        "Needs one stage that is laid out by hand",
    )

    @field_validator("recompute", mode="before")
    @classmethod
    def _names_with_commas(cls, recompute: Any) -> Any:
        """On a command line the names are one word; earlier versions had true and false."""
        if isinstance(recompute, bool):
            return "full" if recompute else "none"
        if not isinstance(recompute, str):
            return recompute
        names = tuple(name.strip() for name in recompute.split(",") if name.strip())
        return names[0] if names in (("auto",), ("none",), ("full",)) else names

    @field_validator("recompute")
    @classmethod
    def _names_are_known(cls, recompute: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(recompute, str):
            if not recompute:
                raise ValueError("memory.recompute names nothing; write full to save only the input of every block")
            if BLOCK_INPUT in recompute:
                raise ValueError(f"memory.recompute: {BLOCK_INPUT} is the input, which is always saved; leave it out")
            known = [name for name in known_tensors() if name != BLOCK_INPUT]
            check_names(recompute, "memory.recompute", known, also=("auto", "none", "full"))
            if len(set(recompute)) < len(recompute):
                raise ValueError("memory.recompute has a name twice; leave one out")
        return recompute

    @field_validator("offload", mode="before")
    @classmethod
    def _off_is_a_word(cls, offload: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if offload is False else offload


def check_names(names: Sequence[str], where: str, known: Sequence[str] | None = None, also: Sequence[str] = ()) -> None:
    """Raises ValueError where a block has no tensor of such a name.

    known: the named tensors to choose from; None: those of all families.  also: words that may stand alone in place of
    names.
    """
    known = known_tensors() if known is None else known
    for name in names:
        if name in also and len(names) == 1:
            raise ValueError(f"{where}: {name} is a word, not a list; write {name} without brackets")
        if name in also:
            raise ValueError(f"{where}: {name!r} cannot stand beside names; leave out the names, or it")
        if name not in known:
            raise ValueError(
                f"{where}: a block has no tensor {name!r}{did_you_mean(name, [*known, *also])}; "
                f"it has {', '.join(known)}"
            )
