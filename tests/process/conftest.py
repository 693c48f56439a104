"""A disk that a test can fill."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, so small that a test can fill it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-o", "size=6m,mode=0700"]
    mounted = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
