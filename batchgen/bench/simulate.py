"""`batchgen bench simulate`: a whole job through the real planner, scheduler and block pool; only the device is pretended.

The device is a roofline (simulate_device). Beside batchgen's own policy it runs what its peers do: the file's order, or a
sorted file, with a least-recently-used prefix cache, admission without a reserve, and attention that reads a shared prefix
once for each row. Everything but these policies is the same code, so the ratios are those of plan, admission and shared
reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from batchgen.bench.lru_pool import LruBlockPool
from batchgen.bench.simulate_device import (
    DEVICES,
    MODELS,
    DeviceRates,
    hidden_tokens,
    least_work,
    limits,
    step_seconds,
    work_of,
)
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import SchedulerConfig
from batchgen.plan.cost_order import cost_order
from batchgen.plan.window import plan_window
from batchgen.plan.work import ModelShape, Work

EOS, WORD = 1, 2  # the two tokens that the device generates


class Group(NamedTuple):
    """Rows that share a prefix: lengths in tokens, `output` the mean of an exponential distribution cut at max_tokens."""

    prefix: int
    suffix: int
    output: float


@dataclass(frozen=True)
class SimulatedJob:
    """`num_rows` rows in shuffled order, `rows_per_group` to a prefix; groups take the kinds in turn. With a template, a
    sorted file has one kind after the other, as have jobs that ask different things of their rows."""

    num_rows: int = 50_000
    rows_per_group: int = 100
    kinds: tuple[Group, ...] = (Group(2000, 200, 100.0),)
    max_tokens: int = 512
    seed: int = 0
    template: int = 0  # tokens that all prompts of a kind begin with

    def draw(self) -> tuple[Callable[[int], np.ndarray], np.ndarray, np.ndarray]:
        """-> (tokens of a row, prompt lengths [n] int32, output lengths [n] int32)."""
        rng = np.random.default_rng(self.seed)
        num_groups = math.ceil(self.num_rows / self.rows_per_group)
        group = rng.permutation(np.arange(self.num_rows) // self.rows_per_group)
        prefixes = [rng.integers(3, 30_000, self.kinds[g % len(self.kinds)].prefix, np.int32) for g in range(num_groups)]
        for g, prefix in enumerate(prefixes):
            prefix[: self.template] = 3 + g % len(self.kinds)
        kind = group % len(self.kinds)
        suffix_length = np.array([k.suffix for k in self.kinds])[kind]
        suffixes = rng.integers(3, 30_000, (self.num_rows, max(k.suffix for k in self.kinds)), np.int32)
        mean = np.array([k.output for k in self.kinds])[kind]
        outputs = np.clip(np.ceil(rng.exponential(mean)), 1, self.max_tokens).astype(np.int32)
        lengths = np.array([len(prefixes[g]) for g in group]) + suffix_length

        def tokens(row: int) -> np.ndarray:
            return np.concatenate([prefixes[group[row]], suffixes[row, : suffix_length[row]]])

        return tokens, lengths.astype(np.int32), outputs


class Policy(NamedTuple):
    """What an engine knows and does."""

    sort: bool
    cost_order: bool  # of subtrees, and admission from both ends
    pool: Callable[[int, int], BlockPool]
    shared_reads: bool
    output_reserve: float


POLICIES = {
    "batchgen": Policy(True, True, BlockPool, True, 1.0),
    "depth-first": Policy(True, False, BlockPool, True, 1.0),
    "sorted": Policy(True, False, LruBlockPool, False, 0.0),
    "arrival": Policy(False, False, LruBlockPool, False, 0.0),
}


class Simulated(NamedTuple):
    """One policy's run. Times in seconds of the simulated device, but `host_seconds`, which this machine took."""

    seconds: float
    work: Work
    prompt_tokens: int
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
) -> tuple[Simulated, Work]:  # fmt: skip
    """Run the job to its end. kv_tokens: what the KV pool holds. Returns also the least work that the job can do with, if
    the policy sorts (and nonsense if not)."""
    tokens, lengths, outputs = job.draw()
    window = plan_window(tokens, np.arange(job.num_rows), lengths, block_size, sort=policy.sort)
    if policy.cost_order:
        window = cost_order(window)
    wanted = outputs[window.index]
    scheduler = Scheduler(config, policy.pool(kv_tokens // block_size + 1, block_size), window)
    state, stats = scheduler.state, scheduler.stats
    began = time.perf_counter()
    num_sampled = context = kv_read = query_tokens = 0
    seconds_of_steps, step_rows = [], []
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
        seconds_of_steps.append(step_seconds(work, model, device))
        step_rows.append(len(step.slots))
        slots = step.sample_slots
        last = step.output_index + 1 >= wanted[state.position[slots]]
        scheduler.update(step, np.where(last, EOS, WORD).astype(np.int32), np.ones(len(slots), bool))
    seconds, rows = np.array(seconds_of_steps), np.array(step_rows)
    result = Simulated(
        seconds=float(seconds.sum()),
        work=Work(len(seconds), query_tokens, num_sampled, context, kv_read),
        prefill_computed=stats.num_prefill,
        recomputed=stats.num_recomputed,
        mean_decode_batch=stats.num_decode / len(seconds),
        preemptions=stats.num_preemptions,
        prompt_tokens=int(lengths.sum()),
        kv_visible=stats.num_kv_visible,
        tail_share=float(seconds[rows < rows.max() / 4].sum() / seconds.sum()),
        host_seconds=time.perf_counter() - began,
    )
    return result, least_work(window, wanted, kv_tokens, config)


def compare(
    job: SimulatedJob, policies: list[str], model: ModelShape, device: DeviceRates, kv_tokens: int, config: SchedulerConfig
) -> dict[str, Any]:
    """Every policy on the same job, a process each, and the limits. Prints a table; returns what goes into the JSON line."""
    runs: dict[str, Simulated] = {}
    least = None
    with ProcessPoolExecutor(min(len(policies), os.cpu_count() or 1), get_context("spawn")) as workers:
        # the slowest come last in POLICIES and start first
        futures = {
            name: workers.submit(simulate, job, POLICIES[name], model, device, kv_tokens, config)
            for name in sorted(policies, key=list(POLICIES).index, reverse=True)
        }
        for name in policies:
            runs[name], work = futures[name].result()
            least = work if name == "batchgen" else least
            line(name, runs[name], model)
    result: dict[str, Any] = {"policies": {name: run._asdict() | {"work": run.work._asdict()} for name, run in runs.items()}}
    if least is not None:
        ours = runs["batchgen"]
        sequential, overlapped = limits(least, model, device)
        result |= {
            f"speedup_vs_{name.replace('-', '_')}": run.seconds / ours.seconds
            for name, run in runs.items()
            if name != "batchgen"
        }
        result |= {
            "sequential_limit_seconds": sequential,
            "overlapped_limit_seconds": overlapped,
            "share_of_sequential_limit": sequential / ours.seconds,
            "share_of_overlapped_limit": overlapped / ours.seconds,
            "prefill_saved": 1 - ours.prefill_computed / ours.prompt_tokens,
            "kv_reads_saved": 1 - ours.work.kv_read / ours.kv_visible,
            "recomputed_tokens": ours.recomputed,
        }
        print(
            f"limits: {sequential:,.0f} s one after the other, {overlapped:,.0f} s overlapped; "
            f"batchgen at {result['share_of_sequential_limit']:.0%} and {result['share_of_overlapped_limit']:.0%} of them"
        )
        for name in runs:
            if name != "batchgen":
                print(f"batchgen is {runs[name].seconds / ours.seconds:.2f}x as fast as {name}")
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
    job = SimulatedJob(options.rows, options.rows_per_group, kinds, options.max_tokens, options.seed, options.template)
    longest = max(k.prefix + k.suffix for k in kinds) + options.max_tokens
    config = SchedulerConfig(
        max_num_batched_tokens=options.budget,
        max_running_requests=options.running,
        max_model_len=longest,
        max_tokens=options.max_tokens,
        eos_token_ids=frozenset([EOS]),
        hidden_tokens=hidden_tokens(DEVICES[options.device], MODELS[options.model]),
    )
    print(
        f"{job.num_rows:,} rows, {job.rows_per_group} to a prefix (prefix/suffix/output {', '.join(options.groups)}), "
        f"{options.model} on one {options.device} with {options.kv_tokens:,} KV tokens. Simulated, not measured."
    )
    result = compare(job, options.policies, MODELS[options.model], DEVICES[options.device], options.kv_tokens, config)
    print(json.dumps({"benchmark": "batchgen.bench.simulate", "options": vars(options), **result}))
    return 0


# --mixed: documents with short answers, and short questions with long ones.
MIXED = {
    "rows": 200,
    "rows_per_group": 10,
    "groups": ["500/8000/30", "100/100/3000"],
    "template": 48,
    "max_tokens": 4096,
    "policies": ["batchgen", "depth-first"],
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("batchgen bench simulate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="other defaults: half of the rows are heavy to prefill, half to decode; compared with plain depth-first order",
    )
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rows-per-group", type=int, default=100, help="rows that share a prefix")
    parser.add_argument(
        "--groups", nargs="+", default=["2000/200/100"], metavar="PREFIX/SUFFIX/OUTPUT", help="kinds of groups, in tokens"
    )
    parser.add_argument("--template", type=int, default=0, help="tokens that all prompts of a kind begin with")
    parser.add_argument("--max-tokens", type=int, default=512, help="answers are cut here")
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="what the KV pool holds")
    parser.add_argument("--budget", type=int, default=8192, help="tokens in a step")
    parser.add_argument("--running", type=int, default=1024, help="requests at a time")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["batchgen", "sorted", "arrival"])
    parser.add_argument("--seed", type=int, default=0)
    if parser.parse_known_args(arguments)[0].mixed:
        parser.set_defaults(**MIXED)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
