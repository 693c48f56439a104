"""The colours of states: readable on their card, and told apart also by the colour-blind.

Sources: WCAG 2.2 (contrast ratio); Machado, Oliveira, Fernandes 2009, "A physiologically-based
model for simulation of color vision deficiency", the matrices for severity 1.0; CIE 1976 (colour
difference).
"""

import itertools
import re
from pathlib import Path

import pytest

from batchml.dashboard import layout

Colour = tuple[float, float, float]

STATIC = Path(layout.__file__).parent / "static"
STATES = ("running", "succeeded", "failed", "cancelled", "starting", "waiting")
TRIALS = ("DONE", "RUNNING", "FAILED", "KILLED", "WAITING", "PAUSED", "PRUNED", "DIVERGED", "LOST")
CURVES = tuple(f"c{number}" for number in range(1, 9))
SIGHTS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                   (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                     (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                   (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


def palette(theme: str) -> dict[str, Colour]:
    """The variables of a theme, `light` or `dark`."""
    found: dict[str, str] = {}
    for name in ("page.css", "sweep.css"):
        text = (STATIC / name).read_text()
        for selector, block in re.findall(r"(:root[^{]*)\{([^}]*)\}", text):
            if selector.strip() == ":root" or (theme == "dark" and "data-theme=dark" in selector):
                found |= dict(re.findall(r"--([\w-]+): *(#[0-9a-fA-F]{3,6})\b", block))
    return {name: _read(value) for name, value in found.items()}


def _read(value: str) -> Colour:
    digits = value[1:] if len(value) == 7 else "".join(2 * each for each in value[1:])
    red, green, blue = (_linear(int(digits[at : at + 2], 16) / 255) for at in (0, 2, 4))
    return red, green, blue


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _light(colour: Colour) -> float:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((_light(one), _light(other)))
    return (high + 0.05) / (low + 0.05)


def difference(one: Colour, other: Colour, sight: str) -> float:
    """CIE76: below 10 two colours are not told apart, below 20 it is hard."""
    pairs = zip(_lab(_seen(one, sight)), _lab(_seen(other, sight)), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def _seen(colour: Colour, sight: str) -> Colour:
    red, green, blue = (
        min(1.0, max(0.0, sum(part * each for part, each in zip(row, colour, strict=True))))
        for row in SIGHTS[sight]
    )
    return red, green, blue


def _lab(colour: Colour) -> Colour:
    rows = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750),
            (0.0193339, 0.1191920, 0.9503041))  # fmt: skip
    white = (0.95047, 1.0, 1.08883)
    x, y, z = (
        _cube(sum(part * each for part, each in zip(row, colour, strict=True)) / of)
        for row, of in zip(rows, white, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _cube(part: float) -> float:
    return part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_states_are_readable_and_told_apart_with_every_sight(theme: str) -> None:
    known = palette(theme)
    for name in STATES:
        assert contrast(known[name], known["card"]) >= 4.5, name
    for sight, (one, other) in itertools.product(SIGHTS, itertools.combinations(STATES, 2)):
        assert difference(known[one], known[other], sight) >= 20, (sight, one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bars_of_trials_and_curves_stand_out_and_are_told_apart(theme: str) -> None:
    known = palette(theme)
    for name in TRIALS:
        assert contrast(known[name], known["card"]) >= 3, name
    for name in (*CURVES, "DIVERGED", "LOST"):  # of texts, too
        assert contrast(known[name], known["card"]) >= 4.5, name
    for state, trial in {"succeeded": "DONE", "running": "RUNNING", "failed": "FAILED"}.items():
        assert known[state] == known[trial], "one state has one colour"
    for group in (TRIALS, CURVES):
        for sight, (one, other) in itertools.product(SIGHTS, itertools.combinations(group, 2)):
            assert difference(known[one], known[other], sight) >= 15, (sight, one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_are_readable_on_every_ground(theme: str) -> None:
    known = palette(theme)
    for name, ground in itertools.product(
        ("fore", "dim", "link", "warn"), ("card", "back", "shade")
    ):
        assert contrast(known[name], known[ground]) >= 4.5, (name, ground)
    assert contrast(known["edge"], known["card"]) >= 3, "borders of fields"
