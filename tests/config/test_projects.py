"""The project of a folder, and the words that name a project."""

from pathlib import Path

import pytest

from batchml.config.project import (
    choose_project,
    find_project_folder,
    folder_above,
    folder_project,
    is_project_id,
    is_project_name,
    project_name,
    short_project,
)
from batchml.config.settings import load_settings
from batchml.errors import ConfigError, UsageError


def project_in(folder: Path, environ: dict[str, str] | None = None, flag: str | None = None) -> str:
    return load_settings(environ or {}, folder, None, flag).project.value


def test_a_folder_without_a_name_is_its_git_root_or_itself(tmp_path: Path) -> None:
    inner = tmp_path / "vision" / "src"
    inner.mkdir(parents=True)
    assert project_name(project_in(inner)) == "src"
    (tmp_path / "vision" / ".git").mkdir()
    assert project_name(project_in(inner)) == "vision"
    assert project_in(inner) == project_in(tmp_path / "vision")


def test_a_worktree_has_a_file_named_git(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").write_text("gitdir: elsewhere")
    assert folder_project(str(tmp_path / "src")) == folder_project(str(tmp_path))


def test_two_folders_of_one_name_are_two_projects(tmp_path: Path) -> None:
    folders = [tmp_path / parent / "vision" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    one, other = map(project_in, folders)
    assert one != other and project_name(one) == project_name(other) == "vision"
    assert short_project(one, [one, other]) == one and short_project(one, [one]) == "vision"


def test_a_link_to_a_folder_is_the_same_project(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert project_in(tmp_path / "link") == project_in(tmp_path / "real")


@pytest.mark.parametrize(
    "name", ["my proj", "häuser", "-x-", "__", "a--b", ".hidden", "x" * 200, "\udce4"]
)
def test_any_folder_has_a_project_that_is_a_tag_of_aws(name: str, tmp_path: Path) -> None:
    assert is_project_id(folder_project(str(tmp_path / name)))


def test_the_name_of_batchml_toml_counts_below_the_variable_and_the_flag(tmp_path: Path) -> None:
    (tmp_path / "batchml.toml").write_text('project = "vision"\n')
    (tmp_path / "src").mkdir()
    assert project_in(tmp_path / "src") == "vision"
    environ = {"BATCHML_PROJECT": "speech"}
    assert project_in(tmp_path, environ) == "speech"
    assert project_in(tmp_path, environ, "text") == "text"
    assert project_in(tmp_path, {"BATCHML_PROJECT": ""}) == "vision"


@pytest.mark.parametrize("value", ['""', '"a b"', '"a--b"', '"-a"', '"a.b"', '"é"', "3", "[]"])
def test_a_wrong_name_in_batchml_toml_is_a_mistake(value: str, tmp_path: Path) -> None:
    (tmp_path / "batchml.toml").write_text(f"project = {value}\n")
    with pytest.raises(ConfigError, match="project: "):
        load_settings({}, tmp_path, None)


def test_a_word_means_an_identity_or_the_only_folder_of_that_name() -> None:
    known = ["vision.00000001", "speech", "text.00000001", "text.00000002"]
    assert choose_project("vision", known, "--project") == "vision.00000001"
    assert choose_project("speech", known, "--project") == "speech"
    assert choose_project("text.00000002", known, "--project") == "text.00000002"
    assert choose_project("of-another-machine", known, "--project") == "of-another-machine"
    with pytest.raises(UsageError, match=r"text\.00000001, text\.00000002"):
        choose_project("text", known, "--project")
    assert choose_project("text", known, "--project", "text.00000002") == "text.00000002"


@pytest.mark.parametrize("word", ["", " ", "a b", "../x", "x" * 65, "vision.1", "vision.0000000g"])
def test_a_word_that_is_no_name_is_refused(word: str) -> None:
    assert not is_project_name(word)
    with pytest.raises(UsageError, match="--project"):
        choose_project(word, [], "--project")


def test_the_folder_of_a_project_is_found_from_the_folders_of_its_runs(tmp_path: Path) -> None:
    folder, job = tmp_path / "vision", tmp_path / "vision" / "jobs" / "fit"
    job.mkdir(parents=True)
    project = folder_project(str(folder))
    assert find_project_folder(project, [str(tmp_path), str(job)]) == str(folder)
    assert find_project_folder(project, [str(tmp_path)]) == ""
    found = {project: str(folder)}
    with pytest.raises(UsageError, match=rf"vision\.[0-9a-f]{{8}}.* \({folder}\)"):
        choose_project(
            "vision", ["vision.00000001", project], "--project", "", lambda p: found.get(p, "")
        )


def test_the_nearest_known_folder_above_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "digits" / "data" / "raw"
    inner.mkdir(parents=True)
    known = [folder_project(str(tmp_path)), folder_project(str(tmp_path / "digits"))]
    assert folder_above(str(inner), known) == str(tmp_path / "digits")
    assert folder_above(str(inner), [folder_project(str(inner))]) == ""
