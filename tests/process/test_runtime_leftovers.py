"""What a command leaves in its working folder is named, once, where that folder goes away."""

import os
from pathlib import Path

import pytest

from batchml.runtime.entry import folders
from batchml.runtime.entry.folders import WorkingFolder, watch_working_folder
from batchml.runtime.protocol.variables import RuntimeEnv
from tests.process.test_runtime_run import run

JOB = "6b0e0000-0000-4000-8000-000000000001"


def working(folder: Path, *kept: Path) -> WorkingFolder:
    return WorkingFolder(str(folder), [str(path) for path in kept])


def write(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)


def test_what_is_new_or_changed_is_named_the_largest_first(tmp_path: Path) -> None:
    write(tmp_path, code=9, model=3)
    before = working(tmp_path)
    assert before.describe_leftovers() == ""
    write(tmp_path, model=4096)
    assert before.describe_leftovers() == (
        "model (4.0 KiB) was written to the working folder, which is not kept: "
        "write it to BATCHML_OUTPUT_DIR"
    )
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs", a=5, b=6)
    write(tmp_path, c=1)
    told = before.describe_leftovers()
    assert told.startswith("model (4.0 KiB), logs/b (6 B), logs/a (5 B) and 1 more were written")
    write(tmp_path, d=1)
    assert "and 2 more were" in before.describe_leftovers()
    assert len(told.splitlines()) == 1


def test_caches_links_and_what_is_kept_are_not_missed(tmp_path: Path) -> None:
    kept = tmp_path / "out"
    before = working(tmp_path, kept)
    for name in ("__pycache__", "out", ".cache"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, file=1)
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path, **{".batchml-metrics": 1})
    assert before.describe_leftovers() == ""
    inside = working(kept, tmp_path)
    write(kept, more=1)
    assert inside.describe_leftovers() == ""


def test_of_a_folder_with_too_much_in_it_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_ENTRIES", 5)
    before = working(tmp_path)
    write(tmp_path, **{f"n{number}": 1 for number in range(6)})
    assert before.describe_leftovers() == ""
    assert working(tmp_path).describe_leftovers() == ""


def test_outside_a_run_and_in_the_workspace_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert watch_working_folder(RuntimeEnv.read({}), "", "", in_aws=False) is None
    for workspace, expected in ((str(tmp_path.parent), ""), ("", "new (1 B) was")):
        found = watch_working_folder(
            RuntimeEnv.read({"AWS_BATCH_JOB_ID": JOB, "BATCHML_WORKSPACE": workspace}),
            "", "", in_aws=False,
        )  # fmt: skip
        assert found is not None
        write(tmp_path, new=1)
        assert found.describe_leftovers().startswith(expected) and bool(
            found.describe_leftovers()
        ) == bool(expected)
        (tmp_path / "new").unlink()


def test_an_attempt_says_it_in_its_last_line_and_counts_it(tmp_path: Path) -> None:
    write(tmp_path, there=1)
    code, lines = run(tmp_path, "sh", "-c", "echo x > model.bin; exit 3", AWS_BATCH_JOB_ID=JOB)
    assert code == 3
    assert lines[0].startswith(b"batchml notice: model.bin (2 B) was written to the working folder")
    assert lines[1].endswith(b"code=3 lines=1")
    assert run(tmp_path, "sh", "-c", "echo x > other")[1] == []
