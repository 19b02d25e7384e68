"""The table of kernels and shapes: for each row its inputs, what it must move and multiply, and who else can do it.

`make bench-kernels` times the rows, `make predict-kernels` predicts them, `make gpu-check` times the short ones. A new
kernel is one more row: bytes that must be read and written at least once each, and 2 flops for every multiplication with
an addition in a matrix product. A row whose op the registry lacks is left out by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from batchgen_kernels.cases.attention import build_metadata, merge_states_case
from batchgen_kernels.cases.cache import copy_blocks_case, rope_and_write_kv_case, write_kv_case
from batchgen_kernels.cases.case import Case, tolerance
from batchgen_kernels.cases.elementwise import (
    add_rms_norm_case,
    gelu_and_mul_case,
    rms_norm_case,
    rotary_embedding_case,
    silu_and_mul_case,
)
from batchgen_kernels.cases.experts import combine_experts_case, grouped_linear_case
from batchgen_kernels.cases.linear import linear_case
from batchgen_kernels.cases.sampling import gather_logprobs_case, sample_tokens_case
from batchgen_kernels.float8 import E4M3, dequantize_rows, quantize_rows
from batchgen_kernels.registry import OPS, load

BF16 = torch.bfloat16
SIZE = 2  # bytes of an element
BLOCK_SIZE = 16  # the engine's
CHECKED_REQUESTS = 3
Call = Callable[[], Any]


class Model(NamedTuple):
    """The shape of a model's layers."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "1B": Model("1B", 2048, 8192, 16, 32, 8, 64, 128256),  # Llama 3.2 1B
    "8B": Model("8B", 4096, 14336, 32, 32, 8, 128, 128256),  # Llama 3.1 8B
}


class Work(NamedTuple):
    """A row with its inputs in place."""

    run: Call  # the Triton op, to be called again and again
    outputs: Callable[[], list[torch.Tensor]]  # of one call on fresh inputs
    expected: Callable[[], list[torch.Tensor]]  # what they should be
    allowed: float  # relative error
    peers: dict[str, Call]  # others that compute the same


class Row(NamedTuple):
    kernel: str
    shape: str
    op: str  # name in the registry
    bytes: int
    flops: int
    make: Callable[[str], Work]  # device -> work; on "meta" only `run` may be called, to compile
    short: bool = False  # also part of `make gpu-check`
    shares: bool = False  # needs attention that reads shared-prefix groups


def rows(short: bool = False) -> tuple[list[Row], list[str]]:
    """(the rows whose op there is, names of kernels that the package lacks)."""
    table = _table()
    there = [row for row in table if _is_there(row) and (row.short or not short)]
    return there, list(dict.fromkeys(row.kernel for row in table if not _is_there(row)))


def _is_there(row: Row) -> bool:
    if "triton" not in OPS.get(row.op, {}):
        return False
    return not row.shares or bool(getattr(load(row.op, "triton"), "shares_prefix_reads", False))


def ops_without_rows() -> list[str]:
    """Triton ops that no row runs."""
    covered = {row.op for row in rows()[0]}
    return [op for op, implementations in OPS.items() if "triton" in implementations and op not in covered]


@functools.cache
def _table() -> list[Row]:
    table = [row for model in MODELS.values() for row in _rows_of(model)]
    # both models have this vocabulary
    table += [row for requests in (16, 256) for row in logits_rows(MODELS["8B"], requests)]
    return table + [row for tokens in (16, 64, 4096) for row in linear_rows(MODELS["8B"], tokens)]


def _rows_of(m: Model) -> Iterator[Row]:
    for requests, length in ((1, 4096), (16, 4096), (64, 2048), (256, 2048)):
        yield attention_row("decode", m, requests, 1, length, short=(requests, m.name) in ((64, "8B"), (256, "1B")))
    for requests in (64, 256):
        yield attention_row("decode", m, requests, 1, 2048, float8=True, short=(requests, m.name) == (64, "8B"))
    for requests, queries, length in ((16, 512, 512), (4, 4096, 4096), (2, 1024, 8192)):
        yield attention_row("prefill", m, requests, queries, length, short=queries == 4096)
    for requests, sharers, prefix in ((256, 32, 2048), (256, 256, 4096), (64, 4, 512)):
        for grouped in (True, False):
            yield shared_row(m, requests, sharers, prefix, 256, grouped, short=(m.name, sharers) == ("8B", 32))
    for tokens in (64, 4096):
        yield from elementwise_rows(m, tokens)


# ---- attention ---------------------------------------------------------------------------------------------------------


def attention_row(
    kernel: str, m: Model, requests: int, queries: int, length: int, short: bool = False, float8: bool = False
) -> Row:
    """`requests` of `queries` new tokens, each the last of `length` in the cache."""
    kv_bytes = requests * length * 2 * m.kv_heads * (m.head_dim + 4 if float8 else m.head_dim * SIZE)  # a float32 scale
    query_bytes = requests * queries * m.heads * m.head_dim * SIZE
    pairs = requests * queries * (2 * length - queries + 1) // 2  # of a query and a key that it sees
    return Row(
        kernel,
        f"{m.name} {requests} x {queries} of {length}{' float8' if float8 else ''}",
        "plan_attention",
        kv_bytes + 2 * query_bytes,
        4 * pairs * m.heads * m.head_dim,
        functools.partial(attention_work, m, requests, queries, length, float8=float8),
        short,
    )


def shared_row(m: Model, requests: int, sharers: int, prefix: int, own: int, grouped: bool, short: bool = False) -> Row:
    """Decode where each `sharers` requests have the same first `prefix` tokens, which are read once for all of them, or,
    not grouped, by each of them: then what one pays for not sharing, less what the L2 cache saves."""
    reads = requests // sharers * prefix + requests * own if grouped else requests * (prefix + own)
    query_bytes = requests * m.heads * m.head_dim * SIZE
    return Row(
        "shared_prefix" if grouped else "not_shared",
        f"{m.name} {requests} of {prefix}+{own}, {sharers} share",
        "plan_attention",
        reads * 2 * m.kv_heads * m.head_dim * SIZE + 2 * query_bytes,
        4 * requests * (prefix + own) * m.heads * m.head_dim,
        functools.partial(attention_work, m, requests, 1, prefix + own, sharers=sharers, prefix=prefix, grouped=grouped),
        short,
        shares=grouped,
    )


def attention_work(
    m: Model,
    requests: int,
    queries: int,
    length: int,
    device: str,
    sharers: int = 1,
    prefix: int = 0,
    grouped: bool = False,
    float8: bool = False,
) -> Work:
    """Blocks in random order. Checked on some requests against dense attention in float32."""
    per_request, shared = -(-length // BLOCK_SIZE), prefix // BLOCK_SIZE
    groups = requests // sharers
    num_blocks = 1 + groups * shared + requests * (per_request - shared)
    order = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)).int()
    prefixes, own = order[: groups * shared].view(groups, shared), order[groups * shared :].view(requests, -1)
    table = torch.cat([prefixes.repeat_interleave(sharers, 0), own], 1)
    metadata = build_metadata([queries] * requests, [length] * requests, table, BLOCK_SIZE, device)
    if grouped:
        first = torch.arange(0, requests, sharers, dtype=torch.int32) * queries
        metadata = metadata._replace(
            kv_start=torch.full_like(metadata.kv_start, shared * BLOCK_SIZE),
            group_query_start=first,
            group_query_end=first + sharers * queries,
            group_block_start=torch.arange(groups + 1, dtype=torch.int32) * shared,
            group_blocks=prefixes.flatten(),
        )
    cache = torch.empty(2, num_blocks, BLOCK_SIZE, m.kv_heads, m.head_dim, dtype=BF16, device=device).normal_()
    scales, options = torch.empty(0), {}
    if float8:
        cache, scales = quantize_rows(cache)
        options = {"key_scale": scales[0], "value_scale": scales[1]}
    query = torch.empty(requests * queries, m.heads, m.head_dim, dtype=BF16, device=device).normal_()
    scale = m.head_dim**-0.5
    plan = load("plan_attention", "triton")(metadata, m.heads, m.kv_heads, m.head_dim)
    run = functools.partial(plan, query, cache[0], cache[1], scale, **options)
    checked = sorted({0, requests // 2, requests - 1})[:CHECKED_REQUESTS]

    def dense(request: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [heads, queries, D], key and value [kv_heads, length, D] of one request."""
        blocks = table[request].to(device).long()
        if float8:  # as bytes, for torch indexes no float8
            codes = cache.view(torch.uint8)[:, blocks].view(E4M3)
            both = dequantize_rows(codes, scales[:, blocks])
        else:
            both = cache[:, blocks]
        key, value = both.flatten(1, 2)[:, :length].transpose(1, 2)
        return query.view(requests, queries, m.heads, m.head_dim)[request].transpose(0, 1), key, value

    def outputs() -> list[torch.Tensor]:
        out = run().view(requests, queries, m.heads, m.head_dim)
        return [out[request].transpose(0, 1) for request in checked]

    def expected() -> list[torch.Tensor]:
        return [exact_attention(*dense(request), scale) for request in checked]

    def peers() -> dict[str, Call]:
        if device == "meta":
            return {}
        q, k, v = (torch.stack(t).to(BF16) for t in zip(*(dense(r) for r in range(requests))))
        found = {"sdpa": sdpa(q, k, v, scale)}
        if importlib.util.find_spec("flash_attn"):
            found["flash_attn"] = flash_attention(q, k, v, scale)
        if importlib.util.find_spec("flashinfer") and queries == 1 and not float8:
            found["flashinfer"] = flashinfer_decode(query, cache, table.to(device), length, scale)
        return found

    return Work(run, outputs, expected, tolerance("plan_attention", "triton", BF16), peers())


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """In float32, some queries at a time: query [H, n, D] are the last n of the L tokens of key and value [Hkv, L, D]."""
    heads, n, _ = query.shape
    kv_heads, length, _ = key.shape
    key, value = (t.float().repeat_interleave(heads // kv_heads, 0) for t in (key, value))
    out = []
    for first in range(0, n, 256):
        some = query[:, first : first + 256].float()
        position = length - n + first + torch.arange(some.shape[1], device=query.device)
        hidden = torch.arange(length, device=query.device) > position[:, None]
        scores = (scale * some @ key.transpose(1, 2)).masked_fill_(hidden, float("-inf"))
        out.append(scores.softmax(-1) @ value)
    return torch.cat(out, 1)


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Call:
    """torch's attention on dense keys and values, [R, heads, tokens, D]: what it costs where nothing has to be paged."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    if query.shape[2] == key.shape[2]:
        options["is_causal"] = True
    elif query.shape[2] > 1:
        from torch.nn.attention.bias import causal_lower_right

        options["attn_mask"] = causal_lower_right(query.shape[2], key.shape[2])
        # this mask takes no grouped heads
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        options["enable_gqa"] = False
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, **options)


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Call:
    """FlashAttention on dense keys and values (its paged form wants blocks of 256)."""
    function = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
    return functools.partial(function, q, k, v, softmax_scale=scale, causal=True)


def flashinfer_decode(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int, scale: float) -> Call:
    """FlashInfer on the very same blocks."""
    requests, per_request = table.shape
    workspace = torch.empty(2**27, dtype=torch.uint8, device=query.device)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(requests + 1, dtype=torch.int32, device=query.device) * per_request
    last = torch.full((requests,), (length - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=query.device)
    heads, head_dim, kv_heads = query.shape[1], query.shape[2], cache.shape[3]
    wrapper.plan(
        starts, table.flatten(), last, heads, kv_heads, head_dim, BLOCK_SIZE, q_data_type=BF16, kv_data_type=BF16,
        sm_scale=scale,
    )  # fmt: skip
    return functools.partial(wrapper.run, query, (cache[0], cache[1]))


# ---- the ops that have a case ------------------------------------------------------------------------------------------


def case_row(op: str, shape: str, moved: int, make_case: Callable[[str], Case], flops: int = 0, short: bool = False) -> Row:
    """A row from a `*_case` function; moved: elements read and written."""

    def make(device: str) -> Work:
        case, triton = make_case(device), load(op, "triton")
        return Work(
            functools.partial(case.call, triton, case.make()),
            functools.partial(case.run, triton),
            functools.partial(case.run, load(op, "reference")),
            tolerance(op, "triton", BF16),
            {"torch": functools.partial(case.call, load(op, "torch"), case.make())} if device != "meta" else {},
        )

    return Row(op, shape, op, moved * SIZE, flops, make, short)


def elementwise_rows(m: Model, tokens: int) -> Iterator[Row]:
    shape = f"{m.name} {tokens} tokens"
    row = functools.partial(case_row, short=(m.name, tokens) == ("8B", 4096))
    heads, kv = (m.heads + m.kv_heads) * m.head_dim, m.kv_heads * m.head_dim
    slots = (BLOCK_SIZE + torch.randperm(tokens, generator=torch.Generator().manual_seed(0))).tolist()
    blocks = 2 + tokens // BLOCK_SIZE
    pairs = [(1 + i, blocks + i) for i in range(tokens // BLOCK_SIZE)]
    yield row("rms_norm", shape, 2 * tokens * m.hidden, lambda d: rms_norm_case((tokens, m.hidden), BF16, d))
    yield row("add_rms_norm", shape, 4 * tokens * m.hidden, lambda d: add_rms_norm_case((tokens, m.hidden), BF16, d))
    yield row(
        "rotary_embedding", shape, 2 * tokens * heads,
        lambda d: rotary_embedding_case(tokens, m.heads, m.kv_heads, m.head_dim, m.head_dim, BF16, d),
    )  # fmt: skip
    yield row("silu_and_mul", shape, 3 * tokens * m.inner, lambda d: silu_and_mul_case(tokens, m.inner, BF16, d))
    yield row("gelu_and_mul", shape, 3 * tokens * m.inner, lambda d: gelu_and_mul_case(tokens, m.inner, BF16, d, "tanh"))
    yield row(
        "write_kv", shape, 4 * tokens * kv,
        lambda d: write_kv_case(slots, blocks, BLOCK_SIZE, m.kv_heads, m.head_dim, BF16, d),
    )  # fmt: skip
    query = m.heads * m.head_dim  # and for float8, codes of half the size and a float32 scale for each head
    for name, moved, float8 in (("", 2 * query + 4 * kv, False), (" float8", 2 * query + 3 * kv + 4 * m.kv_heads, True)):
        yield row(
            "rope_and_write_kv", f"{shape}{name}", tokens * moved,
            functools.partial(
                rope_and_write_kv_case, slots, blocks, BLOCK_SIZE, m.heads, m.kv_heads, m.head_dim, m.head_dim, BF16,
                norm=not float8, float8=float8,
            ),
        )  # fmt: skip
    yield row(
        "copy_blocks", f"{m.name} {len(pairs)} blocks", 4 * tokens * kv * m.layers,
        lambda d: copy_blocks_case(pairs, m.layers, 2 * blocks, BLOCK_SIZE, m.kv_heads, m.head_dim, BF16, d),
    )  # fmt: skip
    yield row(
        "merge_states", shape, 3 * tokens * m.heads * (m.head_dim + 2),  # a float32 for each head is two elements
        lambda d: merge_states_case(tokens, m.heads, m.head_dim, BF16, d),
    )  # fmt: skip


def logits_rows(m: Model, requests: int) -> Iterator[Row]:
    """Over a whole vocabulary, for each of so many rows: the logits are read once at least."""
    shape = f"{requests} x {m.vocab}"
    row = functools.partial(case_row, moved=requests * m.vocab, short=(m.name, requests) == ("8B", 16))
    for name, setting, filtered in (
        ("plain", (0.8, 0, 1.0, 0.0), False),
        ("top-k, top-p", (0.8, 50, 0.9, 0.0), True),
    ):
        yield row(
            "sample_tokens", f"{shape} {name}",
            make_case=functools.partial(
                _dense_logits, sample_tokens_case, requests, m.vocab, BF16, settings=(setting,), filtered=filtered
            ),
        )  # fmt: skip
    yield row(
        "gather_logprobs",
        shape,
        make_case=functools.partial(_dense_logits, gather_logprobs_case, requests, m.vocab, 1, BF16),
    )


def _dense_logits(make_case: Callable[..., Case], *args: Any, **options: Any) -> Case:
    """The case with its logits as a model gives them, contiguous."""
    case = make_case(*args, **options)

    def make() -> tuple[Any, ...]:
        logits, *rest = case.make()
        return logits.contiguous(), *rest

    return case._replace(make=make)


def linear_rows(m: Model, tokens: int) -> Iterator[Row]:
    """The first product of the MLP, dense and as one of eight experts of which each token takes two."""
    num_out, num_in, experts, choices = m.inner, m.hidden, 8, 2
    shape = f"{tokens} x {num_in} x {num_out}"
    row = functools.partial(case_row, flops=2 * tokens * num_in * num_out, short=tokens == 64)
    in_and_out = tokens * (num_in + num_out)
    bits = {
        "linear_invariant": 16,
        "linear_int8": 8,
        "linear_fp8": 8,
        "linear_int4": 4 + 2 * 32 / 128,
    }  # with scale and zero
    for op, size in bits.items():
        make = functools.partial(linear_case, op, tokens, num_in, num_out, BF16)
        yield row(op, shape, in_and_out + int(num_out * num_in * size) // 16, make)
    used = min(experts, tokens * choices)
    yield row(
        "grouped_linear", f"{shape}, {choices} of {experts}",
        tokens * num_in + tokens * choices * num_out + used * num_out * num_in,
        lambda d: grouped_linear_case(tokens, choices, experts, num_in, num_out, BF16, d),
        flops=2 * tokens * choices * num_in * num_out,
    )  # fmt: skip
    yield row(
        "combine_experts", f"{tokens} x {choices} x {num_in}", tokens * (choices + 1) * num_in,
        lambda d: combine_experts_case(tokens, choices, num_in, BF16, d), flops=0,
    )  # fmt: skip
