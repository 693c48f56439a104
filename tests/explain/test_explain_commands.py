"""The commands that are named for a failed run: they exist, and keep what the run was."""

import shlex
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from batchml.explain.ask import variables_of_user
from batchml.explain.failing import why_ended
from batchml.explain.missing import EndedRun, FileState, LocalFindings
from batchml.explain.suggest import CommandWriter, describe_memory, describe_time, own_image
from batchml.model.run import JobStatus, Record, Run
from tests.explain.test_explain_failing import LOGS, STARTS
from tests.support.explain_world import ID, LOST, NOW, OOM, TIMED_OUT, ended


def test_what_needs_more_is_run_again_with_all_that_it_was() -> None:
    """`rerun` keeps tags, variables, parameters and the array; of one, what failed is enough."""
    run = ended(137, reason=OOM, params={"lr": 0.1}).run
    assert (
        why_ended(EndedRun(run, CommandWriter(job="x"))).command
        == f"batchml rerun {ID} --memory '2 GiB'"
    )
    for children, words in (({"FAILED": 2}, ""), ({"FAILED": 1, "SUCCEEDED": 1}, " --failed")):
        array = Run("whole", "lenet", "q", JobStatus.FAILED, array_size=2, children=children)
        found = why_ended(EndedRun(replace(run, array_index=0), CommandWriter(), array=array))
        assert found.command == f"batchml rerun whole{words} --memory '2 GiB'"


def test_a_run_whose_budget_was_spent_is_given_twice_of_it() -> None:
    line = "batchml: the budget of --max-cost is spent: 60 of 60 seconds."
    end = replace(ended(143, line), max_cost=0.25)
    assert why_ended(end).command == f"batchml rerun {ID} --max-cost 0.5 --env dev"


def test_without_the_jobs_folder_the_run_itself_is_repeated() -> None:
    line = "batchml: the code archive c.tar.gz cannot be unpacked: no"
    found = why_ended(EndedRun(ended(78).run, CommandWriter(), lines=(line,)))
    assert found.command == "batchml submit --name lenet --image pytorch -- python train.py"
    child = replace(ended(78).run, array_index=1)
    array = Run("whole", "lenet", "q", JobStatus.FAILED, array_size=2)
    found = why_ended(EndedRun(child, CommandWriter(), array, lines=(line,)))
    assert "--array 2 -- python train.py" in found.command


def test_a_run_of_a_folders_own_image_is_submitted_with_it_and_names_its_variables() -> None:
    line = "batchml: the code archive c.tar.gz cannot be unpacked: no"
    record = Record(spec={"env": {"OWN": "1"}})
    run = replace(ended(78).run, environment={"OWN": "1", "DATA": "secret", "BATCHML_KEY": "k"})
    end = EndedRun(run, CommandWriter(image="."), lines=(line,),
                   variables=variables_of_user(run, record))  # fmt: skip
    found = why_ended(end)
    assert found.command == "batchml submit --name lenet --image . -- python train.py"
    assert found.fix.endswith(" Add its variables with --set-env: DATA.")
    assert "secret" not in f"{found}"


def test_parameters_that_the_job_has_itself_are_left_out() -> None:
    run = ended(78, params={"lr": 0.1, "n": 4, "new": "x"}).run
    line = "batchml: the code archive c.tar.gz cannot be unpacked: no"
    commands = CommandWriter(job="jobs/lenet", defaults={"lr": 0.1, "n": 3})
    again = why_ended(EndedRun(run, commands, lines=(line,))).command
    assert again == "batchml submit jobs/lenet -p n=4 -p new=x"


def test_with_the_jobs_folder_its_parameters_are_given_again() -> None:
    run = ended(78, params={"lr": 0.1, "name": "a b"}).run
    line = "batchml: the code archive c.tar.gz cannot be unpacked: no"
    assert why_ended(EndedRun(run, CommandWriter(job="jobs/lenet"), lines=(line,))).command == (
        "batchml submit jobs/lenet -p lr=0.1 -p 'name=a b'"
    )


@pytest.mark.parametrize(
    ("is_other", "command"),
    [
        (False, "batchml submit . -p config=a/small.yaml -p n=1"),
        (True, "batchml submit . -p config=a/small.yaml -- python t.py --c a/small.yaml"),
    ],
)
def test_a_wrong_path_is_corrected_in_the_parameter_that_has_it(
    is_other: bool, command: str
) -> None:
    params = {"config": "./a/smal.yaml", "n": 1}
    run = replace(ended(1, params=params).run, command=("python", "t.py", "--c", "./a/smal.yaml"))
    line = "FileNotFoundError: [Errno 2] No such file or directory: './a/smal.yaml'"
    found = LocalFindings(FileState.ABSENT, "/p", suggestion=" Did you mean 'a/small.yaml'?")
    commands = CommandWriter(job=".", is_other=is_other, defaults={"config": ""})
    end = EndedRun(run, commands, lines=(line,), findings=found)
    assert why_ended(end).command == command


@pytest.mark.parametrize(
    ("words", "typed"),
    [(("python", "t.py", "--c", "x"), "-p n=2"), (("python", "t.py", "{params}"), "-p n=2 -p c=x")],
)
def test_a_command_of_ones_own_is_proposed_only_with_parameters_that_it_takes(
    words: tuple[str, ...], typed: str
) -> None:
    run = replace(ended(1, params={"n": 2, "c": "x"}).run, command=words)
    writer = CommandWriter(job=".", defaults={"n": 1}, is_other=True)
    assert writer.submit(run) == f"batchml submit . {typed} -- {shlex.join(words)}"


def commands() -> Iterator[str]:
    """Every command that the tables here and there name."""
    for _, code, line, *_ in LOGS:
        yield why_ended(ended(code, line)).command
        yield why_ended(EndedRun(ended(code, line).run, CommandWriter(), lines=(line,))).command
    for _, reason, _ in STARTS:
        yield why_ended(ended(None, status_reason="Task failed to start", reason=reason)).command
    for because in (LOST, TIMED_OUT, "JobQueue deleted", "Dependent Job failed", "CAPACITY:", ""):
        yield why_ended(ended(None, status_reason=because)).command


def test_every_command_that_is_named_is_one_that_we_have() -> None:
    for command in sorted({*filter(None, commands()), *WAITING_COMMANDS}):
        assert takes(command), command


def test_no_command_that_is_named_leaves_everything_as_it_is() -> None:
    """None only prints requests, the run again, or what an unchanged image would be."""
    for command in filter(None, commands()):
        words = shlex.split(command)
        assert "--dry-run" not in words and "--plan" not in words, command
        assert words[1:3] not in (["show", ID], ["compute", "list"], ["image", "list"]), command


WAITING_COMMANDS = {
    f"batchml {words} --env dev"
    for words in (
        "ls --queue default", "ls --queue default --status RUNNING", "explain @last",
        "compute update gpu --max-vcpus 128", "compute update gpu --enable",
        "setup",
        "queue update default --enable", "queue list", "doctor", "cancel @last", "wait @last",
        "logs -f @last",
    )
}  # fmt: skip


def takes(command: str) -> bool:
    """True when the command line reads it without a complaint; nothing is carried out."""
    from batchml.cli.app import full_command

    words = shlex.split(command)[1:]
    words = words[: words.index("--")] if "--" in words else words
    found = full_command()
    context = found.make_context("batchml", words)
    while hasattr(found, "resolve_command"):
        name, found, words = found.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = found.make_context(name, words, parent=context)
    return not context.args


def test_what_cannot_be_submitted_from_here_is_not_named_as_the_way_out() -> None:
    for more in ({"nodes": 2}, {"node_index": 1}):
        for end in (
            ended(143, is_terminated=True, status_reason="by hand", **more),
            ended(137, reason=OOM, **more),
        ):
            assert why_ended(end).command == ""


def test_a_run_of_several_nodes_is_repeated_on_as_many() -> None:
    run = ended(78, key="k" * 17, nodes=3).run
    line = "batchml: the code archive c.tar.gz cannot be unpacked: no"
    again = why_ended(EndedRun(run, CommandWriter(job="jobs/ddp"), lines=(line,))).command
    assert again == "batchml submit jobs/ddp --nodes 3"
    lost = why_ended(
        EndedRun(replace(run, exit_code=75), CommandWriter(), lines=("batchml: node 1 is gone",))
    )
    assert lost.cause == "node-lost"
    assert lost.command == f"batchml rerun {ID} --attempts 2"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("pytorch", "pytorch"), ("batchml/pytorch:0123456789ab", "pytorch"),
        ("123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/pytorch@sha256:0", "pytorch"),
        ("docker.io/library/python:3.12", ""), ("ghcr.io/notbatchml/x:1", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_folder_of_an_image_of_ours_is_known(reference: str, name: str) -> None:
    assert own_image(reference) == name


def test_times_and_sizes_are_short() -> None:
    assert [describe_time(s * 1000) for s in (5, 150, 7200, 3 * 86_400)] == [
        "5 s", "2 min", "2 h", "3 days",
    ]  # fmt: skip
    assert (describe_memory(512), describe_memory(2048), describe_memory(1536)) == (
        "512 MiB",
        "2 GiB",
        "1536 MiB",
    )
    assert NOW > 0


def test_a_rerun_is_not_said_to_go_on() -> None:
    lost = EndedRun(ended(75, key="k").run, CommandWriter(), lines=("batchml: node 1 is gone",))
    assert why_ended(lost).fix.endswith("With --resume this rerun does too.")
