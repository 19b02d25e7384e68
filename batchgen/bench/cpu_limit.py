"""`python -m batchgen.bench.cpu_limit`: how near the CPU engine comes to its own matrix products.

Four workloads, each run whole (plan, cache, prefill, decode), against the time that the matrix products of the very same
steps need when nothing else runs: every shape at its row count, at the rate of the fastest bare product that is here.
Attention, norms, sampling and the host's work are not in that limit, so 100 % cannot be reached.

With one thread both sides are CPU time of this process, which other work on the machine disturbs least; with more threads
they are wall time. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from batchgen.bench.__main__ import machine
from batchgen.bench.limits import show_profile
from batchgen.bench.physics import seconds_on, time_best_linears
from batchgen.bench.systems import BatchgenSystem, Run
from batchgen.bench.workloads import load_workload
from batchgen.errors import BatchgenError


class Case(NamedTuple):
    about: str
    workload: str
    rows: int
    max_tokens: int


CASES = {
    "few-shot": Case("96 rows with 8 worked examples, some 800 shared tokens, before each question", "gsm8k-8shot", 96, 64),
    "docqa": Case("96 questions on documents, six on each", "docqa", 96, 48),
    "unshared": Case("64 questions with nothing in common", "gsm8k-0shot", 64, 64),
    "decode-heavy": Case("64 short questions with long answers", "gsm8k-0shot", 64, 256),
}
TARGET = 0.75


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m batchgen.bench.cpu_limit", description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="the fastest run of so many counts")
    parser.add_argument("--max-tokens", type=int, help="of each row, instead of the case's own number")
    parser.add_argument("--profile", action="store_true", help="run once more and time the parts of a step")
    parser.add_argument("--model", default="packaged:smollm2")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"unknown case {sorted(unknown)[0]!r}; there are {', '.join(CASES)}")
    try:
        system = BatchgenSystem(options.model, options.threads)
        result = {"benchmark": "batchgen.bench.cpu_limit", **machine(options.threads), "target": TARGET}
        print(f"{result['cpu']}, {options.threads} threads", flush=True)
        result["cases"] = {name: measure(name, system, options) for name in options.cases}
    except BatchgenError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, allow_nan=False))
    return 0


def measure(name: str, system: BatchgenSystem, options: argparse.Namespace) -> dict[str, Any]:
    """Runs and limit in turn, so that both see the same machine."""
    case = CASES[name]
    workload = load_workload(case.workload, options.model, case.rows, options.max_tokens or case.max_tokens)
    workload = replace(workload, num_blocks=workload.memory_settings()["ample"])
    runs: list[tuple[float, Run]] = []
    limits: list[float] = []
    for _ in range(options.repeats):
        with seconds_on(options.threads) as spent:
            run = system.run(workload)
        runs.append((spent[0], run))
        most = max(rows for rows, _, _ in run.facts["steps"])
        linears = time_best_linears(system.model, most, options.threads)
        limits.append(sum(linears.of(rows, sampled) * times for rows, sampled, times in run.facts["steps"]))
    seconds, run = min(runs, key=lambda r: r[0])
    limit = min(limits)
    num_tokens = sum(rows * times for rows, _, times in run.facts["steps"])
    share = limit / seconds
    print(
        f"{name:13}{case.about}\n"
        f"{'':13}{num_tokens:,} tokens in {run.facts['num_steps']} steps, {seconds:.2f} s; "
        f"matrix products alone {limit:.2f} s: {share:.1%} of the limit",
        flush=True,
    )
    facts = {
        "seconds": seconds,
        "limit_seconds": limit,
        "share": share,
        "tokens": num_tokens,
        "stages": run.facts["stage_seconds"],
    }
    if options.profile:
        facts["profile"] = show_profile(system.profile(workload))
    return facts


if __name__ == "__main__":
    sys.exit(main())
