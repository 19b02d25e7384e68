"""What the host does in a step: the same, however many requests run and however long their contexts are."""

from __future__ import annotations

from batchgen.bench.host_loop import SteadyDecode, count_instructions


def instructions(num_requests: int, prefix: int, share: int) -> int:
    """Of the cheapest step: now and then some requests need a block at once."""
    batch = SteadyDecode(num_requests, prefix, share)
    return min(count_instructions(batch.step) for _ in range(4))


def test_instructions_of_a_step_depend_neither_on_requests_nor_on_context() -> None:
    counts = {case: instructions(*case) for case in ((64, 200, 16), (1024, 200, 1024), (1024, 200, 16), (1024, 3000, 64))}
    assert max(counts.values()) == min(counts.values()), counts
    assert max(counts.values()) < 1500


def test_a_step_that_hands_out_blocks_costs_no_more_for_more_requests() -> None:
    few, many = (SteadyDecode(n, 200, n) for n in (64, 1024))
    most_few, most_many = (max(count_instructions(b.step) for _ in range(17)) for b in (few, many))
    assert most_few == most_many
