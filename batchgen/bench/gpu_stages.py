"""The stages of the GPU check, one function each: -> (figures for the JSON file, what is wrong in words)."""

from __future__ import annotations

import functools
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from batchgen_kernels import select_ops
from batchgen_kernels.cases import CASES
from batchgen_kernels.cases.attention import plan_attention_case
from batchgen_kernels.cases.case import relative_error, tolerance
from batchgen_kernels.cases.elementwise import add_rms_norm_case, rms_norm_case, rotary_embedding_case, silu_and_mul_case
from batchgen_kernels.registry import OPS, load

from batchgen.engine.engine import Engine
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.step import SchedulerConfig
from batchgen.models.config import ModelConfig, kv_bytes_per_token, num_matmul_parameters
from batchgen.models.decoder import Decoder
from batchgen.plan.window import plan_window
from batchgen.records import Window

BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_LOGIT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative, after all layers; one bfloat16 rounding is 2e-3
Outcome = tuple[dict[str, Any], list[str]]
Stage = tuple[str, Callable[[], Outcome]]


def stages(device: str) -> list[Stage]:
    """What runs on a GPU, what matters most first."""
    bind, big, bfloat16 = functools.partial, one_billion_config(), torch.bfloat16
    return [
        ("machine", bind(machine, device)),
        ("ops", bind(check_ops, device, DTYPES)),
        ("toy_engine", bind(compare_backends, toy_config(), torch.float32, device, std=0.2, num_rows=40, max_tokens=24)),
        ("ceilings", bind(ceilings, device)),
        ("engine_1b", bind(time_engine, device)),
        ("attention", bind(time_attention, device)),
        ("elementwise", bind(time_elementwise, device)),
        ("big_engine", bind(compare_backends, big, bfloat16, device, std=0.02, num_rows=8, max_tokens=8)),
    ]


def self_test_stages() -> list[Stage]:
    """A few of the same functions at the smallest sizes, on the CPU: for the interpreter, and for the tests."""
    some = ("rms_norm", "write_kv", "plan_attention")
    toy = toy_config()
    return [
        ("machine", functools.partial(machine, "cpu")),
        ("ops", functools.partial(check_ops, "cpu", {"float32": torch.float32}, some, 2)),
        ("toy_engine", functools.partial(compare_backends, toy, torch.float32, "cpu", std=0.2, num_rows=4, max_tokens=3)),
        ("engine", functools.partial(time_engine, "cpu", toy, torch.float32, prefill=(2, 20), decodes=((2, 20),), steps=3)),
    ]


def machine(device: str) -> Outcome:
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "device": device,
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda or torch.version.hip,
        }
    print("  " + ", ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))
    return figures, []


# ---- right? ---------------------------------------------------------------------------------------------------------


def check_ops(
    device: str, dtypes: dict[str, torch.dtype], ops: Sequence[str] = tuple(OPS), limit: int | None = None
) -> Outcome:
    """Every case of every op on Triton, against the reference on the same device."""
    figures: dict[str, Any] = {}
    problems: list[str] = []
    for op in ops:
        for name, dtype in dtypes.items():
            begin, worst, wrong = time.perf_counter(), 0.0, 0
            cases = list(CASES[op](dtype, device))[:limit]
            allowed = tolerance(op, "triton", dtype)
            for case in cases:
                expected = case.run(load(op, "reference"))
                errors = [
                    relative_error(out, want) for out, want in zip(case.run(load(op, "triton")), expected, strict=True)
                ]
                worst = max([worst, *errors])
                if max(errors) > allowed:
                    wrong += 1
                    problems.append(f"{op} {name} {case.label}: error {max(errors):.1e}, {allowed:.1e} is allowed")
            seconds = time.perf_counter() - begin
            figures[f"{op} {name}"] = {"cases": len(cases), "wrong": wrong, "worst": finite(worst), "seconds": seconds}
            print(
                f"  {op:18}{name:10}{len(cases):>3} cases, worst error {worst:.1e} of {allowed:.1e}, {seconds:.1f} s",
                flush=True,
            )
    return figures, problems


def finite(x: float) -> float | None:
    """For JSON, which has no infinity."""
    return x if math.isfinite(x) else None


def toy_config() -> ModelConfig:
    return llama_config(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=272)


def one_billion_config() -> ModelConfig:
    """The shape of Llama 3.2 1B: 1.24 B parameters, the head tied to the embedding."""
    return llama_config(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128256)


def llama_config(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5, tie_word_embeddings=True,
        qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, rope_type="default",
        rope_inv_freq=tuple(5e5 ** (-2 * i / head_dim) for i in range(head_dim // 2)), rope_attention_factor=1.0,
        max_position_embeddings=8192, max_supported_len=8192, max_supported_reason="random weights",
    )  # fmt: skip


def random_decoder(config: ModelConfig, backend: str, dtype: torch.dtype, device: str, std: float) -> Decoder:
    """The same random weights for every backend on one device."""
    decoder = Decoder(config, select_ops(backend, device), torch.device(device), dtype, config.max_supported_len)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return decoder.eval()


def shared_prompts(num_rows: int, vocab: int, prefix: int, suffix: int, per_prefix: int) -> list[np.ndarray]:
    """Random ids; each `per_prefix` rows begin with the same `prefix` ids, suffixes differ in length."""
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, vocab, prefix) for _ in range(-(-num_rows // per_prefix))]
    suffixes = [rng.integers(0, vocab, suffix + i % 5) for i in range(num_rows)]
    return [np.concatenate([prefixes[i // per_prefix], suffixes[i]]).astype(np.int32) for i in range(num_rows)]


def window_of(prompts: list[np.ndarray]) -> Window:
    lengths = np.array([len(p) for p in prompts], np.int32)
    return plan_window(lambda i: prompts[i], np.arange(len(prompts)), lengths, BLOCK_SIZE)


def run_engine(
    decoder: Decoder, window: Window, max_tokens: int, budget: int
) -> tuple[dict[int, list[int]], Any, list[Any]]:
    """-> (tokens by row, engine statistics, [(end of the step in seconds, query tokens, rows, context)])."""
    needed = -(-(window.lengths + max_tokens) // BLOCK_SIZE)
    engine = Engine(decoder, decoder.ops, int(needed.sum()) + 2, BLOCK_SIZE, decoder.device, decoder.dtype)
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_running_requests=len(window),
        max_model_len=decoder.config.max_supported_len,
        max_tokens=max_tokens,
        prefix_groups=decoder.ops.shares_prefix_reads,
    )
    steps: list[Any] = []

    def on_step(step: Any, _: Any) -> None:  # after sampling, which waits for the device
        context = int((step.first_position + step.num_scheduled).sum())
        steps.append((time.perf_counter(), int(step.num_scheduled.sum()), len(step.slots), context))

    keys = np.arange(len(window), dtype=np.uint64)
    finished = list(engine.generate(window, config, SamplingConfig(), keys, on_step=on_step))
    return {int(window.index[f.position]): f.token_ids.tolist() for f in finished}, engine.stats, steps


def compare_backends(
    config: ModelConfig, dtype: torch.dtype, device: str, std: float, num_rows: int, max_tokens: int
) -> Outcome:
    """The engine on Triton against the engine on the reference kernels: logits of the first step, and all tokens."""
    prompts = shared_prompts(num_rows, config.vocab_size, prefix=37, suffix=9, per_prefix=4)
    window, logits, tokens, exact = window_of(prompts), {}, {}, dtype == torch.float32
    for backend in ("triton", "reference"):
        decoder = random_decoder(config, backend, dtype, device, std)
        first: list[torch.Tensor] = []
        forward = decoder.forward

        def record(*args: Any, forward: Any = forward, first: list[torch.Tensor] = first) -> torch.Tensor:
            out = forward(*args)
            first.append(out) if not first and len(out) else None
            return out

        decoder.forward = record  # type: ignore[method-assign, assignment]
        tokens[backend], _, _ = run_engine(decoder, window, max_tokens, budget=64)
        logits[backend] = first[0]
    error = relative_error(logits["triton"], logits["reference"])
    same = sum(tokens["triton"][row] == tokens["reference"][row] for row in range(num_rows))
    print(
        f"  {num_rows} rows, {max_tokens} tokens each: first logits differ by {error:.1e}, {same} rows have the same tokens"
    )
    problems = [] if error <= MAX_LOGIT_ERROR[dtype] else [f"logits of the first step differ by {error:.1e}"]
    if exact and same < num_rows:  # in bfloat16 the tokens of a random model part at the first near tie
        problems.append(f"{num_rows - same} of {num_rows} rows have other tokens")
    return {"rows": num_rows, "same_tokens": same, "logit_error": finite(error)}, problems


# ---- fast? ----------------------------------------------------------------------------------------------------------


def seconds_per_call(call: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median of 5 series, each long enough that launching is hidden where it can be."""
    call()
    series = []
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(device)
        series.append((time.perf_counter() - begin) / repeats)
    return statistics.median(series)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


@functools.cache
def measured_ceilings(device: str) -> tuple[float, float]:
    """(bytes/s of a copy, counting reads and writes; FLOP/s of a large bfloat16 product)."""
    size = 8192 if device != "cpu" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    flops = 2 * size**3 / seconds_per_call(lambda: a @ a, device)
    source = torch.empty(2**30 if device != "cpu" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_per_call(lambda: target.copy_(source), device), flops


def ceilings(device: str) -> Outcome:
    copy, flops = measured_ceilings(device)
    print(f"  a copy moves {copy / 1e12:.2f} TB/s, a large bfloat16 product runs at {flops / 1e12:.0f} TFLOP/s")
    return {"copy_bytes_per_second": copy, "gemm_flops": flops}, []


def time_engine(
    device: str,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    prefill: tuple[int, int] = (64, 1024),
    decodes: Sequence[tuple[int, int]] = ((1, 512), (16, 512), (64, 512), (256, 512), (512, 512)),
    steps: int = 96,
) -> Outcome:
    """Whole steps of the engine, host included. prefill, decodes: (rows, prompt tokens)."""
    copy, flops = measured_ceilings(device)
    config = config or one_billion_config()
    decoder = random_decoder(config, "triton", dtype, device, 0.02)
    layers = num_matmul_parameters(config, lm_head=False)
    weights = num_matmul_parameters(config) * dtype.itemsize
    kv = kv_bytes_per_token(config, dtype)
    figures: dict[str, Any] = {}
    rows, length = prefill
    prompts = shared_prompts(rows, config.vocab_size, 0, length, 1)
    run_engine(decoder, window_of(prompts), 2, budget=8192)  # compiles
    begin = time.perf_counter()
    _, stats, _ = run_engine(decoder, window_of(prompts), 1, budget=8192)
    seconds, computed = time.perf_counter() - begin, stats.counts.num_prefill
    share = 2 * layers * computed / seconds / flops
    figures["prefill"] = {"tokens_per_second": computed / seconds, "gemm_share": share, "stages": dict(stats.seconds)}
    print(f"  prefill: {computed / seconds:,.0f} tokens/s; its matrix products at {share:.0%} of the measured rate")
    for rows, length in decodes:
        prompts = shared_prompts(rows, config.vocab_size, 0, length, 1)
        _, stats, log = run_engine(decoder, window_of(prompts), steps, budget=8192)
        times = [b[0] - a[0] for a, b in itertools.pairwise(log) if b[1] == b[2] == rows]  # pure decode steps of all rows
        context = statistics.median(b[3] for b in log if b[1] == b[2] == rows)
        seconds = statistics.median(times)
        moved = (weights + context * kv) / seconds
        host = sum(v for k, v in stats.seconds.items() if k in ("schedule", "inputs", "update")) / stats.counts.num_steps
        figures[f"decode {rows} x {length}"] = {
            "step_seconds": seconds,
            "tokens_per_second": rows / seconds,
            "copy_share": moved / copy,
            "host_seconds_per_step": host,
            "stages": dict(stats.seconds),
        }
        print(
            f"  decode, {rows} rows of {length} tokens: {1e3 * seconds:.2f} ms a step, {rows / seconds:,.0f} tokens/s, "
            f"{moved / copy:.0%} of the copy rate, host {1e3 * host:.2f} ms",
            flush=True,
        )
    return figures, []


def time_attention(device: str) -> Outcome:
    """The attention kernels alone at the 1B shape, in bfloat16: decode as bytes/s, prefill as FLOP/s."""
    copy, flops = measured_ceilings(device)
    heads, kv_heads, dim = 32, 8, 64
    figures: dict[str, Any] = {}
    shapes = [(1, 1, 4096), (16, 1, 2048), (64, 1, 2048), (256, 1, 1024), (8, 1024, 1024), (4, 4096, 4096)]
    for rows, queries, length in shapes:
        case = plan_attention_case(
            [queries] * rows, [length] * rows, heads, kv_heads, dim, BLOCK_SIZE, torch.bfloat16, device, poison=False
        )
        metadata, *tensors = case.make()
        plan = load("plan_attention", "triton")(metadata, heads, kv_heads, dim)
        seconds = seconds_per_call(functools.partial(plan, *tensors), device)
        if queries == 1:
            share, what = 2 * rows * length * kv_heads * dim * 2 / seconds / copy, "copy_share"
        else:
            visible = rows * queries * (2 * length - queries + 1) / 2
            share, what = 4 * visible * heads * dim / seconds / flops, "gemm_share"
        figures[f"{rows} x {queries} of {length}"] = {"seconds": seconds, what: share}
        print(
            f"  {rows} requests, {queries} queries of {length} tokens: {1e6 * seconds:.0f} us, {share:.0%} ({what})",
            flush=True,
        )
    return figures, []


def time_elementwise(device: str) -> Outcome:
    """The other kernels at 4,096 tokens of the 1B shape, as shares of the copy rate."""
    copy, _ = measured_ceilings(device)
    tokens, hidden, inner, dtype = 4096, 2048, 8192, torch.bfloat16
    cases = {  # op -> (case, elements read and written)
        "rms_norm": (rms_norm_case((tokens, hidden), dtype, device), 2 * tokens * hidden),
        "add_rms_norm": (add_rms_norm_case((tokens, hidden), dtype, device), 4 * tokens * hidden),
        "rotary_embedding": (rotary_embedding_case(tokens, 32, 8, 64, 64, dtype, device), 2 * tokens * 40 * 64),
        "silu_and_mul": (silu_and_mul_case(tokens, inner, dtype, device), 3 * tokens * inner),
    }
    figures = {}
    for op, (case, elements) in cases.items():
        arguments = case.make()
        seconds = seconds_per_call(functools.partial(case.call, load(op, "triton"), arguments), device)
        share = elements * dtype.itemsize / seconds / copy
        figures[op] = {"seconds": seconds, "copy_share": share}
        print(f"  {op}: {1e6 * seconds:.0f} us, {share:.0%} of the copy rate")
    return figures, []
