"""A random order of any number of items, computed without a list."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def shuffled(place: int, count: int, key: int) -> int:
    """Map `place` to another number of range(count): a bijection for each key.

    It is a Feistel network of four rounds on the next power of four, applied until the result is
    below `count`.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(4):
            left, right = right, left ^ (_mix(right + (turn << half), key) & low)
        place = left << half | right
        if place < count:
            return place


def _mix(value: int, key: int) -> int:
    """Mix bits by the finaliser of SplitMix64 (Steele et al. 2014)."""
    value = (value + (key + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
