"""`python -m batchgen.bench.overhead`: what a row costs besides the model, from Parquet to merged Parquet.

The whole of `batchgen run` on short prompts, with everything real but the model's forward, which computes nothing and gives
every row the same tokens. Times are wall time; reading and answering run beside each other in two threads, so their stages
overlap. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from batchgen import answering
from batchgen.job import Job
from batchgen.models.inputs import BatchInputs
from batchgen.models.loader import load_config, resolve_model
from batchgen.report.progress import Progress
from batchgen.runner import run_job

WORDS = 64  # logits of the pretended model: enough for an argmax, and no time
SAID = 36


class NoModel:
    """Stands where a Decoder does. forward: [num_sampled, WORDS] logits of which SAID is the greatest."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.products: dict[str, str] = {}
        self.min_rows = 1

    def forward(self, inputs: BatchInputs, *_: Any) -> torch.Tensor:
        logits = torch.zeros(len(inputs.logits_indices), WORDS)
        logits[:, SAID] = 1
        return logits


def write_rows(path: Path, num_rows: int) -> None:
    """Short questions, a sixteenth of them with a head in common; written in pieces."""
    schema = pa.schema([("id", pa.int64()), ("q", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, num_rows, 65_536):
            ids = range(begin, min(begin + 65_536, num_rows))
            texts = [f"Number {i * 7919 % 1_000_003} of list {i % 16}: is it odd?" for i in ids]
            writer.write_table(pa.table({"id": list(ids), "q": texts}, schema))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m batchgen.bench.overhead", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--max-tokens", type=int, default=2, help="of each answer")
    parser.add_argument("--model", default="packaged:smollm2", help="whose tokenizer, chat template and shapes are used")
    options = parser.parse_args(arguments)
    config = load_config(resolve_model(options.model, None, with_weights=True))
    answering.load_decoder = lambda files, device, dtype, *_: NoModel(config, dtype)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="batchgen-overhead-") as folder:
        write_rows(Path(folder) / "rows.parquet", options.rows)
        job = Job.model_validate(
            {
                "model": {"path": options.model},
                "input": {"path": f"{folder}/rows.parquet"},
                "prompt": {"text": "Answer yes or no.\n{{ q }}\n"},
                "sampling": {"max_tokens": options.max_tokens, "ignore_eos": True},
                "output": {"path": f"{folder}/out", "commit_rows": 20_000},
                "engine": {"device": "cpu", "max_running_requests": 1024, "kv_memory": "2 GiB"},
            }
        )
        began, cpu = time.perf_counter(), time.process_time()
        code = run_job(job, Progress())
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        summary = json.loads((Path(folder) / "out/summary.json").read_text())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    per_row = 1e6 / options.rows
    result = {
        "benchmark": "batchgen.bench.overhead",
        "rows": options.rows,
        "exit_code": code,
        "microseconds_per_row": seconds * per_row,
        "cpu_microseconds_per_row": cpu_seconds * per_row,
        "phases": {name: value * per_row for name, value in summary["seconds"].items()},
        "in_steps": {name: value * per_row for name, value in summary["seconds_in_steps"].items()},
        "steps": summary["steps"],
        "peak_rss_bytes": peak,
    }
    print(
        f"{options.rows:,} rows in {seconds:,.1f} s: {seconds * per_row:.1f} microseconds a row "
        f"({cpu_seconds * per_row:.1f} of CPU), peak RSS {peak / 2**20:,.0f} MiB"
    )
    print("microseconds a row by phase: " + ", ".join(f"{name} {value:.1f}" for name, value in result["phases"].items()))
    print("in the engine's steps: " + ", ".join(f"{name} {value:.1f}" for name, value in result["in_steps"].items()))
    print(json.dumps(result))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
