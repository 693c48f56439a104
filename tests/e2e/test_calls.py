"""How many calls to AWS each everyday command makes, counted on the wire: few, and never more."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from batchml.aws.iam import COMMANDS, permissions_of
from batchml.cli.app import run as run_command
from batchml.client import Client
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.local.home import Home, ServerEndpoint
from batchml.model.environment import Environment
from batchml.model.run import JobStatus, Run
from batchml.runs.watch.wait import wait_for_runs
from tests.support.counting import Counted, counting
from tests.support.fakes import FakeClock
from tests.support.iam_actions import action_of

CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
[env.dev.storage]
workspace = "none"
"""
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/python:1"
JOB = f"""
image = "{IMAGE}"
command = ["python", "-c", "print('loss=0.5')"]
[metrics]
loss = 'loss=([0-9.]+)'
"""

Count = Callable[..., Counter[str]]


@pytest.fixture
def account(
    home: Home, server: ServerEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Counted]:
    """A project with the environment `dev` in the account, from whose folder commands are run."""
    project, keys = tmp_path / "project", home.keys()
    (project / "jobs" / "hello").mkdir(parents=True)
    (project / "batchml.toml").write_text(CONFIG)
    (project / "jobs" / "hello" / "job.toml").write_text(JOB)
    for name, command in (("still", '["sleep", "600"]'), ("quick", """["echo", "loss=0.5"]""")):
        (project / "jobs" / name).mkdir()
        (project / "jobs" / name / "job.toml").write_text(
            f'image = "docker.io/library/python:3.12"\ncommand = {command}\ncode = false\n'
        )
    for name in list(os.environ):
        if name.startswith(("AWS_", "BATCHML_")):
            monkeypatch.delenv(name)
    with counting(server.url, keys) as (counted, url):
        for name, value in {
            "BATCHML_HOME": str(tmp_path / "state"),
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project)
        yield counted


@pytest.fixture
def count(account: Counted) -> Count:
    def counted(*words: str, code: int | None = 0) -> Counter[str]:
        """The calls that one command makes, by operation."""
        account.reset()
        found = run_command(words)
        assert code is None or found == code, words
        assert {name.lower() for name in account.calls} <= allowed(*words[:2]), words
        return Counter({name.lower(): n for name, n in account.calls.items()})

    return counted


def allowed(*words: str) -> set[str]:
    """The operations that `doctor --policy` allows a command, in lower case."""
    command = " ".join(words) if " ".join(words) in COMMANDS else words[0]
    actions = {each.action for each in permissions_of(Environment(), [command])}
    names = {action.partition(":")[2] for action in actions}
    of_s3 = ("HeadObject", "ListObjectsV2", "DeleteObjects")
    names |= {name for name in of_s3 if action_of("s3", name) in actions}
    return {name.lower() for name in names}


def only(found: Counter[str], **most: int) -> bool:
    """Whether there were no calls but these, and no more of them."""
    return all(number <= most.get(name, 0) for name, number in found.items())


@pytest.mark.journey
def test_a_submission_is_one_call_of_batch_and_one_look_for_its_code(
    count: Count, account: Counted
) -> None:
    first = count("submit", "hello")
    assert first["submitjob"] == 2  # the first was refused: the definition was not there
    assert first["registerjobdefinition"] == 1
    assert first["describestacks"] == 3
    assert first["putobject"] == 1
    assert count("submit", "hello") == {"submitjob": 1, "headobject": 1}
    assert count("submit", "hello", "--array", "3") == {"submitjob": 1, "headobject": 1}
    assert count("submit", "still")["submitjob"] == 2
    assert count("submit", "still") == {"submitjob": 1}
    assert count("submit", "--after", "@last", "still") == {"submitjob": 1}
    assert len(account.objects) == 1
    assert count("submit", "--dry-run", "still") == {}


def test_a_refused_submission_makes_the_next_one_ask_again(count: Count) -> None:
    count("submit", "still")
    refused = count("submit", "still", "--queue", "nope", code=78)
    assert refused["submitjob"] == 1
    assert count("submit", "still")["describestacks"] == 3
    assert count("submit", "still") == {"submitjob": 1}


@pytest.mark.journey
def test_looking_at_a_run_costs_a_call_or_two(count: Count, home: Home) -> None:
    count("submit", "quick")
    (run,) = Client("local", environ={"BATCHML_HOME": str(home.root)}).runs()
    run.wait()
    assert only(count("wait", "@last"), describejobs=1)
    assert only(count("show", "@last"), describejobs=1, getlogevents=2)
    assert only(count("logs", "@last"), describejobs=1, getlogevents=2)
    assert only(count("ls"), describejobqueues=1, listjobs=1, describejobs=1)
    assert sum(count("explain", "@last", code=None).values()) <= 6


def test_ending_a_run_is_three_calls(count: Count) -> None:
    count("submit", "still")
    assert count("cancel", "@last") == {"describejobs": 2, "terminatejob": 1}


class Slow:
    """A thousand runs of which ten end with each look at them."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._looks = 0
        self.at: list[float] = []
        self.sizes: list[int] = []

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        self.at.append(self._clock.monotonic())
        self.sizes.append(len(job_ids))
        self._looks += 1
        state = {True: JobStatus.SUCCEEDED, False: JobStatus.RUNNING}
        return {
            job_id: Run(job_id, "n", "q", state[int(job_id) < self._looks * 5])
            for job_id in job_ids
        }


class WithSlow(Context):
    slow: Slow

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return self.slow.describe(job_ids)


def test_waiting_on_a_thousand_runs_is_a_call_a_second_at_most(tmp_path: Path) -> None:
    (tmp_path / "batchml.toml").write_text(CONFIG)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "dev")
    clock = FakeClock()
    place = WithSlow(settings, clock, tmp_path)
    place.slow = slow = Slow(clock)
    assert len(list(wait_for_runs(place, [str(number) for number in range(1000)]))) == 1000
    assert max(slow.sizes) <= 100
    assert len(slow.at) > 100
    busiest = max(sum(1 for other in slow.at if 0 <= other - start < 10) for start in slow.at)
    assert busiest <= 11  # in ten seconds
