"""`python -m batchgen.bench.int8`: what `engine.dtype: int8` costs in accuracy and gives in speed, against float32.

Accuracy: both models read the same documents (docqa) token by token; each next token's log-probability is compared, and the
token that each would have generated. Speed: the same workload on both, in turn. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from batchgen_kernels import AttentionMetadata

from batchgen.bench.__main__ import machine
from batchgen.bench.physics import seconds_on
from batchgen.bench.systems import BatchgenSystem
from batchgen.bench.workloads import load_workload
from batchgen.models.config import kv_cache_shape
from batchgen.models.decoder import Decoder
from batchgen.models.inputs import BatchInputs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m batchgen.bench.int8", description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--rows", type=int, default=48, help="of the timed workload")
    parser.add_argument("--max-tokens", type=int, default=16, help="of the timed workload")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="packaged:smollm2")
    options = parser.parse_args(arguments)
    exact = BatchgenSystem(options.model, options.threads)
    int8 = BatchgenSystem(options.model, options.threads, int8=True)
    workload = load_workload("docqa", options.model, options.rows, options.max_tokens)
    workload = replace(workload, num_blocks=workload.memory_settings()["ample"])
    documents = workload.window().index[:: max(1, len(workload.prompts) // options.documents)]
    errors, agreed, surprise = [], [], []
    for row in documents.tolist():
        tokens = torch.from_numpy(workload.prompts[row].astype(np.int64))
        expected, got = log_probs(exact.model, tokens), log_probs(int8.model, tokens)
        following = tokens[1:, None]
        a, b = expected[:-1].gather(1, following), got[:-1].gather(1, following)
        errors.append((a - b).abs().flatten())
        surprise.append((a - b).flatten())
        agreed.append((expected.argmax(1) == got.argmax(1)).float())
    facts: dict[str, Any] = {
        "benchmark": "batchgen.bench.int8",
        **machine(options.threads),
        "tokens": sum(map(len, agreed)),
        "mean_abs_logprob_difference": float(torch.cat(errors).mean()),
        "mean_logprob_loss": float(torch.cat(surprise).mean()),
        "top1_agreement": float(torch.cat(agreed).mean()),
    }
    print(
        f"{facts['tokens']:,} tokens of {len(documents)} documents: log-probabilities differ by "
        f"{facts['mean_abs_logprob_difference']:.3f} on average ({facts['mean_logprob_loss']:+.4f} nats lost), "
        f"the most likely token is the same for {facts['top1_agreement']:.1%}",
        flush=True,
    )
    seconds: dict[str, list[float]] = {"float32": [], "int8": []}
    for _ in range(options.repeats):
        for name, system in (("float32", exact), ("int8", int8)):
            with seconds_on(options.threads) as spent:
                system.run(workload)
            seconds[name] += spent
    facts["seconds"] = seconds
    facts["times_faster"] = float(np.median(seconds["float32"]) / np.median(seconds["int8"]))
    print(
        f"{len(workload.prompts)} questions, {options.max_tokens} tokens each: {facts['times_faster']:.2f}x float32's speed"
    )
    print(json.dumps(facts, allow_nan=False))
    return 0


def log_probs(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [n] int64 -> log-probabilities of what follows each, [n, vocab]: one prefill with a cache of its own."""
    n, block_size = len(tokens), 16
    num_blocks = -(-n // block_size)
    nothing = torch.zeros(0, dtype=torch.int32)
    attention = AttentionMetadata(
        block_size=block_size,
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        kv_start=torch.zeros(1, dtype=torch.int32),
        decode_requests=torch.zeros(0, dtype=torch.int64),
        prefill_requests=torch.zeros(1, dtype=torch.int64),
        max_query_len=n,
        max_seq_len=n,
        group_query_start=nothing,
        group_query_end=nothing,
        group_block_start=torch.zeros(1, dtype=torch.int32),
        group_blocks=nothing,
    )
    cache = torch.zeros(kv_cache_shape(model.config, num_blocks + 1, block_size))
    position = torch.arange(n)
    return model(BatchInputs(tokens, position, position + block_size, position, attention), cache).log_softmax(-1)


if __name__ == "__main__":
    sys.exit(main())
