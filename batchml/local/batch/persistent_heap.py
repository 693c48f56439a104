"""A persistent heap: push and pop return new heaps and leave the old one unchanged.

A leftist heap biased by weight (Cho and Sahni 1998; Okasaki, "Purely Functional Data Structures",
3.1). Merging walks the right spines only, which are never longer than log2(n + 1), so no operation
recurses deeply. A heap is None (empty) or (size, key, item, left, right); keys must be ordered and
unique.
"""

from collections.abc import Iterable, Iterator
from typing import Any

Heap = tuple[int, Any, Any, Any, Any] | None


def push(heap: Heap, key: Any, item: Any) -> Heap:
    """Return `heap` with `item` under `key`. O(log n)."""
    return merge(heap, (1, key, item, None, None))


def pop(heap: Heap) -> Heap:
    """Return `heap` without its least key. O(log n)."""
    return None if heap is None else merge(heap[3], heap[4])


def from_items(entries: Iterable[tuple[Any, Any]]) -> Heap:
    """Build a heap of these keys and items: in order, each the only child of the one before it.
    O(n log n), and O(n) for keys in order.
    """
    heap: Heap = None
    for count, (key, item) in enumerate(sorted(entries, key=_key, reverse=True), 1):
        heap = (count, key, item, heap, None)
    return heap


def _key(entry: tuple[Any, Any]) -> Any:
    return entry[0]


def size(heap: Heap) -> int:
    return 0 if heap is None else heap[0]


def items(heap: Heap) -> Iterator[tuple[Any, Any]]:
    """All keys and items, in no particular order."""
    todo = [heap]
    while todo:
        node = todo.pop()
        if node is not None:
            yield node[1], node[2]
            todo += node[3:]


def merge(one: Heap, other: Heap) -> Heap:
    """Return a heap with the keys of both. O(log n)."""
    if one is None:
        return other
    if other is None:
        return one
    if other[1] < one[1]:
        one, other = other, one
    _, key, item, left, right = one
    right = merge(right, other)
    if size(left) < size(right):
        left, right = right, left
    return (size(left) + size(right) + 1, key, item, left, right)
