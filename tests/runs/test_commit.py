"""The commit of a folder, read without a process: what git itself says is the judge."""

import shutil
import subprocess
from pathlib import Path

import pytest

from batchml.runs.package import CommitMemory, CommitQuery, GitCommit, find_commit
from tests.support.fakes import FakeClock

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "job").mkdir()
    (folder / "job" / "train.py").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder


def test_the_commit_is_gits_wherever_git_keeps_it(repository: Path) -> None:
    job, head = repository / "job", git(repository, "rev-parse", "HEAD")
    assert find_commit(job) == head
    git(repository, "pack-refs", "--all")
    assert find_commit(job) == head
    git(repository, "checkout", "-q", "--detach")
    assert find_commit(job) == head
    git(repository, "worktree", "add", "-q", "-b", "side/branch", str(repository.parent / "tree"))
    tree = repository.parent / "tree"
    git(tree, "commit", "-q", "--allow-empty", "-m", "two")
    assert find_commit(tree / "job") == git(tree, "rev-parse", "HEAD") != head


def test_a_folder_without_a_commit_has_none(tmp_path: Path) -> None:
    assert find_commit(tmp_path) == ""
    assert CommitQuery(tmp_path).read() == GitCommit()
    git(tmp_path, "init", "-q")
    assert find_commit(tmp_path) == ""


@pytest.mark.parametrize(
    "head", ["", "ref: refs/heads/../../../secret", "ref: /etc/passwd", "not a commit", "\xff"]
)
def test_a_damaged_repository_has_none(tmp_path: Path, head: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(head.encode("latin-1"))
    assert find_commit(tmp_path) == ""


def test_changes_are_told_and_those_of_another_folder_do_not_count(repository: Path) -> None:
    assert CommitQuery(repository / "job", patience=60).read().is_dirty is False
    (repository / "other").write_text("2")
    assert CommitQuery(repository / "job", patience=60).read().is_dirty is False
    (repository / "job" / "new.py").write_text("2")
    assert CommitQuery(repository / "job", patience=60).read().is_dirty is True


def test_git_is_not_asked_again_for_the_same_files_within_a_second(repository: Path) -> None:
    job, clock = repository / "job", FakeClock()
    memory = CommitMemory(clock)

    def is_dirty(code: str) -> bool | None:
        return CommitQuery(job, 60, memory).read(code).is_dirty

    assert is_dirty("one") is False
    (job / "train.py").write_text("2")  # only the name of the archive tells it
    assert is_dirty("one") is False
    assert is_dirty("two") is True
    git(repository, "commit", "-qam", "two")
    assert is_dirty("two") is False  # another commit
    (job / "train.py").write_text("3")
    assert is_dirty("two") is False
    assert is_dirty("") is True  # the archive is not that of the folder
    clock.sleep(1)
    assert is_dirty("two") is True
