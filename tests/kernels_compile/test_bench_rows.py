"""Launchers take every row of the kernel table, at its real size, without memory: so a GPU does not meet it unprepared."""

import cross_compile
import pytest

from batchgen.bench.kernel_table import rows


@pytest.mark.parametrize("row", rows()[0], ids=lambda row: f"{row.kernel} {row.shape}")
def test_row(row):
    with (
        cross_compile.target("cuda", 90, processors=132),
        cross_compile.count_variants() as variants,
        cross_compile.capture_launches() as launches,
    ):
        row.make("meta").run()
    assert launches and variants
    assert all(0 < size < (2**31, 2**16, 2**16)[axis] for launch in launches for axis, size in enumerate(launch.grid))
