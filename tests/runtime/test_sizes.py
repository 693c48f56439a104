"""Sizes for people: one form, the same as that of `ls -lh`."""

import subprocess
from pathlib import Path

import pytest

from batchml.runtime.entry.folders import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1025, "1.1 KiB"),
        (9.9 * 1024, "9.9 KiB"), (9.91 * 1024, "10 KiB"), (128 * 1024 + 1, "129 KiB"),
        (1023 * 1024, "1023 KiB"), (1023 * 1024 + 1, "1.0 MiB"), (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"), (28 << 40, "28 TiB"), (5000 << 40, "5000 TiB"), (0.5, "1 B"),
    ],
)  # fmt: skip
def test_a_size_is_rounded_up(size: float, text: str) -> None:
    assert size_text(size) == text


def test_files_have_the_sizes_that_ls_shows(tmp_path: Path) -> None:
    sizes = [1, 1023, 1024, 1025, 10_137, 10_138, 10_240, 1_047_552, 1_047_553, 4_404_020, 3 << 30]
    for size in sizes:
        with open(tmp_path / f"{size:012}", "wb") as file:
            file.truncate(size)
    done = subprocess.run(["ls", "-lh", tmp_path], capture_output=True, text=True, check=True)
    theirs = [line.split()[4] for line in done.stdout.splitlines()[1:]]
    ours = [
        size_text(size).removesuffix("iB").removesuffix(" B").replace(" ", "") for size in sizes
    ]
    assert ours == theirs
