"""Pushing data into the workspace, against cp: `python -m benchmarks.workspace`. docs/workspace.md

cp -a is the lower bound: it neither reads back what it wrote nor compares, does not wait for the
disk, and leaves half a file where it is stopped. With sync and diff it has what a push promises but
the last. rsync --fsync syncs each file and compares checksums on the way, rclone compares them with
what it reads back. An unchanged tree is compared with rsync: both read sizes and times.
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


def _peers(tree: str) -> dict[str, tuple[str, str]]:
    """Other ways to copy a tree into the folder `copy`: name of the row -> words, a shell line."""
    checked = f"cp -a {tree} copy; sync -f copy; diff -r {tree} copy/{tree}"
    peers = {
        "": ("cp -a", f"cp -a {tree} copy"),
        "_checked": ("cp -a; sync -f; diff -r", checked),
        "_rsync": ("rsync -ac --fsync", f"rsync -ac --fsync {tree} copy"),
        "_rclone": ("rclone copy --checksum", f"rclone copy --checksum {tree} copy/{tree}"),
    }
    return {name: each for name, each in peers.items() if shutil.which(each[0].split()[0])}


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
            for name, (beside, line) in _peers(tree).items():
                theirs = _shell(f"rm -rf copy/{tree}; mkdir -p copy", line)
                found = compare(ours, theirs, environ=environ, folder=text, pairs=pairs)
                yield from rows(
                    f"workspace/{tree}{name}", f"push of {what}", found, beside=beside,
                    goal=None if name else goal,
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
