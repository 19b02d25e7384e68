"""`python -m batchgen.bench.predict`: what bytes, FLOPs and occupancy let one expect. PREDICTED, not measured.

Each row of the kernel table is compiled through its real launcher for a GPU that is not here; then, for its kernels,

    time = max(bytes / (bandwidth x share), flops / (rate x share) x waves) + launches

where a wave of programs on all processors costs as much as a full one, and the bandwidth that can be had is bounded by
the bytes that the resident programs keep in flight (Little's law). It knows nothing of latency inside a program, of
arithmetic other than matrix products (exponentials, random numbers), of data that is read twice, or of what the L2 cache
saves: good for orders of magnitude and for what binds, no more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from batchgen.bench.kernel_table import Row


class Gpu(NamedTuple):
    """Rates of the public data sheets, dense."""

    name: str
    arch: int
    processors: int
    bandwidth: float  # bytes/s
    matrix_flops: float  # FLOP/s in bfloat16 with the largest matrix instruction
    small_matrix_share: float  # of it, with the instruction of a single warp (HMMA)


# NVIDIA's data sheets of the SXM boards. On Hopper only warpgroup instructions reach the rate of the data sheet: those of
# one warp get about 0.62 of it ("Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", arXiv 2402.13499).
GPUS = {
    "A100": Gpu("A100 80 GB SXM", 80, 108, 2.039e12, 312e12, 1.0),
    "H100": Gpu("H100 80 GB SXM", 90, 132, 3.35e12, 989e12, 0.62),
    "H200": Gpu("H200 141 GB SXM", 90, 132, 4.8e12, 989e12, 0.62),
}
BANDWIDTH_SHARE = 0.9  # what a large copy gets of the data sheet's bandwidth
MATRIX_SHARE = 0.7  # what a large product gets of its FLOPs within the power limit
LATENCY = 8e-7  # seconds from a load to its data under load
LAUNCH = 4e-6  # seconds between two kernels in a full queue; the host's time is not in it


class Compiled(NamedTuple):
    """What a prediction takes from one kernel of a row."""

    name: str
    programs: int
    resident: int  # programs that a processor holds at a time
    bytes_in_flight: int  # that a program asks for before it needs the first of them
    small_matrix: bool  # its matrix instructions are those of one warp


class Prediction(NamedTuple):
    seconds: float
    bound: str  # "memory", "matrix" or "launch"
    in_flight: float  # share of the bandwidth that the bytes in flight can fill
    waves: float  # programs, rounded up to whole waves of the processors, over programs


def predict(num_bytes: int, flops: int, kernels: list[Compiled], gpu: Gpu) -> Prediction:
    """The row's time, if its first kernel with matrix instructions (else its largest) does all the work."""
    main = max(kernels, key=lambda k: k.programs * k.bytes_in_flight)
    at_a_time = min(main.resident, math.ceil(main.programs / gpu.processors))
    busy = min(main.programs, gpu.processors * at_a_time)
    in_flight = min(1.0, busy * main.bytes_in_flight / (gpu.bandwidth * BANDWIDTH_SHARE * LATENCY))
    waves = math.ceil(main.programs / gpu.processors) * gpu.processors / main.programs
    rate = gpu.matrix_flops * MATRIX_SHARE * (gpu.small_matrix_share if main.small_matrix else 1.0)
    parts = {
        "memory": num_bytes / (gpu.bandwidth * BANDWIDTH_SHARE * in_flight),
        "matrix": flops / rate * waves,
        "launch": LAUNCH * len(kernels),
    }
    seconds = max(parts["memory"], parts["matrix"]) + parts["launch"]
    return Prediction(seconds, max(parts, key=lambda part: parts[part]), in_flight, waves)


def compile_row(row: Row, gpu: Gpu) -> list[Compiled]:
    """The kernels that the row launches on this GPU, in order."""
    from batchgen_kernels import cross_compile

    with cross_compile.target("cuda", gpu.arch, gpu.processors), cross_compile.capture_launches() as launches:
        row.make("meta").run()
        return [compiled(launch, cross_compile.report(launch.kernel)) for launch in launches]


def compiled(launch: Any, r: dict[str, Any]) -> Compiled:
    threads = 32 * r["warps"]
    if r["loop"] and r["loop"]["loads"]:
        ahead = r["async_waits"] and min(r["async_waits"]) > 0  # tiles are copied while another one computes
        in_flight = r["loop"]["load_bytes"] * threads * (max(1, r["stages"] - 1) if ahead else 1)
    else:  # straight-line code issues all its loads, then waits
        in_flight = r["load_bytes"] * threads
    small = any(kind in ("HMMA", "IMMA", "QMMA") for kind in r["mma"])
    return Compiled(launch.kernel.metadata.name, math.prod(launch.grid), max(1, r["occupancy"]), in_flight, small)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m batchgen.bench.predict", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=list(GPUS), help=",".join(GPUS))
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="only these, by the names of the table")
    parser.add_argument("--short", action="store_true", help="the few rows of make gpu-check")
    options = parser.parse_args(arguments)
    if unknown := set(options.gpus) - set(GPUS):
        parser.error(f"unknown GPU {', '.join(sorted(unknown))}; there are {', '.join(GPUS)}")
    os.environ["TRITON_INTERPRET"] = "0"  # before the first import of triton: nothing can be compiled in the interpreter
    from batchgen.bench.kernel_table import ops_without_rows, rows

    table, missing = rows(options.short)
    table = [row for row in table if not options.kernels or row.kernel in options.kernels]
    gpus = [GPUS[name] for name in options.gpus]
    print("PREDICTED from bytes, FLOPs and occupancy, not measured on any GPU:")
    for gpu in gpus:
        print(
            f"  {gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s x {BANDWIDTH_SHARE}, "
            f"{gpu.matrix_flops / 1e12:.0f} TFLOP/s x {MATRIX_SHARE}, {gpu.processors} processors"
        )
    print(f"  {'kernel':18}{'shape':32}{'MB':>8}{'GFLOP':>8}" + "".join(f"{f'{name}, us':>19}" for name in options.gpus))
    results = []
    of_arch: dict[tuple[Row, int, int], list[Compiled]] = {}
    for row in table:
        cells = []
        for gpu in gpus:
            key = (row, gpu.arch, gpu.processors)
            if key not in of_arch:
                of_arch[key] = compile_row(row, gpu)
            p = predict(row.bytes, row.flops, of_arch[key], gpu)
            cells.append(f"{1e6 * p.seconds:>10.1f} {p.bound:<8}")
            results.append({"kernel": row.kernel, "shape": row.shape, "gpu": gpu.name, **p._asdict()})
        print(f"  {row.kernel:18}{row.shape:32}{row.bytes / 1e6:>8.1f}{row.flops / 1e9:>8.1f}" + "".join(cells), flush=True)
    if missing:
        print(f"  not in this package: {', '.join(missing)}")
    if without := ops_without_rows():
        print(f"  without a row: {', '.join(without)}")
    print(json.dumps({"benchmark": "batchgen.bench.predict", "measured": False, "rows": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
