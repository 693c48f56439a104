"""A sweep in AWS, as its calls: AWS Batch is the embedded server behind a counter, S3 is moto's."""

from collections import Counter

from batchml.client import Client
from batchml.local.home import Home, ServerEndpoint
from batchml.model.sweep import TrialState
from batchml.sweeps.run import control_sweep
from batchml.sweeps.start import SweepOptions, prepare_sweep, start_sweep
from batchml.sweeps.stores import open_sweep_store
from tests.support.counting import Counted
from tests.support.fakes import FakeClock
from tests.support.local_server import client_for
from tests.support.s3 import BUCKET
from tests.support.sweep_account import Hurried
from tests.support.sweep_account import account as account

SWEEP = """
job = "hello"
goal = { min = "loss" }
method = "random"
[space]
x = { float = [0.0, 1.0] }
[limits]
"""


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


def test_a_sweep_whose_store_is_in_s3_from_start_to_end(account: Counted) -> None:
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
