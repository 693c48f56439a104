"""How long a completion with Tab takes, with a history of ten thousand runs: the goal is 150 ms.

Compared with starting Python alone, which is the lower bound of any answer.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOAL = 150.0  # ms
TIMES = 20
RUNS = 10_000
LINES = (["s"], ["submit", "le"], ["submit", "lenet", "-p", ""], ["submit", "--queue", ""],
         ["show", ""], ["logs", "-f", "lenet-"])  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batchml-bench-") as folder:
        _write_history(Path(folder))
        env = {**os.environ, "BATCHML_HOME": folder}
        floor = _median([sys.executable, "-c", "pass"], env)
        print(f"{'python -c pass':<32} {floor:6.1f} ms")
        for words in LINES:
            taken = _median([sys.executable, "-m", "batchml", "__complete", *words], env)
            line = " ".join(["batchml", *words])
            print(f"{line + '<Tab>':<32} {taken:6.1f} ms  {taken / floor:4.1f} x  goal {GOAL:.0f}")


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


def _median(command: list[str], env: dict[str, str]) -> float:
    """Milliseconds."""
    taken = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
        taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
