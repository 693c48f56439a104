"""A state folder with jobs at every stage, and the faults that come over it between two servers.

`World` has real runners, real programs and a real journal; of a server all but its HTTP. What the
programs do they write down outside of the state folder: that is the truth that the next server is
held against.
"""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from batchml.clock import SystemClock
from batchml.local.batch import engine
from batchml.local.batch.core import Core
from batchml.local.batch.events import CallReceived, ClockTicked
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.executors.choice import Permits
from batchml.local.executors.container_spec import spec_maker
from batchml.local.executors.pool import OURS, Installation
from batchml.local.executors.spec import ExecutorHost
from batchml.local.executors.supervisor import AttemptSupervisor
from batchml.local.home import Home, ServerEndpoint
from batchml.local.machine import MachineCapacity
from batchml.local.server import daemon
from batchml.local.store import adopt, identity
from batchml.local.store.journal import Journal, read_identity, write_identity
from batchml.runtime.storage.files import read_json, write_json

CLOCK = SystemClock()
SLOTS = 4  # vCPUs: as many jobs run at once

# Where the server that comes after the faults finds each job.
DONE = "done"  # it has ended, and the journal has its end
ENDED = "ended"  # it has ended since, and only its runner has written that down
RUNNING = "running"
UNSENT = "unsent"  # the journal has its start, and its server died before it sent the message
PREPARED = "prepared"  # the journal does not have its start yet
WAITING = "waiting"  # for room
STAGES = (DONE, ENDED, RUNNING, UNSENT, PREPARED, WAITING)
CODES = {DONE: 0, ENDED: 5, RUNNING: 6, UNSENT: 0, PREPARED: 7, WAITING: 0}

PROGRAM = """
echo $$ >> "$TRUTH/starts-$NAME"
echo one; echo two
while [ ! -e "$TRUTH/go-$NAME" ]; do sleep 0.02; done
echo three; echo $CODE >> "$TRUTH/codes-$NAME"; exit $CODE
"""


class Faults(NamedTuple):
    """What happens between two servers. The first of each axis is nothing."""

    journal: str = "now"
    files: str = "now"
    processes: str = "ours"
    installation: str = "same"
    folder: str = "same"


AXES = Faults(
    journal=("now", "earlier", "earlier with its position", "empty", "damaged"),  # type: ignore[arg-type]
    files=(  # type: ignore[arg-type]
        "now", "earlier", "no records", "no ends", "no logs", "no folders", "unreadable",
    ),
    processes=("ours", "another's", "gone"),  # type: ignore[arg-type]
    installation=("same", "moved", "upgraded", "removed"),  # type: ignore[arg-type]
    folder=("same", "copied", "moved", "another machine", "read-only"),  # type: ignore[arg-type]
)  # fmt: skip


class FirstServer(AttemptSupervisor):
    """Dies before it can let one attempt go, and before another is prepared."""

    names: dict[str, str]  # of jobs, by id

    def prepare(self, job: Job, attempt: JobAttempt) -> bool:
        return job.name != PREPARED and super().prepare(job, attempt)

    def begin(self, task_id: str) -> None:
        if self._live[task_id].job.name != UNSENT:
            super().begin(task_id)


class Server:
    """All of a server but its HTTP."""

    def __init__(
        self,
        home: Home,
        loop: asyncio.AbstractEventLoop,
        kind: type[AttemptSupervisor] = AttemptSupervisor,
        installation: Installation = OURS,
    ) -> None:
        self.loop = loop
        self.home = home
        daemon.check_not_emptied(home)
        has_served = daemon.has_served(home)
        self.store = Journal(
            home.journal,
            may_be_new=not has_served,
            why_read_only=partial(identity.why_read_only, home),
        )
        self.read_only = self.store.read_only
        self.has_upgraded = False
        if self.read_only:
            return
        own = daemon.claim(home, self.store)
        now = int(CLOCK.now() * 1000)
        state = engine.restore(self.store.load(MachineCapacity(SLOTS, 8192)), now)
        self.core = Core(state, self.store, CLOCK, home.guard())
        host = ExecutorHost(home, Path("/nonexistent"), dict(os.environ), identity=own.id)
        make_spec = spec_maker(host, Permits())
        self.executor = kind(
            home, own, host.environ, loop, CLOCK, self.core.report, make_spec,
            on_upgrade=self._upgraded, installation=installation, pause=0.05,
        )  # fmt: skip
        self.core.executor = self.executor
        daemon.adopt_all(state, self.executor)
        self.task = loop.create_task(self.core.run())
        loop.run_until_complete(daemon.create_defaults(self.core, CLOCK))
        self.core.report(ClockTicked(now))
        home.write_endpoint(ServerEndpoint(os.getpid(), 1))

    def _upgraded(self) -> None:
        self.has_upgraded = True

    def request(self, operation: str, **params: Any) -> Any:
        name = f"{operation}-{time.monotonic_ns()}"
        event = CallReceived(operation, params, int(CLOCK.now() * 1000), name)
        return self.loop.run_until_complete(self.core.request(event))

    def until(self, condition: Callable[[], object], what: str, limit: float = 20.0) -> None:
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, f"not within {limit} s: {what}"
            self.loop.run_until_complete(asyncio.sleep(0.005))

    def job(self, job_id: str) -> Job | None:
        return self.core.state.jobs.get(job_id) or self.store.jobs([job_id]).get(job_id)

    def die(self) -> None:
        """As a killed server does for those around it: its sockets close, and it says no word."""
        if not self.read_only:
            self.core.close()
            self.loop.run_until_complete(asyncio.wait({self.task}))
            self.executor.close()
        self.store.close()


class World:
    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.folder = folder
        self.truth = folder / "truth"
        self.truth.mkdir(parents=True)
        self.home = Home(folder / "home")
        self.home.prepare()
        self.ids: dict[str, str] = {}
        self.bystanders: list[subprocess.Popen[bytes]] = []
        self.mounted: Path | None = None
        self._build()

    # --- before the faults --------------------------------------------------------------------

    def _build(self) -> None:
        server = Server(self.home, self.loop, FirstServer)
        server.request(
            "RegisterJobDefinition", jobDefinitionName="d", type="container",
            containerProperties={
                "image": "any", "command": ["sh", "-c", PROGRAM],
                "resourceRequirements": [
                    {"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"},
                ],
            },
        )  # fmt: skip
        self._submit(server, DONE)
        self.go(DONE)
        server.until(lambda: server.job(self.ids[DONE]).status.is_terminal, "the first job ends")  # type: ignore[union-attr]
        self._snapshot()
        for name in STAGES[1:]:
            self._submit(server, name)
        server.until(lambda: all(self.starts(n) for n in (ENDED, RUNNING)), "programs run")
        server.until(lambda: self._may_have_begun(server, UNSENT), "the journal has its start")
        server.die()
        self.go(ENDED)
        self._wait(lambda: self.attempt(ENDED, "exit.json").exists())
        self._wait(lambda: (self._record(UNSENT) or {}).get("never_began"))
        self.bystander(BATCHML_TASK=self.attempt(RUNNING).name)
        self.bystander(BATCHML_TASK=f"0123456789abcdef.{self.attempt(RUNNING).name}")

    def _submit(self, server: Server, name: str) -> None:
        given = {"NAME": name, "TRUTH": str(self.truth), "CODE": str(CODES[name])}
        variables = [{"name": key, "value": value} for key, value in given.items()]
        made = server.request(
            "SubmitJob", jobName=name, jobQueue="default", jobDefinition="d",
            containerOverrides={"environment": variables},
        )  # fmt: skip
        self.ids[name] = made["jobId"]

    def _may_have_begun(self, server: Server, name: str) -> bool:
        job = server.job(self.ids[name])
        return job is not None and job.attempt is not None and job.attempt.may_have_begun

    def _snapshot(self) -> None:
        place = self.folder / "earlier"
        place.mkdir()
        for path in (self.home.journal, *self._logs_of_journal(), self.home.position):
            if path.exists():
                shutil.copy2(path, place / path.name)
        shutil.copytree(self.home.attempts, place / "attempts")

    def _logs_of_journal(self) -> list[Path]:
        return [self.home.local / f"journal.db{end}" for end in ("-wal", "-shm")]

    # --- what is true -------------------------------------------------------------------------

    def go(self, name: str) -> None:
        (self.truth / f"go-{name}").touch()

    def starts(self, name: str) -> list[int]:
        path = self.truth / f"starts-{name}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def codes(self, name: str) -> list[int]:
        path = self.truth / f"codes-{name}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def attempt(self, name: str, file: str = "") -> Path:
        """The folder of a job's first attempt, or a file in it, where it was before the faults."""
        from batchml.local.batch.lifecycle import task_id_of

        return self.home.attempt(task_id_of(self.ids[name], 1)) / file

    def _record(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = read_json(str(self.attempt(name, "runner.json")))
        return found

    def bystander(self, **environ: str) -> None:
        words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        self.bystanders.append(subprocess.Popen(words, env=environ, start_new_session=True))

    # --- the faults ---------------------------------------------------------------------------

    def suffer(self, faults: Faults) -> Home:
        """What the next server is started on."""
        self._processes(faults.processes)
        self._files(faults.files)
        self._journal(faults.journal)
        return self._folder(faults.folder)

    def _processes(self, which: str) -> None:
        if which == "ours":
            return
        record = self._record(RUNNING)
        assert record is not None
        for pid in (record["pid"], *self.starts(RUNNING)):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(record["pid"], 0)  # the runner: init would do that for a server that is dead
        if which == "another's":  # its number has come round
            self.bystander()
            changed = {**record, "pid": self.bystanders[-1].pid}
            write_json(str(self.attempt(RUNNING, "runner.json")), changed)

    def _files(self, which: str) -> None:
        if which == "earlier":
            shutil.rmtree(self.home.attempts)
            shutil.copytree(self.folder / "earlier" / "attempts", self.home.attempts)
        elif which == "no folders":
            for folder in self.home.attempts.iterdir():
                shutil.rmtree(folder)
        elif which != "now":
            kinds = {"no records": ("runner.json",), "no ends": ("exit.json",), "no logs": ("log",)}
            for folder in self.home.attempts.iterdir():
                for name in kinds.get(which, ("runner.json", "exit.json", "log")):
                    if (folder / name).exists():
                        (folder / name).unlink()
                        if which == "unreadable":  # also for root, who may read all files
                            (folder / name).mkdir()

    def _journal(self, which: str) -> None:
        journal = self.home.journal
        if which.startswith("earlier"):
            for path in self._logs_of_journal():
                path.unlink(missing_ok=True)
            for path in (self.folder / "earlier").glob("journal.db*"):
                (self.home.local / path.name).write_bytes(path.read_bytes())  # the same inode
            if "position" in which:
                shutil.copy2(self.folder / "earlier" / "position", self.home.position)
        elif which == "empty":
            for path in (journal, *self._logs_of_journal()):
                path.write_bytes(b"")
        elif which == "damaged":
            data = bytearray(journal.read_bytes())
            data[4096 : 4096 + 512] = os.urandom(512)
            data[100:612] = os.urandom(512)
            journal.write_bytes(bytes(data))

    def _folder(self, which: str) -> Home:
        there = Home(self.folder / "there")
        if which == "copied":
            shutil.copytree(self.home.root, there.root, symlinks=True)
            return there
        if which == "moved":
            self.home.root.rename(there.root)
            return there
        if which == "another machine":
            self._as_on_another_machine()
        elif which == "read-only":
            subprocess.run(["mount", "--bind", self.home.root, self.home.root], check=True)
            self.mounted = self.home.root
            subprocess.run(["mount", "-o", "remount,ro,bind", self.home.root], check=True)
        return self.home

    def _as_on_another_machine(self) -> None:
        """The journal says that it is of another machine, as if the disk had been moved here."""
        import sqlite3
        from contextlib import closing

        try:
            with closing(sqlite3.connect(self.home.journal)) as db:
                kept = read_identity(db)
                if kept is not None:
                    write_identity(db, replace(kept, boot="another", machine="another"))
                    db.commit()
        except sqlite3.Error:
            pass  # empty or damaged

    # --- the end ------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, "not within 20 s"
            time.sleep(0.005)

    def close(self) -> None:
        if self.mounted is not None:
            subprocess.run(["umount", "--lazy", self.mounted], check=True)
        for name in STAGES:
            self.go(name)
        for process in self.bystanders:
            process.kill()
            process.wait()
        for name in STAGES:
            for pid in self.starts(name):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def installed(folder: Path, which: str) -> Iterator[tuple[Installation, Callable[[], None]]]:
    """What runners are made of after the fault, and what mends it."""
    if which == "same":
        yield OURS, lambda: None
        return
    if which == "upgraded":
        yield Installation(OURS.python, str(_newer(folder.parent))), lambda: None
        return
    python = folder / "python"
    yield Installation(str(python), OURS.root), lambda: python.symlink_to(OURS.python)


def _newer(folder: Path) -> Path:
    """The package as it will be one day: of another version."""
    root = folder / "newer"
    if not root.exists():
        ours = Path(OURS.root) / "batchml"
        for part in ("local", "runtime"):
            shutil.copytree(ours / part, root / "batchml" / part)
        text = (ours / "__init__.py").read_text()
        (root / "batchml" / "__init__.py").write_text(
            text.replace('__version__ = "', '__version__ = "9.')
        )
    return root


def adopt_copy(home: Home) -> None:
    adopt.adopt(home)


def fill_disk(disk: Path) -> Path:
    """Use up every free byte; the file to delete for space."""
    filler = disk / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (65_536, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return filler
