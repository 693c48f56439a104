"""The report of all checks: as JSON, as a table, and which of them failed. Pure."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.checks import NEEDS, Check

DONE, NOT_DONE, FAILED, TIMED_OUT = "done", "not done", "failed", "out of time"
WIDTH = 100  # characters of a line


class Result(NamedTuple):
    """What became of a check."""

    check: Check
    state: str  # DONE, NOT_DONE, FAILED or TIMED_OUT
    reason: str = ""
    seconds: float = 0.0
    figures: Sequence[Mapping[str, Any]] = ()  # name, value, unit, note
    findings: Sequence[str] = ()
    details: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.check.name,
            "title": self.check.title,
            "state": self.state,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "limit": self.check.seconds,
            "figures": [dict(each) for each in self.figures],
            "findings": list(self.findings),
            "details": dict(self.details),
        }


def read_record(lines: Iterable[str]) -> tuple[str | None, dict[str, Any]]:
    """Read the record of a check's process: its last word, None if it never came, and its reports
    as the fields of a Result. A line that was cut by the process's end is left out.
    """
    end, reason = None, ""
    figures: list[Any] = []
    findings: list[str] = []
    details: dict[str, Any] = {}
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if "figure" in found:
            figures.append(found["figure"])
        if "finding" in found:
            findings.append(found["finding"])
        details.update(found.get("detail", {}))
        if "end" in found:
            end, reason = found["end"], found["reason"]
    fields = {"reason": reason, "figures": figures, "findings": findings, "details": details}
    return end, fields


def unmet(check: Check, lacks: Mapping[str, str], device: str) -> str:
    """Why the check cannot be done on this machine; empty if it can. `lacks` has a reason for each
    need that is not met.
    """
    if device == "cpu" and not check.on_cpu:
        return "has no part for a CPU"
    needs = [need for need in check.needs if not (need == "gpu" and device == "cpu")]
    return "; ".join(f"needs {NEEDS[need]}: {lacks[need]}" for need in needs if need in lacks)


def failures(results: Iterable[Result]) -> list[str]:
    """The names of the checks that failed or ran out of time."""
    return [each.check.name for each in results if each.state in (FAILED, TIMED_OUT)]


def number(value: float) -> str:
    """A number with three or more significant digits: 1234567 -> 1,234,567; 0.01234 -> 0.0123."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def table(report: Mapping[str, Any]) -> str:
    """The report for people, from its JSON."""
    machine = report["machine"]
    head = (
        ("date", report["date"]),
        ("machine", machine["description"]),
        ("GPU", machine["gpu"] or _none(machine["gpu_lacks"])),
        ("driver", machine["driver"] or "none"),
        ("PyTorch", machine["torch"] or _none(machine["torch_lacks"])),
        ("commit", report["commit"] or "unknown"),
        ("device", f"{report['device']}{', small sizes' if report['small'] else ''}"),
    )
    lines = [f"{name:<9}{value}" for name, value in head]
    for check in report["checks"]:
        state = check["state"] if check["state"] == DONE else check["state"].upper()
        lines += ["", f"{check['name']}: {check['title']} ({state}, {check['seconds']:g} s)"]
        if check["reason"]:
            lines += _wrapped(f"{check['state']}: {check['reason']}")
        lines += _figures(check["figures"])
        for finding in check["findings"]:
            lines += _wrapped(f"=> {finding}")
    return "\n".join(lines)


def _none(reason: str) -> str:
    return f"none: {reason}" if reason else "none"


def _figures(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    if not figures:
        return []
    wide = max(len(each["name"]) for each in figures)
    values = [number(each["value"]) for each in figures]
    numbers = max(len(value) for value in values)
    units = max(len(each["unit"]) for each in figures)
    lines = []
    for each, value in zip(figures, values, strict=True):
        start = f"  {each['name']:<{wide}}  {value:>{numbers}} {each['unit']:<{units}}"
        lines.append(f"{start}  {each['note']}".rstrip())
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="     ")
