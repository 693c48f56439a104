"""What axe-core finds on a page: the rules of WCAG 2.2 AA, and its best practices.

axe-core (Deque Systems, MPL-2.0) is test data: `tests/support/axe/`, no part of batchml.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.support.browser import Page

_AXE = Path(__file__).parent / "axe" / "axe.min.js"
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_RUN = """axe.run(document, %s).then(found => {
    const told = rule => rule.nodes.map(node => `${rule.id} (${rule.impact}): ${
        node.target.join(" ")}: ${node.html.slice(0, 160)}: ${
        [...node.any, ...node.all, ...node.none].map(each => each.message).join("; ")}`);
    const unsure = found.incomplete.find(rule => rule.id === "color-contrast");
    return [found.violations.flatMap(told), unsure ? unsure.nodes.map(node => node.target[0]) : []];
})"""
# The contrast of an element's text: WCAG 2.2, "contrast ratio". A text in a bar has its colour as
# background, another one the background of what it lies in.
_CONTRAST = """(selectors => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const read = colour => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].map(each => each / 255);
    };
    const over = (front, back, opacity = 1) => [0, 1, 2].map(
        i => front[i] * front[3] * opacity + back[i] * (1 - front[3] * opacity));
    const light = colour => {
        const [r, g, b] = colour.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const poor = [];
    for (const selector of selectors) {
        const element = document.querySelector(selector);
        if (!element?.checkVisibility()) continue;
        const style = getComputedStyle(element);
        let back = [1, 1, 1], opacity = 1;
        const above = [];
        for (let at = element; at; at = at.parentElement) above.unshift(at);
        for (const each of above) {
            back = over(read(getComputedStyle(each).backgroundColor), back);
            opacity *= Number(getComputedStyle(each).opacity);
        }
        const bar = element.closest(".bar-of")?.querySelector("rect");
        if (bar) back = read(getComputedStyle(bar).fill).slice(0, 3);
        const isSvg = element instanceof SVGElement;
        const front = over(read(isSvg ? style.fill : style.color), back, opacity);
        const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
        const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        if (ratio < (isLarge ? 3 : 4.5))
            poor.push(`${ratio.toFixed(2)}: ${selector}: ${element.outerHTML.slice(0, 160)}`);
    }
    return poor;
})(%s)"""


class Findings(Struct, frozen=True):
    """`violations`: a text for each element that breaks a rule. `unsure`: selectors of texts whose
    contrast axe cannot tell, because they are in a picture, or another element lies over them."""

    violations: list[str]
    unsure: list[str]


_CHOICES: dict[str, Any] = {
    "all": {"runOnly": _TAGS},
    "contrast": {"runOnly": {"type": "rule", "values": ["color-contrast"]}},
    "all but contrast": {"runOnly": _TAGS, "rules": {"color-contrast": {"enabled": False}}},
}


def inspect(page: Page, rules: str = "all") -> Findings:
    """Run axe on the page as it is now: `all` rules, `contrast`, or `all but contrast`."""
    if not page.evaluate("typeof axe !== 'undefined'"):
        page.evaluate(f"{_AXE.read_text()}; true")
    # For what passes axe would make a selector of each element, which takes longer than to look.
    options = {**_CHOICES[rules], "resultTypes": ["violations", "incomplete"]}
    found: list[Any] = page.evaluate(_RUN % json.dumps(options))
    return Findings(*found)


def poor_contrasts(page: Page, found: Findings) -> list[str]:
    """The texts that axe left open and whose contrast is too low."""
    poor: list[str] = page.evaluate(_CONTRAST % json.dumps(found.unsure))
    return poor
