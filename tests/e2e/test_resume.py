"""A training that is interrupted at random ends as one that is not, bit for bit. (C3)

Through the real server, with its retries: a job has ten attempts at most, so that twenty
interruptions take three jobs, which share a folder for checkpoints as rerun jobs of one run do.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home
from batchml.runtime.storage.files import write_atomically
from tests.process.test_notice import Metadata
from tests.support.generate import TORTURE
from tests.support.local_server import define, wait_for, wait_for_job
from tests.support.worlds import Worlds

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 600, 7
INTERRUPTIONS = 20 if TORTURE > 1 else 11  # more than one job stands
ATTEMPTS = 10  # AWS Batch's most
KINDS = ("kill the program", "kill the container", "terminate the container", "spot notice")

# Least squares by stochastic gradients: order, noise and momentum all come from saved state.
TINY = """
import hashlib, json, os, random, sys, time
from batchml.runtime import checkpoint

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])
TARGET = [0.5, -1.25, 2.0, 0.125]

rng = random.Random(7)
weights, speed, first = [0.0] * 4, [0.0] * 4, 0

def save(step):
    def write(path):
        state = {"rng": rng.getstate(), "weights": weights, "speed": speed}
        with open(path + "/state.json", "w") as file:
            json.dump(state, file)
    return checkpoint.save(write, step)

found = checkpoint.newest()
if found:
    first = found.step
    with open(found.path + "/state.json") as file:
        state = json.load(file)
    weights, speed = state["weights"], state["speed"]
    version, words, gauss = state["rng"]
    rng.setstate((version, tuple(words), gauss))

def wait_for_leave(step):
    # The test lets it go on: it is not to be done before it was interrupted.
    while step >= int(open(os.environ["LEAVE"]).read() or 0) and not checkpoint.should_stop():
        time.sleep(0.001)

progress = os.open(os.environ["PROGRESS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for step in range(first, STEPS):
    wait_for_leave(step)
    os.write(progress, b"%d %d\\n" % (os.getpid(), step))
    for _ in range(60):
        x = [rng.gauss(0, 1) for _ in TARGET]
        error = sum((w - t) * v for w, t, v in zip(weights, TARGET, x)) + rng.gauss(0, 0.1)
        speed = [0.9 * s + 0.002 * error * v for s, v in zip(speed, x)]
        weights = [w - s for w, s in zip(weights, speed)]
    if checkpoint.should_stop():
        save(step + 1)
        sys.exit(143)
    if (step + 1) % EVERY == 0:
        save(step + 1)
save(STEPS)
print("result", hashlib.sha256(repr(weights).encode()).hexdigest(), flush=True)
"""

# Dropout, shuffled batches, momentum and a schedule, on more than one thread's worth of state.
TORCH = """
import gc, hashlib, os, sys, time
gc.disable()  # importing is quicker by a third
import torch
from batchml.runtime import checkpoint

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
data = torch.randn(256, 8)
target = (data[:, :3].sum(1, keepdim=True) > 0).float()
model = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
order, first = torch.randperm(256), 0
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}

def save(step):
    state = {name: part.state_dict() for name, part in parts.items()}
    state.update(rng=torch.get_rng_state(), order=order)
    return checkpoint.save(lambda path: torch.save(state, path + "/state.pt"), step)

found = checkpoint.newest()
if found:
    state = torch.load(found.path + "/state.pt", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["rng"])
    order, first = state["order"], found.step

def wait_for_leave(step):
    # The test lets it go on: it is not to be done before it was interrupted.
    while step >= int(open(os.environ["LEAVE"]).read() or 0) and not checkpoint.should_stop():
        time.sleep(0.001)

progress = os.open(os.environ["PROGRESS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for step in range(first, STEPS):
    wait_for_leave(step)
    os.write(progress, b"%d %d\\n" % (os.getpid(), step))
    place = step % 8 * 32
    if place == 0 and step:
        order = torch.randperm(256)
    batch = order[place : place + 32]
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(data[batch]), target[batch])
    loss.backward()
    optimizer.step()
    schedule.step()
    if checkpoint.should_stop():
        save(step + 1)
        sys.exit(143)
    if (step + 1) % EVERY == 0:
        save(step + 1)
save(STEPS)
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("result", hashlib.sha256(parameters).hexdigest(), "loss", round(loss.item(), 4), flush=True)
"""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


class Training:
    """One run, as jobs that go on from each other, and who interrupts it."""

    def __init__(self, folder: Path, python: str, program: str, steps: int) -> None:
        self._folder, self._python, self.steps = folder, python, steps
        (folder / "train.py").write_text(program)
        self._leave = folder / "leave"
        self._progress = folder / "progress"
        self.interrupted: list[str] = []
        self._ended: set[int] = set()  # processes of attempts

    def unbroken_at(self) -> tuple[Path, dict[str, str]]:
        """The program, and the variables of a run that nothing interrupts."""
        return self._folder / "train.py", {
            "PROGRESS": str(self._folder / "unbroken"), "LEAVE": str(self._leave),
            "BATCHML_CHECKPOINT_DIR": str(self._folder / "of the unbroken"),
        }  # fmt: skip

    def unbroken(self) -> str:
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **self.unbroken_at()[1]}
        done = subprocess.run(
            self._command, env=environ, capture_output=True, text=True, check=True
        )
        return done.stdout

    @property
    def _command(self) -> list[str]:
        return [self._python, str(self._folder / "train.py"), str(self.steps), str(EVERY)]

    def let_go_on(self, to: int) -> None:
        """The program may make the steps before `to`."""
        write_atomically(str(self._leave), str(to).encode())

    def submit(self, batch: Any, metadata: Metadata) -> str:
        """A job of ten attempts, each in the care of our runtime."""
        variables = {
            "PYTHONPATH": str(ROOT), "PROGRESS": str(self._progress), "LEAVE": str(self._leave),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.address,
            "BATCHML_CHECKPOINT_DIR": str(self._folder / "checkpoints"),
        }  # fmt: skip
        definition = define(
            batch, [sys.executable, "-m", "batchml.runtime.run", *self._command],
            container={
                "environment": [{"name": n, "value": v} for n, v in variables.items()],
                "resourceRequirements": [
                    {"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "1024"},
                ],
            },
            retryStrategy={"attempts": ATTEMPTS},
        )  # fmt: skip
        made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)
        return str(made["jobId"])

    def at(self) -> list[tuple[int, int]]:
        """Process and step of every step that was begun."""
        if not self._progress.exists():
            return []
        lines = self._progress.read_bytes().split(b"\n")[:-1]
        return [(int(pid), int(step)) for pid, step in map(bytes.split, lines)]

    def interrupt(self, kind: str, steps: int, metadata: Metadata) -> None:
        """Once an attempt is there that has made `steps` steps; wait until it has ended."""

        self.let_go_on(max((step for _, step in self.at()), default=0) + steps + EVERY)

        def came() -> int:
            fresh = [pid for pid, _ in self.at() if pid not in self._ended]
            return fresh[0] if len(fresh) >= steps else 0

        pid = wait_for(came, f"an attempt makes {steps} steps", 60)
        time.sleep(random.uniform(0, 0.01))  # anywhere within a step, or a save
        entry = parent_of(pid)
        if kind == "spot notice":
            metadata.answers["spot/instance-action"] = {"action": "terminate"}
        elif kind == "terminate the container":
            os.kill(entry, signal.SIGTERM)
        else:
            os.kill(entry if kind == "kill the container" else pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"{kind}: it has ended", 60)
        metadata.answers.clear()
        self.interrupted.append(kind)
        self._ended.add(pid)

    def pass_over(self) -> None:
        """All attempts so far have ended."""
        self._ended.update(pid for pid, _ in self.at())

    def resumed(self) -> list[int]:
        """At which step each attempt began."""
        found: dict[int, int] = {}
        for pid, step in self.at():
            found.setdefault(pid, step)
        return list(found.values())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def result(batch: Any, logs: Any, job_id: str) -> str:
    job = wait_for_job(batch, job_id, limit=120)
    assert job["status"] == "SUCCEEDED", json.dumps(job["attempts"], default=str)
    stream = job["container"]["logStreamName"]
    events = logs.get_log_events(logGroupName="/aws/batch/job", logStreamName=stream)["events"]
    lines = [str(event["message"]) for event in events]
    return next(line for line in lines if line.startswith("result")) + "\n"


def interrupted_at_random(
    training: Training, batch: Any, logs: Any, metadata: Metadata, count: int
) -> str:
    """The result of a run that was interrupted `count` times."""
    training.let_go_on(0)
    last = training.submit(batch, metadata)
    for number in range(count):
        if number and number % (ATTEMPTS - 1) == 0:
            batch.terminate_job(jobId=last, reason="the next job goes on")
            wait_for_job(batch, last)
            training.pass_over()
            last = training.submit(batch, metadata)
        kind = KINDS[number % len(KINDS)] if number < len(KINDS) else random.choice(KINDS)
        training.interrupt(kind, random.randint(1, 3 * EVERY), metadata)
    training.let_go_on(training.steps)
    return result(batch, logs, last)


def test_interruptions_at_random_change_no_bit(
    tmp_path: Path, batch: Any, logs: Any, metadata: Metadata
) -> None:
    training = Training(tmp_path, sys.executable, TINY, STEPS)
    found = interrupted_at_random(training, batch, logs, metadata, INTERRUPTIONS)
    assert found == training.unbroken()
    began = training.resumed()
    assert len(began) > INTERRUPTIONS
    assert began == sorted(began), "what was saved once is never lost again"
    assert {*training.interrupted} == {*KINDS}


@pytest.mark.slow
def test_a_torch_training_with_dropout_and_shuffling_changes_no_bit(
    tmp_path: Path, home: Home, batch: Any, logs: Any, metadata: Metadata, pytorch: Path,
    worlds: Worlds,
) -> None:  # fmt: skip
    count, steps = (INTERRUPTIONS, STEPS) if TORTURE > 1 else (2, 150)
    training = Training(tmp_path, str(pytorch), TORCH, steps)
    found = interrupted_at_random(training, batch, logs, metadata, count)
    program, place = training.unbroken_at()
    codes, printed = worlds.run(program, tmp_path, 1, steps, EVERY, **place)
    assert codes == [0] and found in printed
