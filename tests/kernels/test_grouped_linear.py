"""Mixture of experts: routing, a whole layer, offsets past 2^31, wrong inputs. Cases of the ops run in test_ops.py."""

import pytest
import torch
from batchgen_kernels import grouped_linear, linear_launch
from batchgen_kernels._triton import interpreting
from batchgen_kernels.activation import silu_and_mul_reference, silu_and_mul_triton
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.cases.experts import expert_choices, grouped_linear_case
from batchgen_kernels.grouped_linear import route_tokens

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
FP32 = torch.float32


@pytest.mark.parametrize("block_t", [1, 4, 16])
@pytest.mark.parametrize("used", [range(7), [3], [0, -1, 6], [-1]], ids=["all", "one", "some on none", "none"])
def test_routing_by_brute_force(used, block_t):
    """Each pair once, in a tile of its expert, in the order given; what is left of the places is -1."""
    experts = expert_choices(11, 3, list(used), DEVICE)
    routing = route_tokens(experts, 7, block_t)
    tiles = routing.pairs.view(-1, block_t).tolist()
    flat = experts.flatten().tolist()
    seen: dict[int, list[int]] = {}
    for expert, pairs in zip(routing.tile_experts.tolist(), tiles, strict=True):
        pairs = [p for p in pairs if p >= 0]
        assert (expert >= 0) == bool(pairs) and all(flat[p] == expert for p in pairs)
        seen.setdefault(expert, []).extend(pairs)
    assert {e: p for e, p in seen.items() if e >= 0} == {
        e: [p for p, at in enumerate(flat) if at == e] for e in sorted(set(flat)) if e >= 0
    }


def test_shapes_of_a_routing_depend_on_shapes_only():
    shapes = {tuple(t.shape for t in route_tokens(expert_choices(11, 2, used), 7, 4)[:2]) for used in ([1], range(7), [-1])}
    assert len(shapes) == 1


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(8, 128), (8, 8), (24, 3), (1, 1), (33, 4)])
def test_places_suffice_and_are_no_more_than_stated(num_pairs, num_experts):
    """The worst case: every expert but one has a single pair, the last has what is left."""
    ids = torch.arange(num_pairs, device=DEVICE).clamp(max=num_experts - 1)[:, None]
    routing = route_tokens(ids, num_experts, 16)
    assert sorted(routing.pairs[routing.pairs >= 0].tolist()) == list(range(num_pairs))
    assert routing.pairs.numel() <= num_pairs + num_experts * 15


@pytest.mark.parametrize("launch", sorted({row._replace(num_stages=1) for row in linear_launch.LINEAR.values()}), ids=str)
def test_tiles_of_the_launch_table(launch):
    """The interpreter's own launch has one tile only; these are the GPUs'."""
    case = grouped_linear_case(
        20, 2, 3, launch.block_k + 75, launch.block_n + 7, torch.bfloat16, DEVICE, used=[0, 2], scaled=True
    )
    x, weight, experts, scale = case.make()
    routing = route_tokens(experts, 3, launch.block_t)
    out = grouped_linear.grouped_linear_triton(x, weight, experts, scale, routing, launch)
    want = grouped_linear.grouped_linear_reference(x, weight, experts, scale)
    assert relative_error(out, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("column", ["reference", "torch", "triton"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_pair_without_an_expert_is_zero_whatever_its_scale(column, bad):
    x, weight, _, scale = grouped_linear_case(3, 2, 3, 32, 16, FP32, DEVICE, scaled=True).make()
    experts = torch.tensor([[0, -1], [-1, -1], [2, 1]], dtype=torch.int32, device=DEVICE)
    scale[experts < 0] = bad
    out = getattr(grouped_linear, f"grouped_linear_{column}")(x, weight, experts, scale)
    none = experts.flatten() < 0
    assert (out[none] == 0).all() and out[~none].isfinite().all()


def moe(x, gate_up, down, experts, weights, grouped, act, combine):
    y = act(grouped(x, gate_up, experts))
    return combine(grouped(y, down, experts, weights), experts.shape[1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
def test_a_layer_of_experts(dtype):
    """Two products with the activation between them, weighted and combined; one routing for both products."""
    x, gate_up, experts, weights = grouped_linear_case(7, 2, 4, 48, 2 * 24, dtype, DEVICE, scaled=True).make()
    down = torch.randn(4, 40, 24, generator=torch.Generator().manual_seed(5)).to(DEVICE).to(dtype)
    m = grouped_linear
    want = moe(
        x, gate_up, down, experts, weights, m.grouped_linear_reference, silu_and_mul_reference, m.combine_experts_reference
    )
    launch = m.grouped_launch(dtype, experts.numel(), 4)
    routing = route_tokens(experts, 4, launch.block_t)

    def shared(x, weight, experts, scale=None):
        return m.grouped_linear_triton(x, weight, experts, scale, routing, launch)

    got = moe(x, gate_up, down, experts, weights, shared, silu_and_mul_triton, m.combine_experts_triton)
    assert got.dtype == dtype and relative_error(got, want) < TOLERANCE[dtype]


def test_rows_do_not_depend_on_other_tokens_but_for_the_launch():
    """A token's result is that of its own experts: others, NaN among them, may come and go."""
    x, weight, experts, _ = grouped_linear_case(9, 2, 4, 64, 32, FP32, DEVICE).make()
    whole = grouped_linear.grouped_linear_triton(x, weight, experts).view(9, 2, -1)
    poisoned = x.clone()
    poisoned[4] = float("nan")
    out = grouped_linear.grouped_linear_triton(poisoned, weight, experts).view(9, 2, -1)
    others = [t for t in range(9) if t != 4]
    assert torch.equal(out[others], whole[others]) and out[4].isnan().all()
    assert torch.equal(grouped_linear.grouped_linear_triton(x[:3], weight, experts[:3]).view(3, 2, -1), whole[:3])


def test_weights_of_more_than_2_to_the_31_elements():
    torch.utils.deterministic.fill_uninitialized_memory = False
    base = torch.empty(2**31 + 2**30, dtype=torch.bfloat16, device=DEVICE)
    weight = base.as_strided((3, 16, 32), (2**30, 32, 1))  # the last expert's begin at 2^31
    weight[:] = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    experts = torch.tensor([[2], [0], [2], [1]], dtype=torch.int32, device=DEVICE)
    out = grouped_linear.grouped_linear_triton(x, weight, experts)
    want = grouped_linear.grouped_linear_reference(x, weight.contiguous(), experts)
    assert relative_error(out, want) < TOLERANCE[torch.bfloat16] / 10


def other_tokens(m):
    return route_tokens(torch.zeros(64, 2, dtype=torch.int32), 3, m.grouped_launch(FP32, 4, 3).block_t)


X, W, E = torch.ones(2, 8), torch.ones(3, 4, 8), torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.grouped_linear_triton(X, W[0], E), r"grouped_linear: x \[T, K\] and weight \[E, N, K\]"),
        (lambda m: m.grouped_linear_triton(X, W.half(), E), "must share one dtype"),
        (lambda m: m.grouped_linear_triton(X, W, E.float()), "expert_ids must be"),
        (lambda m: m.grouped_linear_triton(torch.ones(3, 8), W, E), "a row for each of 2 tokens or 4 pairs"),
        (lambda m: m.grouped_linear_triton(X[:, :5], W, E), "x has 5 inputs, the weight 8"),
        (lambda m: m.grouped_linear_triton(X, W, E, torch.ones(4)), r"pair_scale must be contiguous float32 \[2, 2\]"),
        (lambda m: m.grouped_linear_triton(X, W, E, routing=route_tokens(E, 3, 4)), "routed in tiles of 4 pairs"),
        (lambda m: m.grouped_linear_triton(X, W, E, routing=other_tokens(m)), "which is not of 4 pairs and 3 experts"),
        (lambda m: m.grouped_linear_triton(X, W[:0], E), "at least one expert"),
        (lambda m: m.combine_experts_triton(torch.ones(3, 8), 2), r"combine_experts: y must be \[T \* 2, N\]"),
    ],
)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(grouped_linear)
