"""`batchml submit` killed or interrupted at any system call: one run or none, and which is known.

strace does it; without strace these tests are skipped. BATCHML_TORTURE walks every point.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.batch.jobs import JobApi
from batchml.aws.session import Access, Session
from batchml.clock import SystemClock
from batchml.history import History
from batchml.local import control
from batchml.local.home import Home
from batchml.model.run import Record
from batchml.runs.reconcile import SettledSubmission, reconcile
from batchml.runs.send import Submitter
from tests.process.test_kill9 import kill_server
from tests.support.cli import Cli
from tests.support.fakes import FakeClock
from tests.support.generate import TORTURE
from tests.support.local_server import wait_for
from tests.torture.test_system_calls import can_trace

pytestmark = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")

CLOCK = SystemClock()
_POINTS = 7  # in the suite; all of them in torture

# What changes something outside of the process, or tells it what was changed: between two of these
# a kill makes no difference.
_CHANGES = (
    "write,writev,pwrite64,fsync,fdatasync,openat,open,rename,link,unlink,unlinkat,mkdir,mkdirat,"
    "flock,connect,sendto,sendmsg,recvfrom"
)
_SUBMIT = ("submit", "--name", "walk", "--", "true")
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\(")


class Walk:
    """One `batchml submit` after the other, each with one fault at another of its calls."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.home = cli.home
        self.trace = cli.folder.parent / "trace"
        self.told: list[str] = []  # job ids that were printed
        self.codes: list[int] = []
        self.points = self._points()

    @property
    def marks(self) -> Path:
        """The folder of the submissions under way."""
        return self.home.root / "submitting" / "local"

    def submit(self, *options: str) -> str:
        """What is printed of a submission under strace."""
        words = ["strace", "-qq", "-o", str(self.trace), "-e", f"trace={_CHANGES}", *options]
        done = subprocess.run(
            [*words, *self.cli.command(*_SUBMIT)], cwd=self.cli.folder, env=self.cli.environ,
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        self.told += re.findall(r"Submitted job \[walk - ([0-9a-f-]{36})\]", done.stdout)
        self.codes.append(done.returncode)
        return done.stdout + done.stderr

    def _points(self) -> list[tuple[str, int]]:
        """Each call with its number, from the first that has to do with the state folder."""
        self.submit()  # the first puts code and image in their places
        self.submit()
        numbers: dict[str, int] = {}
        found = []
        has_begun = False
        for line in self.trace.read_text().splitlines():
            match = _CALL.match(line)
            if match is None:
                continue
            call = match[1]
            numbers[call] = numbers.get(call, 0) + 1
            has_begun = has_begun or str(self.home.root) in line
            # Reading Python's modules opens hundreds of files, and changes nothing.
            if has_begun and (call != "openat" or str(self.home.root) in line):
                found.append((call, numbers[call]))
        assert len(found) > 10
        return found

    def jobs(self) -> dict[str, str]:
        """All jobs of the server: id -> name in AWS."""
        return {
            summary["jobId"]: summary["jobName"]
            for summary in JobApi._summaries(
                self.session().client("batch"),
                "default",
                {"name": "AFTER_CREATED_AT", "values": ["0"]},
            )
        }

    def session(self) -> Session:
        keys = self.home.keys()
        return Session(
            Access(
                "us-east-1",
                endpoint=control.ensure_server(self.home, CLOCK).url,
                access_key_id=keys.access_key_id,
                secret_access_key=keys.secret_access_key,
            )
        )

    def history(self) -> History:
        return History(self.home.root / "history.jsonl")

    def settle(self) -> list[SettledSubmission]:
        """Reconcile, some time later."""
        later = FakeClock(now=CLOCK.now() + 1000)
        return reconcile(Submitter(JobApi(self.session()), self.history(), later), "local")

    def check(self) -> None:
        """Each submission has one run or none, and the history knows it."""
        assert self.history().unconfirmed("local") == []
        jobs = self.jobs()
        kept: list[Record] = self.history().newest_first("local")
        assert {record.job_id: record.job_name for record in kept if record.job_id} == jobs
        assert len(set(jobs.values())) == len(jobs), "two runs of one submission"
        assert set(self.told) <= jobs.keys(), "what was printed is there"


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("killed")
    home = Home(folder / "home")
    home.prepare()
    (folder / "work").mkdir()
    control.ensure_server(home, CLOCK)
    yield Walk(Cli(folder / "work", home))
    kill_server(home)


def some(points: list[Any]) -> list[Any]:
    """A part of them that is spread over the whole, and all of them in torture."""
    return points if TORTURE > 1 else points[:: max(1, len(points) // _POINTS)]


def test_a_client_killed_at_any_call_leaves_one_run_or_none(walk: Walk) -> None:
    points = walk.points
    walk.codes.clear()
    for call, number in some(points):
        walk.submit("-e", f"inject={call}:signal=SIGKILL:when={number}")
    walk.settle()
    walk.check()
    assert not list(walk.marks.iterdir())
    killed = sum(code < 0 or code == 137 for code in walk.codes)
    print(f"{len(points)} points, {len(some(points))} tried, {killed} killed")
    assert killed > len(some(points)) / 2


def test_a_client_interrupted_at_any_call_says_its_run_or_that_there_is_none(walk: Walk) -> None:
    """Ctrl-C at any moment after the intent: the job's id is printed, or nothing was submitted."""
    for call, number in some(walk.points)[:: 1 if TORTURE > 1 else 2]:
        said = walk.submit("-e", f"inject={call}:signal=SIGINT:when={number}")
        assert re.search("Submitted job|Nothing was submitted|batchml reconcile|^$", said), said
    walk.settle()
    walk.check()


def test_a_call_that_fails_leaves_one_run_or_none(walk: Walk) -> None:
    errors = {
        "openat": "ENOSPC", "write": "ENOSPC", "fsync": "EIO", "flock": "ENOLCK",
        "sendto": "ECONNRESET", "recvfrom": "ECONNRESET", "connect": "ECONNREFUSED",
        "unlink": "EIO",
    }  # fmt: skip
    points = [(call, number) for call, number in walk.points if call in errors]
    for call, number in some(points)[:: 1 if TORTURE > 1 else 2]:
        walk.submit("-e", f"inject={call}:error={errors[call]}:when={number}")
    walk.settle()
    walk.check()


def test_reconcile_says_what_became_of_it(walk: Walk) -> None:
    lost, job_id = _lost(walk)
    shown = walk.cli("reconcile", "--json")
    expected = {"key": lost.name, "name": "walk", "state": "submitted", "jobId": job_id}
    assert (shown.code, shown.json) == (0, [expected])
    assert not lost.exists()
    shown = walk.cli("reconcile", lost.name)
    assert shown.code == 1
    assert "It is settled already" in shown.err


def test_the_next_submission_says_what_became_of_the_one_before(walk: Walk) -> None:
    lost, job_id = _lost(walk)
    os.utime(lost, (0, 0))  # some time ago
    assert f"An interrupted submission of 'walk' did arrive: job {job_id}." in walk.submit()
    walk.check()


def _lost(walk: Walk) -> tuple[Path, str]:
    """A client is killed after its call was sent: its mark, and the run."""
    waits = next(number for call, number in walk.points if call == "recvfrom")
    before = set(walk.marks.iterdir())  # a mark that could not be removed waits for the next submit
    walk.submit("-e", f"inject=recvfrom:signal=SIGKILL:when={waits}")
    (lost,) = set(walk.marks.iterdir()) - before
    job_id = wait_for(
        lambda: next((job for job, name in walk.jobs().items() if name.endswith(lost.name)), ""),
        "the call that was sent is carried out",
    )
    return lost, job_id


def test_the_name_of_a_new_history_is_on_the_disk_before_its_first_line(tmp_path: Path) -> None:
    """Whoever finds a line there need not make the name survive a power cut again."""
    path, trace = tmp_path / "history.jsonl", tmp_path / "trace"
    program = (
        "import sys; from pathlib import Path; from batchml.model.run import Record; "
        "from batchml.history import History; kept = History(Path(sys.argv[1])); "
        "kept.add(Record(key='2a', env='local')); kept.intend(Record(key='2b', env='local'))"
    )
    strace = ["strace", "-qq", "-y", "-o", str(trace), "-e", "trace=fsync,write"]
    subprocess.run([*strace, sys.executable, "-c", program, str(path)], check=True, timeout=60)
    calls = re.findall(rf"^(\w+)\(\d+<({re.escape(str(tmp_path))}[^>]*)>", trace.read_text(), re.M)
    assert calls == [
        ("fsync", str(tmp_path)), ("write", str(path)), ("write", str(path)), ("fsync", str(path)),
    ]  # fmt: skip
