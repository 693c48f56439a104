"""A push and an archive that frees, killed or failed at their system calls: nothing half, no loss.

strace does it; without strace these tests are skipped. BATCHML_TORTURE walks every point.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from batchml.runtime.transfer import main
from batchml.runtime.transfer.archive import archive
from batchml.runtime.transfer.archives import FolderArchive
from batchml.runtime.transfer.groups import SMALL
from batchml.runtime.transfer.receive import FolderSource, receive
from batchml.runtime.transfer.restore import ArchiveIncomplete, restore
from batchml.runtime.transfer.tree import Tree
from tests.support.generate import TORTURE
from tests.support.trees import Node, Seen, file, make, seen
from tests.torture.test_system_calls import can_trace

pytestmark = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")

ROOT = str(Path(__file__).parents[2])
_POINTS = 4  # in the suite; all of them in torture
_CALLS = ("mkdir,mkdirat,openat,pwrite64,write,fsync,syncfs,rename,renameat,unlink,unlinkat,rmdir,"
          "ftruncate")  # fmt: skip
_FAULTS = {"openat": "EMFILE", "pwrite64": "ENOSPC", "write": "ENOSPC", "fsync": "EIO",
           "syncfs": "EIO",
           "mkdir": "ENOSPC", "renameat": "EIO", "rename": "EIO", "unlinkat": "EIO"}  # fmt: skip

# What is needed is imported before the mark. One file at a time: points have to be found again.
PROGRAM = """
import os, sys
from batchml.runtime.entry import folders
from batchml.runtime.transfer import main, parallel, receive, restore, tree
import concurrent.futures, concurrent.futures.thread, ctypes, fcntl, hashlib, tempfile
parallel.AT_ONCE = receive.GROUPS_AT_ONCE = receive.FEWEST_FILES = 1
top, there, store = sys.argv[1:]
try:
    os.mkdir("/proc/begin")
except OSError:
    pass
if store == "-":
    source = receive.FolderSource(tree.Tree(top), "")
    sys.exit(bool(receive.receive(source, tree.Tree(there)).missing))
sys.exit(main.main(["archive", store, there, "--delete"], {}, lambda text: None))
"""
TREE: Seen = {
    b"a/x": file("new x" * 1000),
    b"a/y": file("new y"),
    b"a/z": file("new z" * (SMALL // 4)),  # not in a group
    b"l": Node("link", b"a/x"),
    b"e": Node("folder", mode=0o755),
}
OLD: Seen = {b"a/x": file("old"), b"b": file("other")}


class Carrier:
    """The program, in a folder with a tree to push, or one to archive over an older archive."""

    def __init__(self, folder: Path, archives: bool) -> None:
        self._folder, self._archives, self.pushes = folder, archives, not archives
        self.top, self.there, self.store = folder / "top", folder / "there", folder / "store"

    def begin_anew(self) -> None:
        for path in (self.top, self.there, self.store):
            shutil.rmtree(path, ignore_errors=True)
        make(self.top, TREE)
        make(self.there, OLD)
        if self._archives:
            assert archive(Tree(str(self.there)), FolderArchive(str(self.store))).missing == ()
            make(self.there, TREE)

    def go_on(self) -> None:
        """The same as the program, here: nobody disturbs it."""
        if self._archives:
            assert (
                main.main(["archive", str(self.store), str(self.there), "--delete"], {}, str) == 0
            )
        else:
            source = FolderSource(Tree(str(self.top)), "")
            assert receive(source, Tree(str(self.there))).missing == ()

    def run(self, *options: str) -> tuple[int, str]:
        trace = ["strace", "-f", "-qq", "-o", str(self._folder / "trace"), "-e", f"trace={_CALLS}"]
        store = str(self.store) if self._archives else "-"
        done = subprocess.run(
            [*trace, *options, sys.executable, "-S", "-c", PROGRAM,
             str(self.top), str(self.there), store],
            capture_output=True, text=True, env={"PATH": os.environ["PATH"], "PYTHONPATH": ROOT,
                                                 "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        return done.returncode, done.stderr

    def points(self) -> list[tuple[str, int]]:
        """Each call after the mark, with its number in its thread, as strace counts."""
        assert self.run("-v")[0] == 0
        begun, counts, found = False, Counter[tuple[str, str]](), []
        for line in (self._folder / "trace").read_text().splitlines():
            pid, _, rest = line.partition(" ")
            call = re.match(r" *(\w+)\(", rest)
            if call is None:
                continue
            counts[pid, call[1]] += 1
            begun = begun or "/proc/begin" in rest
            if begun:
                found.append((call[1], counts[pid, call[1]]))
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Nothing half is to be seen, and nothing is lost."""
        if not self._archives:
            for path, node in seen(self.there).items():
                if node.kind == "file" and not path.startswith(b".batchml-parts/"):
                    assert node.content in {
                        TREE.get(path, node).content,
                        OLD.get(path, node).content,
                    }
            return
        back = self._folder / "back"
        shutil.rmtree(back, ignore_errors=True)
        try:
            restore(FolderArchive(str(self.store)), Tree(str(back)))
        except ArchiveIncomplete:
            back.mkdir()
        there = {**_contents(back), **_contents(self.there)}
        for path, content in _contents(self.top).items():
            assert there[path] == content, "what the tree had is in it or comes back"

    def check_end(self) -> None:
        if self._archives:
            assert restore(FolderArchive(str(self.store)), Tree(str(self.there))).missing == ()
            assert not (self.store / ".batchml/archive/begun.jsonl").exists()
        assert _contents(self.there) == {**_contents(self.top), b"b": b"other"}
        parts = self.there / ".batchml-parts"
        left = list(parts.iterdir()) if parts.exists() else []
        assert all(part.is_file() and part.stat().st_size for part in left), "no group is left"


def _contents(top: Path) -> dict[bytes, bytes]:
    return {
        path: node.content
        for path, node in seen(top).items()
        if node.kind != "folder" and not path.startswith(b".batchml")
    }


@pytest.fixture(params=["push", "archive"])
def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> Carrier:
    found = Carrier(tmp_path, request.param == "archive")
    found.begin_anew()
    return found


def some(points: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """A part of them that is spread over the whole, and all of them in torture."""
    if TORTURE > 1:
        return points
    step = -(-len(points) // _POINTS)
    return points[os.getpid() % step :: step]


def test_killed_at_any_call_nothing_is_half_and_the_next_goes_on(carrier: Carrier) -> None:
    points = carrier.points()
    assert {call for call, _ in points} >= {"openat", "fsync", "pwrite64"}
    codes = Counter[int]()
    for call, number in some(points):
        carrier.begin_anew()
        code, _ = carrier.run("-e", f"inject={call}:signal=SIGKILL:when={number}")
        codes[code] += 1
        carrier.check()
        carrier.go_on()
        carrier.check_end()
    assert codes[-9]
    print(f"{len(points)} points, {codes}")


def test_a_disk_that_fails_at_any_call_is_told_and_the_next_goes_on(carrier: Carrier) -> None:
    points = [point for point in carrier.points() if point[0] in _FAULTS]
    codes = Counter[int]()
    write = next(point for point in points if point[0] == "pwrite64")
    for call, number in {write, *some(points)}:
        carrier.begin_anew()
        # What fails once in a group is tried again, so all later calls fail, too. Without openat,
        # the program does not begin.
        when = f"{number}+" if carrier.pushes and call != "openat" else number
        code, said = carrier.run("-e", f"inject={call}:error={_FAULTS[call]}:when={when}")
        codes[code] += 1
        carrier.check()
        assert code in (0, 1) or "Full" in said or "OSError" in said, (call, number, said)
        carrier.go_on()
        carrier.check_end()
    assert codes[1]
    print(f"{len(points)} points, {codes}")
