"""Two folders with one state folder: what is typed in one never touches the runs of the other."""

from pathlib import Path

import pytest

from batchml.client import Client
from batchml.dashboard.acting.runs import rerun
from batchml.dashboard.app import PageQuery
from tests.support.cli import Cli


@pytest.fixture
def folders(cli: Cli, tmp_path: Path) -> tuple[Cli, Cli]:
    """Two folders of one name."""
    here, there = (tmp_path / parent / "vision" for parent in ("here", "there"))
    here.mkdir(parents=True)
    there.mkdir(parents=True)
    return Cli(here, cli.home), Cli(there, cli.home)


@pytest.mark.journey
def test_a_command_in_another_folder_does_not_touch_the_run(folders: tuple[Cli, Cli]) -> None:
    here, there = folders
    run = here("submit", "--name", "fit", "--detach", "--json", "--", "sleep", "600").json
    for word in ("@last", "fit", run["jobId"][:6]):
        refused = there("cancel", word)
        assert (refused.code == 1 and "(in the project vision)" in refused.err) or word == "@last"
        assert "project" in refused.err
    assert there("ls").err.splitlines() == [
        f"No runs in the project {there('env', 'show', '--json').json[2]['value']}; "
        "1 in others: --all."
    ]
    assert there("ls", "--json").json == []
    top = there("top", "--json").json
    assert (top["runs"], top["otherRuns"], len(top["queues"])) == ([], 1, 1)
    (listed,) = there("ls", "--all", "--json").json
    assert listed["project"] == run["project"] != top["project"]
    assert there("cost", "--json").json["runs"] == []
    assert there("show", "fit", "--project", run["project"], "--json").json["status"] != "FAILED"
    assert here("cancel", "@last").code == 0
    assert there("wait", run["jobId"][:8]).code == 143


def test_arrays_reruns_and_python_are_of_the_project_where_they_are_asked_for(
    folders: tuple[Cli, Cli],
) -> None:
    here, there = folders
    assert here("submit", "--wait", "--name", "x", "--array", "2", "--", "true").code == 0
    (array,) = here("ls", "--json").json
    assert here("show", "@last:1", "--json").json["project"] == array["project"]
    assert there("rerun", "--wait", array["jobId"]).code == 0
    (again,) = there("ls", "--json").json
    assert again["name"] == "x" and again["project"] != array["project"]
    client = Client(folder=here.folder, environ=here.environ)
    assert [run.job_id for run in client.runs()] == [array["jobId"]]
    assert len(client.runs(all_projects=True)) == 2
    chosen = Client(folder=here.folder, environ=here.environ, project=again["project"])
    assert chosen.run("@last").job_id == again["jobId"]


def test_a_rerun_from_the_dashboard_of_another_folder_stays_in_its_project(
    folders: tuple[Cli, Cli], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = folders
    job = here("submit", "--wait", "--name", "x", "--json", "--", "true").json["jobId"]
    for name, value in there.environ.items():
        monkeypatch.setenv(name, value)
    client = Client(folder=there.folder)
    answer = rerun(client, PageQuery("/act/rerun", body={"run": job, "command": "echo again"}))
    again, first = here("ls", "--json").json
    assert answer["go"] == f"/run/{again['jobId']}" and first["jobId"] == job
    assert again["project"] == first["project"] and there("ls", "--json").json == []


def test_a_name_in_batchml_toml_joins_folders(folders: tuple[Cli, Cli]) -> None:
    for each in folders:
        (each.folder / "batchml.toml").write_text('project = "vision"\n')
    here, there = folders
    script = "echo in $BATCHML_PROJECT"
    assert here("submit", "--wait", "--", "sh", "-c", script).out.count("in vision") == 1
    assert there("logs", "@last").code == 0
    assert there("ls", "--json").json[0]["project"] == "vision"


def test_folders_are_named_where_two_have_one_name_and_where_one_is_inside(
    folders: tuple[Cli, Cli], tmp_path: Path
) -> None:
    here, there = folders
    for each in folders:
        assert each("submit", "--wait", "--name", "fit", "--", "true").code == 0
    elsewhere = Cli(tmp_path, here.home)
    refused = elsewhere("ls", "--project", "vision")
    assert refused.code == 2 and f"({here.folder})" in refused.err, refused
    assert f"({there.folder})" in refused.err
    (own,) = there("ls", "--project", "vision", "--json").json  # there, the own one is meant
    assert own["jobId"] == there("show", "@last", "--json").json["jobId"]
    inner = here.folder / "data"
    inner.mkdir()
    said = Cli(inner, here.home)("ls").err
    assert f"1 in the project {here('ls', '--json').json[0]['project']}, the folder above" in said


@pytest.mark.parametrize("command", [["ls"], ["top"], ["cost"], ["sweeps", "ls"]])
def test_all_projects_and_one_exclude_each_other(cli: Cli, command: list[str]) -> None:
    refused = cli(*command, "--all", "--project", "x")
    assert refused.code == 2 and "--all and --project exclude each other" in refused.err
