"""What the compiler can be held to, for every target. Limits, not values: register counts differ between triton versions."""

import torch
import triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TARGETS = {"sm_80": ("cuda", 80), "sm_90": ("cuda", 90), "sm_100": ("cuda", 100), "gfx942": ("hip", "gfx942")}
ELSEWHERE = ("cuda", 86)  # an architecture without rows of its own
# the matrix instruction of a tile of 64 rows and more, and of a smaller one
LARGE_MMA = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "MFMA", "sm_86": "HMMA"}
SMALL_MMA = {"sm_80": "HMMA", "sm_90": "HMMA", "sm_100": "HMMA", "gfx942": "MFMA", "sm_86": "HMMA"}


PINNED = triton.__version__ == "3.6.0"  # what GPU machines have; see constraints.txt


def assert_sound(r, spills=0, outside_loop=0, wide=True):
    """spills: instructions that may spill anywhere; outside_loop: more that may, but not in the inner loop; wide: whether
    tiles are large enough for each thread to load 128 bits."""
    in_loop = r["loop"]["spills"] if r["loop"] else 0
    assert in_loop <= spills and r["spills"] <= spills + outside_loop, r
    assert r["shared"] <= r["shared_limit"], r
    assert r["occupancy"] != 0, r  # None on AMD
    assert r["wide_loads"] > 0 or not wide, r  # 128 bits; what else is loaded are block ids, lengths and offsets


def assert_copies_in_flight(r, launched):
    """Copies of later tiles are under way while a tile computes: in each loop, for every wait, unless it has two stages.

    And they are wide: in the inner loop itself, not only before it, where tiles are loaded ahead.
    """
    assert r["async_waits"], r
    if launched.num_stages > 2:
        assert min(r["async_waits"]) > 0, r
    assert_wide_loop(r)


def assert_wide_loop(r):
    """The inner loop loads nothing element by element: its data come 128 bits at a time, or 64 where a thread's part of a
    float8 tile is no larger; block ids and scales are 32 bits. (Of NVIDIA; a float32 is as wide as a block id.)"""
    loop = r["loop"]
    assert loop is not None and loop["narrow_loads"] == 0 and loop["widest_load"] >= 8, r


def assert_one_variant(variants, **allowed):
    """Of each kernel, unless so many are `allowed` by name: a further one is seconds of compilation during a job."""
    assert variants
    assert {name: len(keys) for name, keys in variants.items()} == {name: allowed.get(name, 1) for name in variants}
