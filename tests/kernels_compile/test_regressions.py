"""The gates themselves: what makes a kernel slow without making it wrong turns one of them red."""

import sys
from pathlib import Path

import cross_compile
import pytest
import torch
from batchgen_kernels import launch, merge_states, paged_decode, paged_prefill, paged_tile
from batchgen_kernels.cases.attention import paged_inputs
from gates import BF16, TARGETS, assert_copies_in_flight, assert_one_variant, assert_sound, assert_wide_loop

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from mutants import make_mutate


def decode(module=paged_decode, target="sm_90", pad=0, head_dim=128):
    """Report of a decode in blocks of 64; pad: elements between the tokens of the cache that belong to nobody."""
    inputs = paged_inputs([1] * 2, [300] * 2, 8, 2, head_dim, 64, BF16, poison=False)
    metadata, query, key_cache, value_cache, scale = inputs
    if pad:  # both caches within one tensor, so that they keep equal strides
        shape = (*key_cache.shape[:2], key_cache.shape[2] * head_dim + pad)
        wide = torch.zeros(2, *shape, dtype=BF16)[..., :-pad]
        key_cache, value_cache = wide.unflatten(-1, key_cache.shape[2:])
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start, metadata.decode_requests)
    with cross_compile.target(*TARGETS[target]), cross_compile.capture_launches() as launches:
        module.paged_decode(query, key_cache, value_cache, *index, 300, scale, torch.empty_like(query), num_splits=1)
        (launched,) = launches
        return cross_compile.report(launched.kernel)


def prefill(target, head_dim, tile):
    inputs = paged_inputs([70] * 2, [300] * 2, 8, 2, head_dim, 16, BF16, poison=False)
    metadata, query, key_cache, value_cache, scale = inputs
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start, metadata.prefill_requests)
    with cross_compile.target(*TARGETS[target]), cross_compile.capture_launches() as launches:
        paged_prefill.paged_prefill(
            query, key_cache, value_cache, *index, 70, scale, torch.empty_like(query), launch=launch.Launch(*tile)
        )
        return cross_compile.report(launches[0].kernel)


@pytest.fixture
def mutate(monkeypatch, tmp_path):
    """As in tests/kernels: mutate("paged_tile", old, new, entry="paged_decode") -> paged_decode with that in paged_tile."""
    return make_mutate(monkeypatch, tmp_path)


def test_what_is_planted_below_is_sound_as_it_is():
    r = decode()
    assert_sound(r)
    assert_copies_in_flight(r, launch.decode_launch("sm_90", 128, BF16))


@pytest.mark.parametrize(
    ("target", "head_dim", "tile"),
    [("sm_80", 128, (128, 64, 4, 3)), ("sm_90", 256, (128, 32, 4, 3))],
)
def test_a_tile_that_spills(target, head_dim, tile):
    r = prefill(target, head_dim, tile)
    assert r["loop"]["spills"] > 0  # and it is seen where it costs
    with pytest.raises(AssertionError):
        assert_sound(r)


def test_a_tile_that_does_not_fit_shared_memory():
    r = prefill("sm_90", 256, (128, 64, 8, 3))
    assert r["shared"] > r["shared_limit"] and r["occupancy"] == 0
    with pytest.raises(AssertionError):
        assert_sound(r | {"spills": 0})


def test_a_cache_whose_strides_are_no_multiple_of_16_elements():
    """8 would be enough for 128 bits, but what the compiler is told of an integer is whether 16 divides it."""
    r = decode(pad=8)
    assert r["loop"]["wide_loads"] == 0 and not any(r["async_waits"])
    with pytest.raises(AssertionError):
        assert_wide_loop(r)
    with pytest.raises(AssertionError):
        assert_copies_in_flight(r, launch.decode_launch("sm_90", 128, BF16))


def test_a_block_id_loaded_in_the_trip_that_needs_it(mutate):
    text = Path(paged_tile.__file__).read_text()
    begin = text.index("        next_ids = tile_block_ids(table_row, first_key + BLOCK_N,")
    carried = "        block_ids = next_ids\n"
    trip = text[begin : text.index(carried, begin) + len(carried)]
    same = trip.replace("next_ids =", "block_ids =").replace("first_key + BLOCK_N", "first_key")
    r = decode(mutate("paged_tile", trip, same.replace(carried, ""), entry="paged_decode"))
    assert r["async_waits"] and 0 in r["async_waits"]  # copies, but none in flight
    with pytest.raises(AssertionError):
        assert_copies_in_flight(r, launch.decode_launch("sm_90", 128, BF16))


def test_an_integer_of_the_batch_that_is_specialised(mutate):
    specialised = mutate("merge_states", '@triton.jit(do_not_specialize=["num_rows"])', "@triton.jit")

    def variants_of(module):
        with cross_compile.target("cuda", 90), cross_compile.count_variants() as variants:
            with cross_compile.capture_launches():
                for n in (1, 2, 16, 17, 32):
                    state = torch.empty(n, 1, 64, dtype=BF16), torch.empty(n, 1)
                    module.merge_states_triton(*state, *state)
            return variants

    assert_one_variant(variants_of(merge_states))
    variants = variants_of(specialised)
    assert len(variants["merge_states_kernel"]) == 3  # 1, multiples of 16, and the rest
    with pytest.raises(AssertionError):
        assert_one_variant(variants)


# ---- the reading of machine code, on texts whose answers are plain -----------------------------------------------------

SASS = """
.text.kernel:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R1, desc[UR4][R2.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0060*/                   STL [R1], R2 ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/               @P1 BRA `(.L_x_0) ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
"""


def test_the_inner_loop_is_what_the_innermost_backward_branch_encloses():
    ops, loops = cross_compile._instructions(SASS, cross_compile.SASS, cross_compile.SASS_LABEL, cross_compile.SASS_BRANCH)
    assert len(ops) == 11 and len(loops) == 1
    assert cross_compile._count_sass(loops[0]) == {
        "mma": {"HMMA": 2}, "spills": 1, "loads": 2, "wide_loads": 1, "narrow_loads": 1, "widest_load": 16,
        "load_bytes": 18, "wide_stores": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "arch", "blocks", "limit"),
    [
        (255, 0, 8, 90, 1, "registers"),  # 256 registers x 32 x 8 is all there are
        (168, 0, 4, 90, 3, "registers"),  # 65536 / (168 x 128) = 3.05
        (24, 0, 4, 90, 16, "warps"),  # 64 warps
        (32, 104448, 4, 90, 2, "shared"),  # 2 x (102 + 1) KiB of 228; three would be 309
        (32, 81920, 4, 80, 2, "shared"),  # 2 x 81 KiB of 164
        (16, 0, 1, 80, 32, "blocks"),
        (64, 262144, 4, 90, 0, "shared"),
    ],
)
def test_occupancy_by_hand(registers, shared, warps, arch, blocks, limit):
    assert cross_compile.occupancy(registers, shared, warps, arch) == (blocks, limit)
