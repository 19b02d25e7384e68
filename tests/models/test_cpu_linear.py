"""Products for CPUs: each gives the layer's result, and a row the same bits whatever else the step holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batchgen_kernels import select_ops
from model_driver import PagedDriver, run_whole
from toy import make_toy_model

from batchgen.models import cpu_linear
from batchgen.models.cpu_linear import Choice, available_products, choose_products
from batchgen.models.cpu_math import MAX_PADDED_ROWS, first_independent_rows
from batchgen.models.decoder import Decoder
from batchgen.models.loader import load_decoder, resolve_model

PRODUCTS = available_products()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 1536), (64, 960), (1536, 64), (100, 33)])
def test_rows_are_independent_from_the_measured_count_on(name: str, num_in: int, num_out: int) -> None:
    torch.manual_seed(7)
    weight, bias, x = torch.randn(num_out, num_in), torch.randn(num_out), torch.randn(300, num_in)
    product = PRODUCTS[name](weight, bias)
    whole = product(x)
    expected = (x.double() @ weight.double().T + bias).float()
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=0)
    first = first_independent_rows(product, num_out, num_in)
    assert 1 <= first <= MAX_PADDED_ROWS, "no padding makes rows independent on this machine"
    for num_rows in [*range(first, 40), *range(40, 300, 7)]:
        assert torch.equal(product(x[:num_rows]), whole[:num_rows])


def test_a_product_whose_rows_depend_on_their_number_is_found_out() -> None:
    weight = torch.randn(64, 128)

    def product(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight)
        return y * (1 + 1e-6) if x.shape[0] in (12, 33) else y

    assert first_independent_rows(product, 64, 128) == 34


def test_the_fastest_is_chosen_unless_its_rows_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(384, 256) for _ in range(2)]
    found = {
        "torch": cpu_linear.torch_product,
        "quick": cpu_linear.torch_product,
        "wrong": lambda w, b: lambda x: x.sum() + x @ w.T,
    }
    seconds = {"torch": 1.0, "quick": 0.8, "wrong": 0.1}
    monkeypatch.setattr(cpu_linear, "_seconds", lambda *_: seconds)
    assert choose_products(weights, {}, found)["256x384"].product == "quick"
    seconds["quick"] = 0.99  # not clear: torch's own stays
    assert choose_products(weights, {}, found)["256x384"].product == "torch"
    assert choose_products(weights, {"256x384": "quick"}, found)["256x384"].product == "quick"
    assert choose_products(weights, {"256x384": "gone"}, found)["256x384"].product == "torch"


def test_timing_needs_no_particular_shape() -> None:
    seconds = cpu_linear._seconds(PRODUCTS, [torch.randn(384, 256)])
    assert seconds.keys() == PRODUCTS.keys() and all(s > 0 for s in seconds.values())


def load(folder: Path, product: str) -> Decoder:
    weights = Decoder(load_config_of(folder), select_ops("torch"), torch.device("cpu"), torch.float32)
    shapes = {cpu_linear.shape_of(linear.weight) for linear in weights.linears() if linear.weight is not None}
    decoder = load_decoder(
        resolve_model(folder), "cpu", torch.float32, select_ops("torch"), None, dict.fromkeys(shapes, product)
    )
    assert decoder.products == dict.fromkeys(shapes, product)
    return decoder


def load_config_of(folder: Path):  # type: ignore[no-untyped-def]
    from batchgen.models.loader import load_config

    return load_config(resolve_model(folder))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_token_has_the_same_logits_alone_and_among_others(name: str, tmp_path: Path) -> None:
    """Bitwise: what batch, order and resume may not change."""
    folder = make_toy_model(tmp_path, hidden=96, check_sensitivity=False)
    decoder = load(folder, name)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 272, (60, 40), generator=draw).tolist()
    prompt, others = tokens[0][:30], {i: tokens[i][: 1 + i % 5] for i in range(1, 40)}
    alone, crowded = PagedDriver(decoder), PagedDriver(decoder, num_blocks=256, seed=9)
    assert torch.equal(alone.step({0: prompt})[0], crowded.step({**others, 0: prompt})[0])
    for token in tokens[59][:4]:
        together = crowded.step({0: [token], **{i: [token] for i in others}})[0]
        assert torch.equal(alone.step({0: [token]})[0], together)
    torch.testing.assert_close(run_whole(decoder, prompt), run_whole(load(folder, "torch"), prompt), atol=1e-4, rtol=0)


def test_packed_weights_replace_the_plain_ones(tmp_path: Path) -> None:
    decoder = load(make_toy_model(tmp_path, check_sensitivity=False), list(PRODUCTS)[-1])
    assert all(linear.weight is None for linear in decoder.linears())
    assert not any("weight" in name for name, _ in decoder.named_parameters())


def test_int8_rounds_each_row_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(96, 200), torch.randn(96), torch.randn(40, 200)
    x[7] *= 1000  # what spoils its neighbours where all rows have one scale
    x[8], x[9] = 0, torch.nan
    product = cpu_linear.int8_product(weight, bias)
    whole, exact = product(x), torch.nn.functional.linear(x, weight, bias)
    assert all(torch.equal(product(x[i : i + 1]), whole[i : i + 1]) for i in range(40) if i != 9)
    assert torch.equal(whole[8], bias) and whole[9].isnan().all()
    error = (whole - exact).norm(dim=1) / exact.norm(dim=1)
    assert error[[i for i in range(40) if i not in (8, 9)]].max() < (0.02 if cpu_linear.sums_are_exact() else 0.04)

    folder = make_toy_model(tmp_path, check_sensitivity=False)
    decoder = load_decoder(resolve_model(folder), "cpu", torch.float32, select_ops("torch"), int8=True)
    assert set(decoder.products.values()) == {"int8"} and decoder.min_rows == 1
    tokens = torch.randint(0, 272, (30,)).tolist()
    alone, crowded = PagedDriver(decoder), PagedDriver(decoder, num_blocks=256, seed=9)
    others = {i: tokens[: 1 + i % 5] for i in range(1, 20)}
    assert torch.equal(alone.step({0: tokens})[0], crowded.step({**others, 0: tokens})[0])


def test_choices_are_kept_by_shape() -> None:
    weights = [torch.randn(40, 30), torch.randn(30, 40), torch.randn(40, 30)]
    assert choose_products(weights, {}, PRODUCTS).keys() == {"30x40", "40x30"}
    assert all(isinstance(c, Choice) and c.product == "torch" for c in choose_products(weights, {}, PRODUCTS).values())
