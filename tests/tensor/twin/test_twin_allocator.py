"""The replica of the CUDA caching allocator against examples computed by hand, and invariants on random sequences."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ext.twin.allocator import CachingAllocator
from trl_ext.twin.pools import KIB, MIB
from trl_ext.twin.trace import Trace, replay

POLICIES = pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])


def allocator_with(*sizes, expandable=False, cap_bytes=None):
    """Allocations by their place."""
    allocator = CachingAllocator(expandable, cap_bytes)
    for key, num_bytes in enumerate(sizes):
        allocator.allocate(key, num_bytes)
    return allocator


def addresses(allocator):
    """Of live blocks: by key (pool, first byte, byte behind the last)."""
    return {key: (id(pool), block.address, block.end) for key, (pool, block) in allocator._live.items()}


# Segments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "native", "expandable"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB, 12 * MIB, 20 * MIB),
        (21 * MIB, 22 * MIB, 40 * MIB),
    ],
)
def test_what_a_first_request_reserves(num_bytes, native, expandable):
    assert allocator_with(num_bytes).reserved == native
    assert allocator_with(num_bytes, expandable=True).reserved == expandable


@POLICIES
def test_requests_are_rounded_to_512_bytes(expandable):
    assert allocator_with(1, 512, 513, expandable=expandable).allocated == 4 * 512


@POLICIES
def test_small_and_large_requests_share_no_memory(expandable):
    assert allocator_with(MIB, MIB + 1, expandable=expandable).reserved == 22 * MIB


@POLICIES
def test_a_second_request_is_cut_from_what_the_first_left(expandable):
    assert allocator_with(2 * MIB, 18 * MIB, expandable=expandable).reserved == 20 * MIB


def test_a_large_native_block_keeps_a_remainder_of_a_mebibyte():
    # 11 MiB of a segment of 12; of 20 MiB all but 1 MiB and 512 bytes.
    assert allocator_with(11 * MIB).allocated == 12 * MIB
    allocator = allocator_with(20 * MIB)
    allocator.free(0)
    allocator.allocate(1, 19 * MIB)
    assert allocator.allocated == 20 * MIB
    allocator.free(1)
    allocator.allocate(2, 19 * MIB - 512)
    assert allocator.allocated == 19 * MIB - 512


@pytest.mark.parametrize("num_bytes", [2 * MIB - 512, 11 * MIB])
def test_an_expandable_block_keeps_none(num_bytes):
    assert allocator_with(num_bytes, expandable=True).allocated == num_bytes


def test_the_smallest_block_that_is_large_enough_is_taken():
    # Segments of 40, 30 and 20 MiB, all free: 19.5 MiB leave too little of the last one to cut off.
    allocator = allocator_with(40 * MIB, 30 * MIB, 20 * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate("a", 19 * MIB + 512 * KIB)
    assert allocator.allocated == 20 * MIB


def test_of_two_equal_blocks_the_one_at_the_lower_address_is_taken():
    allocator = allocator_with(20 * MIB, 20 * MIB)
    where = addresses(allocator)[0]
    allocator.free(1)
    allocator.free(0)
    allocator.allocate("a", 20 * MIB)
    assert addresses(allocator)["a"] == where


@POLICIES
def test_free_neighbours_join_whatever_the_order(expandable):
    allocator = allocator_with(*[5 * MIB] * 4, expandable=expandable)
    for key in (0, 2, 1, 3):
        allocator.free(key)
    allocator.allocate("a", 20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_free_space_in_two_segments_does_not_join():
    allocator = allocator_with(20 * MIB, 20 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate("a", 40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_an_arena_grows_at_its_free_end_where_a_segment_is_added():
    sizes = (20 * MIB, 40 * MIB, 60 * MIB)
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        for key, num_bytes in enumerate(sizes):
            allocator.allocate(key, num_bytes)
            allocator.free(key)
        reserved[expandable] = allocator.reserved
    assert reserved == {False: 120 * MIB, True: 60 * MIB}


def test_an_arena_spares_its_end_if_a_larger_block_fits():
    # Free: 10 MiB at the end, which can grow, and 20 MiB between two blocks.
    allocator = allocator_with(20 * MIB, 20 * MIB, 20 * MIB, 10 * MIB, expandable=True)
    allocator.free(1)
    allocator.allocate("a", 10 * MIB)
    assert addresses(allocator)["a"][1] == 20 * MIB


# The cache ----------------------------------------------------------------------------------------------------------


def test_only_segments_that_are_free_as_a_whole_go_back():
    allocator = allocator_with(2 * MIB, 2 * MIB, 30 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB


def test_free_pages_go_back_between_blocks_in_use():
    # Pages of 20 MiB, blocks of 30: the one that is free has the second half of page 1 and all of page 2.
    allocator = allocator_with(30 * MIB, 30 * MIB, 30 * MIB, expandable=True)
    assert allocator.reserved == 100 * MIB
    allocator.free(1)
    allocator.empty_cache()
    assert allocator.reserved == 80 * MIB


def test_holes_are_filled_before_the_end_grows():
    allocator = allocator_with(*[20 * MIB] * 3, expandable=True)
    allocator.free(1)
    allocator.empty_cache()
    allocator.allocate("a", 20 * MIB)
    assert addresses(allocator)["a"][1] == 20 * MIB
    assert allocator.reserved == 60 * MIB


def test_a_request_over_the_cap_empties_the_cache_and_is_tried_again():
    allocator = allocator_with(20 * MIB, 30 * MIB, cap_bytes=60 * MIB)
    allocator.free(0)
    allocator.allocate("a", 22 * MIB)
    assert (allocator.num_retries, allocator.reserved, allocator.peak_reserved) == (1, 52 * MIB, 52 * MIB)


@POLICIES
def test_a_request_that_an_empty_cache_does_not_help_is_an_error(expandable):
    allocator = allocator_with(40 * MIB, expandable=expandable, cap_bytes=60 * MIB)
    with pytest.raises(MemoryError, match="cap of"):
        allocator.allocate("a", 22 * MIB)
    assert allocator.num_retries == 1
    assert allocator.reserved == allocator.allocated == 40 * MIB


def test_a_tenant_keeps_a_native_segment_where_an_arena_grows_behind_it():
    # 60 MiB come and go, and each time 40 stay in their place.
    def after_four(expandable):
        allocator = CachingAllocator(expandable, 270 * MIB)
        for key in range(4):
            allocator.allocate("large", 60 * MIB)
            allocator.free("large")
            allocator.allocate(key, 40 * MIB)
        return allocator

    native, arena = after_four(expandable=False), after_four(expandable=True)
    assert (native.reserved, arena.reserved) == (240 * MIB, 180 * MIB)
    arena.allocate("larger", 100 * MIB)
    with pytest.raises(MemoryError):
        native.allocate("larger", 100 * MIB)


# Any sequence -------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 64).map(lambda mib: mib * MIB), st.integers(1, 70 * MIB))
STEPS = st.lists(st.one_of(SIZES, st.integers(-50, -1), st.just(0)), max_size=120)  # free one of the live; 0 empties


def played(steps, expandable, check=lambda allocator: None):
    allocator, requested = CachingAllocator(expandable), {}
    for key, step in enumerate(steps):
        if step > 0:
            allocator.allocate(key, step)
            requested[key] = step
        elif step == 0:
            allocator.empty_cache()
        elif requested:
            gone = list(requested)[step % len(requested)]
            allocator.free(gone)
            del requested[gone]
        check(allocator)
    return allocator, requested


def has_no_overlap(allocator):
    ranges = sorted(addresses(allocator).values())
    return all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(ranges))


@POLICIES
@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_no_two_live_blocks_overlap_and_all_of_them_are_reserved(expandable, steps):
    def check(allocator):
        assert has_no_overlap(allocator)
        assert allocator.allocated <= allocator.reserved <= allocator.peak_reserved

    allocator, requested = played(steps, expandable, check)
    assert sum(requested.values()) <= allocator.allocated


@POLICIES
@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_nothing_is_reserved_when_all_is_free_and_the_cache_is_emptied(expandable, steps):
    allocator, requested = played(steps, expandable)
    for key in requested:
        allocator.free(key)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_an_emptied_arena_holds_no_page_without_a_live_block(steps):
    allocator, _ = played([*steps, 0], expandable=True)
    pages = set()
    for pool, block in allocator._live.values():
        pages |= {(id(pool), page) for page in range(block.address // pool.unit, -(-block.end // pool.unit))}
    units = {id(pool): pool.unit for pool in (allocator._small, allocator._large)}
    assert allocator.reserved == sum(units[pool] for pool, _ in pages)


@POLICIES
@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_a_cap_at_the_peak_changes_nothing(expandable, steps):
    free, _ = played(steps, expandable)
    trace = traced(steps)
    assert replay(trace, expandable, free.peak_reserved) == replay(trace, expandable)


# Traces -------------------------------------------------------------------------------------------------------------


def traced(steps):
    trace, live = Trace(), {}
    trace.begin("update")
    for step in steps:
        if step > 0:
            live[trace.allocate(step)] = step
        elif step == 0:
            trace.empty_cache()
        elif live:
            gone = list(live)[step % len(live)]
            trace.free(gone)
            del live[gone]
    return trace


@POLICIES
@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_a_trace_is_replayed_as_it_was_recorded_also_from_json(expandable, steps):
    allocator, _ = played(steps, expandable)
    trace = traced(steps)
    assert replay(trace, expandable).reserved_bytes.get("update", 0) == allocator.peak_reserved
    assert Trace.unpacked(trace.packed()) == trace


def test_a_phase_begins_with_what_the_one_before_it_has_reserved():
    trace = Trace()
    trace.begin("score")
    trace.free(trace.allocate(40 * MIB))
    trace.begin("update")
    trace.allocate(MIB)
    trace.empty_cache()
    trace.begin("step")
    trace.allocate(4 * MIB)
    reserved = replay(trace, expandable=False).reserved_bytes
    assert reserved == {"load": 0, "score": 40 * MIB, "update": 42 * MIB, "step": 22 * MIB}


def test_what_is_freed_in_host_memory_never_reaches_the_card():
    trace = Trace()
    gone, kept = trace.allocate(200 * MIB), trace.allocate(30 * MIB)
    trace.free(gone)
    trace.land()
    trace.begin("update")
    trace.free(kept)
    trace.allocate(30 * MIB)
    assert replay(trace, expandable=False).peak_bytes == 30 * MIB


def test_the_cap_holds_from_the_end_of_loading_on():
    trace = Trace()
    trace.free(trace.allocate(100 * MIB))
    trace.begin("update")
    trace.allocate(40 * MIB)
    found = replay(trace, expandable=False, cap_bytes=60 * MIB)
    assert found.reserved_bytes == {"load": 100 * MIB, "update": 40 * MIB}
    assert not found.failed_in


def test_a_replay_says_which_phase_does_not_fit():
    trace = Trace()
    trace.begin("update")
    trace.allocate(40 * MIB)
    trace.begin("step")
    trace.allocate(40 * MIB)
    found = replay(trace, expandable=True, cap_bytes=60 * MIB)
    assert found.failed_in == "step"
    assert found.reserved_bytes["update"] == 40 * MIB
