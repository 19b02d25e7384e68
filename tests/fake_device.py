"""A device that keeps token ids where a real one keeps keys and values.

What a request reads through its block table must be its own sequence: this checks sharing, copy-on-write, preemption and
block reuse exactly, without a model. The "next token" is a hash of the whole sequence and of the sample index.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import xxhash

from batchgen.engine.batch_state import BatchState
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import Finished, SchedulerConfig, StepPlan
from batchgen.plan.window import plan_window
from batchgen.records import Window

VOCAB = 50
STALE = -7


def next_token(sequence: np.ndarray, sample_index: int) -> int:
    return xxhash.xxh3_64_intdigest(sequence.astype(np.int32).tobytes(), seed=sample_index) % VOCAB


def expected_output(prompt: np.ndarray, sample_index: int, config: SchedulerConfig) -> list[int]:
    sequence = list(prompt)
    limit = min(len(prompt) + config.max_tokens, config.max_model_len)
    while len(sequence) < limit:
        sequence.append(next_token(np.array(sequence), sample_index))
        if sequence[-1] in config.eos_token_ids:
            break
    return sequence[len(prompt) :]


def window_of(prompts: list[np.ndarray], block_size: int, sort: bool = True) -> Window:
    lengths = np.array([len(p) for p in prompts], np.int32)
    return plan_window(lambda i: prompts[i], np.arange(len(prompts)), lengths, block_size, sort)


def run(
    window: Window,
    config: SchedulerConfig,
    num_blocks: int,
    pool_class: type[BlockPool] = BlockPool,
    ahead: int = 0,
    resumed: dict[tuple[int, int], np.ndarray] | None = None,
) -> tuple[dict[tuple[int, int], Finished], Scheduler]:
    """Drive a scheduler to the end; checks the pool after every step and every read. Keys: (row in file, sample).

    ahead: steps that are scheduled, and computed by the device, before the host sees the tokens of one.
    """
    pool = pool_class(num_blocks, window.block_size)
    scheduler = Scheduler(config, pool, window, resumed=resumed)
    state, block_size = scheduler.state, window.block_size
    memory = np.full((num_blocks, block_size), STALE, np.int64)
    sequences: dict[int, list[int]] = {}  # admission -> its tokens, as far as the device knows them
    results: dict[tuple[int, int], Finished] = {}
    on_device: deque[tuple[StepPlan, list[int]]] = deque()
    steps = 0
    while on_device or not scheduler.done:
        steps += 1
        assert steps < 100_000, "the scheduler does not come to an end"
        step = scheduler.schedule()
        finished = scheduler.take_rejected()
        if step is not None:
            assert int(step.num_scheduled.sum()) <= config.max_num_batched_tokens
            assert (step.num_scheduled > 0).all()
            on_device.append((step, compute(step, state, memory, sequences)))
            check_groups(step, state)
        while len(on_device) > (0 if step is None else ahead):
            done, tokens = on_device.popleft()
            finished += scheduler.update(done, np.array(tokens, np.int32), np.ones(len(tokens), bool))
            pool.check([state.blocks(int(s)) for s in state.running])
            assert len(state.running) <= config.max_running_requests
        for f in finished:
            key = (int(window.index[f.position]), f.sample_index)
            assert key not in results, "a request finished twice"
            results[key] = f
    assert pool._num_free + pool.num_kept == pool.num_usable, "blocks leaked"
    assert state.num_free_slots == state.max_requests, "slots leaked"
    return results, scheduler


def compute(step: StepPlan, state: BatchState, memory: np.ndarray, sequences: dict[int, list[int]]) -> list[int]:
    """One step on the device: it writes, then reads, then samples."""
    block_size = state.block_size
    for source, destination in step.block_copies:
        memory[destination] = memory[source]
    owner = {int(slot): int(state.admission[slot]) for slot in [*step.slots, *step.sample_slots]}
    for slot, admission in owner.items():
        sequences.setdefault(admission, state.known[slot].tolist())
    for slot, first, count in zip(step.slots, step.first_position, step.num_scheduled):
        for p in range(first, first + count):  # all writes of a step come before its reads
            memory[state.block_table[slot, p // block_size], p % block_size] = sequences[owner[slot]][p]
    for slot, first, count in zip(step.slots, step.first_position, step.num_scheduled):
        end = first + count
        read = memory[state.blocks(int(slot))].ravel()[:end]
        assert read.tolist() == sequences[owner[slot]][:end], "a request reads what is not its own"
    tokens = []
    for r, slot, first_unknown in zip(step.sample_requests, step.sample_slots, step.output_index):
        known = sequences[owner[int(step.slots[r])]]
        assert len(known) == state.num_prompt[slot] + first_unknown
        tokens.append(next_token(np.array(known), int(state.sample_index[slot])))
    for slot, token in zip(step.sample_slots, tokens):
        sequences[owner[int(slot)]].append(token)
    return tokens


def check_groups(step, state) -> None:  # type: ignore[no-untyped-def]
    """Every block of a request before its private part lies in exactly one group, and groups hold what members hold."""
    g = step.groups
    covered = [0] * len(step.slots)
    for start, end, begin, stop in zip(g.request_start, g.request_end, g.block_start, g.block_end):
        tables = state.block_table[step.slots[start:end], begin:stop]
        assert (tables == tables[0]).all() and end - start >= 2
        assert (step.first_position[start:end] >= stop * state.block_size).all(), "a query lies inside its group"
        for r in range(start, end):
            assert covered[r] == begin
            covered[r] = int(stop)
    assert covered == g.private_start.tolist()


def trie_edge_tokens(prompts: list[np.ndarray], block_size: int) -> int:
    """Brute force over prefixes as tuples: a full block counts once, a partial one always, and a prompt's last token is
    computed again where all its blocks are known. Sorted order, so a prompt comes before its extensions."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for prompt in sorted(tuple(p.tolist()) for p in prompts):
        cached = 0
        while cached + block_size < len(prompt) and prompt[: cached + block_size] in seen:
            cached += block_size
        total += len(prompt) - cached
        seen |= {prompt[:n] for n in range(block_size, len(prompt) + 1, block_size)}
    return total
