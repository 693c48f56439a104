"""What the wheel holds: the code, and what a user's machine needs beside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_carries_what_ships_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), "."],
        cwd=ROOT, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("batchml-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("cfn", "images", "jobs"):
        here = {
            f"batchml/share/{folder}/{path.relative_to(ROOT / folder)}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert here and here <= names, folder
    code = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "batchml").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert code <= names
    allowed = code | {name for name in names if name.startswith("batchml/share/")}
    rest = {name for name in names - allowed if ".dist-info/" not in name}
    assert rest == set()
