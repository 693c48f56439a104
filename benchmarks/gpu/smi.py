"""Ask nvidia-smi, with whose answers the checks compare what batchml reads through NVML."""

from __future__ import annotations

import re
import subprocess


def query(*fields: str) -> list[dict[str, str]]:
    """The values of these fields for each GPU; empty without nvidia-smi, or if it lacks a field."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return read_table(done.stdout, fields) if done.returncode == 0 else []


def read_table(text: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of nvidia-smi's CSV. A row with another number of columns is left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def number(text: str) -> float | None:
    """`81559`, `0x0001`, `Yes` and `No` as numbers; None for `[N/A]` and other words."""
    if text in ("Yes", "No"):
        return float(text == "Yes")
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return float(int(text, 16))
    return float(text) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) else None
