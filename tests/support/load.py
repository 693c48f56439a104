"""Load for torture tests: clients that submit, stop and look, and write down what they are told.

A client's ledger is a file with a line for each answer, so that what it was told counts also when
it is killed in the next moment. `python -m tests.support.load` is a client that tests kill.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import msgspec
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from msgspec import Struct

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from batchml.model.names import split_key

CLOCK = SystemClock()
LINES = 20  # of a job's output
RETRIES = 10
_BUSY = 10  # jobs that wait: more would only make the end longer
_ROOT = Path(__file__).parents[2]

# Appends its attempt to a file named after its job: a second start would be a second line.
JOB = r"""
echo $AWS_BATCH_JOB_ATTEMPT >> "$STARTS/$AWS_BATCH_JOB_ID"
i=0
while [ $i -lt $COUNT ]; do echo "line $i"; i=$((i+1)); [ $((i % 10)) -ne 0 ] || sleep $NAP; done
[ $AWS_BATCH_JOB_ATTEMPT -ne 1 ] || exit $FIRST
exit $CODE
"""


class Plan(Struct, frozen=True):
    """What a job does; its name says it, so that one whose answer was lost is known as well."""

    kind: str
    first: int  # the exit code of the first attempt
    code: int  # and of any other

    @classmethod
    def of(cls, name: str) -> "Plan":
        kind, first, code, _ = split_key(name)[0].split("-")  # a key follows, if we submitted it
        return cls(kind, int(first), int(code))

    def name(self, token: str) -> str:
        return f"{self.kind}-{self.first}-{self.code}-{token}"

    def code_of(self, attempt: int) -> int:
        return self.first if attempt == 1 else self.code


class Load(Struct, frozen=True):
    """Where the jobs go, and what of."""

    home: str
    starts: str  # a folder
    ledgers: str  # a folder
    definition: str
    nodes: str = ""  # a definition of two nodes, where the machine has room for them
    seed: int = 0

    def environment(self, plan: Plan, nap: float) -> list[dict[str, str]]:
        given = {"STARTS": self.starts, "COUNT": LINES, "NAP": nap,
                 "FIRST": plan.first, "CODE": plan.code}  # fmt: skip
        return [{"name": name, "value": str(value)} for name, value in given.items()]


class Stop(Struct, frozen=True, array_like=True):
    """A stop that was asked for; `at`, in ms, if the answer came."""

    job: str
    operation: str
    reason: str
    at: int | None


class Told(Struct):
    """What all clients were told."""

    jobs: dict[str, str]  # id -> name
    stops: list[Stop]
    surprises: list[str]  # what a server may not answer

    @classmethod
    def read(cls, ledgers: str) -> "Told":
        told = cls({}, [], [])
        for path in sorted(Path(ledgers).iterdir()):
            for line in path.read_text().splitlines():
                what, *rest = json.loads(line)
                if what == "job":
                    told.jobs[rest[0]] = rest[1]
                elif what == "stop":
                    told.stops.append(msgspec.convert(rest, Stop))
                else:
                    told.surprises.append(rest[0])
        return told


class Client:
    """Does one thing after the other, by chance, for as long as there is a server."""

    def __init__(self, load: Load, name: str, tries: int = 1) -> None:
        self._load = load
        self._home = Home(Path(load.home))
        self._session = boto3.Session()
        self._tries = tries
        self._endpoint: ServerEndpoint | None = None
        self._batch: Any = None
        self.begin(name)

    def begin(self, name: str) -> None:
        """From here on it is another client, with a ledger of its own."""
        self._name = name
        self._chance = random.Random(f"{self._load.seed} {name}")
        self._count = 0
        self._mine: list[tuple[str, Plan]] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._ledger = os.open(f"{self._load.ledgers}/{name}", flags, 0o600)

    def connect(self) -> bool:
        """False when no server is there."""
        endpoint = control.find_server(self._home)
        if endpoint is None:
            return False
        if self._endpoint is None or endpoint.port != self._endpoint.port:
            keys = self._home.keys()
            self._batch = self._session.client(
                "batch", region_name="us-east-1", endpoint_url=endpoint.url,
                aws_access_key_id=keys.access_key_id,
                aws_secret_access_key=keys.secret_access_key,
                config=Config(retries={"total_max_attempts": self._tries, "mode": "standard"}),
            )  # fmt: skip
        self._endpoint = endpoint
        return True

    def act(self) -> None:
        """One call, or a few. That the server dies meanwhile is no surprise."""
        if not self.connect():
            CLOCK.sleep(0.02)
            return
        try:
            if self._mine and self._chance.random() < 0.2:
                self._stop()
            elif self._is_busy():
                CLOCK.sleep(0.1)
            else:
                self._submit()
        except BotoCoreError:
            CLOCK.sleep(0.01)
        except (ClientError, KeyError) as error:
            # An answer that is cut off as the server dies is none; and on a dead server's port
            # somebody else may answer.
            CLOCK.sleep(0.3)
            if control.find_server(self._home) == self._endpoint and not _is_to_be_signed_again(
                error
            ):
                self._note("surprise", repr(error))

    def nap(self, most: float) -> None:
        CLOCK.sleep(self._chance.uniform(0, most))

    def _note(self, *what: Any) -> None:
        os.write(self._ledger, json.dumps(what).encode() + b"\n")

    def _is_busy(self) -> bool:
        waiting = 0
        for status in ("RUNNABLE", "PENDING"):
            page = self._batch.list_jobs(jobQueue="default", jobStatus=status, maxResults=_BUSY)
            waiting += len(page["jobSummaryList"])
        return waiting >= _BUSY

    def _submit(self) -> None:
        chance = self._chance
        self._count += 1
        plan, more = self._plan()
        name = plan.name(f"{self._name}n{self._count}")
        environment = self._load.environment(plan, chance.choice([0, 0.02, 0.1, 0.4]))
        if plan.kind == "nodes":
            override = {"targetNodes": "0:", "containerOverrides": {"environment": environment}}
            more["nodeOverrides"] = {"nodePropertyOverrides": [override]}
        else:
            more["containerOverrides"] = {"environment": environment}
        definition = self._load.nodes if plan.kind == "nodes" else self._load.definition
        job_id = str(
            self._batch.submit_job(
                jobName=name, jobQueue="default", jobDefinition=definition, **more
            )["jobId"]
        )
        self._note("job", job_id, name)
        self._mine.append((job_id, plan))
        if not self._batch.describe_jobs(jobs=[job_id])["jobs"]:
            self._note("surprise", f"{job_id} was acknowledged and is not there")

    def _plan(self) -> tuple[Plan, dict[str, Any]]:
        chance = self._chance
        code = chance.choice([0, 0, 0, 1, 7])
        what = chance.random()
        if what < 0.1:
            return Plan("retried", 9, 0), {"retryStrategy": {"attempts": RETRIES}}
        if what < 0.25:
            size = {"arrayProperties": {"size": chance.choice([2, 2, 3])}}
            pairs = [job_id for job_id, plan in self._mine[-8:] if plan.kind == "array"]
            if pairs and chance.random() < 0.5:
                depends = [{"jobId": pairs[-1], "type": "N_TO_N"}]
                return Plan("paired", 0, 0), {"arrayProperties": {"size": 2}, "dependsOn": depends}
            if chance.random() < 0.4:
                return Plan("sequence", 0, 0), {**size, "dependsOn": [{"type": "SEQUENTIAL"}]}
            return Plan("array", 0, 0), {"arrayProperties": {"size": 2}}
        if what < 0.4 and self._mine:
            depends = [{"jobId": chance.choice(self._mine[-3:])[0]}]
            return Plan("after", code, code), {"dependsOn": depends}
        if what < 0.46 and self._load.nodes:
            return Plan("nodes", 0, 0), {}
        return Plan("single", code, code), {}

    def _stop(self) -> None:
        """Of any job, wherever it is; the newest are the likeliest to be somewhere."""
        job_id = self._chance.choice(self._mine[-4:])[0]
        operation = self._chance.choice(["cancel_job", "terminate_job"])
        reason = f"stopped by {self._name}"
        self._note("stop", job_id, operation, reason, None)
        getattr(self._batch, operation)(jobId=job_id, reason=reason)
        self._note("stop", job_id, operation, reason, int(CLOCK.now() * 1000))


def _is_to_be_signed_again(error: Exception) -> bool:
    """B115: what was signed before the server started and has come after."""
    code = error.response["Error"]["Code"] if isinstance(error, ClientError) else ""
    return bool(code == "TooManyRequestsException")


class Mortal:
    """A client process that is killed and replaced, again and again.

    It is forked from one that has loaded everything, because a new one takes longer than a round.
    """

    def __init__(self, load: Load, name: str = "mortal") -> None:
        words = [
            sys.executable,
            "-m",
            "tests.support.load",
            msgspec.json.encode(load).decode(),
            name,
        ]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
        )
        self.replace()

    def replace(self) -> None:
        """Kill it in the middle of whatever it does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip().isdigit()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def _generations() -> Iterator[int]:
    """A number for each line that comes in."""
    for number, _ in enumerate(iter(sys.stdin.readline, "")):
        yield number


def main() -> None:
    load = msgspec.json.decode(sys.argv[1], type=Load)
    name = sys.argv[2]
    client = Client(load, name)
    client.connect()
    child = 0
    for number in _generations():
        _kill(child)
        child = os.fork()
        if not child:
            parent = os.getppid()
            client.begin(f"{name}{number}")
            while os.getppid() == parent:
                client.act()
                client.nap(0.05)
            os._exit(0)
        print(child, flush=True)
    _kill(child)


def _kill(child: int) -> None:
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
