"""The forms in which the compiler writes who takes part."""

import pytest

from jhpt.compiled.replicas import permuted_pairs, replica_groups, spanned_axes

FORMS = {
    "replica_groups={{0,1},{2,3}}, to_apply=%add": ((0, 1), (2, 3)),
    "channel_id=1, replica_groups={{0,2,1,3}}": ((0, 2, 1, 3),),
    "replica_groups={}, to_apply=%add": ((0, 1, 2, 3),),
    "channel_id=3": ((0, 1, 2, 3),),
    "replica_groups=[2,2]<=[4], x={1}": ((0, 1), (2, 3)),
    "replica_groups=[2,2]<=[2,2]T(1,0)": ((0, 2), (1, 3)),
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2)": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "replica_groups=mesh['a'=2,'b'=2] {'b'}, use_global_device_ids=true": ((0, 1), (2, 3)),
    "replica_groups=mesh['a'=2,'b'=2] {'a'}": ((0, 2), (1, 3)),
    "replica_groups=mesh[a=2,b=2] {a,b}": ((0, 1, 2, 3),),
    "replica_groups=mesh['a'=8] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "replica_groups=mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "replica_groups=mesh['a'=2,'b'=2], device_ids=([4]<=[2,2]T(1,0)) {'b'}": ((0, 2), (1, 3)),
    "replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}": ((3, 2), (1, 0)),
}


@pytest.mark.parametrize("text", FORMS)
def test_groups(text):
    assert replica_groups(text, 4) == FORMS[text]


def test_pairs():
    assert permuted_pairs("channel_id=1, source_target_pairs={{0,2},{2,0}}, metadata={}") == ((0, 2), (2, 0))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        (((0, 2), (1, 3)), ("data",)),
        (((0, 4), (1, 5)), ("pipe",)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("data", "tensor")),
        (tuple((n,) for n in range(8)), ()),
    ],
)
def test_axes(groups, axes):
    assert spanned_axes(groups, {"pipe": 2, "data": 2, "tensor": 2}) == axes


def test_axes_of_one_device_are_never_spanned():
    assert spanned_axes(((0, 1), (2, 3)), {"pipe": 1, "data": 2, "tensor4": 1, "tensor2": 2}) == ("tensor2",)
