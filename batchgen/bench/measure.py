"""One workload after another through all systems: the same requests, the same KV memory, each system alone.

A peer is run in every order that its users could give it: as in the file, and sorted by shared prefix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.bench.limits import Limits, explain, show_profile
from batchgen.bench.peer_llama_cpp import LlamaCppSystem, server_path
from batchgen.bench.peers import ContinuousBatchingSystem, GenerateSystem, vllm_process
from batchgen.bench.systems import BatchgenSystem, Run, SystemFailed, SystemProcess, TooSlow, first_difference
from batchgen.bench.workloads import Workload

GUARD_ROWS, GUARD_TOKENS = 3, 6
NEAR_TIE = 1e-3  # difference of logits: rounding of float32 sums over some hundred terms decides
MAX_TIES_LOOKED_AT = 3
GIVE_UP = 12  # times batchgen's seconds; a peer that takes longer is stopped
GIVE_UP_SECONDS = 15.0  # but it gets these
GIVE_UP_CHOOSING_SECONDS = 120.0  # for its first tokens, and for its trials
MAX_STOPS = 2  # then a peer is not tried on further workloads


@dataclass(frozen=True)
class Spec:
    label: str
    make: Callable[[str, int], Any] | None  # None: in an environment of its own
    orders: tuple[str, ...] = ("",)  # in which it is given the requests; "": it has its own
    require: Callable[[], Any] = lambda: None  # raises SystemFailed if it is not installed


PEER_ORDERS = ("file order", "sorted")
SYSTEMS = {
    "batchgen": Spec("batchgen", BatchgenSystem),
    "generate": Spec("transformers generate", GenerateSystem),
    "continuous": Spec("transformers continuous", ContinuousBatchingSystem, PEER_ORDERS),
    "vllm": Spec("vLLM", None, PEER_ORDERS),
    "llama_cpp": Spec("llama.cpp", LlamaCppSystem, PEER_ORDERS, server_path),
}


def label(key: str) -> str:
    """In words what `key` ("vllm", "vllm sorted") names."""
    name, _, order = key.partition(" ")
    return SYSTEMS[name].label + (f", {order}" if order else "")


class Bench:
    """The systems, each waiting in its own process while another one runs, and `missing`: why some are not there."""

    def __init__(
        self, model: str, threads: int, systems: list[str], workloads: list[Workload], peers: Path, repeats: int
    ) -> None:
        self.systems, self.repeats = systems, repeats
        self.processes: dict[str, SystemProcess] = {}
        self.missing: dict[str, str] = {}
        self.stops = dict.fromkeys(systems, 0)
        for name in dict.fromkeys(["generate", *systems]):  # the oracle is always there
            make = SYSTEMS[name].make
            try:
                SYSTEMS[name].require()
                if make is not None:
                    self.processes[name] = SystemProcess(make, model, threads)
                else:
                    self.processes[name] = vllm_process(model, threads, workloads, peers)
            except SystemFailed as e:
                self.missing[name] = str(e)
                print(f"{SYSTEMS[name].label}: {e}", flush=True)

    def close(self) -> None:
        for process in self.processes.values():
            process.close()

    def measure(self, workload: Workload, limits: Limits | None, profile: bool) -> dict[str, Any]:
        window = workload.window()
        total, computed = workload.num_prompt_tokens, window.num_computed()
        requests = len(workload.prompts) * workload.num_samples
        print(
            f"\n{workload.name}: {workload.about}\n"
            f"  {requests} requests, {total:,} prompt tokens ({window.lengths.min()} to {window.lengths.max()} each), "
            f"{workload.max_tokens} out each; the plan computes {computed:,} ({1 - computed / total:.1%} less)",
            flush=True,
        )
        facts: dict[str, Any] = {
            "requests": requests,
            "num_samples": workload.num_samples,
            "prompt_tokens": total,
            "max_tokens": workload.max_tokens,
            "planned_prefill": computed,
            "settings": {},
        }
        settings = workload.memory_settings()
        ready = self.prepare(replace(workload, num_blocks=settings["ample"]))
        for setting, num_blocks in settings.items():
            given = replace(workload, num_blocks=num_blocks)
            systems, ours = self.run_all(given, window.index, ready, limits)
            print(f"\n  {setting} KV memory, {num_blocks:,} blocks of 16 tokens:")
            print_table(systems)
            facts["settings"][setting] = {"num_blocks": num_blocks, "systems": systems}
            if ours is not None and limits is not None:
                facts["settings"][setting]["limits"] = explain(given, ours, limits)
                if profile:
                    facts["settings"][setting]["profile"] = show_profile(self.processes["batchgen"].call("profile", given))
        return facts

    def prepare(self, workload: Workload) -> dict[str, str]:
        """Warm up on a few rows, whose tokens must be the oracle's; then let each system choose its sizes.

        Returns the error of each system that is not to be measured, else "". If that is batchgen, SystemFailed.
        """
        few = replace(workload.take(np.arange(min(GUARD_ROWS, len(workload.prompts)))), max_tokens=GUARD_TOKENS)
        oracle = self.processes["generate"]
        expected = Run(0.0, oracle.call("one_by_one", few), 0)
        faults = {}
        for name in [n for n in self.systems if n not in self.missing]:
            process = self.processes[name]
            try:
                if self.stops[name] >= MAX_STOPS:
                    raise SystemFailed(f"not tried: it was stopped {MAX_STOPS} times")
                limit = None if name == "batchgen" else GIVE_UP_CHOOSING_SECONDS
                process.ready()  # outside its time
                run: Run = process.call("run", few, seconds=limit)
                agreed = agreement(few, run, expected, oracle)
                if agreed["differ"] > agreed["near_ties"]:
                    raise SystemFailed(f"gives other tokens than one prompt at a time: {agreed}")
                choice = process.call("calibrate", workload, seconds=limit)
                faults[name] = ""
            except SystemFailed as e:
                if name == "batchgen":
                    raise
                self.stops[name] += isinstance(e, TooSlow)
                faults[name] = choice = str(e)
            print(f"  {SYSTEMS[name].label}: {'' if faults[name] else 'first tokens right; '}{choice}", flush=True)
        return faults

    def run_all(
        self, workload: Workload, plan_order: np.ndarray, faults: dict[str, str], limits: Limits | None
    ) -> tuple[dict[str, dict[str, Any]], Run | None]:
        """The facts of every system and order, and batchgen's run."""
        systems: dict[str, dict[str, Any]] = {}
        runs: dict[str, Run] = {}
        for name in [*faults] * self.repeats:
            for order in SYSTEMS[name].orders:
                key = f"{name} {order}".strip()
                facts = systems.setdefault(key, {"all_seconds": []})
                if faults[name]:
                    facts["error"] = faults[name]
                if "error" in facts:
                    continue
                ours = systems.get("batchgen", {}).get("all_seconds")
                limit = max(GIVE_UP_SECONDS, GIVE_UP * ours[-1]) if ours and name != "batchgen" else None
                try:
                    run = self.run(name, workload, plan_order if order == "sorted" else None, limit)
                except SystemFailed as e:
                    if name == "batchgen":
                        raise
                    facts["error"] = str(e)
                    if isinstance(e, TooSlow):
                        self.stops[name] += 1
                        facts["stopped_after"] = limit
                    continue
                facts["all_seconds"].append(run.seconds)
                runs[key] = run
        ours = runs.get("batchgen")
        for key, run in runs.items():
            facts = systems[key]
            seconds = float(np.median(facts["all_seconds"]))
            num_output = sum(map(len, run.tokens))
            facts |= {
                "seconds": seconds,
                "prompt_tokens_per_second": workload.num_prompt_tokens / seconds,
                "output_tokens": num_output,
                "output_tokens_per_second": num_output / seconds,
                "prefill_computed": run.num_prefill,
                **run.facts,
            }
            if limits is not None and "steps" in run.facts:
                min_rows = limits.min_rows if key == "batchgen" else 1
                facts["share_of_matmul_limit"] = limits.seconds(run.facts["steps"], min_rows) / seconds
            if ours is not None:
                facts["times_batchgen"] = seconds / float(np.median(systems["batchgen"]["all_seconds"]))
                if key != "batchgen":
                    facts["agreement"] = agreement(workload, ours, run, self.processes["generate"])
        return systems, ours

    def run(self, name: str, workload: Workload, order: np.ndarray | None, limit: float | None) -> Run:
        """One run; with `order` ([n] rows) in that order, its tokens put back into the file's."""
        given = workload if order is None else workload.take(order)
        run: Run = self.processes[name].call("run", given, seconds=limit)
        if any(len(tokens) != workload.max_tokens for tokens in run.tokens):
            raise SystemFailed(f"not every request got {workload.max_tokens} tokens")
        if order is not None:
            n = workload.num_samples
            back = (np.argsort(order)[:, None] * n + np.arange(n)).ravel()
            run.tokens = [run.tokens[i] for i in back]
        return run


def agreement(workload: Workload, a: Run, b: Run, oracle: SystemProcess) -> dict[str, Any]:
    """How many requests have the same tokens, and of some that differ whether rounding decided (a near tie of logits)."""
    differences = [(i, at) for i, pair in enumerate(zip(a.tokens, b.tokens)) if (at := first_difference(*pair)) is not None]
    gaps = []
    for i, at in differences[:MAX_TIES_LOOKED_AT]:
        ids = np.concatenate([workload.prompts[i // workload.num_samples], np.array(a.tokens[i][:at], np.int32)])
        gaps.append(oracle.call("logit_gap", ids, a.tokens[i][at], b.tokens[i][at]))
    return {
        "identical": 1 - len(differences) / len(a.tokens),
        "differ": len(differences),
        "looked_at": len(gaps),
        "near_ties": sum(gap < NEAR_TIE for gap in gaps),
        "largest_gap": max(gaps, default=None),
    }


def print_table(systems: dict[str, dict[str, Any]]) -> None:
    print(f"  {'':36}{'wall s':>8}{'ratio':>8}{'prompt/s':>10}{'output/s':>10}{'prefilled':>11}{'limit':>7}  same tokens")
    for key, facts in systems.items():
        name = f"  {label(key):36}"
        if "seconds" not in facts:
            print(f"{name}{facts['error']}")
            continue
        ratio = f"{facts['times_batchgen']:.2f}x" if "times_batchgen" in facts else ""
        share = f"{facts['share_of_matmul_limit']:.0%}" if "share_of_matmul_limit" in facts else ""
        agreed, told = facts.get("agreement"), ""
        if agreed:
            told = f"{agreed['identical']:.1%}"
            if agreed["differ"]:
                told += f"; of {agreed['looked_at']} that differ, {agreed['near_ties']} at a near tie"
        print(
            f"{name}{facts['seconds']:>8.1f}{ratio:>8}{facts['prompt_tokens_per_second']:>10,.0f}"
            f"{facts['output_tokens_per_second']:>10,.1f}{facts['prefill_computed']:>11,}{share:>7}  {told}"
        )
    sys.stdout.flush()
