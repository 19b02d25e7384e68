"""The peers: transformers' `generate` in length-sorted static batches, and transformers' continuous batching.

Each is given what it is best at, by trial: the batch size of the one, the number of concurrent requests of the other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchgen.bench.systems import Run, ScriptProcess, SystemFailed, SystemProcess
from batchgen.bench.workloads import BLOCK_SIZE, Workload
from batchgen.engine.sizing import prepare_cpu
from batchgen.models.config import kv_bytes_per_token

BATCH_SIZES = (8, 16, 32)
TRIAL_TOKENS = 4  # generated in a trial
TRIAL_PROMPT = 64  # last tokens of a prompt in a trial of static batches: prefill costs the same a token in any batch
CONCURRENCY = (4, 8, 16)
STEP_TOKENS = 256  # of continuous batching; its dense attention mask grows with it


def vllm_process(model: str, threads: int, workloads: list[Workload], peers: Path) -> SystemProcess:
    """vLLM in the environment that `make bench-peers` made, with room for the largest workload.

    SystemFailed if there is none.
    """
    python = peers / "vllm/bin/python"
    if not python.is_file():
        raise SystemFailed("not installed; `make bench-peers` makes an environment for it")
    from batchgen.models.loader import load_config, resolve_model

    files = resolve_model(model)
    longest = max(len(p) + w.max_tokens for w in workloads for p in w.prompts)
    longest = -(-longest // 1024) * 1024  # what vLLM compiles is kept for the next run with the same sizes
    arguments = {
        "model": str(files.folder),
        "threads": threads,
        "num_tokens": max(longest, *(w.memory_settings()["ample"] * BLOCK_SIZE for w in workloads)),
        "bytes_per_token": kv_bytes_per_token(load_config(files), torch.float32),
        "max_model_len": longest,
    }
    return ScriptProcess(python, Path(__file__).with_name("peer_vllm.py"), arguments, peers / "vllm.log")


def load_transformers(model: str, threads: int) -> Any:
    """The same weights in transformers' own module, float32, SDPA."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    import transformers

    from batchgen.models.loader import resolve_model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    prepare_cpu(threads)  # the malloc settings help them too
    path = resolve_model(model).folder
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    loaded.generation_config = transformers.GenerationConfig()  # else its end tokens come back where ours say none
    return loaded


def bare(workload: Workload, prompts: list[np.ndarray]) -> Workload:
    """A trial: these prompts once each, a few tokens, memory for all."""
    trial = replace(workload, prompts=prompts, max_tokens=TRIAL_TOKENS, num_samples=1)
    return replace(trial, num_blocks=2 * trial.memory_settings()["ample"])


class GenerateSystem:
    """transformers `generate`: rows sorted by length, left-padded, batch after batch. Also the oracle of the others."""

    def __init__(self, model: str, threads: int) -> None:
        self.model = load_transformers(model, threads)
        self.batch_size = BATCH_SIZES[-1]

    def calibrate(self, workload: Workload) -> str:
        by_length = sorted(workload.requests(), key=len)
        rows = BATCH_SIZES[-1]
        picked = [by_length[i] for i in np.linspace(0, len(by_length) - 1, min(rows, len(by_length))).astype(int)]
        slice_ = bare(workload, [p[-TRIAL_PROMPT:] for p in picked])
        seconds = {}
        for self.batch_size in [n for n in BATCH_SIZES if n <= len(picked)] or [len(picked)]:
            seconds[self.batch_size] = self.run(slice_).seconds
        self.batch_size = min(seconds, key=lambda n: seconds[n])
        trials = ", ".join(f"{n}: {s:.1f} s" for n, s in seconds.items())
        return f"batches of {self.batch_size} ({len(picked)} short rows took {trials})"

    def run(self, workload: Workload) -> Run:
        begin = time.perf_counter()
        prompts = workload.requests()
        tokens: list[list[int]] = [[] for _ in prompts]
        num_prefill, batches = 0, self.batches(workload)
        for members in batches:
            answers, padded = self._generate([prompts[i] for i in members], workload)
            num_prefill += padded
            for i, answer in zip(members, answers):
                tokens[i] = answer
        return Run(time.perf_counter() - begin, tokens, num_prefill, {"batch_size": max(map(len, batches))})

    def batches(self, workload: Workload) -> list[list[int]]:
        """The requests, shortest first, in batches that the KV memory holds: a batch is as long as its longest row."""
        lengths = [len(p) for p in workload.requests()]
        batches: list[list[int]] = [[]]
        for i in np.argsort(lengths, kind="stable").tolist():
            fits = workload.num_blocks * BLOCK_SIZE // (lengths[i] + workload.max_tokens)
            if len(batches[-1]) >= max(1, min(self.batch_size, fits)):
                batches.append([])
            batches[-1].append(i)
        return batches

    def _generate(self, prompts: list[np.ndarray], workload: Workload) -> tuple[list[list[int]], int]:
        """The answers, and the prompt tokens computed, padding included."""
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        config = GenerationConfig(max_new_tokens=workload.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            output = self.model.generate(ids, attention_mask=mask, generation_config=config)
        return output[:, longest:].tolist(), ids.numel()

    def one_by_one(self, workload: Workload) -> list[list[int]]:
        """The oracle: one prompt at a time, nothing padded. The answer to each request."""
        answers = [self._generate([prompt], workload)[0][0] for prompt in workload.prompts]
        return [answer for answer in answers for _ in range(workload.num_samples)]

    def logit_gap(self, ids: np.ndarray, a: int, b: int) -> float:
        """How far the logits of tokens a and b lie apart after `ids`; infinite if another token is well above both."""
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(ids.astype(np.int64))[None], logits_to_keep=1).logits[0, -1]
        return float(logits.max() - torch.minimum(logits[a], logits[b]))


class ContinuousBatchingSystem:
    """transformers `generate_batch`: paged cache with block sharing, requests in the order given."""

    def __init__(self, model: str, threads: int) -> None:
        self.model = load_transformers(model, threads)
        self.concurrency = CONCURRENCY[1]

    def calibrate(self, workload: Workload) -> str:
        window = workload.window()
        picked = [window.prompt(i) for i in range(min(CONCURRENCY[-1], len(window)))]
        slice_ = bare(workload, picked)
        seconds = {}
        for self.concurrency in [n for n in CONCURRENCY if n <= len(picked)] or [len(picked)]:
            seconds[self.concurrency] = self.run(slice_).seconds
        self.concurrency = min(seconds, key=lambda n: seconds[n])
        trials = ", ".join(f"{n}: {s:.1f} s" for n, s in seconds.items())
        return f"{self.concurrency} requests at a time ({len(picked)} rows took {trials})"

    def run(self, workload: Workload) -> Run:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        begin = time.perf_counter()
        prompts = workload.requests()
        config = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=workload.num_blocks,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=self.concurrency,
            allow_block_sharing=True,
            auto_switch_to_flash=False,  # there is none for CPUs
        )
        generation = GenerationConfig(max_new_tokens=workload.max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with counted_hits() as hits:
            results = self.model.generate_batch(
                [p.tolist() for p in prompts],
                generation_config=generation,
                continuous_batching_config=config,
                warmup=False,  # captures CUDA graphs
            )
        seconds = time.perf_counter() - begin
        answers = list(results.values())
        if failed := [r.error for r in answers if r.error is not None]:
            raise RuntimeError(failed[0])
        if len(answers) != len(prompts):
            raise RuntimeError(f"generate_batch answered {len(answers)} of {len(prompts)} requests")
        tokens = [list(r.generated_tokens) for r in answers]
        num_prefill = workload.num_prompt_tokens - sum(hits)
        return Run(seconds, tokens, num_prefill, {"concurrency": self.concurrency, "num_blocks": config.num_blocks})


@contextlib.contextmanager
def counted_hits() -> Iterator[list[int]]:
    """Notes the prompt tokens that continuous batching finds in its cache, which it does not report."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    original, hits = PagedAttentionCache.search_prefix_match, []

    def search_prefix_match(self: Any, *args: Any, **kwargs: Any) -> int:
        hits.append(original(self, *args, **kwargs))
        return hits[-1]

    PagedAttentionCache.search_prefix_match = search_prefix_match
    try:
        yield hits
    finally:
        PagedAttentionCache.search_prefix_match = original
