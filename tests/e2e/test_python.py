"""docs/python.md, as it is written: its blocks are one program, and say what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

from batchml.local.home import Home

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_program_of_python_md(home: Home, tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, text=True, capture_output=True, timeout=120,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "BATCHML_HOME": str(home.root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "succeeded 0",
        "['epoch 1 loss=0.5', 'epoch 2 loss=0.25']",
        "['python', '-c', 'print(3 ** 2)']",
        "12",
        "0 2 None",
        "1 None ValueError('a width of -1')",
        "2 5 None",
        "5 3",
        "square SUCCEEDED 0",
        "square SUCCEEDED 0",
        "True",
        "['hello']",
        "['square', 'square']",
        "app-error exit-code",
        "[('0', '0'), ('1', '1'), ('2', '2'), ('3', '3')]",
        "[('1', '1'), ('3', '3')]",
        "['waiting'] ['default']",
        "array: 4 -> 2",
        "() True",
        "all 4 trials are over 4",
        "{'x': 2.0} (0.0,)",
        "78 InputNotFound",
    ]


def test_every_argument_and_every_method_is_in_python_md() -> None:
    from inspect import signature

    from batchml.client import Client
    from batchml.handles import MapHandle, RunHandle
    from batchml.runs.options import SubmitOptions
    from batchml.sweeps.handle import SweepHandle

    text = PAGE.read_text("utf-8")
    told = set(re.findall(r"`([a-z_]+)`", text))
    assert {"job", *SubmitOptions.__annotations__} <= told
    assert set(signature(Client.sweep).parameters) - {"self", "file"} <= told
    for name in vars(SweepHandle):
        if not name.startswith("_"):
            assert f"`sweep.{name}" in text, name
    for name in vars(RunHandle):
        if not name.startswith("_"):
            assert f"run.{name}" in text or f"each.{name}" in text, name
    for name in vars(MapHandle):
        if not name.startswith("_"):
            assert f"`areas.{name}" in text, name
