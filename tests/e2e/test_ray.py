"""A gang of unlike nodes, with Ray itself, from `batchml submit` to the report. docs/ray.md."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from batchml.local.home import Home
from batchml.runtime.processes import descendants, send
from tests.support.cli import Cli, read_rest, read_until, write_job
from tests.support.local_server import wait_for
from tests.support.worlds import ROOT

LIMIT = 1500.0  # seconds: the first run downloads and installs Ray
JOB = ROOT / "jobs" / "vit-ray"
STEPS, BATCH, SIZE = 40, 8, 64
# Nothing is drawn for the later steps before the second worker is there. To keep a core busy for so
# long would take a core for so long.
PATIENCE = f"""

def patient(self, batch, draw=Draw.__call__):
    import ray, time

    while batch["id"][0] >= {STEPS // 4 * BATCH} and len(ray.nodes()) < 3:
        time.sleep(0.1)
    return draw(self, batch)


Draw.__call__ = patient
"""


def supervisors(home: Home) -> list[int]:
    """The processes that supervise a worker, of this state folder's server."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            environ = Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        told = dict(each.partition(b"=")[::2] for each in environ)
        is_ours = told.get(b"BATCHML_WORKSPACE", b"").startswith(os.fsencode(home.root))
        is_worker = b'"role":"worker"' in told.get(b"BATCHML_LAUNCH", b"")
        if is_ours and is_worker and b"batchml.runtime.nodes.ray.main" in words:
            found.append(int(entry))
    return found


@pytest.mark.slow
def test_a_vit_trains_while_one_worker_dies_and_another_comes_late(cli: Cli, home: Home) -> None:
    """Every image is seen once and in its place, and nothing is left when the head has ended.

    On two vCPUs the second worker waits in the queue until the first is gone; on more it is there
    from the start, and the first is as dead.
    """
    files = {path.name.replace(".", "__"): path.read_text() for path in JOB.glob("*.py")}
    files["pictures__py"] += PATIENCE
    write_job(cli.folder, "vit-ray", (JOB / "job.toml").read_text(), **files)
    params = ["-p", f"steps={STEPS}", "-p", f"batch_size={BATCH}", "-p", f"size={SIZE}"]
    watching = cli.watch("submit", "--wait", "vit-ray", *params)
    said = read_until(watching, "| loss")
    job = re.findall(r"vit-ray - ([0-9a-f-]{36})", said)[0]
    (worker, *_) = supervisors(home)
    tree = [worker, *descendants(worker)]
    send(tree, signal.SIGKILL)

    out, err = read_rest(watching, LIMIT)
    said += out
    assert watching.returncode == 0, said + err
    assert re.search(r"batchml: worker cpu\[\d\] at 127\.\S+ is gone", said), said
    assert said.count("has joined") == 2, said

    report = json.loads((home.runs / job / "output" / "report.json").read_text())
    head, *workers = sorted(report["nodes"], key=lambda node: str(node["role"]))
    rows = [node["rows"] for node in report["nodes"]]
    assert sum(rows) == STEPS * BATCH, report
    assert head["rows"] > 0
    assert sum(node["rows"] for node in workers) > 0
    assert 0 < report["data_wait"] <= 100
    metrics = cli("show", job, "--json").json["metrics"]
    averages = ("step_seconds", "data_wait", "images_per_second", "dollars_per_1000_steps")
    assert {name: metrics[name] for name in averages} == {name: report[name] for name in averages}
    assert report["dollars_per_1000_steps"] > 0
    losses = [float(loss) for loss in re.findall(r"\| loss ([0-9.]+)", said)]
    assert losses[-1] < losses[0] / 2, losses
    wait_for(lambda: not supervisors(home), "no supervisor of a worker is left", 15)
    assert not any(Path("/proc", str(pid)).exists() for pid in tree)
