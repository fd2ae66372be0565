"""The devices of a collective, and the axes of the mesh along which they lie.

    {{0,1},{2,3}}                          groups one by one
    [4,2]<=[2,4]T(1,0)                     numbers 0 .. 7 as [2, 4], transposed, in 4 rows of 2
    mesh['a'=4,'b'=2] {'a'}                a mesh of numbers in order, groups along some of its axes; an axis `a:(2)2`
                                           is the part of size 2 of `a`, inside its first 2; the mesh may be followed
                                           by the order of its devices, `device_ids=([2,4]T(1,0))`
    {{0,2},{1,3}} of source_target_pairs   (sender, receiver) pairs

Numbers are those of the program's partitions: places in the mesh, counted with the last axis fastest.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'?([^',:=\s]+)'?(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def replica_groups(tail: str, devices: int) -> Groups:
    """The groups of an instruction's attributes; without groups, one of all `devices` partitions."""
    start = tail.find("replica_groups=")
    if start < 0:
        return (tuple(range(devices)),)
    text = tail[start + len("replica_groups=") :]
    if text.startswith(("mesh", "@")):
        match = _MESH.search(text)
        assert match, text[:200]
        return _mesh_groups(match[1], match[2], match[3])
    if match := _IOTA.match(text):
        return _rows(_iota(match).reshape(_numbers(match[1])))
    listed = re.match(r"\{((?:\{[\d,\s]*\},?\s*)*)\}", text)
    groups = tuple(tuple(_numbers(row)) for row in re.findall(r"\{([\d,\s]+)\}", listed[1])) if listed else ()
    return groups or (tuple(range(devices)),)


def permuted_pairs(tail: str) -> Groups:
    """(from, to) of every pair of a collective-permute."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", tail)
    return tuple(tuple(_numbers(pair)) for pair in re.findall(r"\{(\d+,\d+)\}", match[1])) if match else ()


def spanned_axes(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh of these sizes along which members of a group differ, outermost first."""
    devices = np.arange(math.prod(sizes.values()))
    places = np.stack(np.unravel_index(devices, tuple(sizes.values())), axis=1)
    apart = np.zeros(len(sizes), bool)
    for group in groups:
        at = places[list(group)]
        apart |= (at != at[:1]).any(axis=0)
    return tuple(name for name, differs in zip(sizes, apart, strict=True) if differs)


def _mesh_groups(axes: str, order: str | None, along: str) -> Groups:
    sizes = {match[1]: int(match[2]) for match in _AXIS.finditer(axes)}
    devices = _ordered(order, math.prod(sizes.values()))
    # An axis of which a part is used becomes three: outside of the part, the part, and inside of it.
    parts = {match[1]: (int(match[3] or 1), int(match[4] or sizes[match[1]])) for match in _AXIS.finditer(along)}
    shape, inside = list[int](), list[int]()
    for name, size in sizes.items():
        before, part = parts.get(name, (1, 1))
        inside += [len(shape) + 1] if name in parts else []
        shape += [before, part, size // (before * part)]
    outside = [dim for dim in range(len(shape)) if dim not in inside]
    rows = devices.reshape(shape).transpose(outside + inside)
    return _rows(rows.reshape(-1, math.prod(shape[dim] for dim in inside)))


def _ordered(text: str | None, count: int) -> npt.NDArray[np.int64]:
    """The devices of a mesh, in its order."""
    if text is None:
        return np.arange(count)
    match = _IOTA.search(text)
    return _iota(match) if match else np.array(_numbers(text))


def _iota(match: re.Match[str]) -> npt.NDArray[np.int64]:
    dims = _numbers(match[2])
    order = _numbers(match[3]) if match[3] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(-1)


def _rows(table: npt.NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in table)


def _numbers(text: str) -> Sequence[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
