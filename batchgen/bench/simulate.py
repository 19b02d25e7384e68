"""`batchgen bench simulate`: a whole job through the real planner, scheduler and block pool; only the device is pretended.

The device is a roofline (step_cost). Beside batchgen's own policy it runs what its peers do: the file's order, or a sorted
file, with a least-recently-used prefix cache, admission without a reserve, and attention that reads a shared prefix once for
each row. Everything but these policies is the same code, so the ratios are those of plan, admission and shared reads.

    FLOPs of a step  = 2 N T + 2 Nh K + 4 L H D sum of contexts of its T query tokens       (K tokens sampled)
    bytes of a step  = (N + Nh) w + kv (tokens of KV read + T)                              (each weight once)
    seconds          = FLOPs / F + bytes / B + launch                                       no overlap of the two

F and B are what the device sustains (its data sheet times `compute_share` and `memory_share`). T_seq is the same sum over
the job with the fewest possible FLOPs, reads and steps, T_overlap the greater of its two terms.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import SchedulerConfig, StepPlan
from batchgen.plan.window import plan_window
from batchgen.records import Window

EOS, WORD = 1, 2  # the two tokens that the device generates


class DeviceRates(NamedTuple):
    """What a device's data sheet promises, and the share of it that large steps are known to reach."""

    flops: float  # per second, dense, in the model's dtype
    bandwidth: float  # bytes per second
    compute_share: float
    memory_share: float
    launch: float  # seconds of a step that nothing hides: launching, and the host's turn


# Data sheets of the SXM parts; shares as measured by others on 8B-class models (55 % MFU, 80 % MBU). cpu: two AVX2 cores.
DEVICES = {
    "a100": DeviceRates(312e12, 2.04e12, 0.55, 0.80, 0.5e-3),
    "h100": DeviceRates(989e12, 3.35e12, 0.55, 0.80, 0.5e-3),
    "h200": DeviceRates(989e12, 4.8e12, 0.55, 0.80, 0.5e-3),
    "cpu": DeviceRates(140e9, 19e9, 0.80, 0.80, 0.5e-3),
}


class ModelShape(NamedTuple):
    """What of a model a step's cost depends on."""

    layer_parameters: int
    head_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


MODELS = {
    "8b": ModelShape(6_979_321_856, 525_336_576, 32, 32, 8, 128, 2),  # Llama 3.1 8B
    "1b": ModelShape(973_078_528, 262_668_288, 16, 32, 8, 64, 2),  # Llama 3.2 1B
    "135m": ModelShape(106_168_320, 28_311_552, 30, 9, 3, 64, 4),  # SmolLM2 135M in float32
}


class Group(NamedTuple):
    """Rows that share a prefix: lengths in tokens, `output` the mean of an exponential distribution cut at max_tokens."""

    prefix: int
    suffix: int
    output: float


@dataclass(frozen=True)
class SimulatedJob:
    """`num_rows` rows in shuffled order, `rows_per_group` to a prefix; groups take the kinds in turn."""

    num_rows: int = 50_000
    rows_per_group: int = 100
    kinds: tuple[Group, ...] = (Group(2000, 200, 100.0),)
    max_tokens: int = 512
    seed: int = 0

    def draw(self) -> tuple[Callable[[int], np.ndarray], np.ndarray, np.ndarray]:
        """-> (tokens of a row, prompt lengths [n] int32, output lengths [n] int32)."""
        rng = np.random.default_rng(self.seed)
        num_groups = math.ceil(self.num_rows / self.rows_per_group)
        group = rng.permutation(np.arange(self.num_rows) // self.rows_per_group)
        prefixes = [rng.integers(3, 30_000, self.kinds[g % len(self.kinds)].prefix, np.int32) for g in range(num_groups)]
        kind = group % len(self.kinds)
        suffix_length = np.array([k.suffix for k in self.kinds])[kind]
        suffixes = rng.integers(3, 30_000, (self.num_rows, max(k.suffix for k in self.kinds)), np.int32)
        mean = np.array([k.output for k in self.kinds])[kind]
        outputs = np.clip(np.ceil(rng.exponential(mean)), 1, self.max_tokens).astype(np.int32)
        lengths = np.array([len(prefixes[g]) for g in group]) + suffix_length

        def tokens(row: int) -> np.ndarray:
            return np.concatenate([prefixes[group[row]], suffixes[row, : suffix_length[row]]])

        return tokens, lengths.astype(np.int32), outputs


class LruBlockPool(BlockPool):
    """The pool of a serving engine: what is computed stays in the cache until memory is short, then the block that was
    used least recently goes, the deepest first. It knows nothing of what is to come."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.last_use = np.zeros(num_blocks, np.int64)
        self.clock = 0

    @property
    def num_free(self) -> int:
        return self._num_free + int(np.count_nonzero(self.is_cached & (self.ref_count == 0)))

    def allocate(self, n: int, consecutive: bool = False) -> np.ndarray:
        if n > self._num_free:
            self._forget(n - self._num_free)
        return super().allocate(n, consecutive)

    def release(self, blocks: np.ndarray) -> None:
        self.clock += 1
        self.last_use[blocks] = self.clock
        super().release(blocks)

    def insert(self, blocks: np.ndarray, first: int, token_ids: np.ndarray, remaining_uses: np.ndarray) -> None:
        super().insert(blocks, first, token_ids, np.ones_like(remaining_uses))

    def use(self, blocks: Any) -> None:
        pass

    def expect(self, blocks: Any) -> int:
        return 0

    def evict(self, n: int) -> int:
        return 0  # what could go counts as free already

    def _forget(self, n: int) -> None:
        idle = np.flatnonzero(self.is_cached & (self.ref_count == 0))
        # a parent is used no earlier than its children and lies less deep, so it goes after them
        evicted = idle[np.lexsort((-self.depth[idle], self.last_use[idle]))[:n]]
        for block in evicted.tolist():
            del self.cache[self.hash_of.pop(block)]
        self.is_cached[evicted] = False
        self.remaining_uses[evicted] = 0
        np.subtract.at(self.num_children, self.parent[evicted], 1)
        self._free[self._num_free : self._num_free + len(evicted)] = evicted
        self._num_free += len(evicted)
        self._sorted = False


class Policy(NamedTuple):
    """What an engine knows and does."""

    sort: bool
    pool: Callable[[int, int], BlockPool]
    shared_reads: bool
    output_reserve: float


POLICIES = {
    "batchgen": Policy(True, BlockPool, True, 1.0),
    "sorted": Policy(True, LruBlockPool, False, 0.0),
    "arrival": Policy(False, LruBlockPool, False, 0.0),
}


class Work(NamedTuple):
    """What the device is asked for, summed over steps."""

    steps: int
    query_tokens: int
    sampled: int
    context: int  # sum over query tokens of the keys that each sees
    kv_read: int  # tokens of keys and values

    def flops(self, m: ModelShape) -> float:
        linear = 2 * m.layer_parameters * self.query_tokens + 2 * m.head_parameters * self.sampled
        return linear + 4 * m.num_layers * m.num_heads * m.head_dim * self.context

    def bytes(self, m: ModelShape) -> float:
        weights = self.steps * (m.layer_parameters + m.head_parameters) * m.dtype_bytes
        return weights + m.kv_bytes * (self.kv_read + self.query_tokens)

    def seconds(self, m: ModelShape, d: DeviceRates) -> float:
        compute = self.flops(m) / (d.flops * d.compute_share)
        return compute + self.bytes(m) / (d.bandwidth * d.memory_share) + self.steps * d.launch


class Simulated(NamedTuple):
    """One policy's run. Times in seconds of the simulated device, but `host_seconds`, which this machine took."""

    seconds: float
    work: Work
    prefill_computed: int
    recomputed: int
    mean_decode_batch: float
    preemptions: int
    kv_visible: int  # tokens of KV that a kernel without shared reads would read
    tail_share: float  # of the time, with fewer than a quarter of the most rows that ran
    host_seconds: float


def simulate(
    job: SimulatedJob, policy: Policy, model: ModelShape, device: DeviceRates, kv_tokens: int, config: SchedulerConfig,
    block_size: int = 16,
) -> tuple[Simulated, Window]:  # fmt: skip
    """Run the job to its end. kv_tokens: what the KV pool holds."""
    tokens, lengths, outputs = job.draw()
    window = plan_window(tokens, np.arange(job.num_rows), lengths, block_size, sort=policy.sort)
    wanted = outputs[window.index]
    scheduler = Scheduler(config, policy.pool(kv_tokens // block_size + 1, block_size), window)
    state, stats = scheduler.state, scheduler.stats
    began = time.perf_counter()
    num_sampled = context = kv_read = query_tokens = 0
    step_seconds, step_rows = [], []
    while not scheduler.done:
        step = scheduler.schedule()
        scheduler.take_rejected()
        if step is None:
            continue
        read = stats.num_kv_read if policy.shared_reads else stats.num_kv_visible
        work = work_of(step, read - kv_read)
        kv_read = read
        query_tokens += work.query_tokens
        num_sampled += work.sampled
        context += work.context
        step_seconds.append(work.seconds(model, device))
        step_rows.append(len(step.slots))
        slots = step.sample_slots
        last = state.num_tokens[slots] - state.num_prompt[slots] + 1 >= wanted[state.position[slots]]
        scheduler.update(step, np.where(last, EOS, WORD).astype(np.int32), np.ones(len(slots), bool))
    seconds, rows = np.array(step_seconds), np.array(step_rows)
    result = Simulated(
        seconds=float(seconds.sum()),
        work=Work(len(seconds), query_tokens, num_sampled, context, kv_read),
        prefill_computed=stats.num_prefill,
        recomputed=stats.num_recomputed,
        mean_decode_batch=stats.num_decode / len(seconds),
        preemptions=stats.num_preemptions,
        kv_visible=stats.num_kv_visible,
        tail_share=float(seconds[rows < rows.max() / 4].sum() / seconds.sum()),
        host_seconds=time.perf_counter() - began,
    )
    return result, window


def work_of(step: StepPlan, kv_read: int) -> Work:
    first, count = step.first_position.astype(np.int64), step.num_scheduled.astype(np.int64)
    context = int((count * first + count * (count + 1) // 2).sum())
    return Work(1, int(count.sum()), len(step.sample_slots), context, kv_read)


def least_work(window: Window, outputs: np.ndarray, kv_tokens: int, config: SchedulerConfig) -> Work:
    """What no engine can do without: each edge of the prefix tree computed once, and read once in each of as many steps as
    the longest answer below it takes; no fewer steps than the longest answer, the slots and the memory allow.

    window in prefix order; outputs: [n] tokens generated for each of its rows.
    """
    lengths, cached, out = window.lengths.astype(np.int64), window.num_cached().astype(np.int64), outputs.astype(np.int64)
    prompt_context = (lengths * (lengths + 1) - cached * (cached + 1)) // 2
    answer_context = (out - 1) * lengths + out * (out - 1) // 2
    private = lengths % window.block_size  # of a prompt's last block, which no other row shares
    held = int((private * out + out * (out - 1) // 2).sum()) + window.block_size * _edge_steps(window, out)
    steps = max(int(out.max()), math.ceil(int(out.sum()) / config.max_running_requests), math.ceil(held / kv_tokens))
    query_tokens = window.num_computed() + int((out - 1).sum())
    return Work(steps, query_tokens, int(out.sum()), int((prompt_context + answer_context).sum()), held)


def _edge_steps(window: Window, outputs: np.ndarray) -> int:
    """Sum over all full blocks of the prefix tree of the longest answer below each, in steps."""
    total = 0
    path: list[list[int]] = []  # of the row before: [first block, longest answer below], root first
    end = 0
    num_blocks = window.lengths // window.block_size
    for shared, length, out in zip(window.shared_blocks.tolist(), num_blocks.tolist(), outputs.tolist()):
        longest = 0
        while path and path[-1][0] >= shared:
            begin, own = path.pop()
            longest = max(longest, own)
            total += (end - begin) * longest
            end = begin
        if path and shared < end:  # the edge splits where this row leaves it
            total += (end - shared) * max(longest, path[-1][1])
        if path:
            path[-1][1] = max(path[-1][1], longest)
        end = shared
        path.append([shared, out])
        end = length
    longest = 0
    while path:
        begin, own = path.pop()
        longest = max(longest, own)
        total += (end - begin) * longest
        end = begin
    return total


def compare(
    job: SimulatedJob, policies: list[str], model: ModelShape, device: DeviceRates, kv_tokens: int, config: SchedulerConfig
) -> dict[str, Any]:
    """Every policy on the same job, and the limits. Prints a table; returns what goes into the JSON line."""
    runs: dict[str, Simulated] = {}
    limit, no_sharing = None, 0
    for name in policies:
        runs[name], window = simulate(job, POLICIES[name], model, device, kv_tokens, config)
        if limit is None and POLICIES[name].sort:
            limit = least_work(window, job.draw()[2][window.index], kv_tokens, config)
            no_sharing = int(window.lengths.sum())
        line(name, runs[name], model)
    result: dict[str, Any] = {"policies": {name: run._asdict() | {"work": run.work._asdict()} for name, run in runs.items()}}
    if "batchgen" in runs and limit is not None:
        ours = runs["batchgen"]
        compute, memory = limit.flops(model) / device.flops, limit.bytes(model) / device.bandwidth
        sequential = compute / device.compute_share + memory / device.memory_share
        result |= {f"speedup_vs_{name}": run.seconds / ours.seconds for name, run in runs.items() if name != "batchgen"}
        result |= {
            "sequential_limit_seconds": sequential,
            "overlapped_limit_seconds": max(compute / device.compute_share, memory / device.memory_share),
            "share_of_sequential_limit": sequential / ours.seconds,
            "share_of_overlapped_limit": max(compute / device.compute_share, memory / device.memory_share) / ours.seconds,
            "prefill_saved": 1 - ours.prefill_computed / no_sharing,
            "kv_reads_saved": 1 - ours.work.kv_read / ours.kv_visible,
            "recomputed_tokens": ours.recomputed,
        }
        print(
            f"limits: {sequential:,.0f} s one after the other, {result['overlapped_limit_seconds']:,.0f} s overlapped; "
            f"batchgen at {result['share_of_sequential_limit']:.0%} and {result['share_of_overlapped_limit']:.0%} of them"
        )
        for name in runs:
            if name != "batchgen":
                print(f"batchgen is {result[f'speedup_vs_{name}']:.2f}x as fast as {name}")
    return result


def line(name: str, run: Simulated, model: ModelShape) -> None:
    print(
        f"{name:10}{run.seconds:>8,.0f} s, prefill {run.prefill_computed / 1e6:,.1f}M tokens "
        f"(+ {run.recomputed / 1e6:,.1f}M again), {run.work.steps:,} steps of {run.mean_decode_batch:,.0f} decodes, KV read "
        f"{run.work.kv_read * model.kv_bytes / 1e12:,.1f} TB (unshared {run.kv_visible * model.kv_bytes / 1e12:,.1f}), "
        f"{run.preemptions:,} preemptions, tail {run.tail_share:.1%}; simulated in {run.host_seconds:.0f} s",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    kinds = tuple(Group(int(a), int(b), float(c)) for a, b, c in (kind.split("/") for kind in options.groups))
    job = SimulatedJob(options.rows, options.rows_per_group, kinds, options.max_tokens, options.seed)
    longest = max(k.prefix + k.suffix for k in kinds) + options.max_tokens
    config = SchedulerConfig(
        max_num_batched_tokens=options.budget,
        max_running_requests=options.running,
        max_model_len=longest,
        max_tokens=options.max_tokens,
        eos_token_ids=frozenset([EOS]),
    )
    print(
        f"{job.num_rows:,} rows, {job.rows_per_group} to a prefix (prefix/suffix/output {', '.join(options.groups)}), "
        f"{options.model} on one {options.device} with {options.kv_tokens:,} KV tokens. Simulated, not measured."
    )
    result = compare(job, options.policies, MODELS[options.model], DEVICES[options.device], options.kv_tokens, config)
    print(json.dumps({"benchmark": "batchgen.bench.simulate", "options": vars(options), **result}))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("batchgen bench simulate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rows-per-group", type=int, default=100, help="rows that share a prefix")
    parser.add_argument(
        "--groups", nargs="+", default=["2000/200/100"], metavar="PREFIX/SUFFIX/OUTPUT", help="kinds of groups, in tokens"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="answers are cut here")
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="what the KV pool holds")
    parser.add_argument("--budget", type=int, default=8192, help="tokens in a step")
    parser.add_argument("--running", type=int, default=1024, help="requests at a time")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
