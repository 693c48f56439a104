"""The server at its system calls: killed at any of them, told that the disk has failed, cut off
from power after any of them. docs/behaviours.md B80, B82, B83.

strace does it; without strace these tests are skipped. BATCHML_TORTURE walks every point.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.batch.lifecycle import CONTAINER_EXITED, DID_NOT_START
from batchml.local.home import Home
from batchml.local.machine import read_machine
from batchml.local.server.daemon import EXIT_CRASHED
from batchml.local.store.journal import Journal
from tests.process.test_kill9 import kill_server, started
from tests.support.generate import TORTURE
from tests.support.local_server import client_for, define, wait_for, wait_for_job

__all__ = ["started"]  # a fixture


def can_trace() -> bool:
    """Whether strace is there and may trace and tamper here, found out by trying."""
    if not shutil.which("strace"):
        return False
    words = ["strace", "-f", "-b", "execve", "-e", "inject=getpid:error=EIO", "true"]
    return subprocess.run(words, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")

CLOCK = SystemClock()
SEED = 20261121
_POINTS = 8  # in the suite; all of them in torture

# What changes something outside of the process: between two of these a kill makes no difference.
_CHANGES = (
    "write,writev,pwrite64,fsync,fdatasync,ftruncate,openat,rename,link,unlink,mkdir,flock,"
    "sendto,sendmsg,clone,clone3,vfork"
)
_ERRORS = {
    "openat": ("EMFILE", "EIO"),
    "mkdir": ("ENOSPC", "EIO"),
    "rename": ("ENOSPC", "EIO"),
    "pwrite64": ("ENOSPC", "EIO"),
    "fdatasync": ("ENOSPC", "EIO"),
    "sendmsg": ("ENOMEM",),
    "vfork": ("EAGAIN", "ENOMEM"),
    "clone3": ("EAGAIN",),
}

JOB = 'echo $$ >> "$STARTS/$AWS_BATCH_JOB_ID"; echo done'


class Traced:
    """A server under strace, which does to it what it is asked to."""

    def __init__(self, home: Home, *options: str, calls: str = _CHANGES) -> None:
        self.home = home
        self.trace = home.root.parent / "trace"
        self._tid = 0
        reader, writer = os.pipe()
        # Its runners are let go of as they become runners.
        words = ["strace", "-f", "-b", "execve", "-qq", "-o", str(self.trace)]
        words += [
            "-e",
            f"trace={calls}",
            *options,
            sys.executable,
            "-m",
            "batchml.local.server.daemon",
        ]
        words += ["--home", str(home.root), "--ready-fd", str(writer)]
        self.process = subprocess.Popen(
            words, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as file:
            self.serves = "port" in file.readline()  # not if it was killed, or failed, before

    def client(self) -> Any:
        endpoint, keys = self.home.endpoint(), self.home.keys()
        assert endpoint is not None
        return boto3.client(
            "batch", region_name="us-east-1", endpoint_url=endpoint.url,
            aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=10, connect_timeout=10),
        )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None and self.home.is_held()

    def end(self, number: int) -> int:
        """Send the server a signal; its exit status."""
        pid = self.home.holder()
        if pid is not None and self.is_alive:
            with suppress(ProcessLookupError):  # it ends just now
                os.kill(pid, number)
        code = self.process.wait(30)
        wait_for(lambda: not self.home.is_held(), "the server is gone")
        return code

    def counted(self) -> Counter[tuple[str, str]]:
        """How often each thread has made each call by now."""
        found: Counter[tuple[str, str]] = Counter()
        for thread, call in re.findall(r"^(\d+) +(\w+)\(", self.trace.read_text(), re.MULTILINE):
            found[thread, call] += 1
        return found


@pytest.fixture
def traced_home(home: Home, started: Path) -> Iterator[Home]:
    """A state folder whose server has a definition `d`."""
    define(client_for(home, control.ensure_server(home, CLOCK), "batch"), ["sh", "-c", JOB])
    kill_server(home)
    yield home
    kill_server(home)


class Walk:
    """One short life of a server after the other, each with one fault at another point."""

    def __init__(self, home: Home, starts: Path) -> None:
        self._home = home
        self._starts = starts
        self.acknowledged: list[str] = []
        self.stuck: list[str] = []  # faults after which a live server did not go on
        self.codes: Counter[int] = Counter()
        self.crashes: list[str] = []  # faults after which it ended as it never should
        self.reached = 0

    def points(self) -> list[tuple[str, int]]:
        """Each call with its number in its thread, of a life without a fault."""
        server = Traced(self._home)
        starting = server.counted()
        self._life(server, "nothing")
        whole = server.counted()
        server.end(signal.SIGTERM)
        found: dict[tuple[str, int], None] = {}
        main = next(iter(starting))[0]
        for (_, call), count in whole.items():
            # Reading Python's modules opens hundreds of files, and changes nothing.
            first = starting[main, call] if call == "openat" else 0
            found.update(dict.fromkeys((call, number + 1) for number in range(first, count)))
        assert self.stuck == []
        return list(found)

    def strike(self, call: str, number: int, fault: str) -> None:
        server = Traced(self._home, "-e", f"inject={call}:{fault}:when={number}")
        if server.serves:
            self._life(server, f"{call} {number} {fault}")
        code = server.end(signal.SIGKILL)
        self.codes[code] += 1
        if code not in (-signal.SIGKILL, EXIT_CRASHED, 1):
            self.crashes.append(f"{call} {number} {fault}: {code}")
        trace = server.trace.read_text()
        self.reached += "INJECTED" in trace or (
            "SIGKILL" in fault and "killed by SIGKILL" in trace and f"{call}(" in trace
        )

    def _life(self, server: Traced, what: str) -> None:
        """A job from its submission to its end, for as long as the server lives."""
        batch = server.client()
        try:
            job_id = submit(batch, self._starts)
            self.acknowledged.append(job_id)
            end = CLOCK.monotonic() + 10
            while CLOCK.monotonic() < end:
                job = batch.describe_jobs(jobs=[job_id])["jobs"][0]
                if job["status"] in ("SUCCEEDED", "FAILED"):
                    return
                CLOCK.sleep(0.01)
            self.stuck.append(what)
        except (BotoCoreError, ClientError, KeyError):  # boto3 takes an answer cut off for empty
            if "signal" not in what and server.is_alive:
                return  # it was told that this one call has failed
            wait_for(lambda: not server.is_alive, f"the server has ended: {what}")


def submit(batch: Any, starts: Path, **env: str) -> str:
    given = {"STARTS": str(starts), **env}
    made = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition="d",
        containerOverrides={
            "environment": [{"name": name, "value": value} for name, value in given.items()]
        },
    )  # fmt: skip
    return str(made["jobId"])


def settled(home: Home, starts: Path, acknowledged: list[str]) -> list[dict[str, Any]]:
    """All jobs, once a server that nothing happens to has brought them to their ends."""
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    filters = [{"name": "AFTER_CREATED_AT", "values": ["0"]}]
    pages = batch.get_paginator("list_jobs").paginate(jobQueue="default", filters=filters)
    ids = [job["jobId"] for page in pages for job in page["jobSummaryList"]]
    assert set(acknowledged) <= set(ids), "nothing that was acknowledged is lost"
    found = [wait_for_job(batch, job_id) for job_id in ids]
    for job in found:
        assert len(job["attempts"]) == 1
        lines = starts / job["jobId"]
        times = len(lines.read_text().splitlines()) if lines.exists() else 0
        assert times == (job["status"] == "SUCCEEDED"), "it starts once"
    whole = [{"type": "VCPU", "value": str(read_machine().vcpus)}]
    last = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition="d",
        containerOverrides={
            "environment": [{"name": "STARTS", "value": str(starts)}],
            "resourceRequirements": whole,
        },
    )["jobId"]  # fmt: skip
    assert wait_for_job(batch, last)["status"] == "SUCCEEDED", "everything is free again"
    return found


def some(points: list[Any]) -> list[Any]:
    """A part of them that is spread over the whole, and all of them in torture."""
    return points if TORTURE > 1 else points[:: max(1, len(points) // _POINTS)]


def test_a_server_killed_at_any_call_loses_and_doubles_nothing(
    traced_home: Home, started: Path
) -> None:
    walk = Walk(traced_home, started)
    points = walk.points()
    for call, number in some(points):
        walk.strike(call, number, "signal=SIGKILL")
    print(f"{len(points)} points, reached {walk.reached} of {sum(walk.codes.values())}")
    assert walk.stuck == []
    assert walk.reached > len(some(points)) / 2
    jobs = settled(traced_home, started, walk.acknowledged)
    assert {job["statusReason"] for job in jobs} == {CONTAINER_EXITED}
    assert {job["status"] for job in jobs} == {"SUCCEEDED"}


@pytest.mark.parametrize("call", ["openat", "pwrite64", "fdatasync", "unlink", "ftruncate"])
def test_a_first_start_that_is_killed_while_it_makes_the_journal_can_be_made_again(
    tmp_path: Path, call: str
) -> None:
    for number in range(1, 3 if TORTURE == 1 else 60):
        home = Home(tmp_path / f"home{number}")
        files = [f"{home.journal}{suffix}" for suffix in ("", "-journal", "-wal", "-shm")]
        paths = [word for file in files for word in ("-P", file)]
        server = Traced(home, *paths, "-e", f"inject={call}:signal=SIGKILL:when={number}")
        serves = server.serves
        server.end(signal.SIGKILL)
        try:
            batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
            assert batch.describe_job_queues()["jobQueues"]
        finally:
            kill_server(home)
        if serves:
            break
    print(call, number)


def test_a_call_that_fails_stops_the_server_or_one_request_and_loses_nothing(
    traced_home: Home, started: Path
) -> None:
    walk = Walk(traced_home, started)
    points = [
        (call, number, error)
        for call, number in walk.points()
        for error in _ERRORS.get(call, ())
    ]  # fmt: skip
    for call, number, error in some(points):
        walk.strike(call, number, f"error={error}")
    print(f"{len(points)} points, reached {walk.reached}, exit codes {walk.codes}")
    assert walk.stuck == []
    assert walk.crashes == []
    jobs = settled(traced_home, started, walk.acknowledged)
    assert {job["statusReason"] for job in jobs} <= {CONTAINER_EXITED, DID_NOT_START}


@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("call", ["fdatasync", "pwrite64"])
def test_a_disk_that_fails_ends_the_server_and_the_next_goes_on(
    traced_home: Home, started: Path, call: str, when: int
) -> None:
    """B82. What a file system makes of a failed fsync is not known, so nothing may rely on it."""
    journal = traced_home.journal
    paths = ["-P", str(journal), "-P", f"{journal}-wal"]
    server = Traced(traced_home, *paths, "-e", f"inject={call}:error=EIO:when={when}+")
    acknowledged = []
    refused = 0
    if server.serves:
        batch = server.client()
        for _ in range(3):
            try:
                acknowledged.append(submit(batch, started))
            except (BotoCoreError, ClientError, KeyError):
                refused += 1
        assert refused
    assert server.process.wait(30) == EXIT_CRASHED
    assert "INJECTED" in server.trace.read_text()
    log = traced_home.log.read_text()
    assert "cannot be used: disk I/O error" in log
    settled(traced_home, started, acknowledged)


# --- a power cut ------------------------------------------------------------------------------


class Write(NamedTuple):
    file: str  # "" is the main one, "-wal" its log
    at: int
    data: bytes


class Truncated(NamedTuple):
    file: str
    size: int


class Synced(NamedTuple):
    file: str


class Said(NamedTuple):
    text: str


class Removed(NamedTuple):
    file: str


Step = Write | Truncated | Synced | Said | Removed

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$", re.DOTALL)
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_BYTES = re.compile(r"\\x([0-9a-f]{2})")


def _bytes(text: str) -> bytes:
    return bytes.fromhex("".join(_BYTES.findall(text)))


def steps_in(trace: Path, journal: Path) -> Iterator[Step]:
    """What a server did to its journal, and what it said, in order; calls count once they are over.

    (What it says counts from the start of the call: it is heard before that returns.)
    """
    begun: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        call = _LINE.match(line)
        resumed = _RESUMED.match(line)
        if call and call[2] in ("sendto", "write", "sendmsg", "writev"):
            yield Said(b"".join(map(_bytes, re.findall('"([^"]*)"', call[3]))).decode("latin-1"))
            continue
        if call and call[3].endswith("<unfinished ...>"):
            begun[call[1]] = call[3].removesuffix("<unfinished ...>")
            continue
        if call:
            name, rest = call[2], call[3]
        elif resumed:
            name, rest = resumed[2], begun.pop(resumed[1], "") + resumed[3]
        else:
            continue
        step = _step(name, rest, str(journal))
        if step is not None:
            yield step


def _step(name: str, rest: str, journal: str) -> Step | None:
    words, _, answer = rest.rpartition(" = ")
    words = words.rstrip(" )")
    if answer.startswith("-1"):
        return None
    if name == "unlink":
        path = _bytes(words).decode()
        return Removed(path.removeprefix(journal)) if path.startswith(journal) else None
    path = _bytes(words[words.index("<") : words.index(">")]).decode() if "<" in words else ""
    if not path.startswith(journal) or path.endswith("-shm"):
        return None
    file = path.removeprefix(journal)
    match name:
        case "pwrite64":
            data = _bytes(words[words.index(">") :])
            size, at = map(int, words.split(", ")[-2:])
            assert len(data) == size == int(answer), "the trace holds all of it"
            return Write(file, at, data)
        case "ftruncate":
            return Truncated(file, int(words.split(", ")[-1]))
        case "fsync" | "fdatasync":
            return Synced(file)
    return None


class Disk:
    """The journal's files as a disk has them: what was synced, and what may or may not be there."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._sure = {name: bytearray(content) for name, content in files.items()}
        self._unsure: list[Write | Truncated] = []

    def take(self, step: Step) -> None:
        match step:
            case Write() | Truncated():
                self._unsure.append(step)
            case Synced(file):
                self._apply(self._sure, [one for one in self._unsure if one.file == file])
                self._unsure = [one for one in self._unsure if one.file != file]
            case Removed(file):
                self._sure.pop(file, None)
                self._unsure = [one for one in self._unsure if one.file != file]

    def after_a_cut(self, chance: random.Random) -> dict[str, bytes]:
        """What is there after a power cut: of what was not synced all, nothing, or any part."""
        there = {name: bytearray(content) for name, content in self._sure.items()}
        part = chance.choice([0.0, 0.5, 1.0])
        self._apply(there, [one for one in self._unsure if chance.random() < part])
        return {name: bytes(content) for name, content in there.items()}

    @staticmethod
    def _apply(files: dict[str, bytearray], steps: list[Write | Truncated]) -> None:
        for step in steps:
            content = files.setdefault(step.file, bytearray())
            if isinstance(step, Truncated):
                del content[step.size :]
                continue
            content.extend(bytes(max(0, step.at + len(step.data) - len(content))))
            content[step.at : step.at + len(step.data)] = step.data


def test_a_power_cut_after_any_call_loses_nothing_that_was_answered(
    traced_home: Home, started: Path, tmp_path: Path
) -> None:
    """B80, B82. The disk keeps what was synced, and any part of what was not."""
    home = traced_home
    files = {
        suffix: home.journal.with_name(home.journal.name + suffix).read_bytes()
        for suffix in ("", "-wal")
        if home.journal.with_name(home.journal.name + suffix).exists()
    }
    calls = "pwrite64,fsync,fdatasync,ftruncate,unlink,sendto,sendmsg,write"
    server = Traced(home, "-y", "-xx", "-s", "100000", calls=calls)
    batch = server.client()
    jobs = [submit(batch, started, FILL="x" * 6000) for _ in range(12)]
    for number in range(220):  # enough for the log to be moved into the main file
        define(batch, ["echo", "y" * 15_000], name=f"large{number}")
    for job_id in jobs:
        wait_for_job(batch, job_id)
    server.end(signal.SIGTERM)

    chance = random.Random(SEED)
    disk = Disk(files)
    answered: set[str] = set()
    steps = list(steps_in(server.trace, home.journal))
    cuts = set(some(list(range(len(steps))))) | {len(steps) - 1}
    assert sum(isinstance(step, Synced) and not step.file for step in steps) >= 2, "it was moved"
    for number, step in enumerate(steps):
        if isinstance(step, Said):
            answered |= {job_id for job_id in jobs if f'"jobId":"{job_id}"' in step.text}
        disk.take(step)
        if number in cuts:
            _check(disk.after_a_cut(chance), answered, tmp_path / f"cut{number}")
    assert answered == set(jobs)


def _check(files: dict[str, bytes], answered: set[str], folder: Path) -> None:
    folder.mkdir()
    for suffix, content in files.items():
        (folder / f"journal.db{suffix}").write_bytes(content)
    store = Journal(folder / "journal.db")
    try:
        store.load(read_machine())
        assert store.jobs(sorted(answered)).keys() == answered
    finally:
        store.close()
        shutil.rmtree(folder)


def test_answers_and_starts_come_after_the_sync_that_holds_them(
    traced_home: Home, started: Path
) -> None:
    """B80."""
    calls = "recvfrom,pwrite64,fsync,fdatasync,sendto,sendmsg,write"
    server = Traced(traced_home, "-y", "-xx", "-s", "100000", calls=calls)
    job_id = submit(server.client(), started)
    wait_for_job(server.client(), job_id)
    server.end(signal.SIGTERM)
    steps = list(steps_in(server.trace, traced_home.journal))
    task = wait_for(lambda: [p.name for p in traced_home.attempts.iterdir()], "an attempt")[0]
    answer = _first(steps, f'"jobId":"{job_id}"')
    start = _first(steps, f'"begin":"{task}"')
    row = next(n for n, s in enumerate(steps) if isinstance(s, Write) and job_id.encode() in s.data)
    for said in (answer, start):
        assert any(steps[n] == Synced("-wal") for n in range(row, said))


def _first(steps: list[Step], text: str) -> int:
    return next(n for n, step in enumerate(steps) if isinstance(step, Said) and text in step.text)
