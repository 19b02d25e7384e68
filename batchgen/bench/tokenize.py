"""Tokens a second of one core, by workload: rendering, each text tokenized for itself, and what texts share tokenized once.

Seconds are of the processor, so that other work on the machine counts little. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np

from batchgen.bench.workloads import JOBS, RECIPES
from batchgen.job import load_job
from batchgen.prompts import open_inputs, read_prompts
from batchgen.text.tokenize import BATCH_ROWS

ALL_ROWS = 1_000_000


def measure(name: str, model: str, repeats: int) -> dict[str, Any]:
    """All rows of the workload's data, in an order in which what they share is not together."""
    recipe = RECIPES[name]
    job = load_job(
        JOBS / recipe.job, [f"model.path={json.dumps(model)}", "input.limit=null", *recipe.overrides(JOBS, ALL_ROWS)]
    )
    inputs = open_inputs(job, with_weights=False)
    tokenizer, special = inputs.tokenizer, inputs.renderer.add_special_tokens
    texts = [prompt.text for prompt in read_prompts(inputs) if prompt.text is not None]
    texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    batches = [texts[i : i + BATCH_ROWS] for i in range(0, len(texts), BATCH_ROWS)]
    ways: dict[str, Callable[[], Any]] = {
        "render": lambda: list(read_prompts(inputs)),
        "whole": lambda: [ids for batch in batches for ids in tokenizer.encode_whole(batch, special)],
        "shared": lambda: [ids for batch in batches for ids in tokenizer.encode(batch, special)],
    }
    num_tokens = sum(map(len, ways["shared"]()))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            began = process_time()
            run()
            seconds[way].append(process_time() - began)
    rates = {way: num_tokens / statistics.median(spent) for way, spent in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["whole"], seconds["shared"]))
    return {"rows": len(texts), "tokens": num_tokens, "tokens_per_second_per_core": rates, "whole_to_shared": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--model", default="packaged:smollm2", help="whose tokenizer")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    figures = {}
    for name in options.workloads:
        figures[name] = one = measure(name, options.model, options.repeats)
        rates = ", ".join(f"{way} {rate / 1e6:.2f}" for way, rate in one["tokens_per_second_per_core"].items())
        print(
            f"{name:14} {one['rows']:>5,} rows {one['tokens']:>9,} tokens; million tokens/s of one core: {rates}; shared is "
            f"{one['whole_to_shared']:.2f}x whole",
            flush=True,
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
