"""cost and --max-cost, as a user meets them on this machine."""

import sys

import pytest

from batchml.local.machine import read_machine
from tests.support.cli import Cli

# Two attempts: one that fails after a second, and one that saves when it is asked to.
PROGRAM = """
import os, signal, sys, time
if os.environ["AWS_BATCH_JOB_ATTEMPT"] == "1":
    time.sleep(1)
    sys.exit(3)
def save(*_):
    print("saved", os.path.exists(os.environ["BATCHML_STOP_FILE"]), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("going", flush=True)
time.sleep(60)
"""


@pytest.mark.journey
def test_a_run_saves_and_stops_before_it_costs_more(cli: Cli) -> None:
    vcpus = read_machine(with_gpus=False).vcpus
    # Of this machine's vCPUs, the run takes one: $1 an hour, and 6 seconds of it.
    price = f"[env.local]\nusd_per_hour = {vcpus}.0\n"
    (cli.folder / "batchml.toml").write_text(price)
    done = cli(
        "submit", "--wait", "--max-cost", "0.00167", "--memory", "64 MiB", "--attempts", "2",
        "--retry-on", "app-error", "--", sys.executable, "-c", PROGRAM,
    )  # fmt: skip
    assert "--max-cost $0.00167: the run may run 0:06, all attempts together" in done.err
    assert "the budget of --max-cost is spent" in done.out
    assert "saved True" in done.out
    assert done.code == 143

    bill = cli("cost", "@last", "--json").json["cost"]
    assert 0 < bill["low"] == bill["high"] <= 0.0025
    first, second = bill["attempts"]
    assert (first["hasFailed"], second["hasFailed"]) == (True, False)
    assert first["seconds"] + second["seconds"] < 8
    assert bill["failed"]["low"] == first["usd"]["low"]

    totals = cli("cost", "--since", "1h", "--json").json
    assert totals["total"]["runs"] == 1
    assert totals["queues"]["default"]["low"] == bill["low"]
    words = cli("cost").out
    assert "The last 7d: $0.00" in words
    assert "Prices: batchml.toml." in words
    refused = cli("cost", "--queue", "nope")
    assert refused.code and "Job queue 'nope' does not exist. Known: default." in refused.err
