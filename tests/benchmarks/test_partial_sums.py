"""What ranks would send adds up to what one device has."""

import numpy as np

from benchmarks.partial_sums import PLACES, partial_sums
from jhpt.training.setup import prepare
from tests.sharding.plans import batch, random_params, stored


def test_parts_add_up(tiny):
    sums = {}
    for ranks in (1, 4):
        setup = prepare(tiny(**{"parallel.tensor": ranks, "parallel.data": 1, "data.batch_size": 2}))
        params = random_params(setup)
        sums[ranks] = partial_sums(setup, stored(setup, params), np.asarray(batch(setup, 2)))
    places = [place for both in PLACES.values() for place in both]
    assert sums[4].keys() == {(layer, place) for layer in range(2) for place in places}
    for key, whole in sums[1].items():
        parts = sums[4][key].reshape(4, *whole.shape)
        assert np.abs(parts.sum(0) - whole).max() <= 1e-5 * np.abs(whole).max()
        assert all(part.any() for part in parts)
