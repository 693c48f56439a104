"""`make wheel`: install the wheel into an empty environment of each Python, and run it there.

`python -m tests.try_wheel DIST PYTHON...` skips, visibly, a Python that this machine does not have.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*command: str | Path, **environ: str) -> str:
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout


def try_with(python: str, wheel: Path) -> str:
    """The version that `batchml --version` prints, after a job has run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        run(python, "-m", "venv", environment)
        run(environment / "bin" / "python", "-m", "pip", "install", "--quiet",
            "--disable-pip-version-check", wheel)  # fmt: skip
        batchml, home = environment / "bin" / "batchml", str(Path(folder) / "home")
        try:
            output = run(batchml, "submit", "--wait", "--", "echo", "it runs", BATCHML_HOME=home)
            assert "it runs" in output, output
        finally:
            run(batchml, "local", "stop", BATCHML_HOME=home)
        return run(batchml, "--version").strip()


def main(dist: str, *pythons: str) -> None:
    (wheel,) = Path(dist).glob("*.whl")
    found = [python for python in pythons if _works(python)]
    for python in pythons:
        if python in found:
            print(f"{python}: {try_with(python, wheel.absolute())} runs")
        else:
            print(f"{python}: not on this machine, skipped")
    if not found:
        sys.exit("No supported Python was found.")


def _works(python: str) -> bool:
    """A version manager may have a command for a Python that is not selected."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "--version"], capture_output=True).returncode == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
