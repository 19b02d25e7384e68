"""A toy model behind the Engine, and transformers' greedy answers to compare with, one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batchgen_kernels import select_ops
from transformers import AutoModelForCausalLM

from batchgen.engine.engine import Engine
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.step import Finished, SchedulerConfig, SchedulerStats
from batchgen.models.decoder import Decoder
from batchgen.models.files import resolve_model
from batchgen.models.loader import load_decoder
from batchgen.plan.window import plan_window

CPU = torch.device("cpu")
CLEAR_GAP = 1e-4  # between the two largest logits; below it rounding may decide
ORDERS = ("sorted", "given", "reversed")


@dataclass
class Outcome:
    """Results by (row as given, sample)."""

    by_request: dict[tuple[int, int], Finished]
    stats: SchedulerStats
    num_planned: int  # prompt tokens that the plan says will be computed
    groups_seen: int = 0  # shared-prefix groups that reached the attention

    def tokens(self) -> dict[tuple[int, int], list[int]]:
        return {key: f.token_ids.tolist() for key, f in self.by_request.items()}


@dataclass
class ToyEngine:
    folder: Path
    backend: str = "torch"
    kv_dtype: torch.dtype = torch.float32
    decoder: Decoder = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = load_decoder(resolve_model(self.folder), CPU, torch.float32, select_ops(self.backend))

    def run(
        self,
        prompts: list[list[int]],
        *,
        block_size: int = 4,
        num_blocks: int | None = None,
        budget: int = 512,
        cap: int = 32,
        order: str = "sorted",
        max_tokens: int = 12,
        max_model_len: int = 512,
        sampling: SamplingConfig | None = None,
        kv_fill: float = float("nan"),
        ahead: int = 0,
        row_keys: np.ndarray | None = None,
        **config: Any,
    ) -> Outcome:
        """Poisoned pool and invariants checked after every step, unless told otherwise. num_blocks None: room for all."""
        ids = [np.array(p, np.int32) for p in prompts]
        index = np.arange(len(ids))
        index = index[::-1].copy() if order == "reversed" else index
        lengths = np.array([len(ids[i]) for i in index], np.int32)
        window = plan_window(lambda i: ids[i], index, lengths, block_size, sort=order == "sorted")
        ops = select_ops(self.backend)
        groups_seen = 0
        plan_attention = ops.plan_attention

        def watched(metadata: Any, *sizes: int) -> Any:
            nonlocal groups_seen
            groups_seen += metadata.group_query_start.numel()
            return plan_attention(metadata, *sizes)

        self.decoder.ops = ops
        scheduler_config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_running_requests=cap,
            max_model_len=max_model_len,
            max_tokens=max_tokens,
            **{"prefix_groups": ops.shares_prefix_reads} | config,
        )
        if num_blocks is None:
            num_blocks = 2 + sum(-(-(len(p) + max_tokens) // block_size) + 1 for p in ids) * scheduler_config.num_samples
        engine = Engine(
            self.decoder, ops, num_blocks, block_size, CPU, self.kv_dtype, kv_fill=kv_fill, check=True, ahead=ahead
        )
        ops.plan_attention = watched
        keys = np.arange(len(ids), dtype=np.uint64) * np.uint64(7919) if row_keys is None else row_keys
        results: dict[tuple[int, int], Finished] = {}
        for f in engine.generate(window, scheduler_config, sampling or SamplingConfig(), keys[window.index]):
            key = int(window.index[f.position]), f.sample_index
            assert key not in results, "a request finished twice"
            results[key] = f
        assert set(results) == {(i, s) for i in range(len(ids)) for s in range(scheduler_config.num_samples)}
        return Outcome(results, engine.stats.counts, window.num_computed(), groups_seen)


class Oracle:
    """transformers, float32, eager attention, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def greedy(self, prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset()) -> list[int]:
        """The end token included, as `generate` does. Every choice must be clear, else the prompt is no test."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
                eos_token_id=sorted(eos) or None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        top = torch.stack(out.logits)[:, 0].topk(2).values
        gap = (top[:, 0] - top[:, 1]).min().item()
        assert gap > CLEAR_GAP, f"a near tie ({gap}): choose another seed"
        return out.sequences[0, len(prompt) :].tolist()


def tree_of_prompts(num_tokens: int = 256, seed: int = 0) -> list[list[int]]:
    """Prompts that meet every corner: three levels of shared prefixes, copies, a prompt that is a prefix of others, lengths
    around multiples of 4 and 16, and some that share nothing. Shuffled."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return rng.integers(0, num_tokens, n).tolist()

    trunk = draw(32)
    limbs = [trunk + draw(16), trunk + draw(5)]
    prompts = [limb + draw(n) for limb in limbs for n in (1, 3, 11, 16)]
    prompts += [trunk, limbs[0], limbs[0], limbs[0][:33]]  # copies and prefixes; 32 and 48 are whole blocks
    prompts += [draw(n) for n in (1, 2, 4, 15, 16, 17, 40)]
    return [prompts[i] for i in rng.permutation(len(prompts))]
