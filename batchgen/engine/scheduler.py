"""Which request computes how many tokens in the next step. Host side, numpy, no torch.

There is no prefill phase and no decode phase: each request is behind by some tokens and a step hands out tokens under a
budget, first to those that are one behind (decodes), then to running prefills in plan order, then to new requests in plan
order. So prefills are chunked, steps are mixed, and requests enter and leave at every step.

Memory: a request is admitted when its prompt and what all running ones are still expected to need fit into the pool.
If the expectation was too low, the request that is latest in the plan is preempted: its blocks go, its tokens stay, and
it recomputes them when it is admitted again, so greedy output does not change.

A step counts as computed once it is scheduled, so the next one may be scheduled while the device still works on it. What it
sampled is seen when `update` brings it: a request that ended with it may be in a step more by then, for nothing, and a
preempted one loses a token that was not seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from batchgen.engine.admission import AdmissionOrder
from batchgen.engine.batch_state import BatchState
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.memory_forecast import MemoryForecast, wanted
from batchgen.engine.prefix_groups import (
    GroupRule,
    PrefixGroups,
    find_groups,
    spares_enough_reads,
)
from batchgen.engine.step import Finished, SchedulerConfig, SchedulerStats, StepPlan
from batchgen.errors import EngineError
from batchgen.records import FinishReason, RowFault, Window

NO_BLOCKS = np.empty(0, np.int32)
NO_COPIES = np.empty((0, 2), np.int32)


@dataclass(order=True)
class Candidate:
    """Samples of a row that wait to come into the batch, or one that was preempted and waits to come back."""

    position: int
    first_sample: int
    num_samples: int = field(compare=False)
    num_expected: int = field(compare=False)  # leading blocks of which the pool counts a use to come for it
    outputs: np.ndarray = field(compare=False, default_factory=lambda: np.empty(0, np.int32))
    num_computed: int = field(compare=False, default=0)  # before its preemption
    num_preemptions: int = field(compare=False, default=0)
    num_cached: int = field(compare=False, default=-1)  # at its first admission; -1: it was never in


class DecodeBatch(NamedTuple):
    """A step in which each running request was one behind. While they stay the same, so does all of this but two sums."""

    slots: np.ndarray  # [R] int32, the array that is BatchState.running
    ones: np.ndarray  # [R] int32
    requests: np.ndarray  # [R] int32, 0 .. R - 1
    admissions: np.ndarray  # [R] int64
    groups: PrefixGroups
    spared: int  # reads of a token that the groups spare
    first: np.ndarray  # [R] int32, first positions of that step
    output_index: np.ndarray  # [R] int32, of the tokens that it sampled
    sum_end: int  # of first + 1
    steps_left: int  # until the first of them is at its limit


class Scheduler:
    """Drives one window through one pool. `schedule`, and `update` once a step or later, in their order, until `done`;
    take_rejected after each `schedule`.

    group_rule chooses the shared-prefix groups of a step. resumed: (position, sample) -> tokens that an earlier run has
    generated ([n] int32, 0 < n < max_tokens); they come back as those do that were preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        window: Window,
        group_rule: GroupRule = spares_enough_reads,
        resumed: Mapping[tuple[int, int], np.ndarray] | None = None,
    ) -> None:
        self.config, self.pool, self.window, self.group_rule = config, pool, window, group_rule
        longest = int(window.lengths.max(initial=1)) + config.max_tokens
        self.state = BatchState(
            config.max_running_requests, min(longest, config.max_model_len), config.max_tokens, pool.block_size
        )
        self.stats = SchedulerStats()
        self.order = AdmissionOrder(window, config.hidden_tokens)
        self._budget_left = config.max_num_batched_tokens  # for rows that come in with this step
        self.waiting: list[Candidate] = []  # heap in plan order
        self.held: dict[tuple[int, int], Candidate] | None = None  # not None: only `waiting` may come in, see recovery
        self.forks: dict[int, list[int]] = {}  # slot that prefills a prompt -> slots that will fork from it
        self.rejected: list[Finished] = []  # rows that can never fit, until take_rejected
        self.resumed = dict(resumed or {})  # those whose turn has not come
        self._last_matched = -1  # position of the prompt that was looked up last
        self._copies: list[tuple[int, int, int]] = []  # (slot, source, destination) for the next step
        none = np.empty(0, np.int32)
        self._groups_of: tuple[np.ndarray, ...] = (none, none, none)  # admissions, shared blocks and grants of ...
        self._last_groups = PrefixGroups.none(0)
        self._decodes: DecodeBatch | None = None  # the step before, if it was one
        self._is_full = False  # memory let nobody in, and nobody has left since
        self._forecast = MemoryForecast(config.max_tokens, pool.block_size)
        self._common = common_blocks(window, config.num_samples)

    # ---- one step -----------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        nothing_waits = self.order.next_row is None and not self.waiting
        return len(self.state.running) == 0 and nothing_waits and not self.rejected and self.held is None

    def take_rejected(self) -> list[Finished]:
        """Rows found since the last call that can never fit."""
        rejected, self.rejected = self.rejected, []
        return rejected

    def unfinished(self) -> dict[tuple[int, int], np.ndarray]:
        """(position, sample) -> its tokens so far ([n] int32, n > 0), of every request that has some and is not done."""
        s = self.state
        waiting = {(c.position, c.first_sample): c.outputs for c in [*self.waiting, *(self.held or {}).values()]}
        running = {(int(s.position[i]), int(s.sample_index[i])): s.outputs(i).copy() for i in s.running.tolist()}
        return {key: ids for key, ids in (self.resumed | waiting | running).items() if len(ids)}

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute (then see take_rejected and done)."""
        s = self.state
        if (step := self._decode_again()) is not None:
            return step
        copies, self._copies = self._copies, []
        grants, preempted = self._make_room(copies)
        slots = s.running[grants > 0]
        grants = grants[grants > 0]
        self._give_blocks(slots, grants)
        if not preempted and (admitted := self._admit(self._budget_left)):
            granted = np.zeros(s.max_requests, np.int32)
            granted[slots] = grants
            granted[[slot for slot, _ in admitted]] = [n for _, n in admitted]
            grants = granted[s.running]
            slots, grants = s.running[grants > 0], grants[grants > 0]
        if len(slots) == 0:
            return None
        return self._step_plan(slots, grants, copies)

    def _step_plan(self, slots: np.ndarray, grants: np.ndarray, copies: list[tuple[int, int, int]]) -> StepPlan:
        s = self.state
        first = s.num_computed[slots]
        end = first + grants
        sample_requests = np.flatnonzero(end == s.num_tokens[slots]).astype(np.int32)
        sample_slots = slots[sample_requests]
        if self.forks:
            sample_requests, sample_slots = self._fork_complete(sample_requests, sample_slots)
        groups = self._groups(slots, grants, first) if self.config.prefix_groups else PrefixGroups.none(len(slots))
        spared = (int(groups.private_start.sum(dtype=np.int64)) - len(groups.block_ids)) * self.pool.block_size
        self._count(slots, first, end, spared)
        step = StepPlan(
            slots,
            grants,
            first,
            sample_requests,
            sample_slots,
            s.admission[sample_slots],
            s.num_tokens[sample_slots] - s.num_prompt[sample_slots],
            np.array([(source, destination) for _, source, destination in copies], np.int32).reshape(-1, 2),
            groups,
        )
        s.num_computed[slots] = end
        s.num_tokens[sample_slots] += 1
        self._decodes = None
        if len(slots) == len(s.running) == len(sample_slots) == int(grants.sum()) and (first >= s.num_prompt[slots]).all():
            steps_left = int((s.max_tokens[slots] - s.num_tokens[slots]).min())
            self._decodes = DecodeBatch(
                s.running, grants, sample_requests, step.sample_admissions, groups, spared, first, step.output_index,
                int(end.sum(dtype=np.int64)), steps_left,
            )  # fmt: skip
        return step

    def _decode_again(self) -> StepPlan | None:
        """The step before once more, a token on: the same requests, none with a prompt to compute, none to come in. None if
        it is not like that. Does what the long way does, with what that has found out."""
        s, pool, b = self.state, self.pool, self._decodes
        if b is None or b.slots is not s.running or b.steps_left == 0 or self._copies or self._may_admit():
            return None
        first = b.first + 1
        grow = b.slots[s.num_blocks[b.slots] * pool.block_size <= first]
        if len(grow) > pool.num_free:
            return None
        if len(grow):
            s.block_table[grow, s.num_blocks[grow]] = pool.allocate(len(grow))
            s.num_blocks[grow] += 1
        output_index = b.output_index + 1
        s.num_computed[b.slots] = first + 1
        s.num_tokens[b.slots] = first + 2
        num_requests = len(first)
        self._decodes = b = b._replace(
            first=first, output_index=output_index, sum_end=b.sum_end + num_requests, steps_left=b.steps_left - 1
        )
        self.order.next_step()
        self.stats.num_steps += 1
        self.stats.num_decode += num_requests
        self.stats.num_kv_visible += b.sum_end
        self.stats.num_kv_read += b.sum_end - b.spared
        return StepPlan(
            b.slots, b.ones, first, b.requests, b.slots, b.admissions, output_index, NO_COPIES, b.groups, repeats=True
        )

    def _may_admit(self) -> bool:
        if self._is_full or self.state.num_free_slots == 0:
            return False
        return bool(self.waiting) or (self.held is None and self.order.next_row is not None)

    def _groups(self, slots: np.ndarray, grants: np.ndarray, first: np.ndarray) -> PrefixGroups:
        """The shared-prefix groups; those of the step before, where nothing has changed that they depend on."""
        s = self.state
        full = first // self.pool.block_size  # blocks filled before this step's queries
        shared = s.common_with_previous(slots)
        shared[1:] = np.minimum(shared[1:], np.minimum(full[1:], full[:-1]))
        key = (s.admission[slots], shared, grants)
        if len(slots) != len(self._groups_of[0]) or not all(map(np.array_equal, key, self._groups_of)):
            self._groups_of = key
            self._last_groups = find_groups(shared, grants, s.block_table, slots, self.pool.block_size, self.group_rule)
        return self._last_groups

    def update(
        self,
        step: StepPlan,
        token_ids: np.ndarray,
        finite: np.ndarray,
        hits_stop: Callable[[np.ndarray], bool] | None = None,
    ) -> list[Finished]:
        """Take the step's sampled tokens ([K] int32) and whether their logits were finite ([K] bool).

        hits_stop(output_ids) says whether a stop string has appeared. Returns the requests that are done.
        """
        s = self.state
        slots, index = step.sample_slots, step.output_index
        late = s.admission[slots] != step.sample_admissions
        if late.any():
            self.stats.num_late += int(late.sum())
            slots, index, token_ids, finite = slots[~late], index[~late], token_ids[~late], finite[~late]
        s.output_ids[slots, index] = token_ids
        s.num_outputs[slots] = index + 1
        stopped = np.zeros(len(slots), bool)
        for eos in self.config.eos_token_ids:
            stopped |= token_ids == eos
        if hits_stop is not None:
            for i in np.flatnonzero(~stopped).tolist():
                stopped[i] = hits_stop(s.outputs(int(slots[i])))
        done = stopped | ~finite | (s.num_prompt[slots] + index + 1 >= s.max_tokens[slots])
        finished = []
        for i in np.flatnonzero(done).tolist():
            reason = FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            finished.append(self._finish(int(slots[i]), reason, bool(finite[i])))
        return finished

    def _finish(self, slot: int, reason: FinishReason, finite: bool) -> Finished:
        s = self.state
        outputs = s.outputs(slot).copy()
        block_size = self.pool.block_size
        known = int(s.num_prompt[slot]) + len(outputs)
        self._forecast.end(-(-int(s.max_tokens[slot]) // block_size) - -(-known // block_size))
        self.stats.num_output += len(outputs)
        fault = None
        if not finite:
            reason, outputs = FinishReason.ERROR, outputs[:-1]
            fault = RowFault("non_finite_logits", "the model's output was not a finite number; try a wider dtype")
        done = Finished(
            int(s.position[slot]),
            int(s.sample_index[slot]),
            outputs,
            reason,
            int(s.num_prompt[slot]),
            int(s.num_cached[slot]),
            int(s.num_preemptions[slot]),
            fault,
        )
        self._drop(slot)
        return done

    def _drop(self, slot: int) -> None:
        """Take `slot` out of the batch and give its blocks back."""
        s = self.state
        if self._copies:
            self._copies = [c for c in self._copies if c[0] != slot]
        self._is_full = False
        self.pool.release(s.blocks(slot))
        s.running = s.running[s.running != slot]
        s.free_slot(slot)

    # ---- those that run ---------------------------------------------------------------------------------------------

    def _make_room(self, copies: list[tuple[int, int, int]]) -> tuple[np.ndarray, bool]:
        """Tokens for each running request ([R] int32), after giving up kept blocks and preempting until they fit."""
        preempted = False
        while True:
            grants = self._share_budget()
            short = int(self._blocks_short(self.state.running, grants).sum()) - self.pool.num_free
            if short <= 0 or self.pool.evict(short) >= short:
                return grants, preempted
            if len(self.state.running) == 1:
                raise EngineError("the only running request does not fit into the KV pool; this is a bug in admission")
            victim = int(self.state.running[-1])
            copies[:] = [c for c in copies if c[0] != victim]
            self._preempt(victim)
            preempted = True

    def _share_budget(self) -> np.ndarray:
        s, budget = self.state, self.config.max_num_batched_tokens
        tokens = s.num_tokens[s.running]
        behind = np.where(tokens < s.max_tokens[s.running], tokens - s.num_computed[s.running], 0)
        grants = np.zeros(len(behind), np.int32)
        decodes = np.flatnonzero(behind == 1)[:budget]
        grants[decodes] = 1
        decoding = s.running[decodes]
        left = s.max_tokens[decoding] - s.num_tokens[decoding]
        budget = min(budget - len(decodes), self.order.pace(int(behind[behind > 1].sum()), s.position[decoding], left))
        for r in np.flatnonzero(behind > 1).tolist():
            grants[r] = min(int(behind[r]), budget)
            budget -= int(grants[r])
        self._budget_left = budget
        return grants

    def _blocks_short(self, slots: np.ndarray, grants: np.ndarray) -> np.ndarray:
        """[R] int32: blocks that each lacks for its next tokens, and its forks for their copies of its last block."""
        s, block_size = self.state, self.pool.block_size
        end = s.num_computed[slots] + grants
        short = np.maximum(-(-end // block_size) - s.num_blocks[slots], 0)
        for slot, children in self.forks.items():
            r = np.flatnonzero(slots == slot)
            if len(r) and end[r[0]] == s.num_tokens[slot] and end[r[0]] % block_size:
                short[r[0]] += len(children)
        return short

    def _give_blocks(self, slots: np.ndarray, grants: np.ndarray) -> int:
        """Blocks for the next tokens of each, entered into the cache where the plan has uses for them; returns how many."""
        s, block_size = self.state, self.pool.block_size
        need = -(-(s.num_computed[slots] + grants) // block_size) - s.num_blocks[slots]
        decoding = (s.num_computed[slots] >= s.num_prompt[slots]) & (need <= 1)
        grow = slots[decoding & (need > 0)]
        s.block_table[grow, s.num_blocks[grow]] = self.pool.allocate(len(grow))
        s.num_blocks[grow] += 1
        for slot, n, short in zip(slots[~decoding].tolist(), grants[~decoding].tolist(), need[~decoding].tolist()):
            if short > 0:
                s.append_blocks(slot, self.pool.allocate(short, consecutive=True))
            if self.config.prefix_cache:
                self._cache_prompt(slot, int(s.num_computed[slot]), int(s.num_computed[slot]) + n)
        return int(np.maximum(need, 0).sum())

    def _cache_prompt(self, slot: int, begin: int, end: int) -> None:
        """Enter the prompt blocks that tokens [begin, end) fill, with the uses that the plan still has for them."""
        s, block_size = self.state, self.pool.block_size
        first, last = begin // block_size, min(end, int(s.num_prompt[slot])) // block_size
        if last > first:
            position = int(s.position[slot])
            uses = self.order.uses(position)[0][first:last]
            # further samples of this row that got no slot with it will read its prompt again
            uses = uses + sum(1 for c in self.waiting if c.position == position and c.num_cached < 0)
            self.pool.insert(s.blocks(slot), first, s.known[slot], uses)

    def _preempt(self, slot: int) -> None:
        s = self.state
        children = self.forks.pop(slot, [])
        for child in children:
            s.free_slot(child)
        candidate = Candidate(
            int(s.position[slot]),
            int(s.sample_index[slot]),
            1 + len(children),
            self.pool.expect(s.blocks(slot)),
            s.outputs(slot).copy(),
            int(s.num_computed[slot]),
            int(s.num_preemptions[slot]) + 1,
            int(s.num_cached[slot]),
        )
        heapq.heappush(self.waiting, candidate)
        self._drop(slot)
        self.stats.num_preemptions += 1

    def _fork_complete(self, requests: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Further samples of the prompts that this step completes start to run; requests and slots with theirs behind."""
        parents, children = [], []
        for r, slot in zip(requests.tolist(), slots.tolist()):
            for child in self.forks.pop(slot, ()):
                self._fork(slot, child)
                parents.append(r)
                children.append(child)
        if not children:
            return requests, slots
        forks = np.array(children, np.int32)
        self.state.set_running(np.concatenate([self.state.running, forks]))
        return np.append(requests, np.array(parents, np.int32)), np.append(slots, forks)

    def start_over(self) -> None:
        """All running requests go back into the queue with the tokens that were seen, and the pool is a new one: nothing in
        the cache is trusted."""
        for slot in self.state.running[::-1].tolist():
            self._preempt(slot)
        self.pool, self._copies, self._decodes = type(self.pool)(self.pool.num_blocks, self.pool.block_size), [], None
        for candidate in self.waiting:
            candidate.num_expected = 0

    def _fork(self, parent: int, child: int) -> None:
        """Start `child` as a further sample of the prompt that `parent` completes in this step: full blocks are shared,
        the partial one is copied before the next step writes to it."""
        s, block_size = self.state, self.pool.block_size
        num_prompt = int(s.num_prompt[parent])
        full = s.blocks(parent)[: num_prompt // block_size]
        self.pool.acquire(full)
        s.append_blocks(child, full)
        s.num_computed[child] = s.num_tokens[child] = num_prompt
        self.stats.num_cached += num_prompt
        if num_prompt % block_size:
            copy = self.pool.allocate(1)
            self._copies.append((child, int(s.blocks(parent)[num_prompt // block_size]), int(copy[0])))
            s.append_blocks(child, copy)

    # ---- admission ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int) -> list[tuple[int, int]]:
        """Let candidates in while tokens, slots and memory last. Returns (slot, tokens) of each."""
        s, pool, block_size = self.state, self.pool, self.pool.block_size
        admitted: list[tuple[int, int]] = []
        missing = self._blocks_missing(s.running)
        mean, variance = self._future(s.running)
        room = pool.num_free - missing - self.config.output_reserve * wanted(mean, variance)
        self.order.next_step()
        self.order.observe(len(s.running) // self.config.num_samples, room, pool.num_usable)
        while budget > 0 and s.num_free_slots and (candidate := self._next_candidate()) is not None:
            prompt = self.window.prompt(candidate.position)
            limit = min(len(prompt) + self.config.max_tokens, self.config.max_model_len)
            matched = self._match(candidate.position, prompt) if self.config.prefix_cache else NO_BLOCKS
            if (fault := self._never_fits(len(prompt), limit)) is not None:
                self._take(candidate, candidate.num_samples)
                pool.use(matched[: candidate.num_expected])
                self.reject(candidate, fault)
                continue
            known = np.concatenate([prompt, candidate.outputs])
            hit = matched[: (len(known) - 1) // block_size]
            num_samples = min(self._at_once(candidate), s.num_free_slots)
            need = -(-len(known) // block_size) + (num_samples - 1) * (len(known) % block_size > 0) - len(hit)
            private = max(0, -(-len(known) // block_size) - int(self._common[candidate.position]))
            left = -(-limit // block_size) - -(-len(known) // block_size)
            more, more_variance = self._forecast.candidate(left, private, num_samples)
            reserve = int(np.ceil(self.config.output_reserve * wanted(mean + more, variance + more_variance)))
            pool.acquire(hit)  # before anything is evicted
            if need + missing + reserve > pool.num_free:
                if admitted or len(s.running):
                    pool.release_hit(hit)
                    self._is_full = True
                    break
                # Nothing runs, so nothing will free a block: let one sample in and do without the reserve.
                num_samples, need = 1, -(-len(known) // block_size) - len(hit)
                pool.evict(need - pool.num_free)
            self._take(candidate, num_samples)
            if num_samples < candidate.num_samples:
                pool.expect(hit)  # the samples that stay behind will read what this one reads and computes
            pool.use(matched[: candidate.num_expected])
            slot = self._enter(candidate, num_samples, known, len(prompt), limit, hit)
            grant = min(len(known) - int(s.num_computed[slot]), budget)
            num_given = self._give_blocks(np.array([slot], np.int32), np.array([grant], np.int32))
            admitted.append((slot, grant))
            budget -= grant
            missing += need - num_given
            mean, variance = mean + more, variance + more_variance
        if admitted:
            s.set_running(np.concatenate([s.running, np.array([slot for slot, _ in admitted], np.int32)]))
        self.stats.max_running = max(self.stats.max_running, len(s.running) + sum(map(len, self.forks.values())))
        return admitted

    def _match(self, position: int, prompt: np.ndarray) -> np.ndarray:
        """Cached blocks of this prompt. The plan knows how much of it is the prompt that was looked up before."""
        first, last = sorted((position, self._last_matched))
        if first == last:
            num_same = len(prompt) // self.pool.block_size
        else:
            num_same = int(self.window.shared_blocks[first + 1 : last + 1].min()) if first >= 0 else 0
        self._last_matched = position
        return self.pool.match(prompt, num_same)

    def _next_candidate(self) -> Candidate | None:
        if self.waiting:
            return self.waiting[0]
        row = self.order.next_row if self.held is None else None
        return None if row is None else self._candidate(row, 0, self.config.num_samples, self.order.uses(row)[1])

    def _candidate(self, position: int, first: int, num_samples: int, num_expected: int) -> Candidate:
        candidate = Candidate(position, first, num_samples, num_expected)
        candidate.outputs = self.resumed.get((position, first), candidate.outputs)
        return candidate

    def _at_once(self, candidate: Candidate) -> int:
        """How many of its samples may come in with one computation of the prompt: one that has tokens comes alone."""
        if len(candidate.outputs):
            return 1
        samples = range(candidate.first_sample, candidate.first_sample + candidate.num_samples)
        return next((i for i, s in enumerate(samples) if (candidate.position, s) in self.resumed), len(samples))

    def _take(self, candidate: Candidate, num_samples: int) -> None:
        """Remove `candidate` from the queue; samples beyond `num_samples` wait as a candidate of their own."""
        if self.waiting and self.waiting[0] is candidate:
            heapq.heappop(self.waiting)
        else:
            self.order.take()
        self.stats.num_resumed += len(self.resumed.pop((candidate.position, candidate.first_sample), ()))
        if num_samples < candidate.num_samples:
            first, rest = candidate.first_sample + num_samples, candidate.num_samples - num_samples
            num_full = int(self.window.lengths[candidate.position]) // self.pool.block_size
            heapq.heappush(self.waiting, self._candidate(candidate.position, first, rest, num_full))

    def _enter(
        self, candidate: Candidate, num_samples: int, known: np.ndarray, num_prompt: int, limit: int, hit: np.ndarray
    ) -> int:
        """Fill a slot for the candidate, and empty ones for the samples that will fork from it."""
        s = self.state
        slot = s.take_slot()
        children = [s.take_slot() for _ in range(num_samples - 1)]
        for i, new in enumerate([slot, *children]):
            s.position[new], s.sample_index[new] = candidate.position, candidate.first_sample + i
            s.num_prompt[new], s.max_tokens[new] = num_prompt, limit
            s.num_cached[new] = num_prompt  # a fork finds its whole prompt
            s.num_recompute[new] = s.num_preemptions[new] = 0
            s.known[new], s.num_known[new], s.num_outputs[new] = known, len(known), 0
        if children:
            self.forks[slot] = children
        s.append_blocks(slot, hit)
        s.num_tokens[slot] = len(known)
        s.num_computed[slot] = len(hit) * self.pool.block_size
        s.num_cached[slot] = s.num_computed[slot] if candidate.num_cached < 0 else candidate.num_cached
        s.num_recompute[slot] = candidate.num_computed
        s.num_preemptions[slot] = candidate.num_preemptions
        s.output_ids[slot, : len(candidate.outputs)] = candidate.outputs
        s.num_outputs[slot] = len(candidate.outputs)
        if candidate.num_cached < 0:
            self.stats.num_cached += int(s.num_cached[slot])
        return slot

    def _never_fits(self, num_prompt: int, limit: int) -> RowFault | None:
        if num_prompt >= self.config.max_model_len:
            return RowFault(
                "prompt_too_long", f"the prompt has {num_prompt} tokens, the model takes {self.config.max_model_len - 1}"
            )
        need, have = -(-limit // self.pool.block_size), self.pool.num_usable
        if need > have:
            size = self.pool.block_size
            return RowFault(
                "kv_memory_too_small",
                f"prompt and answer may take {limit} tokens ({need} blocks of {size}), the KV pool holds "
                f"{have * size}; raise engine.kv_memory or lower sampling.max_tokens",
            )
        return None

    def reject(self, candidate: Candidate, fault: RowFault) -> None:
        """Its requests end with `fault`. It is in no queue any more."""
        none, num_prompt = np.empty(0, np.int32), int(self.window.lengths[candidate.position])
        for i in range(candidate.num_samples):
            sample = candidate.first_sample + i
            self.rejected.append(Finished(candidate.position, sample, none, FinishReason.ERROR, num_prompt, 0, 0, fault))

    # ---- how much memory the running set will want ------------------------------------------------------------------

    def _blocks_missing(self, slots: np.ndarray) -> int:
        """Blocks that the running requests lack for the tokens that they know, and the forks to come for their copies."""
        s, block_size = self.state, self.pool.block_size
        known = s.num_tokens[slots]
        forks = sum(len(children) * int(s.num_tokens[slot] % block_size > 0) for slot, children in self.forks.items())
        return int((-(-known // block_size) - s.num_blocks[slots]).sum()) + forks

    def _future(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forecast of the running requests and of the forks to come."""
        s = self.state
        children = np.array([child for c in self.forks.values() for child in c], np.int32)
        slots = np.concatenate([slots, children])
        known = s.num_tokens[slots]
        known[len(slots) - len(children) :] = s.num_prompt[children]
        private = np.maximum(s.num_blocks[slots] - self._common[s.position[slots]], 0)
        return self._forecast.running(self._blocks_left(slots, known), private)

    def _blocks_left(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """[R] int32: blocks that each may still take beyond those of the tokens that it knows."""
        block_size = self.pool.block_size
        return -(-self.state.max_tokens[slots] // block_size) - -(-known // block_size)

    # ---- counters -----------------------------------------------------------------------------------------------------

    def _count(self, slots: np.ndarray, first: np.ndarray, end: np.ndarray, spared: int) -> None:
        """spared: reads of a token that the step's groups spare."""
        s, stats = self.state, self.stats
        total = int((end - first).sum())
        stats.num_steps += 1
        behind = np.flatnonzero(first < np.maximum(s.num_prompt[slots], s.num_recompute[slots]))  # not plain decodes
        again = prompt = 0
        if len(behind):
            slots, first, until = slots[behind], first[behind], end[behind]
            repeated = np.clip(np.minimum(until, s.num_recompute[slots]) - first, 0, None)
            again = int(repeated.sum())
            prompt = int(np.clip(np.minimum(until, s.num_prompt[slots]) - first - repeated, 0, None).sum())
        stats.num_recomputed += again
        stats.num_prefill += prompt
        stats.num_decode += total - again - prompt
        visible = int(end.sum(dtype=np.int64))
        stats.num_kv_visible += visible
        stats.num_kv_read += visible - spared


def common_blocks(window: Window, num_samples: int) -> np.ndarray:
    """[n] int32: leading blocks of each row that it has in common with a neighbour, or with its own samples."""
    if num_samples > 1:
        return window.lengths // window.block_size
    after = np.append(window.shared_blocks[1:], 0)
    return np.maximum(window.shared_blocks, after).astype(np.int32)
