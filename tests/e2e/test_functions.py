"""Python functions as runs, from a script, from stdin, and again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchml.local.home import Home

MODULE = """
class TooLarge(Exception):
    pass

def half(number):
    import sys
    sys.stdout.write(f"half of {number}\\n")
    if number > 5:
        raise TooLarge(number)
    return number / 2
"""

SCRIPT = """
import os
from pathlib import Path
from lib import halves
from batchml import Client
from batchml.errors import RunFailed

class Point:
    def __init__(self, x):
        self.x = x

def move(point, by=1):
    return Point(point.x + by)

client, folder = Client(), Path.cwd()
moved = client.submit(move, Point(2), 3, tags={"team": "vision"})
print(type(moved.result()) is Point, moved.result().x)
mapped = client.map(halves.half, [2, 6, 4, 8])
print(sorted((item.index, item.value, repr(item.error)) for item in mapped.results()))
try:
    mapped.result()
except halves.TooLarge as error:
    print("raised", error, "in half" in error.__notes__[0])
print([line.text for line in mapped[2].logs()], mapped[-2].result())
again = mapped.run.rerun(failed=True)
try:
    again.result()
except halves.TooLarge as error:
    print("again", error)
(folder / "src" / "lib" / "halves.py").write_text("def half(number): return number")
print(mapped.run.rerun(code=True).result())
try:
    client.submit(os._exit, 7).result()
except RunFailed as error:
    print(error.outcome, error.exit_code, "Why: batchml explain" in str(error))
print(client.run("move").result().x, client.map(halves.half, [3]).result())
"""


def run_python(folder: Path, home: Home, *words: str, text: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, *words], input=text, cwd=folder, text=True, capture_output=True,
        timeout=120, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "BATCHML_HOME": str(home.root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.journey
def test_results_and_exceptions_come_back(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "src" / "lib").mkdir(parents=True)
    (folder / "src" / "lib" / "halves.py").write_text(MODULE)
    # What a rerun sends is what was sent, whatever the folder's own rules say of pickles.
    (folder / ".gitignore").write_text("*.pickle\n")
    (folder / "src" / "main.py").write_text(SCRIPT)
    assert run_python(folder, home, "src/main.py") == [
        "True 5",
        "[(0, 1.0, 'None'), (1, None, 'TooLarge(6)'), (2, 2.0, 'None'), (3, None, 'TooLarge(8)')]",
        "raised 6 True",
        "['half of 4'] 2.0",
        "again 6",
        "[2, 6, 4, 8]",
        "app-error 7 True",
        "5 [3]",
    ]


def test_a_lambda_of_a_program_from_stdin_runs(home: Home, tmp_path: Path) -> None:
    program = "from batchml import Client\nprint(Client().submit(lambda x: x + 1, 2).result())"
    assert run_python(tmp_path, home, "-", text=program) == ["3"]


def test_a_module_that_is_not_in_the_image_is_named(home: Home, tmp_path: Path) -> None:
    program = (
        "from batchml import Client\n"
        "def f():\n"
        "    import numpy\n"
        "run = Client().submit(f)\n"
        "try:\n"
        "    run.result()\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name)\n"
    )
    assert run_python(tmp_path, home, "-", text=program) == ["numpy"]
