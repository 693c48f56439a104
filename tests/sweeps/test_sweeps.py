"""`sweeps ls, show, best, report` on stores that were filled by events.

Only `best --get` asks a server, for the outputs of a run.
"""

import json
import re
import shlex
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.cli.app import full_command, run
from batchml.context import Context
from batchml.model.job import JobSpec
from batchml.model.sweep import EarlyStop, SweepLimits, Trial, TrialState
from batchml.runs.outputs import OutputEntry
from batchml.runtime.protocol.sweep import (
    END,
    INBOX,
    MessageSender,
    add_end,
    checkpoint_prefix,
    encode_message,
    make_message,
    message_key,
)
from batchml.sweeps.commands.best import (
    _code_address,
    best_text,
    doubts,
    job_file,
    to_toml,
    trial_job_file,
)
from batchml.sweeps.commands.render import end_lines
from batchml.sweeps.control.events import (
    MessageReceived,
    PlannedTrial,
    SweepEnded,
    TrialBatch,
)
from batchml.sweeps.control.lease import expect_controller
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.jobs import CODE, CodeUpdate
from batchml.sweeps.results import rank_trials
from batchml.sweeps.spec.file import read_sweep
from batchml.sweeps.started import command_line
from batchml.sweeps.stores import list_sweeps, open_sweep_store, suggest
from batchml.sweeps.view import SweepView, make_row
from tests.support.sweep_story import BEGAN, JOB, PARETO, SPEC, fill, started, story, unfinished
from tests.support.sweep_story import context as context

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(context: Context, capsys: pytest.CaptureFixture[str]) -> Command:
    def called(*words: str) -> tuple[int, str, str]:
        code = run(["sweeps", *words])
        return code, *capsys.readouterr()

    return called


def numbers(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


# --- ls, show -------------------------------------------------------------------------------


def test_the_list_has_the_newest_first_and_one_that_is_damaged_hides_no_other(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(30))
    newer = replace(started(PARETO), key="3bcdefgh2345abcde", created_at=BEGAN + 50)
    fill(context, newer, story(20, PARETO))
    third = replace(started(), key="4bcdefgh2345abcde", created_at=BEGAN + 90, name="torn")
    (store := open_sweep_store(context, third.key)).put("spec.json", msgspec.json.encode(third))
    torn = {"name": "torn", "created_at": 1790000090, "project": context.project}
    store.put("spec.json", msgspec.json.encode(torn))
    code, out, _ = command("ls")
    assert code == 0
    rows = out.splitlines()
    assert [row.split()[0] for row in rows] == ["SWEEP", "4bcdefgh", "3bcdefgh", "2bcdefgh"]
    assert "ended" in rows[3] and "tpe+asha" in rows[3] and "val_accuracy 0.9" in rows[3]
    listed = json.loads(command("ls", "--json", "--limit", "2")[1])
    assert [each["sweepId"] for each in listed] == [third.key, newer.key]
    assert listed[0]["trouble"] and listed[1]["trials"] == 20


def test_no_sweeps_are_no_error(command: Command) -> None:
    code, out, err = command("ls")
    assert (code, out) == (0, "") and "batchml sweep" in err


def test_show_says_how_it_stands_and_what_to_do_next(context: Context, command: Command) -> None:
    fill(context, started(), story(30))
    code, out, err = command("show", "@last")
    assert code == 0
    assert "30 of 100 trials: " in out and "Ended: all 30 trials are over" in out
    assert "batchml sweeps best 2bcdefgh2345abcde" in err
    shown = numbers(command("show", "lenet-tune", "--json")[1])
    assert shown["status"] == "ended" and sum(shown["counts"].values()) == 30
    assert shown["best"]["metrics"]["val_accuracy"] > 0.9
    assert command("show", "@last", "--follow")[0] == 0  # which has nothing to wait for


def test_show_names_the_logs_of_failed_trials_and_of_the_best(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(100))
    state = SweepView(context, started(), open_sweep_store(context, started().key)).state
    failed = [trial for trial in state.trials.values() if trial.state is TrialState.FAILED]
    assert failed
    _, _, err = command("show", "@last")
    assert f"trial {failed[0].number} failed:  batchml logs {failed[0].job_id}\n" in err
    assert re.search(rf"run again: +batchml sweeps rerun {started().key} --failed\n", err)
    best = numbers(command("show", "@last", "--json")[1])
    assert re.search(rf"its log: +batchml logs {best['best']['jobId']}\n", err)
    first = best["failed"][0]
    assert (first["trial"], first["jobId"]) == (failed[0].number, failed[0].job_id)


def test_one_trial_says_why_it_failed_and_how_to_see_all(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(100))
    shown = numbers(command("show", "@last", "--json")[1])["failed"][0]
    number = str(shown["trial"])
    code, out, _ = command("show", "@last", "--trial", number)
    assert code == 0 and f"batchml logs {shown['jobId']}" in out
    assert shown["why"] in out and f"batchml sweeps rerun {started().key} --trial {number}" in out
    told = numbers(command("show", "@last", "--trial", number, "--json")[1])
    assert told["state"] == "FAILED" and told["lastLines"] and told["command"]
    assert command("show", "@last", "--trial", "100")[2].count("Trials are 0 to 99") == 1
    assert command("show", "@last", "--trial", "1", "--follow")[0] == 2


def test_a_sweep_that_nobody_attends_to_says_so(context: Context, command: Command) -> None:
    store = fill(context, started(), unfinished(40))
    _, out, err = command("show", "2bcd")
    assert "paused" in out.splitlines()[0]
    assert "paused" in command("ls")[1] and json.loads(command("ls", "--json")[1])
    assert json.loads(command("ls", "--json")[1])[0]["status"] == "paused"
    assert numbers(command("show", "2bcd", "--json")[1])["status"] == "paused"
    assert "It has no controller" in err and "batchml sweeps resume 2bcdefgh" in err
    expect_controller(store, "run-1", time.time() + 600.0, 0)
    _, out, err = command("show", "2bcd")
    assert "running" in out.splitlines()[0] and "sweeps resume" not in err
    assert "Its controller: the run run-1, which is starting." in err


def test_an_array_whose_jobs_go_on_runs_and_one_without_jobs_is_paused(context: Context) -> None:
    array = replace(SPEC, method="random", early_stop=EarlyStop(), limits=SweepLimits(trials=100))
    fill(context, started(array), unfinished(40))
    fill(context, replace(started(array), key="3bcdefgh2345abcde"), [])
    found = {each.key[0]: make_row(context, each).status for each in list_sweeps(context)}
    assert found == {"2": "running", "3": "paused"}


def test_a_sweep_whose_first_document_is_damaged_is_listed_and_says_so(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(3)).put("spec.json", b"{torn")
    code, out, _ = command("ls")
    assert code == 0 and "2bcdefgh" in out and "cannot be read" in out
    code, _, err = command("show", "2bcdefgh")
    assert code == 78 and "spec.json is damaged" in err and "nothing was sent" not in err


def test_what_was_run_again_is_shown_wherever_the_best_is(
    context: Context, command: Command
) -> None:
    events = list(story(30))
    best = SweepView(context, started(), fill(context, started(), events)).state
    number = rank_trials(best, SPEC)[0].number
    again = [PlannedTrial(100 + n, {}, n, "confirm", confirms=number) for n in range(2)]
    said = [
        MessageReceived(
            add_end(
                make_message(
                    MessageSender(2, 100 + n, 1, n, f"{JOB}:{n}", BEGAN), 1, END, BEGAN,
                    points=[[27, [0.9 + n / 10], BEGAN]],
                ),
                "DONE", 0, "",
            )
        )
        for n in range(2)
    ]  # fmt: skip
    store = open_sweep_store(context, started().key)
    SweepLedger(store).append([TrialBatch(2, BEGAN, "0123456789abcdef-2", tuple(again)), *said])
    line = f"Confirmed: trial {number} has 0.9"
    assert line in command("show", "@last")[1] and line in command("best", "@last")[1]
    told = numbers(command("show", "@last", "--json")[1])["confirmed"]
    assert [each["trial"] for each in told] == [number] and len(told[0]["values"]) == 3
    assert json.loads(command("best", "@last", "--json")[1])[0]["confirmed"]["values"]
    summary = SweepView(context, started(), store).summary
    assert any(line in each for each in end_lines(started(), summary))


def test_a_sweep_is_named_where_a_run_is_asked_for(context: Context) -> None:
    fill(context, started(), story(3))
    for word in ("lenet-tune", "2bcdefgh", "2bcdefgh2345abcde"):
        told = str(suggest(context, word))
        assert "It is a sweep: batchml sweeps show 2bcdefgh2345abcde" in told
    assert suggest(context, "other") is None and suggest(context, "@last") is None


def test_a_sweep_that_is_not_there_is_named_with_those_that_are(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(3))
    for words in (["show"], ["best"], ["report"]):
        code, out, err = command(words[0], "lenet-tone", *words[1:])
        assert (code, out) == (1, "") and "Did you mean 'lenet-tune'?" in err


def test_looking_sees_what_trials_said_since_and_writes_nothing(context: Context) -> None:
    events = list(story(12))
    said = [event for event in events if isinstance(event, MessageReceived)]
    rest = [event for event in events if not isinstance(event, MessageReceived | SweepEnded)]
    store = fill(context, started(), [*rest, *said[:8]])
    view = SweepView(context, started(), store)
    before = view.state.counts.copy()
    for event in said[8:]:
        message = event.message
        key = message_key(*(message[name] for name in ("wave", "trial", "attempt", "seq")))
        store.put(key, encode_message(message))
    keys = store.keys("")
    state = view.state
    assert state.counts != before
    assert all(trial.state.is_ended for trial in state.trials.values())
    assert store.keys("") == keys and len(store.keys(INBOX)) == len(said) - 8
    store.delete(*store.keys(INBOX))  # a controller took them
    SweepLedger(store).append(said[8:])
    whole = SweepView(context, started(), store).state
    assert view.state == whole


# --- best -----------------------------------------------------------------------------------


def test_the_best_with_its_parameters_and_its_command(context: Context, command: Command) -> None:
    fill(context, started(), story(60))
    best = json.loads(command("best", "@last", "--json")[1])[0]
    _, out, _ = command("best", "@last")
    assert out.startswith("val_accuracy 0.9")
    for name, value in best["params"].items():
        assert f"{name} " in out and str(value) in out
    _, line, _ = command("best", "@last", "--command")
    assert shlex.split(line) == [f"BATCHML_SEED={best['seed']}", *best["command"]]
    assert best["command"][:2] == ["python", "train.py"] and "--lr" in best["command"]
    several = json.loads(command("best", "@last", "-n", "5", "--json")[1])
    assert len(several) == 5 and several[0] == best
    assert len(command("best", "@last", "-n", "5", "--command")[1].splitlines()) == 5


def test_the_best_as_a_job_that_batchml_reads_again(context: Context, command: Command) -> None:
    fill(context, started(), story(60))
    _, text, _ = command("best", "@last", "--job")
    best = json.loads(command("best", "@last", "--json")[1])[0]
    job = msgspec.convert(tomllib.loads(text), JobSpec)
    assert job.params == best["params"]
    assert job.argv()[:2] == ["python", "train.py"]
    assert job.env == {"BATCHML_SEED": str(best["seed"])}


def test_the_bests_checkpoint_and_job_are_fetched(context: Context, command: Command) -> None:
    store = fill(context, started(), story(60))
    best = json.loads(command("best", "@last", "--json")[1])[0]
    store.put(checkpoint_prefix(best["trial"]) + "deep/weights.bin", b"abc")
    store.put(checkpoint_prefix(10_000) + "weights.bin", b"other")
    code, out, _ = command("best", "@last", "--get", "got", "--json")
    assert code == 0 and numbers(out)["checkpoint"] == 1
    assert Path("got/checkpoint/deep/weights.bin").read_bytes() == b"abc"
    assert tomllib.loads(Path("got/job.toml").read_text())["params"] == best["params"]


def test_a_folder_with_another_trial_is_refused_before_anything_is_written(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(60))
    assert command("best", "@last", "--get", "got")[0] == 0
    assert command("best", "@last", "--get", "got")[0] == 0
    job = Path("got/job.toml")
    text = job.read_text().replace("# Found by the sweep ", "# Found by the sweep x")
    job.write_text(text)
    code, _, err = command("best", "@last", "--get", "got")
    assert code == 2 and "another fetch (sweep x" in err and "Name a new folder" in err
    assert job.read_text() == text
    code, _, err = command("best", "@last", "--get", "got/job.toml")
    assert code == 2 and "got/job.toml is not a folder" in err


def test_the_code_that_is_fetched_is_what_the_trial_ran(context: Context) -> None:
    sweep = replace(started(), code="/codes/old.tar.gz")
    store = fill(context, sweep, story(10))
    trial = rank_trials(SweepView(context, sweep, store).state, SPEC)[0]
    assert trial.started_at is not None
    assert _code_address(sweep, store, trial, None) == "/codes/old.tar.gz"
    for at, name in ((trial.started_at + 9, "old"), (trial.started_at - 9, "new")):
        store.put(CODE, msgspec.json.encode(CodeUpdate("new.tar.gz", at)))
        assert _code_address(sweep, store, trial, None) == f"/codes/{name}.tar.gz"


def test_code_that_is_gone_is_said_and_the_rest_is_fetched(
    context: Context, command: Command
) -> None:
    sweep = replace(
        started(), code=str(context.home.code / "gone.tar.gz"), folder="/home/ada/lenet"
    )
    fill(context, sweep, story(10))
    code, _, err = command("best", "@last", "--get", "got")
    assert code == 0 and "Its code is no longer stored. It was packed from /home/ada/lenet" in err
    assert "batchml submit" not in err and Path("got/job.toml").exists()


def test_where_nothing_is_best_it_says_why(context: Context, command: Command) -> None:
    fill(context, started(), unfinished(1)[:2])
    code, out, err = command("best", "@last")
    assert (code, out) == (1, "") and "No trial has reported its metric yet" in err
    code, _, err = command("best", "@last", "--json")
    assert code == 1 and "No trial has reported its metric yet" in err


def test_a_best_whose_model_may_be_incomplete_is_named(context: Context) -> None:
    fill(context, started(), story(60))
    row = make_row(context, list_sweeps(context)[0])
    trial = row.best
    assert trial is not None and list(doubts(trial, None)) == []
    trial.why = "it continued after epoch 27, its early_stop.max"
    why = f"{trial.why}. Files that it wrote last may be incomplete"
    full, empty = OutputEntry("log.txt", 9, 0), OutputEntry("model.bin", 0, 0)
    assert list(doubts(trial, [full, empty])) == [why, "empty files in its outputs: model.bin"]
    trial.why = ""
    assert list(doubts(trial, [full])) == []
    assert list(doubts(trial, [])) == ["it has written no files to BATCHML_OUTPUT_DIR"]


def test_ways_of_best_that_do_not_go_together(context: Context, command: Command) -> None:
    code, _, err = command("best", "@last", "--job", "--command")
    assert code == 2 and "exclude each other" in err


def test_several_goals_have_a_front(context: Context, command: Command) -> None:
    fill(context, started(PARETO), story(50, PARETO))
    _, out, _ = command("best", "@last")
    assert "latency_ms" in out
    front = numbers(command("show", "@last", "--json")[1])["pareto"]
    assert len(front) > 1
    line = "no other trial beats these in every goal: "
    line += ", ".join(str(each["trial"]) for each in front)
    assert line in out and line in command("show", "@last")[1]
    best = json.loads(command("best", "@last", "-n", "30", "--json")[1])
    assert [each["trial"] for each in best[: len(front)]] == [each["trial"] for each in front]
    assert [each["isPareto"] for each in best] == [n < len(front) for n in range(30)]
    assert "They come first" in command("best", "@last", "-n", "30")[1]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.one_of(
            st.text(max_size=12), st.booleans(), st.integers(-(2**53), 2**53),
            st.floats(allow_nan=False, allow_infinity=False),
        ),
        max_size=6,
    )
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_any_parameters_survive_the_job_file(params: dict[str, Any]) -> None:
    job = JobSpec(image="i", command=("a", 'quote "\\'), env={"A": "b\nc"}, secrets={"S": "ssm:/x"})
    found = msgspec.convert(tomllib.loads(job_file(job, params)), JobSpec)
    assert found == replace(job, params=params)


def test_tables_of_tables_are_toml() -> None:
    table = {"a": 1, "groups": [{"name": "x", "resources": {"gpus": 1}}, {"name": "y"}], "b": []}
    assert tomllib.loads(to_toml(table)) == table


# --- report, export -------------------------------------------------------------------------


def test_a_report_has_its_name_from_the_sweep_and_its_files_beside_it(
    context: Context, command: Command
) -> None:
    fill(context, started(), story(60))
    code, out, err = command("report", "@last")
    assert (code, out) == (0, "lenet-tune-2bcdefgh.html\n") and "60 trials" in err
    assert sorted(path.suffix for path in Path(".").glob("lenet-tune-2bcdefgh.*")) == [
        ".csv", ".html", ".json",
    ]  # fmt: skip
    code, _, err = command("report", "@last", "-o", "sub/r.html")
    assert code == 2 and "the folder sub does not exist" in err and not Path("sub").exists()
    Path("sub").mkdir()
    found = numbers(command("report", "@last", "-o", "sub/r.html", "--json")[1])
    assert found["trials"] == 60 and Path(found["csv"]).exists()
    assert command("report", "@last", "-o", "r.pdf")[0] == 2


# --- the guide ------------------------------------------------------------------------------

GUIDE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text("utf-8")


def commands_of_the_guide() -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", GUIDE, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(batchml [^`]+)`", GUIDE)
    return sorted({line for line in (*lines, *inline) if line.startswith("batchml sweep")})


@pytest.mark.parametrize("line", commands_of_the_guide())
def test_every_command_of_the_guide_can_be_read(line: str) -> None:
    """Parsed as the command line does it, and not run."""
    command = full_command()
    context, words = None, shlex.split(line)
    name, *rest = words
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )


def test_the_files_of_the_guide_are_a_job_and_a_sweep() -> None:
    job, sweep = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL))
    assert msgspec.convert(job, JobSpec).command[-1] == "{params}"
    spec = read_sweep(sweep | {"name": "guide"}, "sweep.toml")
    assert (spec.goal.metric, spec.limits.trials, spec.early_stop.max) == ("val_accuracy", 16, 9)


def test_the_guide_names_every_state_of_a_trial() -> None:
    for state in TrialState:
        assert state.value in GUIDE


def test_the_folders_in_the_command_of_a_best_trial_are_explained_and_its_data_go_with_it() -> None:
    job = {"name": "n", "image": "pytorch", "command": ["train", "--data", "{data}", "{params}"]}
    environ = {"BATCHML_DATA_DIR": "/sets", "BATCHML_PROJECT": "p"}
    sweep = replace(started(), job=job, environ=environ)
    trial = Trial(number=1, params={"lr": 0.1}, seed=7)
    *_, last = best_text(sweep, [trial], SweepState()).splitlines()
    assert last == (
        "  Here {data} is /sets. As a run: batchml sweeps best 2bcdefgh2345abcde --get best && "
        "batchml submit best"
    )
    assert "As a run" not in best_text(started(), [trial], SweepState())
    written = tomllib.loads(trial_job_file(sweep, trial))
    assert written["env"] == {"BATCHML_DATA_DIR": "/sets", "BATCHML_SEED": "7"}


def test_the_command_of_a_trial_names_folders_that_a_shell_can_use() -> None:
    words = ["train", "--out={outputs}/a.png", "--data", "{data}", "--ckpt", "{checkpoints}"]
    job = {"name": "n", "image": "pytorch", "command": words}
    sweep, trial = replace(started(), job=job), Trial(number=1, params={}, seed=7)
    assert command_line(sweep, trial) == (
        "mkdir -p outputs checkpoints && "
        "BATCHML_SEED=7 train --out=outputs/a.png --data data --ckpt checkpoints"
    )
    with_data = replace(sweep, environ={"BATCHML_DATA_DIR": "/my sets"})
    assert "--data '/my sets'" in command_line(with_data, trial)
    plain = replace(sweep, job={**job, "command": ["train", "{lr}"], "params": {"lr": 1}})
    assert command_line(plain, trial) == "BATCHML_SEED=7 train 1"
    seeded = replace(sweep, job={**job, "command": ["t", "{params}"], "params": {"seed": "{seed}"}})
    assert command_line(seeded, trial) == "BATCHML_SEED=7 t --seed 7"
