"""Subarrays of ranges of elements, beside numpy's own indexing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from axonmpi.checkpoint.shards.subarrays import Subarray, subarrays_of_range

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_subarrays_of_a_range_are_its_elements_in_order(shape, data):
    count = int(np.prod(shape, dtype=int))
    last = data.draw(st.integers(0, count))
    first = data.draw(st.integers(0, last))
    whole = np.arange(count).reshape(shape)
    subarrays = subarrays_of_range(shape, first, last)
    assert [element for subarray in subarrays for element in whole[subarray.slices].ravel()] == list(
        range(first, last)
    )
    assert len(subarrays) <= max(1, 2 * len(shape) - 1)
    assert all(
        subarray.run_in(shape) == subarray.numel and whole[subarray.start] == subarray.offset_in(shape)
        for subarray in subarrays
    )


@given(shapes.filter(bool), st.data())
def test_intersections_and_runs(shape, data):
    def subarray():
        start = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
        return Subarray(
            start, tuple(data.draw(st.integers(1, extent - at)) for at, extent in zip(start, shape, strict=True))
        )

    one, other = subarray(), subarray()
    whole = np.arange(np.prod(shape)).reshape(shape)
    common = one.intersection(other)
    expected = np.intersect1d(whole[one.slices], whole[other.slices])
    found = np.array([], dtype=int) if common is None else whole[one.slices][common.within(one).slices].ravel()
    assert sorted(found) == list(expected)
    run = one.run_in(shape)
    elements = whole[one.slices].ravel()
    assert all(np.diff(elements[at : at + run]).tolist() == [1] * (run - 1) for at in range(0, len(elements), run))
    assert list(one.run_offsets(shape)) == elements[::run].tolist()
