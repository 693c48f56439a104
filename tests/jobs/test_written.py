"""Files that batchml has written are no code of the next run."""

import os
from pathlib import Path

import pytest

from batchml.explain.missing import FileState, MissingItem, search_folder
from batchml.jobs.code import find_files, pack
from batchml.jobs.written import LIST, OUTPUTS_RULE, WRITTEN, note_written, read_written
from batchml.local.home import Home


@pytest.fixture
def job(tmp_path: Path) -> Path:
    job = tmp_path / "job"
    (job / "fetched").mkdir(parents=True)
    for name in ("train.py", "curves.html", "fetched/train.py"):
        (job / name).write_text(name)
    return job


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def sent(job: Path, home: Home) -> tuple[str, ...]:
    return find_files(job, home.root).files


def test_a_plot_is_not_sent_until_its_user_has_changed_it(job: Path, home: Home) -> None:
    plot = job / "curves.html"
    assert "curves.html" in sent(job, home)
    note_written(home, [plot])
    assert sent(job, home) == ("fetched/train.py", "train.py")
    assert pack(job, home.root).ignored == (), "its user did not exclude it"
    plot.write_text("mine")
    assert "curves.html" in sent(job, home)


def test_a_moved_file_and_one_that_batchmlignore_includes_are_sent(job: Path, home: Home) -> None:
    note_written(home, [job / "curves.html"])
    (job / ".batchmlignore").write_text("!curves.html\n")
    assert "curves.html" in sent(job, home)
    (job / ".batchmlignore").unlink()
    (job / "curves.html").rename(job / "page.html")
    assert "page.html" in sent(job, home)


def test_a_folder_that_was_fetched_is_a_job_of_its_own(job: Path, home: Home) -> None:
    note_written(home, [job / "fetched"])
    assert sent(job, home) == ("curves.html", "train.py")
    assert sent(job / "fetched", home) == ("train.py",)


def test_fetched_outputs_are_not_named_among_ignored_files(job: Path, home: Home) -> None:
    (job / "fetched" / ".batchmlignore").write_text(OUTPUTS_RULE)
    assert sent(job, home) == ("curves.html", "train.py")
    assert pack(job, home.root).ignored == ()
    (job / "fetched" / ".batchmlignore").write_text("train.py\n")
    assert pack(job, home.root).ignored == ("fetched/train.py",), "a rule of its user"


def test_a_line_with_an_exclamation_mark_sends_fetched_outputs(job: Path, home: Home) -> None:
    """`explain` proposes the line; the rule that `get` wrote below must not undo it."""
    (job / "best").mkdir()
    (job / "fetched").rename(job / "best" / "outputs")
    fetched = job / "best" / "outputs"
    (fetched / ".batchmlignore").write_text(OUTPUTS_RULE)
    (fetched / "deep").mkdir()
    (fetched / "deep" / "model.pt").touch()
    for missed in ("best/outputs/train.py", "best/outputs/deep/model.pt"):
        found = search_folder(job, MissingItem(missed), home.root)
        assert (found.state, found.ignored_by) == (FileState.IGNORED, WRITTEN)
        (job / ".batchmlignore").write_text(f"!{found.path}\n")
        assert [name for name in sent(job, home) if name.startswith("best")] == [missed]
    (job / ".batchmlignore").write_text("!best/outputs/\n")
    assert {"best/outputs/train.py", "best/outputs/deep/model.pt"} <= {*sent(job, home)}


def test_the_same_folder_by_another_path_is_the_same(
    job: Path, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(job)
    note_written(home, [tmp_path / "link" / "curves.html"])
    assert "curves.html" not in sent(job, home)
    monkeypatch.chdir(job)
    note_written(home, [Path("train.py")])
    assert "train.py" not in sent(tmp_path / "link", home)


def test_a_list_that_cannot_be_written_or_read_costs_nothing(job: Path, home: Home) -> None:
    note_written(home, [job / "nowhere"])
    assert not (home.root / LIST).exists()
    home.prepare()
    (home.root / LIST).write_bytes(b'{"path": 1}\nnot json\n\xff\n')
    note_written(home, [job / "curves.html"])
    assert "curves.html" not in sent(job, home)
    (home.root / LIST).unlink()
    (home.root / LIST).mkdir()
    note_written(home, [job / "curves.html"])
    assert "curves.html" in sent(job, home)
    assert read_written(None) == read_written(job)


def test_a_long_list_forgets_files_that_are_gone(job: Path, home: Home) -> None:
    for number in range(9):
        path = job / f"{number}.html"
        path.touch()
        note_written(home, [path], most=100)
        if number < 8:
            path.unlink()
    assert len(read_written(home.root).files) <= 2
    assert os.stat(home.root / LIST).st_mode & 0o77 == 0
    assert sent(job, home) == ("curves.html", "fetched/train.py", "train.py")


def test_explain_says_why_such_a_file_is_missing(job: Path, home: Home) -> None:
    note_written(home, [job / "curves.html"])
    found = search_folder(job, MissingItem("curves.html"), home.root)
    assert (found.state, found.ignored_by) == (FileState.IGNORED, WRITTEN)
