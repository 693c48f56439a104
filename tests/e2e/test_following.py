"""Following arrays, nodes and retries through the real server, and what `logs` can choose."""

import json
import re
import shutil
import signal
from typing import Any

import pytest

from batchml.client import Client
from batchml.errors import LogDamaged
from tests.support.cli import Cli, read_until
from tests.support.local_server import client_for

SHELL = ("--", "sh", "-c")
CHILD = (
    "echo hello $AWS_BATCH_JOB_ARRAY_INDEX; test $AWS_BATCH_JOB_ARRAY_INDEX != 1 "
    "|| test $AWS_BATCH_JOB_ATTEMPT != 1 || exit 4"
)
STAMP = re.compile(r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\] ")


def lines(text: str) -> list[str]:
    """What was printed, with whose it is, without times."""
    return [STAMP.sub("", line) for line in text.splitlines() if STAMP.search(line)]


@pytest.mark.journey
def test_an_array_is_followed_child_by_child_and_attempt_by_attempt(cli: Cli) -> None:
    shown = cli("submit", "--wait", "--array", "3", "--attempts", "2", "--retry-on", "app-error",
                *SHELL, CHILD)  # fmt: skip
    assert shown.code == 0, shown.err
    followed = lines(shown.out)
    assert sorted(followed) == ["0 | hello 0", "1 | hello 1", "1/2 | hello 1", "2 | hello 2"]
    assert shown.err.count("complete: 1 line.") == 4
    # What `logs` prints afterwards is the same, in the order of the children.
    assert lines(cli("logs", "@last").out) == sorted(followed)
    assert lines(cli("logs", "@last:1").out) == ["hello 1", "hello 1"]
    assert lines(cli("logs", "@last", "--attempt", "2").out) == ["1/2 | hello 1"]
    assert lines(cli("logs", "@last", "--grep", "[02]$").out) == ["0 | hello 0", "2 | hello 2"]
    entries = cli("logs", "@last", "--tail", "1", "--json").json
    assert [(each["child"], each["attempt"]) for each in entries] == [("0", 1), ("1", 2), ("2", 1)]
    task = entries[1]["logStreamName"].rpartition("/")[2]
    (cli.home.attempts / task / "log").unlink()
    shown = cli("logs", "@last")
    assert (shown.code, lines(shown.out)) == (1, ["0 | hello 0", "1 | hello 1", "2 | hello 2"])
    assert shown.err.count("The log of 1/2 is not complete: it is gone.") == 1


@pytest.mark.journey
def test_nodes_are_followed_side_by_side(cli: Cli) -> None:
    assert cli("local", "start").code == 0
    endpoint = cli.home.endpoint()
    assert endpoint is not None
    batch = client_for(cli.home, endpoint, "batch")
    one = cli.home.root / "one"  # the main node waits for the other, which ends with it
    script = f"echo node $AWS_BATCH_JOB_NODE_INDEX; [ $AWS_BATCH_JOB_NODE_INDEX = 0 ] || >{one}; "
    script += f"until [ -e {one} ]; do sleep 0.05; done; sleep 0.2"
    container: Any = {
        "image": "any", "command": ["sh", "-c", script],
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"},
        ],
    }  # fmt: skip
    batch.register_job_definition(
        jobDefinitionName="nodes", type="multinode",
        nodeProperties={"numNodes": 2, "mainNode": 0, "nodeRangeProperties": [
            {"targetNodes": "0:", "container": container}]},
    )  # fmt: skip
    job = batch.submit_job(jobName="n", jobQueue="default", jobDefinition="nodes")["jobId"]
    shown = cli("logs", "-f", job)
    assert shown.code == 0, shown.err
    assert sorted(lines(shown.out)) == ["0 | node 0", "1 | node 1"]
    assert lines(cli("logs", f"{job}#1").out) == ["node 1"]


def test_the_log_of_a_run_can_be_cut_and_searched_and_its_end_is_kept(cli: Cli) -> None:
    shown = cli("submit", "--wait", *SHELL, "for n in 1 2 3 4; do echo line $n; done; exit 3")
    assert shown.code == 3
    assert lines(cli("logs", "@last", "--tail", "2").out) == ["line 3", "line 4"]
    assert lines(cli("logs", "@last", "--since", "1h", "--grep", "[12]").out) == [
        "line 1",
        "line 2",
    ]
    assert lines(cli("logs", "@last", "--since", "2100-01-01").out) == []
    assert lines(cli("logs", "-f", "@last", "--grep", "3").out) == ["line 3"]
    for wrong in (["--grep", "("], ["--since", "soon"], ["-f", "--tail", "3"]):
        shown = cli("logs", "@last", *wrong)
        assert (shown.code, shown.out) == (2, ""), shown
        assert wrong[0].replace("-f", "--follow") in shown.err
    # Who followed it has kept its end, which AWS Batch forgets.
    kept = (cli.home.root / "history.jsonl").read_text().splitlines()
    (end,) = [line for line in map(json.loads, kept) if line.get("status")]
    assert (end["exit_code"], end["outcome"]) == (3, "app-error")


def test_sigterm_detaches_like_ctrl_c(cli: Cli) -> None:
    watching = cli.watch("submit", "--wait", *SHELL, "echo up; sleep 60")
    read_until(watching, "] up")
    watching.send_signal(signal.SIGTERM)
    _, told = watching.communicate(timeout=20)
    assert watching.returncode == 130
    assert "Detached: the job goes on." in told
    assert json.loads(cli("show", "@last", "--json").out)["status"] == "RUNNING"
    assert cli("cancel", "@last").code == 0


def test_a_reader_that_goes_ends_the_command_with_a_code_that_is_no_runs(cli: Cli) -> None:
    assert cli("submit", "--wait", *SHELL, "seq 20000").code == 0
    for more in ((), ("-f",)):
        watching = cli.watch("logs", *more, "@last")
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert watching.stdout.readline() != ""
        watching.stdout.close()
        assert watching.wait(timeout=60) == 141
        assert [line for line in watching.stderr if not line.startswith("Runs as ")] == []
        watching.stderr.close()


def test_a_log_that_is_not_what_its_run_wrote_is_called_so(cli: Cli) -> None:
    """B260: with exit code 1; who follows the run still gets the run's code."""
    script = "for n in 1 2 3 4 5; do echo line $n; done; exit 3"
    assert "Log complete: 5 lines." in cli("submit", "--wait", *SHELL, script).err
    shown = cli("logs", "@last", "--json")
    assert (shown.code, [entry["logComplete"] for entry in shown.json]) == (0, [True] * 5)
    (log,) = cli.home.attempts.glob("*/log")
    whole = log.read_bytes()
    gone = "is not complete: it is gone. This file with 5 lines was deleted"
    for data, left, words in (
        (b"".join(whole.splitlines(True)[:3]), "12", "not complete: line 3 of 5 is missing."),
        (whole.replace(b"line 4", b"line x"), "123x5", "it differs at line 4 of 5."),
        (whole + b"1 line 6\n", "123456", "something was added after 5 lines."),
        (None, "", gone),
    ):
        log.unlink() if data is None else log.write_bytes(data)
        shown = cli("logs", "@last")
        assert (shown.code, lines(shown.out)) == (1, [f"line {each}" for each in left])
        assert words in shown.err and str(log) in shown.err and "printed nothing" not in shown.err
    shutil.rmtree(log.parent)
    for arguments in (["--tail", "9"], ["--json"]):
        shown = cli("logs", "@last", *arguments)
        assert (shown.code, gone in shown.err) == (1, True)
    assert [entry["logComplete"] for entry in shown.json] == [False]
    followed = cli("logs", "-f", "@last")
    assert (followed.code, gone in followed.err) == (3, True)
    assert "Log complete" not in followed.err
    run = Client("local", cli.folder, environ={"BATCHML_HOME": str(cli.home.root)}).run("@last")
    for follow in (False, True):
        with pytest.raises(LogDamaged, match=gone):
            list(run.logs(follow))
