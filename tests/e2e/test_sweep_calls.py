"""A sweep in AWS, as its calls: AWS Batch is the embedded server behind a counter, S3 is moto's."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.client import Client
from batchml.clock import SystemClock
from batchml.local.home import Home, ServerEndpoint
from batchml.model.sweep import TrialState
from batchml.sweeps.run import control_sweep
from batchml.sweeps.start import SweepOptions, prepare_sweep, start_sweep
from batchml.sweeps.stores import open_sweep_store
from tests.support.counting import Counted, counting
from tests.support.fakes import FakeClock
from tests.support.local_server import client_for
from tests.support.s3 import BUCKET, KEYS, moto_s3

CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
[env.dev.storage]
workspace = "none"
"""
SWEEP = """
job = "hello"
goal = { min = "loss" }
method = "random"
[space]
x = { float = [0.0, 1.0] }
[limits]
"""


@pytest.fixture
def account(
    home: Home, server: ServerEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Counted]:
    """A project whose environment `dev` is in the account, from whose folder all is done."""
    project, keys = tmp_path / "project", home.keys()
    (project / "jobs" / "hello").mkdir(parents=True)
    (project / "batchml.toml").write_text(CONFIG)
    for name in list(os.environ):
        if name.startswith(("AWS_", "BATCHML_")):
            monkeypatch.delenv(name)
    with moto_s3() as s3, counting(server.url, keys) as (counted, url):
        trial = {**KEYS, "AWS_ENDPOINT_URL_S3": s3, "AWS_REGION": "eu-west-1"}
        lines = "".join(f'{name} = "{value}"\n' for name, value in trial.items())
        (project / "jobs" / "hello" / "job.toml").write_text(
            'image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/python:1"\n'
            """command = ["python", "-c", "print('loss={x}')"]\n[params]\nx = 0\n[env]\n""" + lines
        )
        for name, value in {
            "BATCHML_HOME": str(tmp_path / "state"),
            "AWS_ENDPOINT_URL": url,
            "AWS_ENDPOINT_URL_S3": s3,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project)
        yield counted


class Hurried(SystemClock):
    """The pace is made for AWS, where trials take longer than here: each nap is cut short, and
    taken for a whole one."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.2))
        self.ahead += max(0.0, seconds - 0.2)


def of_batch(calls: Counter[str]) -> Counter[str]:
    return Counter({name.lower(): many for name, many in calls.items() if name != "DescribeStacks"})


def test_ten_thousand_trials_are_one_submission_and_watching_them_a_call_a_round(
    account: Counted, home: Home, server: ServerEndpoint
) -> None:
    client_for(home, server, "batch").update_compute_environment(
        computeEnvironment="this-machine", state="DISABLED"
    )
    context, clock = Client("dev")._context, FakeClock()
    ready = prepare_sweep(context, SweepOptions(table=_table("trials = 10000\nparallel = 500")))
    assert all(name.startswith("Describe") or name.startswith("describe") for name in account.calls)
    account.reset()
    store = start_sweep(context, ready)
    context.clock = clock
    rounds = control_sweep(context, ready.sweep, store).snapshots()
    first = next(rounds)
    assert first.counts[TrialState.WAITING] == 10_000
    # The first was refused: the definition was not there yet.
    sent = of_batch(account.calls)
    assert sent.pop("describejobs", 0) <= 1
    assert sent.pop("describejobdefinitions") == sent.pop("registerjobdefinition") == 1
    assert sent == {"submitjob": 2, "createconsumableresource": 1}
    account.reset()
    began = clock.monotonic()
    for _ in range(20):
        next(rounds)
    seconds = clock.monotonic() - began
    assert sum(account.calls.values()) <= min(20, seconds)
    assert account.calls.keys() == {"describejobs"}
    rounds.close()
    (run,) = [run for run in context.batch.list_recent("default") if run.array_size]
    context.batch.terminate(run.job_id, "enough")


def test_a_sweep_whose_board_is_in_s3_from_start_to_end(account: Counted) -> None:
    client = Client("dev", clock=Hurried())
    handle = client.sweep(_table("trials = 3"))
    store = open_sweep_store(client._context, handle.key)
    assert store.where == f"s3://{BUCKET}/runs/{handle.key}"
    summary = handle.wait(timeout=3600)
    assert summary.by == "done"
    best = handle.best()
    assert best is not None
    assert best.values == (best.params["x"],)
    assert of_batch(account.calls)["submitjob"] == 2
    assert store.keys("inbox/") == []
    assert client.sweeps("@last") == handle


def test_an_array_goes_on_where_no_controller_can_be_had(account: Counted) -> None:
    """Its image cannot be had here; what a controller would watch is said."""
    said: list[str] = []
    client = Client("dev", clock=Hurried(), tell=said.append)
    handle = client.sweep(_table("trials = 3\nparallel = 1"))
    handle.detach()
    assert of_batch(account.calls)["submitjob"] == 2  # the first: no such definition
    assert sum("Without a controller, failing trials" in words for words in said) == 1
    assert handle.wait(timeout=3600).by == "done"


def _table(limits: str) -> dict[str, object]:
    import tomllib

    return tomllib.loads(SWEEP + limits)
