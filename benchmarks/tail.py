"""Following a log: how fast a long one is read, and how soon a line is seen.

Compared, in turn, with `aws logs filter-log-events` on the same stream of the embedded server, and
with what `aws logs tail --follow` of version 2 does: FilterLogEvents, and five seconds of sleep
(awscli/customizations/logs/tail.py); version 1, which pip installs, has no `tail`. In AWS a user
waits for the pause between two calls, so ours is also measured with the pause that it has there.
"""

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from batchml.aws.batch.jobs import JobApi
from batchml.aws.logs import StreamReader
from batchml.aws.session import Access, Session
from batchml.clock import SystemClock
from batchml.context import LOCAL_INTERVALS, PollIntervals
from batchml.local import control
from batchml.local.home import Home
from batchml.model.run import Run
from batchml.runs.watch.events import OutputLine
from batchml.runs.watch.follow import follow
from benchmarks.pairs import compare, rows
from benchmarks.rows import Finding, LeftOut, paired
from benchmarks.running import main

GROUP = "/aws/batch/job"
BETWEEN = 1.7  # seconds between two lines: no multiple of anybody's pause
_TAIL_SLEEPS = 5.0
_TICKS = f"""
import sys, time
for _ in range(int(float(sys.argv[1]) / {BETWEEN})):
    print(time.time(), flush=True)
    time.sleep({BETWEEN})
"""


def measure(full: bool) -> Iterator[Finding]:
    lines, seconds = (200_000, 45) if full else (20_000, 20)
    with tempfile.TemporaryDirectory() as folder:
        place = _Place(Home(Path(folder) / "home"))
        try:
            yield from _throughput(place, folder, lines)
            yield from _latency(place, seconds)
        finally:
            control.stop_server(place.home, SystemClock())


class _Place:
    """The embedded server, and whoever talks to it."""

    def __init__(self, home: Home) -> None:
        self.home = home
        endpoint = control.ensure_server(home, SystemClock())
        keys = home.keys()
        self.session = Session(
            Access(
                "us-east-1",
                endpoint=endpoint.url,
                access_key_id=keys.access_key_id,
                secret_access_key=keys.secret_access_key,
            )
        )
        self.batch = JobApi(self.session)
        self.environ = {
            "BATCHML_HOME": str(home.root),
            "AWS_ENDPOINT_URL": endpoint.url,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def submit(self, command: Sequence[str]) -> str:
        client = self.session.client("batch")
        needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
        made = client.register_job_definition(
            jobDefinitionName="prints", type="container",
            containerProperties={
                "image": "any", "command": list(command), "resourceRequirements": needs,
            },
        )  # fmt: skip
        definition = made["jobDefinitionArn"]
        sent = client.submit_job(jobName="prints", jobQueue="default", jobDefinition=definition)
        return str(sent["jobId"])

    def when(self, job_id: str, is_it: Callable[[Run], Any]) -> Run:
        while not is_it(run := self.batch.describe([job_id])[job_id]):
            time.sleep(0.05)
        return run

    def open_log(self, run: Run, stream: str) -> StreamReader:
        return StreamReader(lambda: self.session, run.log_group, stream)


def _read_by_cli(stream: str) -> list[str]:
    aws = shutil.which("aws", path=str(Path(sys.executable).parent)) or "aws"
    asked = ["--log-group-name", GROUP, "--log-stream-names", stream]
    shown = ["--query", "events[].[timestamp,message]", "--output", "text"]
    return [aws, "logs", "filter-log-events", *asked, *shown]


def _throughput(place: _Place, folder: str, lines: int) -> Iterator[Finding]:
    job_id = place.submit(["seq", str(lines)])
    run = place.when(job_id, lambda run: run.status.is_terminal)
    stream = run.attempts[-1].log_stream
    for name, more in (("logs", []), ("follow", ["-f"])):
        ours = [sys.executable, "-m", "batchml", "logs", *more, job_id]
        theirs = _read_by_cli(stream)
        if shutil.which(theirs[0]) is None:
            yield LeftOut(name=f"tail/{name}", why="the AWS CLI is not here")
            continue
        found = compare(ours, theirs, environ=place.environ, folder=folder, pairs=3)
        measured = " ".join(["batchml logs", *more, f"of {lines:,} lines"])
        yield from rows(f"tail/{name}", measured, found, beside="the AWS CLI", goal=1)


def _latency(place: _Place, seconds: int) -> Iterator[Finding]:
    """All watch one job at the same time."""
    job_id = place.submit([sys.executable, "-c", _TICKS, str(seconds)])
    run = place.when(job_id, lambda run: run.attempts and run.status == "RUNNING")
    over = threading.Event()
    watchers = {
        "aws": _Watcher(_followed(place, job_id, PollIntervals())),
        "local": _Watcher(_followed(place, job_id, LOCAL_INTERVALS)),
        "cli": _Watcher(_tailed(place, run.attempts[-1].log_stream, over)),
    }
    place.when(job_id, lambda run: run.status.is_terminal)
    time.sleep(_TAIL_SLEEPS)
    over.set()
    for watcher in watchers.values():
        watcher.join()
    theirs = watchers["cli"].delays
    for pace in ("aws", "local"):
        yield paired(
            f"tail/latency_{pace}", f"a line is seen, pace for {pace}, {seconds} s",
            "s", list(zip(watchers[pace].delays, theirs, strict=False)),
            beside="aws logs tail --follow", goal=1,
        )  # fmt: skip


class _Watcher(threading.Thread):
    """Notes how long ago each line was printed when it arrives."""

    def __init__(self, lines: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self._lines = lines
        self.delays: list[float] = []
        self.start()

    def run(self) -> None:
        for line in self._lines:
            try:
                self.delays.append(time.time() - json.loads(line))
            except ValueError:
                continue


def _tailed(place: _Place, stream: str, over: threading.Event) -> Iterator[str]:
    """As version 2 of the AWS CLI does it."""
    client = place.session.client("logs")
    seen: set[str] = set()
    while not over.is_set():
        pages = client.get_paginator("filter_log_events").paginate(
            logGroupName=GROUP, logStreamNames=[stream]
        )
        for event in (event for page in pages for event in page["events"]):
            if event["eventId"] not in seen:
                seen.add(event["eventId"])
                yield event["message"]
        over.wait(_TAIL_SLEEPS)


def _followed(place: _Place, job_id: str, pace: PollIntervals) -> Iterator[str]:
    seen = follow(place.batch.describe, place.open_log, job_id, clock=SystemClock(), pace=pace)
    return (happening.text for happening in seen if isinstance(happening, OutputLine))


if __name__ == "__main__":
    main(measure)
