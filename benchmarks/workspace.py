"""Pushing data into the workspace, against cp: `python -m benchmarks.workspace`. docs/workspace.md

cp is the lower bound: it neither reads back what it wrote nor compares, does not wait for the disk,
and leaves half a file where it is stopped. An unchanged tree is compared with rsync, if there is
one: both read sizes and times.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pairs import compare, rows
from benchmarks.rows import Finding
from benchmarks.running import main

SMALL, EACH = 5_000, 4_096  # files, bytes
LARGE = 512 * 1024**2  # bytes
PAIRS = 5


def _trees(folder: Path, small: int, large: int) -> None:
    for number in range(small):
        path = folder / "small" / f"{number // 100}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(EACH))
    (folder / "large").mkdir()
    with open(folder / "large" / "one.bin", "wb") as file:
        for _ in range(large // 1024**2):
            file.write(os.urandom(1024**2))


def _shell(*lines: str) -> list[str]:
    return ["sh", "-ec", "\n".join(lines)]


def measure(full: bool) -> Iterator[Finding]:
    pairs, small, large = (PAIRS, SMALL, LARGE) if full else (3, SMALL // 5, LARGE // 4)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _trees(folder, small, large)
        environ = {"BATCHML_HOME": str(folder / "home")}
        push = f"{sys.executable} -m batchml workspace push"
        trees = {
            "small": (f"{small:,} files of {EACH} bytes", 2.0),
            "large": (f"a file of {large // 1024**2} MiB", 1.5),
        }
        for tree, (what, goal) in trees.items():
            ours = _shell(f"rm -rf home/workspace/{tree}", f"{push} {tree}")
            floor = _shell(f"rm -rf copy/{tree}; mkdir -p copy", f"cp -a {tree} copy/{tree}")
            found = compare(ours, floor, environ=environ, folder=text, pairs=pairs)
            yield from rows(
                f"workspace/{tree}", f"push of {what}", found, beside="cp -a", goal=goal
            )
            if shutil.which("rclone"):
                # Like ours it compares checksums, and reads back what it wrote.
                floor = _shell(f"rm -rf rc/{tree}", f"rclone copy --checksum {tree} rc/{tree}")
                found = compare(ours, floor, environ=environ, folder=text, pairs=pairs)
                yield from rows(
                    f"workspace/{tree}_rclone", f"push of {what}", found,
                    beside="rclone copy --checksum",
                )  # fmt: skip
        rsync = shutil.which("rsync")
        again = _shell("rsync -a small copy" if rsync else "cp -au small copy")
        found = compare(_shell(f"{push} small"), again, environ=environ, folder=text, pairs=pairs)
        yield from rows(
            "workspace/unchanged", f"push of {small:,} files that are there", found,
            beside="rsync -a" if rsync else "cp -au", goal=20,
        )  # fmt: skip


if __name__ == "__main__":
    main(measure)
