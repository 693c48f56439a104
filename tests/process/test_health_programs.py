"""Bad hosts through the real entry of a container and the real server: acceptance A6."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from batchml.runtime.protocol.log_marks import parse_mark
from tests.support.local_server import define, wait_for_job

ROOT = str(Path(__file__).parents[2])
ENTRY = [sys.executable, "-m", "batchml.runtime.run"]


class Attempts:
    """One run, whose attempts are started on hosts that the test names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.number = 0

    def on(self, host: str, **environ: str) -> tuple[int, list[str]]:
        """One attempt of a plain run: its exit code, and what it printed."""
        self.number += 1
        return self._end(self._start(host, environ))

    def together_on(self, *hosts: str) -> list[tuple[int, list[str]]]:
        """One attempt of a run of many nodes, the main node first."""
        self.number += 1
        plan = LaunchPlan(TORCHRUN, processes=1, start_within=60.0)
        nodes = []
        for index, host in enumerate(hosts):
            environ = {
                "BATCHML_LAUNCH": plan.to_json(), "BATCHML_GANG_TOKEN": "5" * 32,
                "BATCHML_NODE_ADDRESS": f"127.88.{os.getpid() % 200}.{index + 1}",
                "AWS_BATCH_JOB_NUM_NODES": str(len(hosts)),
                "AWS_BATCH_JOB_NODE_INDEX": str(index), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            }  # fmt: skip
            if index:
                main = f"127.88.{os.getpid() % 200}.1"
                environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = main
            nodes.append(self._start(host, environ))
        return [self._end(node) for node in nodes]

    def _start(self, host: str, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*ENTRY, "sh", "-c", "echo trained"],
            cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "TMPDIR": str(self.root),
                "AWS_BATCH_JOB_ID": "job", "AWS_BATCH_JOB_ATTEMPT": str(self.number),
                "BATCHML_KEY": "5" * 32, "BATCHML_STORE": str(self.root / "store"),
                "BATCHML_HOST_ID": host, "BATCHML_FAULT_FILE": str(self.root / "fault-{host}"),
                **environ,
            },
        )  # fmt: skip

    def _end(self, process: "subprocess.Popen[bytes]") -> tuple[int, list[str]]:
        output, errors = process.communicate(timeout=60)
        lines = output.decode().splitlines()
        assert errors == b""
        told = parse_mark(lines[-1])
        assert told is not None and told[1]["code"] == str(process.returncode)
        return process.returncode, lines[:-1]


def test_a_run_leaves_a_bad_host_does_not_come_back_to_it_and_ends_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "fault-host-2").write_text("XID 79: it has fallen off the bus")
    run = Attempts(tmp_path)
    assert run.on("host-2") == (
        75,
        ["batchml: this host (host-2) is unfit: fault file: XID 79: it has fallen off the bus; "
         "another one is tried (1 of 3)"],
    )  # fmt: skip
    (tmp_path / "fault-host-2").unlink()  # it looks well again
    code, lines = run.on("host-2")
    assert (code, len(lines)) == (75, 1) and "found unfit before" in lines[0]
    assert run.on("host-3") == (0, ["trained"])


def test_a_gang_leaves_the_bad_host_of_one_node_and_trains_on_others(tmp_path: Path) -> None:
    (tmp_path / "fault-host-2").write_text("XID 79")
    run = Attempts(tmp_path)
    (code, lines), _ = run.together_on("host-1", "host-2")
    assert code == 75
    assert any("host-2" in line and "fault file: XID 79" in line for line in lines), lines
    assert not any("trained" in line for line in lines)
    nodes = run.together_on("host-1", "host-3")
    assert [code for code, _ in nodes] == [0, 0], nodes
    assert all(any(line.endswith("trained") for line in lines) for _, lines in nodes)


def test_checks_that_are_off_let_a_run_on_any_host(tmp_path: Path) -> None:
    (tmp_path / "fault-host-2").write_text("XID 79")
    off = '{"checks":"off"}'
    assert Attempts(tmp_path).on("host-2", BATCHML_HEALTH=off) == (0, ["trained"])


def test_where_every_try_finds_the_host_bad_the_run_ends_with_the_evidence(
    batch: Any, client: Callable[[str], Any], tmp_path: Path
) -> None:
    """This machine is the only host there is: two tries, and then it says so and gives up."""
    fault = tmp_path / "fault"
    fault.write_text("row 7 of the memory of GPU 0")
    definition = define(
        batch, [*ENTRY, "sh", "-c", "echo trained"],
        container={"environment": [
            {"name": name, "value": value} for name, value in (
                ("PYTHONPATH", ROOT), ("BATCHML_KEY", "key"), ("BATCHML_FAULT_FILE", str(fault)),
                ("BATCHML_HEALTH", '{"tries":2}'),
            )
        ]},
        retryStrategy={"attempts": 9, "evaluateOnExit": [
            {"onExitCode": "75", "action": "RETRY"}, {"onExitCode": "*", "action": "EXIT"},
        ]},
    )  # fmt: skip
    job = batch.submit_job(jobName="unfit", jobQueue="default", jobDefinition=definition)
    ended = wait_for_job(batch, job["jobId"], limit=60)
    codes = [attempt["container"]["exitCode"] for attempt in ended["attempts"]]
    assert (ended["status"], codes) == ("FAILED", [75, 75, 78])
    stream = ended["attempts"][-1]["container"]["logStreamName"]
    events = client("logs").get_log_events(
        logGroupName="/aws/batch/job", logStreamName=stream, startFromHead=True
    )["events"]
    told = " ".join(event["message"] for event in events)
    assert "one host was unfit in 3 tries" in told
    assert "row 7 of the memory of GPU 0" in told and '`checks = "off"`' in told
