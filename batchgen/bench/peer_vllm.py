"""vLLM's offline engine as a peer. Run as a script by the python of vLLM's own environment, where there is no batchgen.

Messages are pickled by multiprocessing.connection over stdin and stdout: in comes (method, arguments), out goes
(result, None) or (None, error); plain lists and numbers only, as the two sides may have different numpys. The first
answer, (None, None), says that the engine is up. What vLLM itself prints goes to stderr.
"""

import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection

BLOCK_SIZE = 32  # tokens; what vLLM's attention on CPUs takes must be a multiple of it
MAX_RUNNING, STEP_TOKENS = 128, 1024  # as many as batchgen takes on a CPU; vLLM's own defaults are 256 and 2,048 to 4,096


class VllmSystem:
    """One engine whose pool holds `num_tokens` tokens; a run with less memory holds the blocks beyond it back.

    The engine core runs in this process, so that both cores are the model's and its scheduler can be looked at.
    """

    def __init__(self, model, threads, num_tokens, bytes_per_token, max_model_len):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(threads)  # else vLLM takes one
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil((num_tokens + 2 * BLOCK_SIZE) * bytes_per_token / 2**30))
        os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import LLM

        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=-(-num_tokens // BLOCK_SIZE) + 1,  # one is the null block
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=True,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.steps: Counter[tuple[int, int]] = Counter()
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            step = schedule(*args, **kwargs)
            if step.total_num_scheduled_tokens:  # the head is computed for every request of a step
                self.steps[step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)] += 1
            return step

        self.scheduler.schedule = counted

    def calibrate(self, prompts, max_tokens, num_tokens):
        return f"up to {MAX_RUNNING} requests, {STEP_TOKENS} tokens a step"

    def run(self, prompts, max_tokens, num_tokens):
        """Answer all prompts (lists of ids), greedily, from an empty prefix cache of `num_tokens` tokens."""
        from vllm import SamplingParams

        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache of vLLM could not be emptied")
        held = self.pool.get_new_blocks(max(0, self.pool.get_num_free_blocks() - num_tokens // BLOCK_SIZE))
        self.steps.clear()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        try:
            begin = time.perf_counter()
            outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
        finally:
            self.pool.free_blocks(held)
        steps = [[tokens, sampled, n] for (tokens, sampled), n in sorted(self.steps.items())]
        computed = sum(tokens * n for tokens, _, n in steps)
        return {
            "seconds": seconds,
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "num_prefill": computed - len(prompts) * (max_tokens - 1),  # computed again after a preemption: included
            "facts": {"steps": steps, "num_steps": sum(self.steps.values())},
        }


def serve(make):
    """Make the system of the arguments in argv, then answer one call after another until the other side closes."""
    output = os.dup(1)
    os.dup2(2, 1)
    reader, writer = Connection(0, writable=False), Connection(output, readable=False)
    system, method, args = None, "", ()
    while True:
        try:
            if system is None:
                system, result = make(**json.loads(sys.argv[1])), None
            else:
                result = getattr(system, method)(*args)
            writer.send((result, None))
        except Exception as e:
            traceback.print_exc()
            writer.send((None, f"{type(e).__name__}: {' '.join(str(e).split())}"))
        try:
            method, args = reader.recv()
        except EOFError:
            return


if __name__ == "__main__":
    serve(VllmSystem)
