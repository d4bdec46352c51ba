"""Who is slow, from what each rank waited for the others."""

from hypothesis import given
from hypothesis import strategies as st

from training.stragglers import Shares, Tally, line, own_seconds


def tally(hosts, *shares):
    found = Tally(hosts)
    found.add(Shares(1, 99.0, tuple(50.0 * i for i in range(len(hosts))), (9.0,) * len(hosts)))  # the first line counts for nothing
    for share in shares:
        found.add(share)
    return found


def test_the_rank_that_waits_least_is_the_slow_one():
    # A step of 3 s, of which the data travels 0.5 s: rank 1 computes 2.5 s, the others 1 s and then wait for it.
    found = tally("ab", Shares(10, 3.0, (2.0, 0.5), (0.0, 0.0))).slowest()
    assert (found["rank"], found["host"], found["ratio"], found["steps"]) == (1, "b", 2.0, 10)
    assert (found["ownSeconds"], found["medianSeconds"]) == (3.0, 1.5)
    assert line(found) == "slowest: rank 1 on host b, 2.00 times the median rank (3 s a step against 1.5 s); the others wait for it"


def test_what_it_waited_for_is_told_where_it_is_data():
    found = tally("ab", Shares(10, 3.0, (2.0, 0.5), (0.0, 1.5))).slowest()
    assert "1.5 s of it waiting for data" in line(found)


def test_ranks_that_differ_little_are_not_spoken_of():
    assert line(tally("ab", Shares(10, 3.0, (0.6, 0.5), (0.0, 0.0))).slowest()) is None


def test_a_rank_alone_and_a_run_of_one_line_have_no_slowest():
    assert tally("a", Shares(10, 3.0, (0.0,), (0.0,))).slowest() is None
    assert tally("ab").slowest() is None
    assert line(None) is None


@given(
    st.integers(2, 6).flatmap(lambda n: st.lists(st.tuples(*[st.floats(0.01, 10)] * n), min_size=1, max_size=5)),
    st.floats(0, 5),
)
def test_own_times_are_found_whatever_the_data_takes_to_travel(computed, travel):
    """Each rank computes, then waits for the slowest and for the data; what is measured is the waiting."""
    lines = [Shares(4, max(line) + travel, tuple(travel + max(line) - own for own in line), (0.0,) * len(line)) for line in computed]
    for own, shares in zip(computed, lines, strict=True):
        # Travel is everyone's, and counts as everyone's own: it can't be told from computing.
        assert all(abs(found - (seconds + travel)) < 1e-9 for found, seconds in zip(own_seconds(shares), own, strict=True))
    found = tally("abcdef"[: len(computed[0])], *lines).slowest()
    sums = [sum(line[rank] for line in computed) for rank in range(len(computed[0]))]
    assert sums[found["rank"]] >= max(sums) - 1e-6
    assert found["ratio"] >= 1
