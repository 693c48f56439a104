"""The path of a file or folder without links, as `os.path.realpath` gives it."""

import os
from pathlib import Path

import pytest

from batchml.runtime.entry.folders import real_path


@pytest.mark.parametrize(
    "name", ["folder", "link", "link/below", "missing", "loop", "link/no/more"]
)
def test_it_is_that_of_the_standard_library(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "loop").symlink_to("loop")
    path = str(tmp_path / name)
    assert real_path(path) == os.path.realpath(path)
