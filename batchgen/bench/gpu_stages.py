"""The stages of the GPU check, one function each: -> (figures for the JSON file, what is wrong in words)."""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from batchgen_kernels import select_ops
from batchgen_kernels.cases import CASES
from batchgen_kernels.cases.case import relative_error, tolerance
from batchgen_kernels.registry import OPS, load

from batchgen.bench import kernels
from batchgen.bench.kernel_table import MODELS, attention_row, elementwise_rows, rows
from batchgen.bench.physics import job_flops, static_cost
from batchgen.engine.engine import Engine
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.step import SchedulerConfig
from batchgen.models.config import ModelConfig, kv_bytes_per_token, num_matmul_parameters
from batchgen.models.decoder import Decoder
from batchgen.plan.window import plan_window
from batchgen.records import Window

BLOCK_SIZE = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
MAX_LOGIT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative, after all layers; one bfloat16 rounding is 2e-3
Outcome = tuple[dict[str, Any], list[str]]


class Stage(NamedTuple):
    name: str
    seconds: float  # that it may take: it ends by itself then, with what it has
    run: Callable[[float], Outcome]  # time.perf_counter() at which it should end -> outcome


def stages(device: str) -> list[Stage]:
    """What runs on a GPU, what matters most first. Together less than 8 minutes, where every one takes all its time."""
    big, bfloat16 = one_billion_config(), torch.bfloat16
    toy = functools.partial(compare_backends, toy_config(), torch.float32, device, std=0.2, num_rows=40, max_tokens=24)
    whole = functools.partial(compare_backends, big, bfloat16, device, std=0.02, num_rows=8, max_tokens=8)
    return [
        Stage("machine", 5, lambda until: machine(device)),
        Stage("compile", 110, lambda until: compile_ahead(*this_gpu(device), things_to_compile(), until)),
        Stage("ops", 110, lambda until: check_ops(device, DTYPES, until=until)),
        Stage("toy_engine", 40, lambda until: toy()),
        Stage("engine_1b", 90, lambda until: time_engine(device, until=until)),
        Stage("kernels", 60, lambda until: kernels.time_rows(*rows(short=True), device, until)),
        Stage("big_engine", 30, lambda until: whole()),
    ]


def self_test_stages() -> list[Stage]:
    """A few of the same functions at the smallest sizes, on the CPU: for the interpreter, and for the tests."""
    some = ("rms_norm", "write_kv", "plan_attention")
    config, float32 = toy_config(), torch.float32
    toy = functools.partial(compare_backends, config, float32, "cpu", std=0.2, num_rows=4, max_tokens=3)
    sizes: dict[str, Any] = {"job": Job(4, 20, 2, 5, 2), "prefill": (2, 20), "decodes": ((2, 20),), "steps": 3}
    small = MODELS["1B"]._replace(name="toy", hidden=64, inner=64, layers=1, heads=4, kv_heads=2)
    table = [attention_row("decode", small, 2, 1, 20), attention_row("prefill", small, 1, 5, 20)]
    table += [row for row in elementwise_rows(small, 16) if row.kernel == "rms_norm"]
    return [
        Stage("machine", 60, lambda until: machine("cpu")),
        Stage("ops", 60, lambda until: check_ops("cpu", {"float32": float32}, some, 2, until)),
        Stage("toy_engine", 60, lambda until: toy()),
        Stage("engine", 60, lambda until: time_engine("cpu", config, float32, until=until, **sizes)),
        Stage("kernels", 60, lambda until: kernels.time_rows(table, [], "cpu", until)),
    ]


def machine(device: str) -> Outcome:
    figures = kernels.machine(device)
    print("  " + ", ".join(f"{k} {v}" for k, v in figures.items()))
    return figures, []


# ---- compiling --------------------------------------------------------------------------------------------------------

Target = tuple[str, int | str]  # ("cuda", 90)


def this_gpu(device: str) -> tuple[Target, int]:
    """-> (what kernels are compiled for here, processors)"""
    from batchgen_kernels.cross_compile import current_target

    return current_target(), torch.cuda.get_device_properties(device).multi_processor_count


def things_to_compile() -> list[tuple[str, str]]:
    """(op, dtype) of every case, and ("row", kernel and shape) of the kernel table, which has those of a 1B model."""
    table = [("row", f"{row.kernel} {row.shape}") for row in rows()[0]]
    return table + [(op, name) for op in sorted(OPS, key=lambda op: op != "plan_attention") for name in DTYPES]


def compile_ahead(target: Target, processors: int, things: Sequence[tuple[str, str]], until: float) -> Outcome:
    """Compile what later stages launch, on all cores, into triton's cache on disk; a stage that runs out of time costs no
    more than compiling later. The processes use no GPU: they compile as one does where there is none."""
    begin, compiled, faults = time.perf_counter(), 0, []
    work = [(target, processors, thing) for thing in things]
    with multiprocessing.get_context("spawn").Pool(min(len(work), os.cpu_count() or 1)) as pool:
        results = pool.imap_unordered(compile_one, work)
        done = 0
        try:
            while done < len(work):
                number, fault = results.next(timeout=max(0.1, until - time.perf_counter()))
                done, compiled = done + 1, compiled + number
                faults += [fault] if fault else []
        except multiprocessing.TimeoutError:
            print(f"  no time left for {len(work) - done} of {len(work)}; they are compiled where they are used")
    seconds = time.perf_counter() - begin
    print(f"  {compiled} kernels for {target[1]} in {seconds:.0f} s, by {os.cpu_count()} cores")
    for fault in faults:
        print(f"  not ahead: {fault}")
    # nothing is wrong with a kernel yet that cannot be compiled in this way: its stage will tell
    return {"compiled": compiled, "not_reached": len(work) - done, "faults": faults}, []


def compile_one(work: tuple[Target, int, tuple[str, str]]) -> tuple[int, str | None]:
    """-> (kernels compiled, what went wrong)"""
    from batchgen_kernels import cross_compile

    target, processors, (what, which) = work
    torch.set_num_threads(1)
    try:
        launcher = cross_compile.current_launcher() if torch.cuda.is_available() else None
        with cross_compile.target(*target, processors), cross_compile.capture_launches() as launches:
            if what == "row":
                next(row for row in rows()[0] if f"{row.kernel} {row.shape}" == which).make("meta").run()
            else:
                for case in CASES[what](DTYPES[which], "cpu"):
                    case.run(load(what, "triton"))
        for kernel in {launched.kernel.hash: launched.kernel for launched in launches}.values():
            if launcher:  # a C program for each signature, which the compiler of C takes as long for
                launcher(kernel.src, kernel.metadata)
        return len({launched.kernel.hash for launched in launches}), None
    except Exception as e:
        return 0, f"{what} {which}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"


# ---- right? ---------------------------------------------------------------------------------------------------------


def check_ops(
    device: str,
    dtypes: dict[str, torch.dtype],
    ops: Sequence[str] | None = None,
    limit: int | None = None,
    until: float = math.inf,
) -> Outcome:
    """Every case of every op that Triton has, against the reference on the same device."""
    figures: dict[str, Any] = {}
    problems: list[str] = []
    not_reached = []
    there = [op for op in ops or OPS if "triton" in OPS[op]]
    for (name, dtype), op in itertools.product(dtypes.items(), there):
        begin, worst, wrong = time.perf_counter(), 0.0, 0
        if begin > until:
            not_reached.append(f"{op} {name}")
            continue
        allowed, number = tolerance(op, "triton", dtype), 0
        for case in itertools.islice(CASES[op](dtype, device), limit):
            try:
                expected = case.run(load(op, "reference"))
                errors = [relative_error(*pair) for pair in zip(case.run(load(op, "triton")), expected, strict=True)]
            except Exception as e:  # the compiler's or the driver's, too
                errors = [math.inf]
                problems.append(f"{op} {name} {case.label}: {type(e).__name__}: {' '.join(str(e).split())[:300]}")
            number, worst = number + 1, max([worst, *errors])
            if not max(errors) <= allowed:
                wrong += 1
                problems.append(f"{op} {name} {case.label}: error {max(errors):.1e}, {allowed:.1e} is allowed")
        seconds = time.perf_counter() - begin
        figures[f"{op} {name}"] = {"cases": number, "wrong": wrong, "worst": finite(worst), "seconds": seconds}
        print(f"  {op:18}{name:10}{number:>3} cases, worst error {worst:.1e} of {allowed:.1e}, {seconds:.1f} s", flush=True)
    if not_reached:
        print(f"  no time left for: {', '.join(not_reached)}")
    return figures | {"not_reached": not_reached}, problems


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
    """In prefix order. The plan's own sort is Arrow's, which may not be here."""
    order = np.array(sorted(range(len(prompts)), key=lambda i: prompts[i].tolist()))
    lengths = np.array([len(prompts[i]) for i in order], np.int32)
    return plan_window(lambda i: prompts[i], order, lengths, BLOCK_SIZE, sort=False)


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


class Job(NamedTuple):
    """A job whose rows share prefixes: every `per_prefix` rows the same `prefix` tokens, then `suffix` of their own."""

    rows: int
    prefix: int
    per_prefix: int
    suffix: int
    max_tokens: int


SHARED = Job(rows=512, prefix=1024, per_prefix=32, suffix=64, max_tokens=64)


def time_engine(
    device: str,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    job: Job = SHARED,
    prefill: tuple[int, int] = (64, 1024),
    decodes: Sequence[tuple[int, int]] = ((256, 512), (64, 512), (1, 512), (512, 512), (16, 512)),
    steps: int = 64,
    until: float = math.inf,
) -> Outcome:
    """A whole job against its roofline, then whole steps of the engine, host included. prefill, decodes: (rows, tokens)."""
    ceilings = kernels.measured_ceilings(device)
    config = config or one_billion_config()
    decoder = random_decoder(config, "triton", dtype, device, 0.02)
    figures: dict[str, Any] = {}
    compile_engine(decoder, prefill)
    figures["job"] = time_job(decoder, job, ceilings)
    rows, length = prefill
    prompts = shared_prompts(rows, config.vocab_size, 0, length, 1)
    begin = time.perf_counter()
    _, stats, _ = run_engine(decoder, window_of(prompts), 1, budget=8192)
    seconds, computed = time.perf_counter() - begin, stats.counts.num_prefill
    share = 2 * num_matmul_parameters(config, lm_head=False) * computed / seconds / ceilings.gemm
    figures["prefill"] = {"tokens_per_second": computed / seconds, "gemm_share": share, "stages": dict(stats.seconds)}
    print(f"  prefill: {computed / seconds:,.0f} tokens/s; its matrix products at {share:.0%} of the measured rate")
    for rows, length in decodes:
        if time.perf_counter() > until:
            print(f"  no time left for a decode of {rows} rows of {length} tokens")
            continue
        figures[f"decode {rows} x {length}"] = time_decode(decoder, rows, length, steps, ceilings)
    return figures, []


def compile_engine(decoder: Decoder, prefill: tuple[int, int]) -> None:
    """What a first run would do besides running: a prefill with shared prefixes, and two steps of decode."""
    rows, length = prefill
    run_engine(
        decoder, window_of(shared_prompts(rows, decoder.config.vocab_size, length // 2, length // 2, 8)), 3, budget=8192
    )


def time_job(decoder: Decoder, job: Job, ceilings: kernels.Ceilings) -> dict[str, Any]:
    """From token ids to token ids. Its roofline: weights once a step and each key/value token that the steps read at the
    copy's rate; matrix products and attention at the product's rate; one after the other, and at best both at once."""
    config = decoder.config
    prompts = shared_prompts(job.rows, config.vocab_size, job.prefix, job.suffix, job.per_prefix)
    window, cost = window_of(prompts), static_cost(config, decoder.dtype)
    begin = time.perf_counter()
    tokens, stats, _ = run_engine(decoder, window, job.max_tokens, budget=8192)
    seconds, counts = time.perf_counter() - begin, stats.counts
    flops = job_flops(cost, config, window, np.array([len(tokens[int(i)]) for i in window.index]))
    compute = (flops.linear + flops.attention) / ceilings.gemm
    memory = (counts.num_steps * cost.weight_bytes + counts.num_kv_read * cost.kv_bytes_per_token) / ceilings.copy
    in_turn, at_once = compute + memory, max(compute, memory)
    output = sum(map(len, tokens.values()))
    print(
        f"  job of {job.rows} rows, {job.prefix} shared and {job.suffix} own tokens each, {job.max_tokens} out: "
        f"{seconds:.2f} s, {output / seconds:,.0f} output and {window.lengths.sum() / seconds:,.0f} prompt tokens/s, "
        f"{in_turn / seconds:.0%} of the roofline in turn, {at_once / seconds:.0%} of it at once",
        flush=True,
    )
    return {
        "seconds": seconds,
        "output_tokens_per_second": output / seconds,
        "prompt_tokens": int(window.lengths.sum()),
        "prefill_computed": counts.num_prefill,
        "num_steps": counts.num_steps,
        "kv_read_factor": counts.num_kv_visible / max(counts.num_kv_read, 1),
        "compute_seconds": compute,
        "memory_seconds": memory,
        "share_in_turn": in_turn / seconds,
        "share_at_once": at_once / seconds,
        "stages": dict(stats.seconds),
    }


def time_decode(decoder: Decoder, rows: int, length: int, steps: int, ceilings: kernels.Ceilings) -> dict[str, Any]:
    """The median step in which all rows decode, and what it reads: the weights, and every key and value."""
    config = decoder.config
    prompts = shared_prompts(rows, config.vocab_size, 0, length, 1)
    _, stats, log = run_engine(decoder, window_of(prompts), steps, budget=8192)
    times = [b[0] - a[0] for a, b in itertools.pairwise(log) if b[1] == b[2] == rows]
    context = statistics.median(b[3] for b in log if b[1] == b[2] == rows)
    seconds = statistics.median(times)
    weights = num_matmul_parameters(config) * decoder.dtype.itemsize
    share = (weights + context * kv_bytes_per_token(config, decoder.dtype)) / seconds / ceilings.copy
    host = sum(v for k, v in stats.seconds.items() if k in ("schedule", "inputs", "update")) / stats.counts.num_steps
    print(
        f"  decode, {rows} rows of {length} tokens: {1e3 * seconds:.2f} ms a step, {rows / seconds:,.0f} tokens/s, "
        f"{share:.0%} of the copy rate, host {1e3 * host:.2f} ms",
        flush=True,
    )
    return {
        "step_seconds": seconds,
        "tokens_per_second": rows / seconds,
        "copy_share": share,
        "host_seconds_per_step": host,
        "stages": dict(stats.seconds),
    }
