"""How long a completion with Tab takes, with a history of ten thousand runs.

Compared with starting Python alone, which is the lower bound of any answer.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pairs import compare, rows
from benchmarks.rows import Finding
from benchmarks.running import main

GOAL = 10.0  # times the start of Python
RUNS = 10_000
LINES = {
    "command": ["s"],
    "job": ["submit", "le"],
    "param": ["submit", "lenet", "-p", ""],
    "queue": ["submit", "--queue", ""],
    "show": ["show", ""],
    "logs": ["logs", "-f", "lenet-"],
}


def measure(full: bool) -> Iterator[Finding]:
    python = str(Path(sys.executable).parent / "python")
    with tempfile.TemporaryDirectory(prefix="batchml-bench-") as folder:
        _write_history(Path(folder))
        for name, words in LINES.items():
            found = compare(
                [python, "-m", "batchml", "__complete", *words], [python, "-c", "pass"],
                environ={"BATCHML_HOME": folder}, folder=folder, pairs=20 if full else 9,
            )  # fmt: skip
            line = " ".join(["batchml", *words])
            yield from rows(
                f"completion/{name}", f"{line}<Tab>, {RUNS:,} runs", found,
                beside="python -c pass", goal=GOAL,
            )  # fmt: skip


def _write_history(folder: Path) -> None:
    folder.chmod(0o700)
    lines = (
        {
            "key": f"2{number:016d}",
            "job_id": f"{number:08x}-1111-4111-8111-111111111111",
            "name": f"lenet-{number % 100}",
            "env": "local",
            "queue": "default",
            "at": number,
            "command": ["python", "train.py", "--epochs", "10"],
        }
        for number in range(RUNS)
    )
    (folder / "history.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


if __name__ == "__main__":
    main(measure)
