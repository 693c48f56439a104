"""`batchml.local.batch.persistent_heap`: a priority queue that never changes in place."""

import gc
import math

from hypothesis import given
from hypothesis import strategies as st

from batchml.local.batch import persistent_heap
from batchml.local.batch.persistent_heap import Heap


def drained(line: Heap) -> list[tuple[int, int]]:
    found = []
    while line is not None:
        found.append((line[1], line[2]))
        line = persistent_heap.pop(line)
    return found


def built(keys: list[int]) -> Heap:
    line: Heap = None
    for key in keys:
        line = persistent_heap.push(line, key, -key)
    return line


@given(st.lists(st.integers(), unique=True))
def test_keys_come_out_in_order_with_their_items(keys: list[int]) -> None:
    assert drained(built(keys)) == [(key, -key) for key in sorted(keys)]


@given(st.lists(st.integers(), unique=True))
def test_all_that_is_in_it_can_be_looked_at(keys: list[int]) -> None:
    assert sorted(persistent_heap.items(built(keys))) == [(key, -key) for key in sorted(keys)]


@given(st.lists(st.integers(), unique=True, min_size=1), st.integers())
def test_pushing_and_popping_leave_the_old_heap_as_it_was(keys: list[int], more: int) -> None:
    line = built(keys)
    persistent_heap.pop(line)
    persistent_heap.push(line, more, 0)
    assert [key for key, _ in drained(line)] == sorted(keys)


@given(st.lists(st.tuples(st.booleans(), st.integers()), max_size=60))
def test_any_mix_of_pushes_and_pops_agrees_with_a_sorted_list(
    steps: list[tuple[bool, int]],
) -> None:
    line: Heap = None
    model: list[tuple[int, int]] = []
    for place, (is_push, key) in enumerate(steps):
        if is_push:
            line = persistent_heap.push(line, (key, place), place)
            model = sorted([*model, (key, place)])
        else:
            line, model = persistent_heap.pop(line), model[1:]
        assert (None if line is None else line[1]) == (model[0] if model else None)


def test_popping_an_empty_heap_gives_an_empty_heap() -> None:
    assert persistent_heap.pop(None) is None


def test_right_spines_stay_short_however_many_keys_there_are() -> None:
    for keys in (list(range(5000)), list(range(5000, 0, -1))):
        line = built(keys)
        length, node = 0, line
        while node is not None:
            length, node = length + 1, node[4]
        assert length <= math.log2(len(keys) + 1)
        assert len(drained(line)) == len(keys)


@given(st.lists(st.integers(), unique=True))
def test_a_heap_knows_how_much_it_holds(keys: list[int]) -> None:
    line = persistent_heap.from_items((key, -key) for key in keys)
    assert persistent_heap.size(line) == len(keys)
    assert persistent_heap.size(persistent_heap.pop(line)) == max(0, len(keys) - 1)


@given(st.lists(st.integers(), unique=True), st.integers(0, 50))
def test_heaps_of_items_are_merged(keys: list[int], most: int) -> None:
    parts = (keys[:most], keys[most:])
    heaps = [persistent_heap.from_items((key, -key) for key in part) for part in parts]
    assert drained(persistent_heap.merge(*heaps)) == [(key, -key) for key in sorted(keys)]


def test_a_heap_of_very_many_items_is_made_changed_and_freed() -> None:
    """Each item is the only child of the one before, and nothing recurses as deeply."""
    heap = persistent_heap.from_items((key, key) for key in range(300_000))
    heap = persistent_heap.push(persistent_heap.pop(heap), -1, -1)
    assert heap is not None and (heap[1], persistent_heap.size(heap)) == (-1, 300_000)
    assert sum(1 for _ in persistent_heap.items(heap)) == 300_000
    gc.collect()
    del heap
