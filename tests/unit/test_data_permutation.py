"""The computed shuffle: nothing lost, nothing twice, and another one for every seed and epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.permutation import permuted

SEEDS = st.integers(0, 2**31 - 1)
PINNED_10 = [3, 6, 7, 5, 4, 0, 8, 2, 9, 1]
PINNED_LARGE = [70940696263, 327845429337, 465609307551, 400970908687]


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_number_comes_exactly_once(n, seed, epoch):
    assert sorted(permuted(np.arange(n), n, seed, epoch)) == list(range(n))


@given(n=st.integers(1, 2**40), seed=SEEDS, data=st.data())
def test_any_place_can_be_asked_for_by_itself(n, seed, data):
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permuted(places, n, seed, 3)
    assert [int(permuted(place, n, seed, 3)) for place in places] == together.tolist()
    assert ((together >= 0) & (together < n)).all()
    assert len(set(together.tolist())) == len(set(places)), "two places went to the same number"


@given(n=st.integers(20, 5000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_seeds_and_epochs_give_other_orders(n, seed, epoch):
    order = permuted(np.arange(n), n, seed, epoch)
    assert not np.array_equal(order, permuted(np.arange(n), n, seed + 1, epoch))
    assert not np.array_equal(order, permuted(np.arange(n), n, seed, epoch + 1))


@pytest.mark.parametrize("n", [97, 1000, 4096, 10_007])
def test_the_order_looks_mixed(n):
    """Statistics of a random order within five standard deviations, over 40 epochs taken together."""
    epochs = 40
    orders = np.stack([permuted(np.arange(n), n, 7, epoch) for epoch in range(epochs)]).astype(np.float64)
    correlation = np.corrcoef(np.tile(np.arange(n), epochs), orders.ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(n * epochs), "place and value are correlated"
    neighbours = np.corrcoef(orders[:, :-1].ravel(), orders[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(n * epochs), "neighbours stay together"
    fixed = (orders == np.arange(n)).sum()
    assert abs(fixed - epochs) < 5 * np.sqrt(epochs), "too many numbers stay in place (one an epoch is expected)"
    halves = (orders[:, : n // 2] < n / 2).mean()
    assert abs(halves - 0.5) < 5 * 0.5 / np.sqrt(n * epochs / 2), "the halves are not mixed"


def test_the_order_is_the_same_in_every_version():
    """Runs resume by it, so these numbers may never change."""
    assert permuted(np.arange(10), 10, 0, 0).tolist() == PINNED_10
    assert permuted([0, 1, 2, 10**12 - 1], 10**12, 42, 7).tolist() == PINNED_LARGE


@pytest.mark.parametrize(("positions", "n"), [([0], 0), ([-1], 5), ([5], 5)])
def test_a_place_outside_is_refused(positions, n):
    with pytest.raises(ValueError, match=r"shuffle|positions"):
        permuted(positions, n, 0, 0)
