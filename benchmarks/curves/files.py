"""Files of a workspace: to archive them, to look whether they have changed, to bring them back."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from batchml.runtime.transfer.archive import archive
from batchml.runtime.transfer.archives import FolderArchive
from batchml.runtime.transfer.restore import restore
from batchml.runtime.transfer.tree import Tree
from benchmarks.curves.cost import cpu, cpu_of_command, sizes
from benchmarks.rows import Curve


def files(full: bool) -> Iterator[Curve]:
    sent: list[tuple[int, float]] = []
    again: list[tuple[int, float]] = []
    back, tars, copies = [], [], []
    for size in sizes(full, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            for number in range(size):
                path = folder / "tree" / f"{number // 100}" / f"{number}.bin"
                if number % 100 == 0:
                    path.parent.mkdir(parents=True)
                path.write_bytes(b"%08d" % number * 128)
            (folder / "archive").mkdir()
            (folder / "back").mkdir()
            tree, store = Tree(f"{text}/tree"), FolderArchive(f"{text}/archive")
            for costs in (sent, again):
                costs.append((size, cpu(lambda: archive(tree, store)) / size * 1e6))  # noqa: B023
            taken = cpu(lambda: restore(store, Tree(f"{text}/back")))  # noqa: B023
            back.append((size, taken / size * 1e6))
            tars.append((size, cpu_of_command(["tar", "cf", "a.tar", "tree"], text) / size * 1e6))
            copy = cpu_of_command(["cp", "-a", "tree", "copy"], text)
            copies.append((size, copy / size * 1e6))
    how = "files of 1 KiB, a hundred in each folder"
    for name, title, points, peers in (
        ("archive", "workspace archive", sent, {"tar": tars, "cp -a": copies}),
        ("unchanged", "workspace archive again", again, {}),
        ("restore", "workspace restore", back, {"cp -a": copies}),
    ):
        yield Curve(
            name=f"curves/files_{name}", title=title, axis="files", unit="us of CPU a file",
            how=how, points=points, peers=peers,
        )  # fmt: skip
