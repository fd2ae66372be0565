"""Assignments of degrees that are nearly alike, put aside as one until it matters which of them a stage takes.

A step's time grows in every stage's forward, backward, sync and update seconds.  So an assignment with the least of
each over a group stands for all of it: no plan with a member is faster than the one with the stand-in.  In stages that
are not the slowest hardly anything depends on the choice, and most groups are never opened.
"""

from dataclasses import dataclass

from jhpt.planner.search.layer_degrees import Option


@dataclass(frozen=True)
class Group:
    """Options of one stage with the same degrees at both ends, which transfers depend on; `least` of each time."""

    least: Option
    members: tuple[Option, ...]


def single(option: Option) -> Group:
    """A group of one."""
    return Group(option, (option,))


def groups(options: list[Option], m: int, tolerance: float) -> list[Group]:
    """Options in order of their time alone, each put to the first group that it differs from by so little of it."""
    found: list[Group] = []
    for option in sorted(options, key=lambda option: _alone(option, m)):
        for at, group in enumerate(found):
            joined = _joined(group, option)
            if joined and _alone(option, m) - _alone(joined.least, m) <= tolerance * _alone(option, m):
                found[at] = joined
                break
        else:
            found.append(single(option))
    return found


def _alone(option: Option, m: int) -> float:
    return m * option.forward + (m - 1) * option.backward + option.sync + option.update


def _joined(group: Group, option: Option) -> Group | None:
    least = group.least
    if (least.degrees[0], least.degrees[-1]) != (option.degrees[0], option.degrees[-1]):
        return None
    both = Option(
        forward=min(least.forward, option.forward),
        backward=min(least.backward, option.backward),
        sync=min(least.sync, option.sync),
        update=min(least.update, option.update),
        degrees=least.degrees,
    )
    return Group(both, (*group.members, option))
