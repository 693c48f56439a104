"""The embedded CloudWatch Logs: streams, and lines of a stream."""

import asyncio
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchml.clock import SystemClock
from batchml.local.logs.api import LogReads
from batchml.local.store.journal import Journal
from benchmarks.curves.cost import SOME, cpu, cpu_of_command, each, sizes
from benchmarks.rows import Curve

GROUP = "/aws/batch/job"
AT = 1_800_000_000_000  # ms


def open_reads(folder: Path, names: list[str]) -> LogReads:
    """Log calls in this process, on streams that lie in `folder`."""
    store = Journal(folder / "journal.db")
    with sqlite3.connect(folder / "journal.db") as db:
        db.executemany(
            "INSERT INTO streams (log_group, stream, task_id, created_at) VALUES (?, ?, ?, 0)",
            [(GROUP, name, name) for name in names],
        )
    db.close()
    return LogReads(store, lambda task: folder / task, SystemClock())


def ask(reads: LogReads, operation: str, **params: Any) -> dict[str, Any]:
    answer, _ = asyncio.run(reads.answer(operation, {"logGroupName": GROUP, **params}))
    found: dict[str, Any] = answer
    return found


def follow(reads: LogReads, stream: str) -> None:
    """All lines of a stream, page by page."""
    token = "f/0"
    while True:
        answer = ask(reads, "GetLogEvents", logStreamName=stream, nextToken=token)
        if answer["nextForwardToken"] == token:
            return
        token = answer["nextForwardToken"]


def merge(reads: LogReads) -> None:
    """All lines of all streams, page by page."""
    token: dict[str, Any] = {}
    while True:
        answer = ask(reads, "FilterLogEvents", **token)
        if "nextToken" not in answer:
            return
        token = {"nextToken": answer["nextToken"]}


def streams(full: bool) -> Iterator[Curve]:
    merges, peers, pages = [], [], []
    for size in sizes(full, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            names = [f"s{number:06d}" for number in range(size)]
            for number, name in enumerate(names):
                with open(folder / name, "w", encoding="ascii") as file:
                    file.writelines(f"{AT + n * 10 + number % 7} {name} {n}\n" for n in range(5))
            reads = open_reads(folder, names)
            merges.append((size, cpu(lambda: merge(reads)) / size * 1e6))  # noqa: B023
            newest = {"orderBy": "LogStreamName", "descending": True, "limit": 50}
            pages.append((size, each(lambda: ask(reads, "DescribeLogStreams", **newest), 10)))  # noqa: B023
            reads.close()
            sort = "sort --merge --numeric-sort s*"
            taken = cpu_of_command(["sh", "-c", sort], text)
            peers.append((size, taken / size * 1e6))
    yield Curve(
        name="curves/streams_merge", title="FilterLogEvents of all streams", axis="log streams",
        unit="us of CPU a stream", how="five lines each, page by page", points=merges,
        peers={"sort --merge": peers},
    )  # fmt: skip
    yield Curve(
        name="curves/streams_page", title="DescribeLogStreams: the first 50", axis="log streams",
        unit="us of CPU", how="median of 10", points=pages,
    )  # fmt: skip


def lines(full: bool) -> Iterator[Curve]:
    reading, late, peers = [], [], []
    for size in sizes(full):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            with open(folder / "one", "w", encoding="ascii") as file:
                file.writelines(f"{AT + n // 100} {n}\n" for n in range(size))
            reads = open_reads(folder, ["one"])
            reading.append((size, cpu(lambda: follow(reads, "one")) / size * 1e6))  # noqa: B023
            end = {"logStreamName": "one", "startFromHead": True, "limit": 10}
            asked = {**end, "startTime": AT + (size - 1) // 100}
            late.append((size, each(lambda: ask(reads, "GetLogEvents", **asked))))  # noqa: B023
            reads.close()
            script = "import json,sys\nfor line in open('one'): json.dumps(line.split(None, 1))"
            peers.append((size, cpu_of_command(["python3", "-c", script], text) / size * 1e6))
    yield Curve(
        name="curves/lines_read", title="GetLogEvents of a whole stream", axis="lines",
        unit="us of CPU a line", how="page by page", points=reading,
        peers={"a loop that writes each line as JSON, with its start": peers},
    )  # fmt: skip
    yield Curve(
        name="curves/lines_late", title="GetLogEvents from a late startTime", axis="lines",
        unit="us of CPU", how=f"median of {SOME}", points=late,
    )  # fmt: skip
