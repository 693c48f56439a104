"""Whatever is killed, and whenever: nothing that was acknowledged is lost, doubled or stuck.

Each round kills, at a random moment, a server, a runner, a client, or two of them, under load; in
some the state folder is copied, and the copy looked at, or moved away and back while jobs run.
BATCHML_KILL9_ROUNDS, BATCHML_KILL9_MINUTES and BATCHML_KILL9_SEED choose how many rounds or how
long, and which moments; BATCHML_TORTURE=20 makes them ten thousand.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from batchml.clock import SystemClock
from batchml.errors import StateDamaged
from batchml.local import control
from batchml.local.batch.lifecycle import DEPENDENCY_FAILED
from batchml.local.executors import cgroup
from batchml.local.executors.supervisor import NO_EVIDENCE, RUNNER_LOST
from batchml.local.home import Home
from batchml.local.machine import read_machine
from batchml.model.names import split_key
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR
from tests.process.test_kill9 import kill_server, output, started
from tests.process.test_processes import is_alive
from tests.support.generate import TORTURE
from tests.support.load import JOB, LINES, RETRIES, Client, Load, Mortal, Plan, Stop, Told
from tests.support.local_server import client_for, define, identity_of, wait_for, wait_for_job

__all__ = ["started"]  # a fixture

CLOCK = SystemClock()
_DEFAULT = 40 if TORTURE == 1 else 500 * TORTURE
ROUNDS = int(os.environ.get("BATCHML_KILL9_ROUNDS", _DEFAULT))
MINUTES = float(os.environ.get("BATCHML_KILL9_MINUTES", "0"))
_COPY_EVERY, _MOVE_EVERY = 17, 30  # rounds
SEED = int(os.environ.get("BATCHML_KILL9_SEED", "20261121"))


class Rounds:
    """Kills a server, its runners and its clients, under load, and knows which attempts that cost.

    A runner is stopped before it is killed, so that it can be seen what it had.
    """

    def __init__(self, home: Home, load: Load, chance: random.Random) -> None:
        self.home = home
        self.lost: set[str] = set()  # attempts that have lost their runner
        self.perhaps: set[str] = set()  # those that had lost theirs only if they had begun
        self.restarts: list[float] = []  # seconds
        self.moves: list[tuple[float, float]] = []  # when the state folder was moved, in ms
        self.killed: Counter[str] = Counter()
        self.both = 0  # how often a server and a runner were killed at once
        self._gate = Lock()  # held while there is no state folder
        self._chance = chance
        self._clients = [Client(load, f"client{n}", tries) for n, tries in enumerate((1, 3))]
        self._mortal = Mortal(load)
        self._people: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._load = load

    def run(self, rounds: int) -> None:
        over = Event()
        threads = [Thread(target=self._go_on, args=(each, over)) for each in self._clients]
        for thread in threads:
            thread.start()
        end = CLOCK.monotonic() + 60 * MINUTES
        try:
            for number in count():
                if CLOCK.monotonic() > end if MINUTES else number >= rounds:
                    break
                self._round(number)
        finally:
            over.set()
            for thread in threads:
                thread.join()
            self._mortal.close()
            for _, person in self._people:
                person.kill()
                person.wait()

    def _go_on(self, client: Client, over: Event) -> None:
        while not over.is_set():
            with self._gate:
                client.act()
            client.nap(0.1)

    def _round(self, number: int) -> None:
        CLOCK.sleep(self._chance.uniform(0, 0.2))
        if number % 20 == 10:
            self._people.append(self._person(number))
        if number % _COPY_EVERY == _COPY_EVERY - 1:
            self._copy()
        if number % _MOVE_EVERY == _MOVE_EVERY - 1:
            self._move()
        victims = self._chance.choices(_VICTIMS, _OFTEN)[0]
        self.killed.update(victims)
        self.both += victims == ("server", "runner")
        runner = self._stopped_runner() if "runner" in victims else None
        if "server" in victims:
            kill_server(self.home)
        if runner is not None:
            with suppress(ProcessLookupError):  # it ended before it stood still
                signal.pidfd_send_signal(runner, signal.SIGKILL)
            os.close(runner)
        if "client" in victims:
            self._mortal.replace()
            for _, person in self._people[: self._chance.randrange(2)]:
                person.kill()
        if "server" in victims:
            if self._chance.random() < 0.1:
                _kill_while_it_starts(self.home, self._chance.uniform(0, 0.5))
            before = CLOCK.monotonic()
            control.ensure_server(self.home, CLOCK)
            self.restarts.append(CLOCK.monotonic() - before)

    def _copy(self) -> None:
        """A copy of the folder as it is, files that change among it: it is read, or refused."""
        copy = Home(self.home.root.with_name("copy"))
        subprocess.run(
            ["cp", "-a", self.home.root, copy.root], check=False, stderr=subprocess.DEVNULL
        )
        try:
            endpoint = control.ensure_server(copy, CLOCK)
        except StateDamaged:
            self.killed["copy refused"] += 1  # it was torn
        else:
            assert endpoint.read_only
            batch = client_for(copy, endpoint, "batch")
            batch.list_jobs(jobQueue="default", jobStatus="RUNNING")
            control.stop_server(copy, CLOCK)
            self.killed["copy read"] += 1
        shutil.rmtree(copy.root)

    def _move(self) -> None:
        """Away and back while jobs run: each server stops by itself, and the next goes on."""
        there = Home(self.home.root.with_name("there"))
        before = CLOCK.now()
        with self._gate:
            self._mortal.close()
            for _, person in self._people:
                person.kill()
                person.wait()
            for place, next_place in ((self.home, there), (there, self.home)):
                control.ensure_server(place, CLOCK)
                # Of a client that was killed as it started one, another may be on its way.
                wait_for(partial(_is_alone, place), "there is one server")
                server = place.holder()
                assert server is not None
                if next_place.root.exists():  # made anew by a program that had its old path
                    control.stop_server(next_place, CLOCK)
                    next_place.root.rename(next_place.root.with_name(f"left-{CLOCK.monotonic()}"))
                place.root.rename(next_place.root)
                wait_for(partial(_is_gone, server), "the server stops by itself")
                control.ensure_server(next_place, CLOCK)
            self.killed["moved"] += 2
            self.moves.append((1000 * before - 1000, 1000 * CLOCK.now()))
            self._mortal = Mortal(self._load, f"mortal{self.killed['moved']}x")

    def _person(self, number: int) -> tuple[str, subprocess.Popen[bytes]]:
        """Somebody who types `batchml submit --wait`."""
        name = Plan("typed", 0, 0).name(f"person{number}")
        words = [sys.executable, "-m", "batchml", "submit", "--wait", "--name", name, "--"]
        exports = "".join(
            f"export {pair['name']}='{pair['value']}'\n"
            for pair in self._load.environment(Plan.of(name), 0.1)
        )
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))}
        return name, subprocess.Popen(
            [*words, "sh", "-c", exports + JOB], cwd=self.home.root.parent,
            env={**environ, "BATCHML_HOME": str(self.home.root)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _stopped_runner(self) -> int | None:
        """The pidfd of some runner, which stands still; its attempt, if it has begun, is noted."""
        found = runners(self.home)
        if not found:
            return None
        busy = [pid for pid in found if _record_of(pid)]
        pid = self._chance.choice(busy if busy and self._chance.random() < 0.7 else found)
        try:
            runner = os.pidfd_open(pid)
            signal.pidfd_send_signal(runner, signal.SIGSTOP)
        except ProcessLookupError:
            return None
        wait_for(lambda: not is_alive(pid) or _stands_still(pid), "the runner stands still")
        record = _record_of(pid)
        if record:
            # One that prepares an attempt may not have read yet that its program may start.
            may_have_begun = b'"may_have_begun": true' in Path(record).read_bytes()
            (self.lost if may_have_begun else self.perhaps).add(record.split("/")[-2])
        return runner


def _is_alone(home: Home) -> bool:
    """Whether the server of a state folder is its only one, also of those that are starting."""
    words = f"batchml.local.server.daemon\0--home\0{home.root}\0".encode()
    found = 0
    for entry in os.listdir("/proc"):
        try:
            found += entry.isdigit() and words in Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
    return found == 1


def _is_gone(pid: int) -> bool:
    return not is_alive(pid)


_VICTIMS = [
    ("server",), ("runner",), ("client",),
    ("server", "runner"), ("server", "client"), ("runner", "client"),
]  # fmt: skip
_OFTEN = [30, 28, 22, 8, 6, 6]


def runners(home: Home) -> list[int]:
    """The pids of a state folder's runners, of whichever server."""
    log = str(home.local / "runners.log")
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/fd/1") == log:
                found.append(int(entry))
        except OSError:
            continue
    # A program that a runner is about to start looks like its runner for a moment.
    return sorted(pid for pid in found if _is_runner(pid) and parent_of(pid) not in found)


def _is_runner(pid: int) -> bool:
    try:
        return b"executors.runner" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parent_of(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])


def _record_of(pid: int) -> str:
    """The record that a runner holds; empty if it has none, or the attempt has ended."""
    try:
        files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return ""  # it has died, or has closed a file just now
    return next((file for file in files if file.endswith("/runner.json")), "")


def _stands_still(pid: int) -> bool:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        states.append((task / "stat").read_bytes().rpartition(b")")[2].split()[0])
    return set(states) <= {b"T", b"t", b"Z", b"X"}


def test_whatever_is_killed_nothing_is_lost_doubled_or_stuck(home: Home, started: Path) -> None:
    print(f"BATCHML_KILL9_SEED={SEED} BATCHML_KILL9_ROUNDS={ROUNDS}")
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    definition = define(batch, ["sh", "-c", JOB])
    ledgers = started.parent / "ledgers"
    ledgers.mkdir()
    nodes = _define_nodes(batch) if read_machine().vcpus >= 2 else ""
    load = Load(str(home.root), str(started), str(ledgers), definition, nodes, SEED)
    rounds = Rounds(home, load, random.Random(SEED))
    rounds.run(ROUNDS)
    slowest = sorted(rounds.restarts)[-3:]
    print(
        f"killed: {dict(rounds.killed)}; {len(rounds.lost)} attempts; slowest restarts: {slowest}"
    )
    assert slowest[-1] < 30, "a restart takes well under 3 s, where others leave it the time"

    told = Told.read(str(ledgers))
    assert told.surprises == []
    endpoint = control.ensure_server(home, CLOCK)
    batch, logs = (client_for(home, endpoint, service) for service in ("batch", "logs"))
    wait_for(lambda: not unfinished(batch), "every job ends", 60 + ROUNDS)
    verdict = Verdict(batch, logs, started, told, rounds)
    assert len(verdict.jobs) >= min(ROUNDS, 5), "there was load"
    verdict.pass_()
    print(f"{len(verdict.jobs)} jobs ended: {dict(verdict.seen)}")

    machine = read_machine()
    needs = [
        {"type": "VCPU", "value": str(machine.vcpus)},
        {"type": "MEMORY", "value": str(machine.memory)},
    ]
    environment = load.environment(Plan("whole", 0, 0), 0)
    whole = batch.submit_job(
        jobName="whole", jobQueue="default", jobDefinition=definition,
        containerOverrides={"environment": environment, "resourceRequirements": needs},
    )["jobId"]  # fmt: skip
    assert wait_for_job(batch, whole)["status"] == "SUCCEEDED", "everything is free again"
    control.stop_server(home, CLOCK)
    wait_for(lambda: not runners(home), "idle runners end with their server")
    assert _of_any_attempt(home) == []
    assert cgroup.members(list(cgroup.find(identity_of(home)).values())) == []
    errors = re.findall(r".*(?:Traceback|ERROR).*", home.log.read_text())
    known = ("is in use", "was moved, deleted or replaced", "has no readable record")
    assert [line for line in errors if not any(text in line for text in known)] == []
    assert (home.local / "runners.log").read_text() == ""


def _define_nodes(batch: Any) -> str:
    resources = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
    container = {
        "image": "any", "command": ["sh", "-c", JOB], "resourceRequirements": resources,
    }  # fmt: skip
    made = batch.register_job_definition(
        jobDefinitionName="nodes", type="multinode",
        nodeProperties={
            "numNodes": 2, "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:", "container": container}],
        },
    )  # fmt: skip
    return f"{made['jobDefinitionName']}:{made['revision']}"


def unfinished(batch: Any) -> bool:
    statuses = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
    return any(
        batch.list_jobs(jobQueue="default", jobStatus=status)["jobSummaryList"]
        for status in statuses
    )


def _of_any_attempt(home: Home) -> list[int]:
    """Processes that have an attempt of this state folder in their environment."""
    known = set(os.listdir(home.attempts))
    found = []
    for entry in os.listdir("/proc"):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes() if entry.isdigit() else b""
        except OSError:
            continue
        tags = re.findall(rb"(?:^|\0)BATCHML_TASK=[0-9a-f]+\.([0-9a-f]+)", environ)
        if any(tag.decode() in known for tag in tags):
            found.append(int(entry))
    return found


class Verdict:
    """Looks at every job once all have ended: each has one end, and the one that it must have."""

    def __init__(self, batch: Any, logs: Any, starts: Path, told: Told, rounds: Rounds) -> None:
        self._perhaps = rounds.perhaps
        self._moves = rounds.moves
        self._both = rounds.both
        self._batch = batch
        self._logs = logs
        self._starts = starts
        self._told = told
        self._lost = rounds.lost
        self._stops: dict[str, list[Stop]] = {}
        for stop in told.stops:
            self._stops.setdefault(stop.job, []).append(stop)
        self.seen: Counter[str] = Counter()
        filters = [{"name": "AFTER_CREATED_AT", "values": ["0"]}]
        self.jobs = self._describe(self._list(jobQueue="default", filters=filters))
        self._below: dict[str, list[str]] = {}
        for job_id, job in list(self.jobs.items()):
            for key in ("arrayProperties", "nodeProperties"):
                if key in job:
                    self._below[job_id] = self._list_below(job_id, key)
                    self.jobs |= self._describe(self._below[job_id])

    def pass_(self) -> None:
        assert self._told.jobs.keys() <= self.jobs.keys(), "nothing that was acknowledged is lost"
        tops = [
            split_key(job["jobName"])[0]
            for job_id, job in self.jobs.items()
            if not re.search("[:#]", job_id)
        ]
        assert len(set(tops)) == len(tops), "nothing that was sent once is there twice"
        tasks: set[str] = set()
        for job_id, job in self.jobs.items():
            try:
                self._judge(job_id, job)
                tasks |= {_task(attempt) for attempt in job["attempts"]}
            except AssertionError as error:
                raise AssertionError(
                    f"{error}\nof {job}\nstops {self._stops_of(job_id)}"
                ) from error
        assert self._lost <= tasks, "every attempt is recorded"
        # Those that a server had committed to start, and that neither it could send nor a runner
        # read, because both died.
        assert self.seen["no evidence"] <= self._both, "none is lost whose runner lives"

    def _list(self, **more: Any) -> list[str]:
        pages = self._batch.get_paginator("list_jobs").paginate(**more)
        return [job["jobId"] for page in pages for job in page["jobSummaryList"]]

    def _list_below(self, job_id: str, key: str) -> list[str]:
        parent = {"arrayProperties": "arrayJobId", "nodeProperties": "multiNodeJobId"}[key]
        found = []
        for status in ("PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED"):
            found += self._list(jobStatus=status, **{parent: job_id})
        return found

    def _describe(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        found = {}
        for at in range(0, len(ids), 100):
            for job in self._batch.describe_jobs(jobs=ids[at : at + 100])["jobs"]:
                found[job["jobId"]] = job
        assert found.keys() == set(ids)
        return found

    def _stops_of(self, job_id: str) -> list[Stop]:
        whole = re.split("[:#]", job_id)[0]
        return self._stops.get(job_id, []) + (self._stops.get(whole, []) if whole != job_id else [])

    def _judge(self, job_id: str, job: dict[str, Any]) -> None:
        plan = Plan.of(job["jobName"])
        stops = self._stops_of(job_id)
        stopped = job.get("statusReason", "") in {stop.reason for stop in stops}
        self.seen[plan.kind] += 1
        assert job["status"] in ("SUCCEEDED", "FAILED")
        for stop in stops:
            is_whole = plan.kind != "nodes" or stop.job == job_id  # a node ends as it ended itself
            if stop.operation == "terminate_job" and stop.at is not None and is_whole:
                assert stopped or job["stoppedAt"] <= stop.at, "an acknowledged stop is carried out"
        below = [self.jobs[other] for other in self._below.get(job_id, ())]
        if "arrayProperties" in job and below:
            self._judge_array(job, below, stopped)
            return
        if "nodeProperties" in job and below:
            return self._judge_nodes(job, below, stopped)
        number = 0
        for number, attempt in enumerate(job["attempts"], 1):
            self._judge_attempt(job, plan, number, attempt, stopped or plan.kind == "nodes")
        assert number <= (RETRIES if plan.kind == "retried" else 1)
        starts = self._starts / job_id
        lines = starts.read_text().split() if starts.exists() else []
        assert len(set(lines)) == len(lines), "an attempt starts once"
        assert {int(line) for line in lines} <= set(range(1, number + 1))
        if plan.kind == "nodes" or stopped:
            return
        if not job["attempts"]:
            assert job["statusReason"] == DEPENDENCY_FAILED
            assert "FAILED" in {self.jobs[other]["status"] for other in self._waited_for(job)}
            self.seen["failed dependency"] += 1
            return
        good = job["attempts"][-1]["container"].get("exitCode") == 0
        assert job["status"] == ("SUCCEEDED" if good else "FAILED")
        assert good or plan.kind != "retried" or number == RETRIES, "it is tried again"

    def _lost_its_files(self, plan: Plan, attempt: dict[str, Any]) -> bool:
        """Whether our runtime started when its files, which are in the state folder, were gone."""
        return (
            plan.kind == "typed"
            and attempt["container"].get("exitCode") == CONFIGURATION_ERROR
            and any(first <= attempt["startedAt"] <= last for first, last in self._moves)
        )

    def _judge_attempt(
        self, job: dict[str, Any], plan: Plan, number: int, attempt: dict[str, Any], forced: bool
    ) -> None:
        container = attempt["container"]
        is_last = number == len(job["attempts"])
        is_lost = _task(attempt) in self._lost
        if attempt["statusReason"] == NO_EVIDENCE:
            self.seen["no evidence"] += 1
            is_lost = True
        elif _task(attempt) in self._perhaps:
            is_lost = attempt["statusReason"] == RUNNER_LOST
            self.seen["lost attempt"] += is_lost
        elif is_lost:
            self.seen["lost attempt"] += 1
            assert attempt["statusReason"] == RUNNER_LOST and "exitCode" not in container
        else:
            assert attempt["statusReason"] != RUNNER_LOST, "none is lost whose runner lives"
        natural = container.get("exitCode") == plan.code_of(number)
        assert natural or is_lost or (forced and is_last) or self._lost_its_files(plan, attempt)
        if "logStreamName" not in container:
            return
        if self._lost_its_files(plan, attempt):
            self.seen["moved as it started"] += 1
            return
        lines = output(self._logs, job, container["logStreamName"])
        wanted = [f"line {line}" for line in range(LINES)]
        assert lines == wanted if natural and not forced else lines == wanted[: len(lines)]

    def _judge_array(self, job: dict[str, Any], below: list[dict[str, Any]], stopped: bool) -> None:
        summary = {k: v for k, v in job["arrayProperties"]["statusSummary"].items() if v}
        assert summary == Counter(child["status"] for child in below)
        assert sum(summary.values()) == job["arrayProperties"]["size"]
        good = set(summary) == {"SUCCEEDED"}
        assert stopped or job["status"] == ("SUCCEEDED" if good else "FAILED")

    def _judge_nodes(self, job: dict[str, Any], below: list[dict[str, Any]], stopped: bool) -> None:
        assert len(below) == 2
        main = self.jobs[f"{job['jobId']}#0"]
        lost = [
            attempt
            for attempt in main["attempts"]
            if attempt["statusReason"] in (NO_EVIDENCE, RUNNER_LOST)
        ]
        assert stopped or job["status"] == ("FAILED" if lost else "SUCCEEDED")

    def _waited_for(self, job: dict[str, Any]) -> list[str]:
        """The jobs, or children, whose failure fails this one."""
        whole, _, index = job["jobId"].partition(":")
        found = []
        for entry in self.jobs[whole]["dependsOn"]:
            kind = entry.get("type", "")
            if kind == "SEQUENTIAL":
                found += [f"{whole}:{int(index) - 1}"] if int(index or 0) else []
            else:
                found.append(entry["jobId"] + (f":{index}" if kind == "N_TO_N" else ""))
        return found


def _task(attempt: dict[str, Any]) -> str:
    return str(attempt["container"].get("taskArn", "")).rpartition("/")[2]


def _kill_while_it_starts(home: Home, after: float) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "batchml.local.server.daemon", "--home", str(home.root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    CLOCK.sleep(after)
    daemon.kill()
    daemon.wait()
