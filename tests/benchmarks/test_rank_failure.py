"""The comparison of those who notice a lost rank: what counts as naming it, and one job over Gloo."""

import pytest

from benchmarks.rank_failure import NAMED, measure


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 10000 ms", True),
        ("  rank      : 1 (local_rank: 1)", True),
        ("failed (exitcode: 17) local_rank: 1 (pid: 7) of binary: python", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10)", False),
        ("Connection closed by peer [127.0.0.1]:5000", False),
        ("Rank 10 failed to pass monitoredBarrier in 10000 ms", False),
    ],
)
def test_what_names_rank_1(words, named):
    assert bool(NAMED.search(words)) is named


def test_a_rank_that_ends_is_named_over_gloo():
    record = measure("gloo", "barrier", "exit", 20.0)
    assert record["named"] is not None, record
    assert record["ended"] is not None, record
