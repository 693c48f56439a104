"""A cluster of this machine, as the commands show it: against a real server."""

import os
from pathlib import Path

import pytest

from batchml.local.home import Home
from batchml.local.machine import count_vcpus
from tests.e2e.test_everyday import Inside
from tests.support.cli import Cli
from tests.support.local_server import wait_for


@pytest.fixture
def cli(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("AWS_", "BATCHML_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHML_HOME", str(home.root))
    return Inside(tmp_path, home, capsys)


@pytest.mark.journey
def test_who_runs_who_waits_and_why_is_told_alike_everywhere(cli: Cli) -> None:
    """In `queue list`, `queue show`, `compute hosts` and `top`."""
    vcpus = count_vcpus()
    all_of_it = ("--vcpus", str(vcpus), "--", "sleep", "600")
    runs = [
        cli("submit", "--json", "--name", name, *all_of_it).json["jobId"]
        for name in ("runs", "next", "later")
    ]
    wait_for(lambda: cli("show", runs[0], "--json").json["status"] == "RUNNING", "it runs")
    free = f"needs {vcpus} vCPU{'s' if vcpus > 1 else ''}, 0 free"

    (queue,) = cli("queue", "list", "--json").json
    assert (queue["jobQueueName"], queue["running"], queue["waiting"]) == ("default", 1, 2)
    assert (queue["held"]["vcpus"], queue["asked"]["vcpus"]) == (vcpus, 2 * vcpus)
    assert queue["head"] == {"jobId": runs[1], "reason": free}
    assert cli("queue", "list").out.splitlines()[1].endswith(free)

    shown = cli("queue", "show", "default", "--json").json
    assert [(run["jobId"], run["position"]) for run in shown["runs"]] == [
        (runs[0], None), (runs[1], 1), (runs[2], 2)
    ]  # fmt: skip
    lines = cli("queue", "show", "default").out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[-3:]] == [
        "this-machine", f"(#1 {free})", "(#2)"
    ]  # fmt: skip

    hosts = cli("compute", "hosts", "--json").json
    (host,) = hosts["hosts"]
    assert (host["state"], host["runs"], host["tasks"]) == ("allocated", [runs[0]], 1)
    assert host["room"]["usedVcpus"] == host["room"]["vcpus"] == vcpus
    assert "allocated" in cli("compute", "hosts", "this-machine").out
    assert cli("compute", "hosts", "nowhere").code == 1

    top = cli("top", "--queue", "default").out
    assert f"this machine: allocated   vCPUs {vcpus}/{vcpus}" in top and f"(#1 {free})" in top
    for run in runs:
        cli("cancel", run)
    wait_for(lambda: cli("top", "--json").json["total"]["hosts"] == {"idle": 1}, "all have gone")
