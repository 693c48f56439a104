"""What helps after a failure: which button or link the page has for the command of `explain`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.dashboard.act import PageAction
from batchml.dashboard.acting.repair import (
    Remedy,
    explanation_panel,
    remedy_for,
    suspect_in_command,
    suspects,
)
from batchml.dashboard.acting.runs import in_own_project, rerun_action
from batchml.jobs.find import KnownJob, load_job
from batchml.model.explanation import Explanation
from batchml.model.run import Attempt, JobStatus, Record, Run
from batchml.runs.search import FoundRun

OTHER = "0a1b2c3d-1111-4222-8333-444455556666"
JOB = """\
image = "python"
command = ["pyhton", "train.py", "{data}"]
[params]
data = "train.csv"
"""


def failed(
    params: Mapping[str, str] | None = None, code: str = "", children: Mapping[str, int] = {}
) -> FoundRun:
    run = Run("a1b2", "lenet", "gpu", JobStatus.FAILED, created_at=1, exit_code=1,
              attempts=(Attempt(1, 2, exit_code=1),), children=dict(children))  # fmt: skip
    return FoundRun(run, Record(params=dict(params or {}), code=code))


def remedy(
    found: FoundRun, command: str, jobs: Sequence[KnownJob] = (), verdict: str = "It failed."
) -> Remedy:
    why = Explanation("exception", verdict, (), "Correct it.", command)
    return remedy_for(found, why, " --env dev", lambda: jobs, Path("/work"))


def values(action: PageAction | None) -> dict[str, str]:
    """The fields of a form that differ from the run or from the job."""
    assert action is not None
    return {
        each.name: each.value
        for each in action.fields
        if each.value != (each.value if each.present is None else each.present)
    }


@pytest.fixture
def job(tmp_path: Path) -> KnownJob:
    (tmp_path / "job.toml").write_text(JOB)
    return KnownJob("half", tmp_path, load_job(tmp_path))


def test_a_recommended_rerun_is_a_form_with_the_recommended_values() -> None:
    made = remedy(failed(), "batchml rerun a1b2 --memory '4 GiB' --resume --env dev")
    assert made.action is not None and made.action.path == "/act/rerun"
    assert made.action.label == "Run again with 4 GiB of memory and its checkpoint"
    assert values(made.action) == {"memory": "4 GiB", "resume": "true"}


def test_a_flag_without_a_field_leaves_the_command_only() -> None:
    for flags in ("--neurons 2", "--memory", "--tag a=b"):
        assert remedy(failed(), f"batchml rerun a1b2 {flags}") == Remedy()
    assert remedy(failed(), "batchml rerun other") == Remedy()
    assert remedy(failed(), "batchml 'not closed").action is not None


def test_a_wrong_command_is_the_form_of_the_job_with_the_right_one(job: KnownJob) -> None:
    made = remedy(failed(), f"batchml submit {job.folder} -- python train.py --env dev", [job])
    assert made.action is not None and made.action.path == "/act/submit"
    assert made.action.body == {"job": "half"}
    assert made.action.label == "Submit it with the command python train.py"
    assert values(made.action) == {"command": "python train.py"}


def test_a_missing_module_is_the_form_of_the_job_with_another_image(job: KnownJob) -> None:
    made = remedy(failed(), f"batchml submit {job.folder} --image .", [job])
    assert values(made.action) == {"image": "."}
    # A folder of the command line never becomes a field.
    assert remedy(failed(), f"batchml submit {job.folder} --image ../x", [job]) == Remedy()


def test_the_form_of_a_job_has_the_parameters_of_the_run(job: KnownJob) -> None:
    found = failed({"data": "missing.csv"})
    made = remedy(found, f"batchml submit {job.folder}", [job], "missing.csv does not exist.")
    assert values(made.action) == {"data": "missing.csv"}
    assert made.action is not None and made.action.label == "Submit it with another data"
    assert remedy(found, "batchml submit /elsewhere", [job]) == Remedy()


def test_an_error_of_the_program_has_a_rerun_and_a_link_to_the_log() -> None:
    made = remedy(failed(code="s3://b/c.tar"), "batchml logs a1b2")
    assert values(made.action) == {"code": "true"}
    assert made.link == ("See the log", "#log-title")
    array = failed(code="s3://b/c.tar", children={"SUCCEEDED": 3, "FAILED": 1})
    made = remedy(array, "batchml logs a1b2:2")
    assert values(made.action) == {"failed": "true", "code": "true"}
    assert made.link == ("See child 2", "/run/a1b2:2")


def test_a_value_that_occurs_in_the_error_is_the_one_to_change() -> None:
    found = failed({"optimizer": "sdg", "lr": "0.1", "epochs": "3"}, code="s3://b/c.tar")
    made = remedy(found, "batchml logs a1b2", verdict="ValueError: unknown optimizer 'sdg'")
    assert made.action is not None
    assert made.action.label == "Run again with another optimizer"
    assert values(made.action) == {}  # the user's to decide
    first = [each.name for each in made.action.fields if each.is_first]
    assert first == ["optimizer"]


def typed(*command: str, image: str = ".") -> FoundRun:
    """A run of a command without a job, whose image was made of the folder's files."""
    run = Run("a1b2", "ad", "gpu", JobStatus.FAILED, created_at=1, exit_code=2, command=command,
              image="batchml/python:1",
              attempts=(Attempt(1, 2, exit_code=2),))  # fmt: skip
    spec = {"image": image, "command": list(command)}
    return FoundRun(run, Record(code="s3://b/c.tar", spec=spec, command=command))


@pytest.mark.parametrize(
    ("cause", "error", "selected"),
    [
        ("bad-argument", "train.py: error: argument --lr: invalid float value: 'O.1'", "O.1"),
        ("unknown-flag", "train.py: error: unrecognized arguments: --epoch=3", "--epoch"),
        ("missing-file", "No such file or directory: '/data/mnist'", "/data/mnist"),
        ("bad-argument", "the following arguments are required: --out", ""),
    ],
)
def test_a_wrong_word_of_a_command_is_selected_in_the_form_of_its_rerun(
    cause: str, error: str, selected: str
) -> None:
    found = typed("python", "train.py", "--lr", "O.1", "--epoch=3", "--data", "/data/mnist")
    again = f"batchml submit --name ad --image python -- {shlex.join(found.command)}"
    for command in ("batchml logs a1b2", again if cause == "missing-file" else ""):
        made = remedy_for(found, Explanation(cause, error, (), "", command), "", list, Path("/"))
        assert made.action is not None and made.action.path == "/act/rerun"
        assert made.action.label == "Run again corrected"
        (field,) = [each for each in made.action.fields if each.name == "command"]
        assert field.value == "python train.py --lr O.1 --epoch=3 --data /data/mnist"
        assert (field.is_first, field.is_more, field.selected) == (True, False, selected)


def test_the_word_that_the_verdict_names_comes_before_a_traceback_of_the_program() -> None:
    why = Explanation("missing-file", "/data/a does not exist.", ('File "t.py": open("/data/a")',))
    assert suspect_in_command(typed("python", "t.py", "/data/a"), why) == "/data/a"
    assert (
        suspect_in_command(typed("python", "t.py"), Explanation("exception", "It failed.")) is None
    )


def test_the_file_of_a_line_in_a_traceback_is_no_wrong_word_of_the_command() -> None:
    evidence = (
        "train.py, line 1: def f(:",
        'File "train.py", line 1',
        "SyntaxError: invalid syntax",
    )
    why = Explanation("exception", "The program raised SyntaxError.", evidence)
    assert suspect_in_command(typed("python", "train.py"), why) is None


def test_a_command_without_a_job_is_typed_in_the_folder_of_its_run() -> None:
    found = typed("python", "t.py")
    assert found.record is not None
    found = replace(found, record=replace(found.record, folder="/home/ann/ad"))
    why = Explanation("missing-module", "No x.", (), "", "batchml submit --image . -- python t.py")
    made = str(explanation_panel(found, why, "", list, Path("/"), read_only=False))
    assert "In a terminal, in /home/ann/ad:" in made


def test_the_command_of_a_run_without_parameters_stands_in_the_form_of_its_rerun() -> None:
    made = rerun_action(typed("python", "train.py", "a b"), "")
    (field,) = [each for each in made.fields if each.name == "command"]
    assert (field.value, field.flag, field.is_more) == ("python train.py 'a b'", "--", False)


def test_the_rerun_of_a_run_of_another_project_stays_there_and_says_so() -> None:
    found = typed("python", "train.py")
    assert found.record is not None
    found = replace(found, record=replace(found.record, project="ad"))
    made = in_own_project(rerun_action(found, ""), found, "exp")
    assert made.command == "batchml rerun a1b2 --project ad"
    assert made.notes == ("It is of the project ad, and so is the new run.",)
    assert in_own_project(rerun_action(found, ""), found, "ad").notes == ()


def test_a_module_that_a_command_misses_is_a_rerun_with_the_image_made_anew() -> None:
    found = typed("python", "train.py", image="python")
    made = remedy(found, "batchml submit --name ad --image . -- python train.py --env dev")
    assert made.action is not None and made.action.path == "/act/rerun"
    assert values(made.action) == {"image": ".", "code": "true"}
    assert made.action.label.startswith("Run again with an image made of its files now")
    wrong = remedy(found, "batchml submit --name ad --image ../x -- python train.py")
    assert values(wrong.action) == {"code": "true"}  # no path becomes a field
    other = remedy(found, "batchml submit --name ad --image . -- python3 train.py")
    assert values(other.action)["command"] == "python3 train.py"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("lr must be below 1, not 10.0", ["lr"]),
        ("step 10.0 of the program", []),  # a number means nothing without its name
        ("lr: 110.0 or 10.05", []),
        ("cannot open /data/a.csv", ["path"]),
        ("cannot open /data/a.csv.gz", []),
        ("x is True", []),
    ],
)
def test_suspects(text: str, names: list[str]) -> None:
    found = failed({"lr": "10.0", "path": "/data/a.csv", "one": "x"})
    assert suspects(found, Explanation("exception", text)) == names


def test_another_run_that_failed_is_a_link() -> None:
    made = remedy(failed(), f"batchml explain {OTHER}")
    assert made == Remedy(None, ("See the run 0a1b2c3d", f"/run/{OTHER}"))
    assert remedy(failed(), "batchml top").link == ("See the cluster", "/cluster")
    queue = remedy(failed(), "batchml ls --queue 'a&b' --env dev")
    assert queue.link == ("See the runs of the queue a&b", "/?q=a%26b")


def test_a_run_that_does_well_has_nothing_to_explain_and_links_have_words() -> None:
    def panel(why: Explanation) -> str:
        return str(explanation_panel(failed(), why, "", lambda: (), Path("/work"),
                                     read_only=False))  # fmt: skip

    assert "It runs." not in panel(Explanation("running", "It runs.", is_problem=False))
    assert "Why it failed" in panel(Explanation("exception", "It failed."))
    assert remedy(failed(), f"batchml logs -f {OTHER}").link == (
        "See the run 0a1b2c3d", f"/run/{OTHER}")  # fmt: skip
