"""The table of kernels: its bytes and FLOPs by hand, that a wrong kernel is not timed, and the arithmetic of predictions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batchgen_kernels.cases.case import relative_error
from batchgen_kernels.registry import OPS

from batchgen.bench import kernel_table, kernels, predict
from batchgen.bench.kernel_table import (
    MODELS,
    attention_row,
    elementwise_rows,
    exact_attention,
    linear_rows,
    logits_rows,
    shared_row,
)
from batchgen.bench.predict import GPUS, Compiled

ROOT = Path(__file__).parents[2]
TOY = MODELS["1B"]._replace(name="toy", hidden=64, inner=32, layers=2, heads=4, kv_heads=2, head_dim=16)


def test_every_row_has_a_name_of_its_own_and_gpu_check_gets_some_of_each_kernel():
    table, missing = kernel_table.rows()
    names = [(row.kernel, row.shape) for row in table]
    assert len(names) == len(set(names))
    short, _ = kernel_table.rows(short=True)
    assert {row.kernel for row in short} == {row.kernel for row in table}
    assert not set(missing) & {row.kernel for row in table}


def test_a_kernel_that_the_package_lacks_is_left_out_by_name(monkeypatch):
    monkeypatch.setitem(OPS, "silu_and_mul", {"torch": "activation:silu_and_mul_torch"})
    table, missing = kernel_table.rows()
    assert "silu_and_mul" in missing and all(row.op != "silu_and_mul" for row in table)
    monkeypatch.setitem(OPS, "unheard_of", {"triton": "a:b"})
    assert kernel_table.ops_without_rows() == ["unheard_of"]


def test_bytes_and_flops_by_hand():
    decode = attention_row("decode", MODELS["8B"], 64, 1, 2048)
    assert decode.bytes == 64 * 2048 * 4096 + 2 * 64 * 8192  # 4 KiB a token and layer; 8 KiB a query and an output
    assert decode.flops == 64 * 2048 * 4 * 32 * 128
    float8 = attention_row("decode", MODELS["8B"], 64, 1, 2048, float8=True)
    assert float8.bytes == 64 * 2048 * 2 * 8 * (128 + 4) + 2 * 64 * 8192 and float8.flops == decode.flops
    prefill = attention_row("prefill", TOY, 2, 3, 5)  # queries see 3, 4 and 5 tokens
    assert prefill.flops == 2 * (3 + 4 + 5) * 4 * 4 * 16
    assert prefill.bytes == 2 * 5 * 2 * 2 * 16 * 2 + 2 * (2 * 3 * 4 * 16 * 2)
    moved = {row.kernel: row.bytes for row in elementwise_rows(TOY, 16) if "float8" not in row.shape}
    assert moved["rms_norm"] == 2 * 16 * 64 * 2
    assert moved["add_rms_norm"] == 4 * 16 * 64 * 2
    assert moved["rotary_embedding"] == 2 * 16 * 6 * 16 * 2
    assert moved["silu_and_mul"] == 3 * 16 * 32 * 2
    assert moved["write_kv"] == 4 * 16 * 2 * 16 * 2
    assert moved["rope_and_write_kv"] == (2 * 16 * 4 * 16 + 4 * 16 * 2 * 16) * 2  # queries twice; k and v read and written
    (float8,) = (row.bytes for row in elementwise_rows(TOY, 16) if "float8" in row.shape)
    assert float8 == moved["rope_and_write_kv"] - 2 * 16 * 2 * 16 + 2 * 16 * 2 * 4  # a byte less each, a scale more
    assert moved["copy_blocks"] == 2 * 1 * (2 * 2 * 16 * 2 * 16) * 2  # one block, read and written: layers, k and v
    assert moved["merge_states"] == 3 * 16 * 4 * (16 * 2 + 4)
    linear = {row.kernel: row for row in linear_rows(TOY._replace(hidden=128), 3)}
    assert linear["linear_invariant"].bytes == 3 * (128 + 32) * 2 + 32 * 128 * 2
    assert linear["linear_int8"].bytes == 3 * (128 + 32) * 2 + 32 * 128
    assert linear["linear_int4"].bytes == 3 * (128 + 32) * 2 + 32 * (64 + 8)  # a float32 scale and zero for 128 codes
    assert linear["grouped_linear"].bytes == (3 * 128 + 3 * 2 * 32 + 6 * 32 * 128) * 2  # at most six experts are met
    assert linear["grouped_linear"].flops == 2 * linear["linear_fp8"].flops == 2 * 3 * 2 * 128 * 32
    assert linear["combine_experts"].bytes == 3 * 3 * 128 * 2


@pytest.mark.parametrize(("queries", "length"), [(1, 20), (5, 20), (7, 7)])
def test_exact_attention_and_sdpa_are_two_ways_to_the_same(queries, length):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, n, 16, generator=generator) for h, n in ((4, queries), (2, length), (2, length)))
    peer = kernel_table.sdpa(q[None], k[None], v[None], 0.25)()[0]
    torch.testing.assert_close(exact_attention(q, k, v, 0.25), peer, rtol=1e-5, atol=1e-5)


def toy_rows():
    yield from linear_rows(TOY._replace(hidden=128), 3)
    yield attention_row("decode", TOY, 3, 1, 40)
    yield attention_row("decode", TOY, 3, 1, 40, float8=True)
    for grouped in (False, True):
        yield shared_row(TOY, 4, 2, 32, 16, grouped)
    yield from elementwise_rows(TOY, 16)
    yield from logits_rows(TOY._replace(vocab=1003), 2)


@pytest.mark.parametrize("row", list(toy_rows()), ids=lambda row: f"{row.kernel} {row.shape}")
def test_rows_say_what_is_right(row):
    """At toy sizes, in the interpreter: outputs are those expected, and peers run."""
    if not kernel_table._is_there(row):
        pytest.skip(f"{row.op} is not there")
    work = row.make("cpu")
    for out, expected in zip(work.outputs(), work.expected(), strict=True):
        assert relative_error(out, expected) <= work.allowed
    for peer in work.peers.values():
        peer()


def test_sharing_is_fewer_bytes_and_as_many_flops():
    shared, apart = (shared_row(TOY, 4, 2, 32, 16, grouped) for grouped in (True, False))
    token, queries = 2 * 2 * 16 * 2, 2 * 4 * 4 * 16 * 2
    assert shared.bytes == (2 * 32 + 4 * 16) * token + queries and apart.bytes == 4 * 48 * token + queries
    assert shared.flops == apart.flops == 4 * 4 * 48 * 4 * 16


@pytest.mark.parametrize(("queries", "length"), [(1, 20), (5, 20)])
def test_attention_in_the_interpreter_is_right_and_timed(queries, length):
    figures = kernels.time_row(attention_row("attention", TOY, 2, queries, length), kernels.Ceilings(1e9, 1e12), "cpu")
    assert figures["error"] < 5e-3 and figures["microseconds"] > 0 and figures["others"]["sdpa"] > 0
    assert figures["copy_share"] == pytest.approx(figures["gb_per_second"])


def test_a_wrong_kernel_is_not_timed(monkeypatch, capsys):
    right = kernel_table.load

    def load(op, implementation):
        function = right(op, "torch")
        return (lambda x, weight, eps: 1.02 * function(x, weight, eps)) if implementation == "triton" else function

    monkeypatch.setattr(kernel_table, "load", load)
    table = [row for row in elementwise_rows(TOY, 16) if row.kernel == "rms_norm"]
    figures, problems = kernels.time_rows(table, ["absent"], "cpu")
    assert len(problems) == 1 and problems[0].startswith("rms_norm toy 16 tokens: error 2.0e-02")
    assert "microseconds" not in figures["rows"][0]
    said = capsys.readouterr().out
    assert "WRONG: error" in said and "not in this package: absent" in said
    assert kernels.time_rows(table, [], "cpu", until=0.0)[0]["left_out"] == ["rms_norm toy 16 tokens"]


def test_a_row_that_breaks_hides_no_other(capsys):
    def breaks(device):
        raise RuntimeError("out of memory")

    table = [row for row in elementwise_rows(TOY, 16) if row.kernel == "rms_norm"]
    figures, problems = kernels.time_rows([table[0]._replace(shape="huge", make=breaks), *table], [], "cpu")
    assert problems == ["rms_norm huge: RuntimeError: out of memory"]
    assert "microseconds" in figures["rows"][1]
    json.dumps(figures, allow_nan=False)


def test_the_clock_of_a_gpu(monkeypatch):
    """Events around one call each, on flushed caches; the median of what they say."""
    log, milliseconds = [], iter([5.0, 1.0, 2.0, 3.0, 100.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return next(milliseconds)

    class Flush:
        def zero_(self):
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(kernels, "_flush", lambda device: Flush())
    assert kernels.median_seconds(lambda: log.append("call"), "cuda", repeats=5) == 3e-3
    assert log == ["call"] * 3 + ["flush", "record", "call", "record"] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_so_without_a_gpu(capsys):
    assert kernels.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("bench-kernels: torch sees no GPU here, so nothing was timed.") and "predict-kernels" in said


# ---- predictions -------------------------------------------------------------------------------------------------------

H200 = GPUS["H200"]


def kernel(programs, resident=2, bytes_in_flight=100_000, small=False):
    return Compiled("k", programs, resident, bytes_in_flight, small)


def test_a_kernel_that_fills_the_bandwidth():
    """4.8 TB/s x 0.9 = 4.32e12: 2 MB take 463 ns; 0.8 us of that are 3.456 MB, which 264 x 100 kB in flight exceed."""
    p = predict.predict(2_000_000, 0, [kernel(1000)], H200)
    assert p.in_flight == 1.0 and p.seconds == pytest.approx(2e6 / 4.32e12 + 4e-6)


def test_too_few_bytes_in_flight_bound_the_bandwidth():
    p = predict.predict(10**9, 0, [kernel(10, bytes_in_flight=34_560)], H200)  # 345,600 of 3,456,000
    assert p.in_flight == pytest.approx(0.1) and p.bound == "memory"
    assert p.seconds == pytest.approx(1e9 / 4.32e11 + 4e-6)
    # a processor that holds one program at a time keeps half as much in flight as one that holds two
    one, two = (predict.predict(10**9, 0, [kernel(1000, resident, 10_000)], H200).in_flight for resident in (1, 2))
    assert two == pytest.approx(2 * one) and one == pytest.approx(132 * 10_000 / 3_456_000)


def test_a_last_wave_that_is_not_full_costs_a_whole_one():
    p = predict.predict(1, 10**12, [kernel(133)], H200)
    assert p.bound == "matrix" and p.waves == pytest.approx(264 / 133)
    assert p.seconds == pytest.approx(1e12 / (989e12 * 0.7) * 264 / 133 + 4e-6)
    small = predict.predict(1, 10**12, [kernel(132, small=True)], H200)
    assert small.seconds == pytest.approx(1e12 / (989e12 * 0.7 * 0.62) + 4e-6)


def test_each_kernel_is_a_launch():
    p = predict.predict(1000, 0, [kernel(1), kernel(1), kernel(1)], H200)
    assert p.bound == "launch" and p.seconds == pytest.approx(12e-6, rel=0.01)


def test_the_machine_code_says_what_is_in_flight():
    class Launch:
        grid = (3, 4, 5)

        class kernel:
            class metadata:
                name = "k"

    r = {"warps": 4, "stages": 4, "async_waits": [4], "occupancy": 2, "load_bytes": 64, "mma": {"HMMA": 1}}
    loop = {"load_bytes": 256, "loads": 16}
    of = lambda **changes: predict.compiled(Launch, r | {"loop": loop} | changes)  # noqa: E731
    assert of() == Compiled("k", 60, 2, 256 * 128 * 3, True)
    assert of(async_waits=[0]).bytes_in_flight == 256 * 128  # a pipeline that overlaps nothing
    assert of(loop=None, mma={"HGMMA": 1}) == Compiled("k", 60, 2, 64 * 128, False)


def test_the_table_of_predictions_says_what_it_is(tmp_path):
    """Through real launchers."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "batchgen.bench.predict",
        "--gpus",
        "H200",
        "--kernels",
        "decode,rms_norm",
        "--short",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    assert table[0].startswith("PREDICTED") and "not measured" in table[0]
    result = json.loads(line)
    assert result["measured"] is False
    times = {(row["kernel"], row["shape"], row["gpu"]): row["seconds"] for row in result["rows"]}
    assert len(times) == 4  # three of decode, one of rms_norm
    ideal = attention_row("decode", MODELS["8B"], 64, 1, 2048).bytes / 4.8e12
    assert ideal < times["decode", "8B 64 x 1 of 2048", "H200 141 GB SXM"] < 1.5 * ideal
