"""Drawing a token from each row of logits: Gumbel-max over the tokens that top-k, top-p and min-p leave.

    token = argmax over survivors of  logit / temperature + g,     g = -ln(-ln(u)),  u uniform in (0, 1)

which has the distribution of the softmax over the survivors (Gumbel 1954; Maddison et al. 2014). No sort, and no
probability is written. logits: [K, vocab]; the parameters are [K], a row each.

**Greedy** rows (temperature below MIN_TEMPERATURE, top_k 1 or top_p <= 0) take the largest logit, the lowest id of equals.

**Survivors**, in Hugging Face's order: temperature; top-k, with all ties of the k-th; top-p over what top-k left,
renormalised: the smallest set of most likely tokens whose sum reaches top_p, ties with the least likely included; min-p:
logit >= max + temperature * ln(min_p). Each keeps the logits from some value on, so a row has one threshold. A radix search
over the order-preserving integer image of float32 finds it: each pass over the row sums what lies above PIVOTS values.

**Noise** is Philox4x32-10 (Salmon et al. 2011), keyed by the seed, four words for four neighbouring tokens. The counter is
    word 0, 1: row key                  word 2: position (24 bits), token // 4 (low 8 bits above them)
    word 3: sample index (20 bits), token // 4 (high 12 bits above them)
a bijection for position < 2^24, sample index < 2^20, vocab <= 2^22: no two draws of a seed share a word. -ln(u) is exact in
its small values (large noise), with steps of 2^-32: g lies in [-3.14, 22.88], and only tokens less likely than about 2^-32
are drawn too seldom.

**The same token everywhere.** A draw depends on the row's logits and parameters, seed, row key, sample index and position;
never on the batch, the tiles or the GPU. Logarithm and exponential are polynomials of fused multiply-adds, and no
product outside one meets a sum, so that a compiler has no choice of rounding; top-p sums integers (2^40 exp(x - max),
rounded down), so in any order.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.launch import DTYPES

MIN_TEMPERATURE = 1e-3  # below this the distribution is a point in every dtype: greedy
MAX_VOCAB = 1 << 22  # what the counter and the 64-bit sums of weights hold
CHUNK = 4096  # tokens of a program that scores; more programs a row help few rows, and cost nothing with many
BLOCK = 2048  # tokens of a tile of the threshold search, which takes a program a row
PIVOTS = 4  # values that a pass of the search compares with; 8 spill
MASK32 = 0xFFFFFFFF


def ln_series(f, fma):
    """ln(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1], relative error 2e-7. Of torch's tensors or, compiled, of triton's."""
    r = fma(f, -0.10082377, 0.161805)
    r = fma(r, f, -0.17243226)
    r = fma(r, f, 0.19906883)
    r = fma(r, f, -0.24971229)
    r = fma(r, f, 0.33334714)
    r = fma(r, f, -0.5000032)
    return f * fma(r, f, 1.0)


def exp2_series(f, fma):
    """2^f for f in [0, 1), relative error 1e-7, exactly 1 at 0. Of torch's tensors or, compiled, of triton's."""
    r = fma(f, 0.0018671302, 0.00901703)
    r = fma(r, f, 0.055799913)
    r = fma(r, f, 0.24016444)
    r = fma(r, f, 0.6931513)
    return fma(r, f, 1.0)


# ---- reference and torch --------------------------------------------------------------------------------------------


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """a * b + c in float32, rounded once, as every GPU does it."""
    b, c = (t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=torch.float32) for t in (b, c))
    product = a.double() * b.double()  # exact
    total = product + c.double()
    bits = total.view(torch.int64)
    halfway = bits & 0x1FFFFFFF == 0x10000000  # between two float32: what the first rounding dropped decides the second
    if halfway.any():
        added = total - product
        dropped = (product - (total - added)) + (c.double() - added)
        step = torch.where((dropped > 0) == (total > 0), 1, -1)
        total = (bits + torch.where(halfway & (dropped != 0), step, 0)).view(torch.float64)
    return total.float()


def philox(counter: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Philox4x32-10. counter: four int64 tensors with values below 2^32; seed: the 64-bit key. Returns four like them."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK32, seed >> 32 & MASK32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64, as a signed integer
        c0, c1, c2, c3 = (p1 >> 32 & MASK32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32 & MASK32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = k0 + 0x9E3779B9 & MASK32, k1 + 0xBB67AE85 & MASK32
    return [c0, c1, c2, c3]


def ln(y: torch.Tensor) -> torch.Tensor:
    """ln(y) of normal positive float32, bit by bit what the kernels compute."""
    bits = y.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # so that y / 2^exponent lies in [sqrt(1/2), sqrt(2))
    fraction = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return fma(exponent.float(), 0.6931472, ln_series(fraction, fma))


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """-ln(-ln(u)) float32 for u = 1 - (word + 1/2) / 2^32; word: int64 below 2^32."""
    below = ln_series((word.float() + 0.5) * -(2.0**-32), fma)
    u = ((word ^ MASK32).float() + 0.5) * 2.0**-32
    return -ln(-torch.where(word < 1 << 30, below, ln(u)))  # near 1, u itself would have lost its small difference to 1


def noise_counter(
    row_keys: torch.Tensor, sample_index: torch.Tensor, positions: torch.Tensor, block: torch.Tensor
) -> list[torch.Tensor]:
    """The four words (int64) of the Philox counter of tokens 4 block .. 4 block + 3; the arguments broadcast."""
    sample, position = sample_index.long(), positions.long()
    words = row_keys & MASK32, row_keys >> 32 & MASK32, position | (block & 0xFF) << 24, sample | block >> 8 << 20
    return list(torch.broadcast_tensors(*words))


def gumbel_noise(
    row_keys: torch.Tensor, sample_index: torch.Tensor, positions: torch.Tensor, vocab: int, seed: int
) -> torch.Tensor:
    """[K, vocab] float32; row_keys int64, sample_index and positions int32, all [K]."""
    block = torch.arange(-(-vocab // 4), device=row_keys.device)
    counter = noise_counter(row_keys[:, None], sample_index[:, None], positions[:, None], block)
    return gumbel(torch.stack(philox(counter, seed), -1).flatten(1)[:, :vocab])


def fixed_point_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """2^40 exp((logit - max) / temperature), rounded down. logits: [..., vocab] float32; temperature: [...] float32."""
    inverse_temperature = (1.0 / temperature)[..., None]
    top = logits.amax(-1, keepdim=True) * inverse_temperature
    y = (fma(logits, inverse_temperature, -top) * 1.442695).clamp(min=-62.0)
    whole = y.floor()
    mantissa = (exp2_series(y - whole, fma) * 2.0**23).long()
    return (mantissa << 17) >> (-whole).long()


def _is_greedy(temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (temperature < MIN_TEMPERATURE) | (top_k == 1) | (top_p <= 0)


def _mass_to_reach(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return (total.double() * top_p.double()).long().clamp(min=1)


def sample_tokens_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    row_keys: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
    seed: int,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [K, vocab] -> (token ids [K] int32, whether the row's logits were usable [K] bool).

    temperature, top_p, min_p: [K] float32; top_k, sample_index, positions (of the output): [K] int32; row_keys: [K] int64,
    the bits of an unsigned key. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. seed: 64 bits. filtered
    False says that top-k, top-p and min-p are off in every row, whatever the tensors hold, and saves looking. A row with
    a NaN, with +inf or with nothing but -inf is not usable and gets token 0.
    """
    ids = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    finite = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    greedy = _is_greedy(temperature, top_k, top_p) if filtered else temperature < MIN_TEMPERATURE
    for i, row in enumerate(logits.float()):
        finite[i] = not row.isnan().any() and bool(row.max().isfinite())
        if not finite[i]:
            continue
        if greedy[i]:
            ids[i] = (row == row.max()).nonzero()[0, 0]
            continue
        if filtered:
            row = row.masked_fill(~_survivors_reference(row, temperature[i], int(top_k[i]), top_p[i], min_p[i]), -torch.inf)
        noise = gumbel_noise(row_keys[i : i + 1], sample_index[i : i + 1], positions[i : i + 1], len(row), seed)[0]
        score = fma(row, 1.0 / temperature[i], noise)
        ids[i] = (score == score.max()).nonzero()[0, 0]
    return ids, finite


def _survivors_reference(
    row: torch.Tensor, temperature: torch.Tensor, top_k: int, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    keep = row.isfinite()
    if 0 < top_k < len(row):
        keep &= row >= row.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        weights = fixed_point_weights(row, temperature).masked_fill(~keep, 0)
        ranked, order = row.masked_fill(~keep, -torch.inf).sort(descending=True)
        reached = weights[order].cumsum(0) >= _mass_to_reach(weights.sum(), top_p)
        keep &= row >= ranked[reached.nonzero()[0, 0]]
    if min_p > 0:
        keep &= row >= fma(temperature, ln(min_p), row.max())
    return keep


def sample_tokens_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    row_keys: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
    seed: int,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, all rows at once, with a sort where rows are filtered."""
    vocab = logits.shape[1]
    x = logits.float()
    top = x.amax(-1, keepdim=True)
    finite = top[:, 0].isfinite()  # amax passes NaN on
    greedy = temperature < MIN_TEMPERATURE
    x, top = torch.where(finite[:, None], x, 0.0), torch.where(finite[:, None], top, 0.0)
    if filtered:
        greedy |= _is_greedy(temperature, top_k, top_p)
        safe = torch.where(greedy, 1.0, temperature)
        ranked, order = x.sort(-1, descending=True)
        kth = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long() - 1
        weights = fixed_point_weights(x, safe).gather(-1, order)
        weights.masked_fill_(ranked < ranked.gather(-1, kth[:, None]), 0)
        reached = weights.cumsum(-1) >= _mass_to_reach(weights.sum(-1), top_p)[:, None]
        last = torch.where(top_p < 1, reached.int().argmax(-1), kth)  # rank of the least likely survivor
        cutoff = torch.where(min_p > 0, fma(safe, ln(min_p), top[:, 0]), -torch.inf)
        threshold = torch.maximum(ranked.gather(-1, last[:, None]), cutoff[:, None])
        x = x.masked_fill(x < torch.where(greedy[:, None], -torch.inf, threshold), -torch.inf)
    noise = gumbel_noise(row_keys, sample_index, positions, vocab, seed)
    score = torch.where(greedy[:, None], x, fma(x, (1.0 / temperature)[:, None], noise))
    best = score == score.amax(-1, keepdim=True)  # argmax of what is equal is the first only on booleans as integers
    return torch.where(finite, best.int().argmax(-1), 0).int(), finite


# ---- triton ---------------------------------------------------------------------------------------------------------

ln_series_kernel = triton.jit(ln_series)
exp2_series_kernel = triton.jit(exp2_series)


@triton.jit
def fma_kernel(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
def ln_kernel(y):
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return tl.fma(exponent.to(tl.float32), 0.6931472, ln_series_kernel(f, fma_kernel))


@triton.jit
def gumbel_kernel(key, sample, position, start, seed_low, seed_high, CHUNK: tl.constexpr):
    """[CHUNK] float32: the noise of tokens start.. of a row; start is a multiple of 4."""
    block = start // 4 + tl.arange(0, CHUNK // 4)
    zero = tl.zeros_like(block)
    r0, r1, r2, r3 = tl.philox_impl(
        (zero + (key & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True),
        (zero + ((key >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True),
        (position | (block & 0xFF) << 24).to(tl.uint32, bitcast=True),
        (sample | block >> 8 << 20).to(tl.uint32, bitcast=True),
        seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
    )
    r = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    below = ln_series_kernel((r.to(tl.float32) + 0.5) * -2.3283064365386963e-10, fma_kernel)
    u = ((r ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -ln_kernel(-tl.where(r < 1073741824, below, ln_kernel(u)))


@triton.jit
def order_key(x):
    """float32 -> int32 of the same order, equal for the two zeros."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def order_value(key):
    """The inverse, of an int64 key."""
    magnitude = tl.abs(key).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key >= 0, magnitude, -magnitude)


@triton.jit
def load_logits(row_ptr, start, vocab, BLOCK: tl.constexpr):
    """(logits [BLOCK] float32 with -inf for what is not finite and past the end, their order keys)."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, float("-inf"))
    return x, order_key(x)


@triton.jit
def weight_kernel(x, top, inverse_temperature):
    y = tl.maximum(tl.fma(x, inverse_temperature, -top) * 1.442695, -62.0)
    whole = tl.floor(y)
    mantissa = (exp2_series_kernel(y - whole, fma_kernel) * 8388608.0).to(tl.int32).to(tl.int64)
    return (mantissa << 17) >> (-whole).to(tl.int64)


@triton.jit
def search_threshold(
    row_ptr, vocab, low, high, target, top, inverse_temperature, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest key t in [low, high) for which the logits with key >= t sum to target: of weights, or of ones.

    The sum from `low` on reaches it, or low is the answer for want of more; that from `high` on does not.
    """
    fraction = (tl.arange(0, PIVOTS) + 1).to(tl.int64)
    passes = 0
    while high - low > 1:
        if passes % 2 == 0:  # quick where logits are spread evenly, but slow to close in on a zero
            bottom = order_value(low).to(tl.float64)
            width = order_value(high).to(tl.float64) - bottom
            pivot = order_key((bottom + width * (fraction.to(tl.float64) / (PIVOTS + 1))).to(tl.float32)).to(tl.int64)
        else:  # never more than 32 / log2(PIVOTS + 1) of these
            pivot = low + (high - low) * fraction // (PIVOTS + 1)
        passes += 1
        pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
        sums = tl.zeros([BLOCK, PIVOTS], tl.int64)
        least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        most = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
        for start in range(0, vocab, BLOCK):
            x, key = load_logits(row_ptr, start, vocab, BLOCK)
            if tl.max(key, 0) >= low:
                if WEIGHTED:
                    weight = weight_kernel(x, top, inverse_temperature)
                else:
                    weight = tl.full([BLOCK], 1, tl.int64)
                sums += tl.where(key[:, None] >= pivot.to(tl.int32)[None, :], weight[:, None], 0)
                undecided = (key >= low) & (key < high)
                least = tl.minimum(least, tl.where(undecided, key, 0x7FFFFFFF))
                most = tl.maximum(most, tl.where(undecided, key, -0x7FFFFFFF))
        reached = tl.sum(sums, 0) >= target
        # between the least and the most that were undecided there is nothing to look for: ties end the search
        next_low = tl.maximum(tl.max(tl.where(reached, pivot, low), 0), tl.min(least, 0).to(tl.int64))
        high = tl.minimum(tl.min(tl.where(reached, high, pivot), 0), tl.max(most, 0).to(tl.int64) + 1)
        low = next_low
    return low


@triton.jit(
    do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"],
)
def threshold_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    threshold_ptr,
    vocab,
    stride_row,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The order key from which on the logits of a row survive; that of -inf where all do."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = tl.full((), -0x7F800000, tl.int64)
    limits = ((top_k > 1) & (top_k < vocab)) | ((top_p > 0.0) & (top_p < 1.0)) | (min_p > 0.0)
    if limits & (temperature >= MIN_TEMPERATURE) & (top_k != 1) & (top_p > 0.0):
        least = tl.full([BLOCK], 0x7F800000, tl.int32)
        most = tl.full([BLOCK], -0x7F800000, tl.int32)
        for start in range(0, vocab, BLOCK):
            x, key = load_logits(row_ptr, start, vocab, BLOCK)
            least = tl.minimum(least, tl.where(x > float("-inf"), key, 0x7F800000))
            most = tl.maximum(most, key)
        low = tl.min(least, 0).to(tl.int64)
        last = tl.max(most, 0).to(tl.int64)
        if low <= last:  # else nothing is finite
            inverse_temperature = tl.div_rn(1.0, temperature)
            largest = order_value(last)
            top = largest * inverse_temperature
            if (top_k > 0) & (top_k < vocab):
                low = search_threshold(
                    row_ptr, vocab, low, last + 1, top_k.to(tl.int64), top, inverse_temperature, False, BLOCK, PIVOTS
                )
            if top_p < 1.0:
                mass = tl.zeros([BLOCK], tl.int64)
                for start in range(0, vocab, BLOCK):
                    x, key = load_logits(row_ptr, start, vocab, BLOCK)
                    mass += tl.where(key >= low, weight_kernel(x, top, inverse_temperature), 0)
                target = (tl.sum(mass, 0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
                low = search_threshold(
                    row_ptr, vocab, low, last + 1, tl.maximum(target, 1), top, inverse_temperature, True, BLOCK, PIVOTS
                )
            if min_p > 0.0:
                cutoff = order_key(tl.fma(temperature, ln_kernel(min_p), largest)).to(tl.int64)
                low = tl.minimum(tl.maximum(low, cutoff), last)
            threshold = low
    tl.store(threshold_ptr + row, threshold.to(tl.int32))


@triton.jit(
    do_not_specialize=["seed_low", "seed_high"],
    do_not_specialize_on_alignment=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "row_key_ptr", "sample_index_ptr", "position_ptr",
    ],
)  # fmt: skip
def score_chunk_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    threshold_ptr,  # or None: every token survives
    row_key_ptr,
    sample_index_ptr,
    position_ptr,
    score_ptr,
    token_ptr,
    vocab,
    stride_row,
    seed_low,
    seed_high,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best score of a chunk of a row and its token; token -1 if a logit there is NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < MIN_TEMPERATURE
    token = start + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    unusable = tl.max((x != x).to(tl.int32) | (x == float("inf")).to(tl.int32), 0)
    x = tl.where(tl.abs(x) < float("inf"), x, float("-inf"))
    if threshold_ptr is not None:
        greedy = greedy | (tl.load(top_k_ptr + row) == 1) | (tl.load(top_p_ptr + row) <= 0.0)
        x = tl.where(order_key(x) >= tl.load(threshold_ptr + row), x, float("-inf"))
    if (greedy == 0) & (tl.max(x, 0) > float("-inf")):  # noise is most of the work; a chunk without survivors needs none
        noise = gumbel_kernel(
            tl.load(row_key_ptr + row), tl.load(sample_index_ptr + row), tl.load(position_ptr + row),
            start, seed_low, seed_high, CHUNK,
        )  # fmt: skip
        x = tl.fma(x, tl.div_rn(1.0, temperature), noise)
    best = tl.max(x, 0)
    chosen = tl.min(tl.where(x == best, token, 0x7FFFFFFF), 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(score_ptr + at, best)
    tl.store(token_ptr + at, tl.where(unusable > 0, -1, chosen))


@triton.jit
def merge_chunks_kernel(
    score_ptr, token_ptr, id_ptr, finite_ptr, NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED_CHUNKS)
    score = tl.load(score_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    token = tl.load(token_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0x7FFFFFFF)
    best = tl.max(score, 0)
    chosen = tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)
    finite = (tl.min(token, 0) >= 0) & (best > float("-inf"))
    tl.store(id_ptr + row, tl.where(finite, chosen, 0))
    tl.store(finite_ptr + row, finite)


def sample_tokens_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    row_keys: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
    seed: int,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. Rows of logits may be strided, the parameters are contiguous; nothing waits for the device."""
    num_rows, vocab = check_logits("sample_tokens", logits)
    parameters = {
        "temperature": (temperature, torch.float32),
        "top_k": (top_k, torch.int32),
        "top_p": (top_p, torch.float32),
        "min_p": (min_p, torch.float32),
        "row_keys": (row_keys, torch.int64),
        "sample_index": (sample_index, torch.int32),
        "positions": (positions, torch.int32),
    }
    for name, (parameter, dtype) in parameters.items():
        if parameter.shape != (num_rows,) or parameter.dtype != dtype or not parameter.is_contiguous():
            raise ValueError(
                f"sample_tokens: {name} must be contiguous [{num_rows}] {dtype}, "
                f"got {tuple(parameter.shape)} {parameter.dtype} with strides {parameter.stride()}"
            )
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"sample_tokens: seed must be of 64 bits, 0 to 2^64 - 1, got {seed}")
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return ids, finite
    threshold = find_thresholds(logits, temperature, top_k, top_p, min_p) if filtered else None
    num_chunks = -(-vocab // CHUNK)
    score = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    token = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    score_chunk_kernel[(num_rows, num_chunks)](
        logits, temperature, top_k, top_p, threshold, row_keys, sample_index, positions, score, token,
        vocab, logits.stride(0), _as_int32(seed & MASK32), _as_int32(seed >> 32),
        MIN_TEMPERATURE=MIN_TEMPERATURE, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    merge_chunks_kernel[(num_rows,)](
        score, token, ids, finite,
        NUM_CHUNKS=num_chunks, PADDED_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip
    return ids, finite


def find_thresholds(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[K] int32: the least `order_key` of a logit that survives in each row; that of -inf in greedy rows."""
    num_rows, vocab = logits.shape
    threshold = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    threshold_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, threshold, vocab, logits.stride(0),
        MIN_TEMPERATURE=MIN_TEMPERATURE, BLOCK=BLOCK, PIVOTS=PIVOTS, num_warps=8,
    )  # fmt: skip
    return threshold


def check_logits(op: str, logits: torch.Tensor) -> tuple[int, int]:
    """(num_rows, vocab) of usable logits; ValueError otherwise."""
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"{op}: logits must be [K, vocab] with 1 to {MAX_VOCAB} tokens, got {tuple(logits.shape)}")
    if logits.dtype not in DTYPES:
        raise ValueError(f"{op}: logits must be float32, bfloat16 or float16, got {logits.dtype}")
    if logits.stride(1) != 1:
        raise ValueError(f"{op}: logits must be dense in their last dimension, got strides {logits.stride()}")
    return logits.shape[0], logits.shape[1]


def _as_int32(word: int) -> int:
    """The signed integer with these 32 bits: one type of argument, so one compiled variant, for every seed."""
    return word - (1 << 32) if word >= 1 << 31 else word
