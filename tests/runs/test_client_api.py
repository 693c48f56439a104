"""batchml.Client: the same as the commands, typed, and nothing asked before it is needed."""

import json
import os
import threading
from collections.abc import Sequence
from decimal import Decimal
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Unpack

import msgspec
import pytest

from batchml.cli.options import read_seconds
from batchml.client import Client
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.cost.bill import AttemptCost, Bill
from batchml.cost.quote import Usd
from batchml.errors import ConfigError, NotFound, UsageError
from batchml.handles import RunHandle
from batchml.local.batch.fault_injection import TAG
from batchml.model.explanation import Explanation
from batchml.model.job import JobSpec, Resources, Retry, Scalar
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.commands.submit import submit as submit_command
from batchml.runs.options import RunRequest, SubmitOptions, resolve_job, to_request
from batchml.runs.prepare import prepare, to_requests
from batchml.runs.search import FoundRun
from batchml.runs.watch.wait import DeadlineClock, StoppableClock, WatchStopped, wait_for_runs
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

# Flags of the command alone: how to show a run, and where.
SHOWING = {
    "ctx", "wait", "dry_run", "offline", "cancel_on_interrupt", "env", "project", "json_"
}  # fmt: skip


def place_in(folder: Path) -> Context:
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "local")
    return Context(settings, FakeClock(), folder)


def test_what_the_command_takes_the_client_takes() -> None:
    flags = signature(submit_command).parameters.keys() - SHOWING
    assert flags - {"job"} == SubmitOptions.__annotations__.keys() - {"command"}
    own_tests = {"nodes", "fallback", "strict_resources", "include_secrets"}
    assert CHANGES.keys() | own_tests == SubmitOptions.__annotations__.keys()


def test_every_argument_has_a_type_and_every_method_a_text() -> None:
    for kind in (Client, RunHandle):
        for name, member in vars(kind).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if name.startswith("_") or not callable(function):
                continue
            assert function.__doc__, name
            for parameter in list(signature(function).parameters.values()):
                if parameter.name not in ("self", "cls"):
                    assert parameter.annotation is not Parameter.empty, (name, parameter.name)


def test_a_client_asks_nothing_before_it_is_needed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(home)})
    found = client.plan(command=["echo", "hi"], array=3, tags={"a": "b"})
    assert found["SubmitJob"]["arrayProperties"] == {"size": 3}
    assert found["SubmitJob"]["tags"]["a"] == "b"
    assert not home.exists()
    assert repr(client) == f"Client(env='local', folder='{tmp_path}')"


CHANGES: dict[str, Any] = {
    "command": ["echo", "other"],
    "params": {"lr": 0.2},
    "name": "other",
    "queue": "urgent",
    "image": "pytorch",
    "vcpus": 3,
    "memory": "64 MiB",
    "gpus": 1,
    "neurons": 1,
    "launch": "torchrun",
    "array": 7,
    "after": ["6b0e0000-0000-4000-8000-000000000001"],
    "attempts": 4,
    "auto_resume": True,
    "retry_on": ["app-error"],
    "timeout": "2h",
    "idle_after": "30m",
    "max_cost": 0.5,
    "set_env": {"A": "b"},
    "data": {"train": "s3://team/sets"},
    "tags": {"a": "b"},
    "share": "team",
}


@pytest.mark.parametrize("argument", CHANGES)
def test_no_argument_is_taken_and_forgotten(
    tmp_path: Path, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer took a timeout and never sent it."""
    (tmp_path / "batchml.toml").write_text("[env.local]\nusd_per_hour = 1.0\n")
    spec = JobSpec(image="python", command=("echo", "{lr}"), params={"lr": 0.1}, name="a")
    spec = msgspec.structs.replace(spec, resources=Resources(memory="32 MiB"), code=False)
    place = place_in(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    there = {"jobQueues": [{"jobQueueName": "urgent", "priority": 1}]}  # a queue is looked for
    place._session = ScriptedSession(lambda *_: there)

    def plan(**changes: Unpack[SubmitOptions]) -> tuple[str, list[str]]:
        prepared = prepare(place, to_request(spec, changes), dry_run=True)
        found = json.dumps(to_requests(prepared)).replace(prepared.record.key, "KEY")
        return found, list(prepared.notices)

    assert plan() == plan()
    assert plan(**{argument: CHANGES[argument]}) != plan()


def test_secrets_and_what_does_not_fit_are_refused_unless_said_otherwise(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TOKEN=x")
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    with pytest.raises(ConfigError, match="include-secrets"):
        client.plan(command=["true"])
    assert client.plan(command=["true"], include_secrets=True)
    large: dict[str, Any] = {"command": ["true"], "vcpus": 10_000, "include_secrets": True}
    assert client.plan(**large)
    with pytest.raises(ConfigError, match="this machine would give"):
        client.plan(**large, strict_resources=True)


def test_the_tag_of_a_rehearsal_is_the_users_to_give(tmp_path: Path) -> None:
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    found = client.plan(command=["true"], tags={TAG: "oom@3s"})
    assert found["SubmitJob"]["tags"][TAG] == "oom@3s"
    with pytest.raises(ConfigError, match="--tag batchml:key: names that begin with"):
        client.plan(command=["true"], tags={"batchml:key": "x"})


def test_empty_words_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """AWS Batch refuses them in words that do not say which."""
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    spec = JobSpec(
        image="python", command=("p", "{a}", "{b}{c}", "-{a}"), params={"a": "", "b": "", "c": "x"}
    )
    with pytest.raises(ConfigError) as caught:
        client.plan(spec, params={"c": ""})
    first, second = caught.value.mistakes
    assert first.startswith("params.a: is empty, and with it the word {a} of the command")
    assert second.startswith("params.b, -p c=: is empty")
    assert client.plan(spec, params={"a": "1"})
    switch = JobSpec(image="python", command=("p", "{params}"))
    with pytest.raises(ConfigError, match="For a flag without a value write"):
        client.plan(switch, params={"bias": ""})


def test_a_text_is_no_list_and_an_empty_value_no_default(tmp_path: Path) -> None:
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "home")})
    with pytest.raises(UsageError, match=r'Give a list of words: \["python", "mf\.py"\]\.'):
        client.plan(command="python mf.py")
    with pytest.raises(UsageError, match="command: is empty"):
        client.plan(command=[])
    with pytest.raises(UsageError, match=r'after: is a text\. Give a list: \["@last"\]'):
        client.plan(command=["true"], after="@last")
    with pytest.raises(UsageError, match="--name is empty"):
        client.plan(command=["true"], name=" ")


def test_a_whole_number_of_a_job_takes_no_fraction(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'image = "python"\ncommand = ["x", "{n}"]\nparams = { n = 100 }\n'
    )
    context = place_in(tmp_path)
    spec = resolve_job(context, to_request(".", {"params": {"n": 20}})).spec
    assert spec.params == {"n": 20}
    with pytest.raises(ConfigError, match=r"-p n=1\.5: the default is 100, so give a whole"):
        resolve_job(context, to_request(".", {"params": {"n": 1.5}}))
    # A run's own values may be changed freely by `rerun`: they were no declaration.
    assert resolve_job(context, to_request(spec, {"params": {"n": 1.5}})).spec.params["n"] == 1.5


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_job_of_the_current_folder(tmp_path: Path, name: str) -> None:
    """It is a variable of the shell that is not set: `submit "$JOB"`."""
    (tmp_path / "job.toml").write_text('image = "python"\ncommand = ["true"]\n')
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    with pytest.raises(UsageError, match="The name of the job is empty"):
        client.plan(name)
    with pytest.raises(ConfigError, match="--array 0: AWS Batch takes 2"):
        client.plan(".", array=0)


def test_a_duration_of_a_flag_is_at_most_a_hundred_years() -> None:
    assert read_seconds("36500d", "--since") == 36_500 * 86_400
    with pytest.raises(UsageError, match="--since 99999999999d: at most 36500d"):
        read_seconds("99999999999d", "--since")


def test_a_folder_with_a_job_is_the_job_where_nothing_else_is_named(tmp_path: Path) -> None:
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    with pytest.raises(UsageError, match="Name a job"):
        client.plan()
    (tmp_path / "job.toml").write_text('image = "python"\ncommand = ["a"]\nname = "here"\n')
    assert client.plan()["SubmitJob"]["jobName"].startswith("here-")
    assert client.plan(command=["b"])["SubmitJob"]["jobName"].startswith("b-")


def test_what_python_shows_of_a_run_is_short_and_harmless(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    run = Run("j-1", "a\x1b", "q", JobStatus.FAILED, exit_code=3, environment={"TOKEN": "secret"})
    assert repr(run) == str(run) == "Run('a\\x1b', 'j-1', FAILED, exit_code=3)"
    assert repr(RunHandle(place, "j-1")) == "RunHandle('j-1', env='local')"
    seen = RunHandle(place, "j-1", "a", FoundRun(run, None))
    assert repr(seen) == "RunHandle('a', 'j-1', env='local', last seen FAILED)"
    (tmp_path / "home").mkdir()
    again = {"env": {"BATCHML_ARRAY_MAP": "2 4"}}
    place.history.intend(Record(key="2aaaaaaaaaaaaaaaa", name="n", env="local", at=1, spec=again))
    place.history.add_job_id("2aaaaaaaaaaaaaaaa", "p")
    assert repr(RunHandle(place, "p:1")) == "RunHandle('p:4', env='local')"
    forgotten = FoundRun(None, Record(key="2a", job_id="j", name="a"))
    assert repr(RunHandle(place, "j", "a", forgotten)) == "RunHandle('a', 'j', env='local')"
    told = Explanation("oom", "It \x1b died.", ("long",), "more", "batchml rerun j")
    assert repr(told) == "Explanation('oom', 'It \\x1b died.', command='batchml rerun j')"


def test_a_long_command_is_shown_whole(tmp_path: Path) -> None:
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    command = ["echo", *["x" * 100] * 200]
    assert client.plan(command=command)["order"]["command"] == command


def test_environment_and_folder_are_refused_when_they_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="'prod' does not exist"):
        Client("prod", tmp_path, environ={})
    with pytest.raises(UsageError, match="is not a folder"):
        Client(folder=tmp_path / "nowhere", environ={})


def test_a_job_made_in_a_program_obeys_the_rules_of_the_file(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    spec = JobSpec(image="python", command=("echo", "{n}"), params={"n": 1})
    ordered = resolve_job(place, to_request(spec, {"params": {"n": 2}, "set_env": {"A": "secret"}}))
    assert (ordered.spec.name, ordered.spec.argv()) == ("echo", ["echo", "2"])
    assert ordered.spec.env == {"A": "secret"}
    assert ordered.original.env == {}  # what is kept on disk has no variables of the command line
    with pytest.raises(ConfigError) as caught:
        resolve_job(place, to_request(JobSpec(image="", command=("echo", "{n}", ""))))
    assert len(caught.value.mistakes) == 2


def test_all_mistakes_of_an_order_are_told_at_once(tmp_path: Path) -> None:
    order = RunRequest(
        command=("true",), array=1, max_cost=0.0, tags={"batchml:key": "x"}, after=("a",) * 21
    )
    with pytest.raises(ConfigError) as caught:
        resolve_job(place_in(tmp_path), order)
    assert len(caught.value.mistakes) == 4


BYTES = os.fsdecode(b"caf\xe9")  # as Python has it of a command line that is not UTF-8


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"command": ("echo", BYTES)}, r"command\[1\]"),
        ({"command": ("echo",), "params": {"p": BYTES}}, "params.p"),
        ({"command": ("echo",), "params": {BYTES: "1"}}, "params"),
        ({"command": ("echo",), "tags": {"who": BYTES}}, "tags.who"),
        ({"command": ("echo",), "changes": {"name": BYTES}}, "name"),
        ({"command": ("echo",), "changes": {"env": {"A": "x\0y"}}}, "env.A"),
        ({"command": ("echo", "a\0b")}, r"command\[1\]"),
        ({"command": ("echo",), "params": {"p": "a\0b"}}, "params.p"),
        ({"job": BYTES}, "job"),
    ],
)
def test_what_no_request_or_argument_can_carry_is_refused(
    tmp_path: Path, asked: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError, match=rf"- {place}: .*(is not UTF-8|has a NUL)") as caught:
        resolve_job(place_in(tmp_path), RunRequest(**asked))
    assert len(caught.value.mistakes) == 1
    str(caught.value).encode()


def test_a_job_that_no_request_can_carry_is_refused(tmp_path: Path) -> None:
    text = 'image = "python"\ncommand = ["echo", "a\\u0000b"]\n[metrics]\nm = "\\u0000(.)"\n'
    for folder in (tmp_path / "jobs" / "fine", tmp_path / BYTES / "jobs" / "fine"):
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"command\[1\]: 'a.x00b' has a NUL") as caught:
        resolve_job(place_in(tmp_path), RunRequest(job="fine"))
    assert len(caught.value.mistakes) == 1
    with pytest.raises(ConfigError, match=r"the folder's path.* is not UTF-8"):
        resolve_job(place_in(tmp_path / BYTES), RunRequest(job="fine"))


def test_parameters_that_are_too_long_together_are_refused(tmp_path: Path) -> None:
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path / "h")})
    params: dict[str, Scalar] = {f"p{number}": "x" * 1000 for number in range(1000)}
    with pytest.raises(ConfigError, match=r"params, together: .*128 KiB at most"):
        client.plan(command=["true"], params=params)


def test_one_node_is_not_cancelled_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="To stop all nodes: batchml cancel j"):
        RunHandle(place_in(tmp_path), "j#1").cancel()


def test_a_cost_that_is_kept_is_told_of_a_run_that_aws_has_forgotten(tmp_path: Path) -> None:
    settings = load_settings({"BATCHML_HOME": str(tmp_path)}, tmp_path, "local")
    place = Forgotten(settings, FakeClock(), tmp_path)
    place.history.intend(Record(key="2aaaaaaaaaaaaaaaa", name="n", env="local", at=1))
    place.history.add_job_id("2aaaaaaaaaaaaaaaa", "j")
    run = Run("j", "n", "q", JobStatus.SUCCEEDED, created_at=1, started_at=1, stopped_at=2)
    place.history.add_end(run, cost=0.25)
    assert float(RunHandle(place, "j").cost().usd.high) == 0.25
    assert repr(RunHandle(place, "j").cost()) == "Bill('j', Usd(0.25), 1 attempt)"


def test_amounts_of_a_bill_are_rounded_and_short_to_read() -> None:
    third, zero = Decimal(1) / 3, Decimal("0E-30")
    attempt = AttemptCost(1, "j", "h", 1.0, Usd(), Usd(zero, third), Usd(zero, zero))
    bill = Bill("j", (attempt, msgspec.structs.replace(attempt, usd=None))).round()
    assert str(bill.usd.high) == "0.333333" and str(bill.usd.low) == "0.000000"
    assert repr(bill) == "Bill('j', Usd(0 to 0.333333), 2 attempts)"
    assert repr(bill.attempts[0].hour) == "Usd(0)"


class Forgotten(Context):
    """An environment that knows no run any more."""

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return {}


@pytest.mark.parametrize("array", [0, 1, -3, 10_001])
def test_an_array_of_a_size_that_batch_refuses_is_not_sent(tmp_path: Path, array: int) -> None:
    with pytest.raises(ConfigError, match="2 to 10,000"):
        resolve_job(place_in(tmp_path), RunRequest(command=("true",), array=array))


class Endless(Context):
    """An environment whose runs go on."""

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return {each: Run(each, "n", "q", JobStatus.RUNNING) for each in job_ids}


def test_waiting_ends_when_it_was_told_to(tmp_path: Path) -> None:
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    clock = FakeClock()
    place, start = Endless(settings, clock, tmp_path), clock.monotonic()
    with pytest.raises(TimeoutError, match="The runs go on"):
        list(wait_for_runs(place, ["a", "b"], timeout=30))
    assert clock.monotonic() == start + 30


class Done(Context):
    """An environment whose runs have ended."""

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return {each: Run(each, "n", "q", JobStatus.SUCCEEDED, exit_code=0) for each in job_ids}


def test_an_end_that_was_waited_for_is_remembered(tmp_path: Path) -> None:
    settings = load_settings({"BATCHML_HOME": str(tmp_path)}, tmp_path, "local")
    place = Done(settings, FakeClock(), tmp_path)
    place.history.intend(Record(key="2aaaaaaaaaaaaaaaa", name="n", env="local", at=1))
    place.history.add_job_id("2aaaaaaaaaaaaaaaa", "mine")
    ended = wait_for_runs(place, ["mine", "another's"])
    next(ended)
    ended.close()  # type: ignore[attr-defined]  # who looks at the first alone
    (kept,) = place.history.newest_first("local")
    assert (kept.status, kept.exit_code) == ("SUCCEEDED", 0)


def test_a_run_that_is_looked_up_has_its_name_and_status(tmp_path: Path) -> None:
    client = Client("local", tmp_path, environ={"BATCHML_HOME": str(tmp_path)})
    client._context = place = Done(client._context.settings, FakeClock(), tmp_path)
    place.history.intend(Record(key="2aaaaaaaaaaaaaaaa", name="n", env="local", at=1))
    place.history.add_job_id("2aaaaaaaaaaaaaaaa", "j")
    assert repr(client.run("n")) == "RunHandle('n', 'j', env='local', last seen SUCCEEDED)"
    with pytest.raises(UsageError, match=r"run\(None\): give a job id, a name, a key or @last"):
        client.run(None)  # type: ignore[arg-type]


def test_nobody_sleeps_past_the_end() -> None:
    clock = FakeClock()
    until = DeadlineClock(clock, 5)
    until.sleep(3)
    until.sleep(100)
    assert clock.naps == [3, 2]
    with pytest.raises(TimeoutError):
        until.sleep(0.1)


def test_watching_ends_at_once_when_another_thread_stops_it() -> None:
    stop = threading.Event()
    clock = StoppableClock(FakeClock(), stop)
    clock.sleep(0.001)
    stop.set()
    with pytest.raises(WatchStopped):
        clock.sleep(1e6)


def test_two_handles_of_a_run_are_the_same(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    assert RunHandle(place, "j", "n") == RunHandle(place, "j")
    assert len({RunHandle(place, "j"), RunHandle(place, "j"), RunHandle(place, "k")}) == 2
    assert RunHandle(place, "j", "n").name == "n"  # known, so not asked for


def test_one_attempt_of_several_nodes_is_warned_of_and_another_command_is_known(
    tmp_path: Path,
) -> None:
    place = place_in(tmp_path)
    for attempts, nodes, warns in ((1, 1, False), (1, 2, True), (2, 2, False)):
        spec = JobSpec(image="python", command=("a",), name="a", code=False, nodes=nodes,
                       retry=Retry(attempts=attempts))  # fmt: skip
        spec = msgspec.structs.replace(spec, resources=Resources(memory="32 MiB"))
        prepared = prepare(place, RunRequest(spec=spec), dry_run=True)
        found = [notice for notice in prepared.notices if notice.startswith("One attempt")]
        assert bool(found) is warns and not prepared.record.other
    again = prepare(place, RunRequest(spec=spec, command=("b",)), dry_run=True)
    assert again.record.other
