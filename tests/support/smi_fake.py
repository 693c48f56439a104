"""A program nvidia-smi that lists the two GPUs of `nvml_fake`, with the same values."""

import json
from collections.abc import Mapping
from pathlib import Path

VALUES: dict[str, tuple[str, str]] = {
    "uuid": ("GPU-aaaa", "GPU-bbbb"),
    "driver_version": ("580.95.05", "580.95.05"),
    "ecc.errors.uncorrected.volatile.total": ("0", "0"),
    "remapped_rows.uncorrectable": ("0", "0"),
    "memory.used": ("1024", "1024"),
    "utilization.gpu": ("40", "80"),
}
SCRIPT = """#!{python}
import sys
values = {values}
asked = next(word for word in sys.argv if word.startswith("--query-gpu="))
names = asked.partition("=")[2].split(",")
for name in names:
    if name not in values:
        sys.exit(f'Field "{{name}}" is not a valid field to query.')
for at in range(len(values["uuid"])):
    print(", ".join(values[name][at] for name in names))
"""


def write_smi(folder: Path, python: str, changed: Mapping[str, tuple[str, str]]) -> None:
    """Write nvidia-smi into this folder. `changed` replaces values by their fields."""
    program = folder / "nvidia-smi"
    program.write_text(SCRIPT.format(python=python, values=json.dumps({**VALUES, **changed})))
    program.chmod(0o755)
