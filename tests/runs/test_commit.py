"""The commit of a folder, read without a process: what git itself says is the judge."""

import shutil
import subprocess
from pathlib import Path

import pytest

from batchml.runs.package import CommitQuery, GitCommit, find_commit

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
