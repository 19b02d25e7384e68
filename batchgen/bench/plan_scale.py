"""The planner at scale: rows that share prefixes, streamed into the token store and planned window by window.

The token ids are synthetic (no tokenizer: that is measured elsewhere); store, partitions and windows are those of a run.
Each size runs in a process of its own, so that its peak memory is its own. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from batchgen.plan.partition import choose_partitioning
from batchgen.plan.window import plan_window
from batchgen.prompts import entry_ranges
from batchgen.text.token_store import TokenStore, TokenStoreWriter
from batchgen.text.tokens_in_making import TokensInMaking

BLOCK_SIZE = 16
BATCH_ROWS = 1024
PREFIX_TOKENS, SUFFIX_TOKENS = 96, 32


def window_of(store: TokenStore, first: int, end: int) -> Any:
    return plan_window(store.pack(first, end), np.arange(first, end), store.lengths[first:end], BLOCK_SIZE)


def write_store(path: Path, num_rows: int, num_prefixes: int) -> None:
    """Each row is one of `num_prefixes` prefixes, all behind the same 16 tokens, and a suffix of its own."""

    def partition(head: TokenStore) -> Any:
        return choose_partitioning(window_of(head, 0, head.num_rows), num_rows)

    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, 50_000, (num_prefixes, PREFIX_TOKENS), np.int32)
    prefixes[:, :16] = np.arange(16)
    with TokenStoreWriter(path, partition=partition) as writer:
        for begin in range(0, num_rows, BATCH_ROWS):
            n = min(BATCH_ROWS, num_rows - begin)
            suffixes = rng.integers(0, 50_000, (n, SUFFIX_TOKENS), np.int32)
            rows = np.concatenate([prefixes[rng.integers(0, num_prefixes, n)], suffixes], axis=1)
            numbers = np.arange(begin, begin + n)
            writer.append(numbers, numbers, list(rows), [None] * n)


def peak_rss() -> int:
    """Bytes this process has held at most, mapped file pages included (Linux)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


def measure(num_rows: int, num_prefixes: int, folder: Path) -> dict[str, Any]:
    before = peak_rss()
    path = folder / "tokens.arrow"
    began = perf_counter()
    write_store(path, num_rows, num_prefixes)
    written = perf_counter()
    store = TokenStore.open(path)
    num_planned = num_computed = num_windows = 0
    for _, first, end in entry_ranges(TokensInMaking(store)):
        window = window_of(store, first, end)
        num_planned, num_windows = num_planned + len(window), num_windows + 1
        num_computed += window.num_computed()
    ended = perf_counter()
    assert num_planned == num_rows
    files = [file for file in folder.rglob("*.arrow")]
    return {
        "rows": num_rows,
        "tokens": int(store.lengths.sum(dtype=np.int64)),
        "computed": num_computed,
        "windows": num_windows,
        "store_bytes": sum(file.stat().st_size for file in files),
        "write_seconds": written - began,
        "plan_seconds": ended - written,
        "rows_per_second": num_rows / (ended - began),
        "plan_us_per_row": (ended - written) / num_rows * 1e6,
        "cpu_seconds": process_time(),
        "peak_rss_bytes": peak_rss(),
        "rss_before_bytes": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--prefixes", type=int, default=100_000)
    parser.add_argument(
        "--folder", type=Path, help="where the store goes and is deleted again (default: a temporary folder)"
    )
    parser.add_argument("--one", action="store_true", help="measure this size only, in this process")
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory(prefix="batchgen-plan-", dir=options.folder) as folder:
            print(json.dumps(measure(options.rows, options.prefixes, Path(folder))))
        return
    figures = []
    for num_rows in sorted({max(1, options.rows * 3 // 100), max(1, options.rows * 3 // 10), options.rows}):
        command = [sys.executable, "-m", "batchgen.bench.plan_scale", "--one", "--rows", str(num_rows)]
        command += ["--prefixes", str(options.prefixes), *(["--folder", str(options.folder)] if options.folder else [])]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        one = json.loads(lines[-1])
        figures.append(one)
        print(
            f"{one['rows']:>12,} rows in {one['windows']} windows: write {one['write_seconds']:.0f} s, plan "
            f"{one['plan_seconds']:.0f} s ({one['plan_us_per_row']:.1f} us a row), {one['rows_per_second']:,.0f} rows/s, "
            f"{one['cpu_seconds']:.0f} s of one core, "
            f"peak RSS {one['peak_rss_bytes'] / 2**20:,.0f} MiB, store {one['store_bytes'] / 2**20:,.0f} MiB, "
            f"{one['computed'] / one['tokens']:.1%} of tokens to compute",
            flush=True,
        )
    print(json.dumps({**figures[-1], "smaller": figures[:-1]}))


if __name__ == "__main__":
    main()
