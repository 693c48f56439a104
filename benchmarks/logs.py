"""Job output: how fast it is written and read, and in how much memory.

Compared with a shell and the same bytes, in the same minute: `seq N | cat > file` for writing,
`cat` for reading one stream, `sort --merge` for reading a thousand as one.
"""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchml.aws.session import Access, Session
from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from benchmarks.curves.logs import ask, follow, merge, open_reads
from benchmarks.rows import Finding, alone, paired
from benchmarks.running import main

STREAMS, LINES_EACH = 1000, 200
PAIRS = 3


def measure(full: bool) -> Iterator[Finding]:
    lines, megabytes = (1_000_000, 1000) if full else (100_000, 50)
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        endpoint = control.ensure_server(home, SystemClock())
        try:
            server = _Server(home, endpoint)
            yield from _take_in(server, lines, Path(folder))
            yield from _stay_small(server, megabytes)
        finally:
            control.stop_server(home, SystemClock())
        yield from _give_out(Path(folder), lines)
        yield from _merge(Path(folder) / "many")


class _Server:
    def __init__(self, home: Home, endpoint: ServerEndpoint) -> None:
        keys = home.keys()
        access = Access(
            "us-east-1",
            endpoint=endpoint.url,
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
        )
        self.pid = endpoint.pid
        self.batch = Session(access).client("batch")

    def run(self, script: str) -> tuple[float, dict[str, int]]:
        """The seconds of a job, and the most memory in MiB of the server and of what it starts."""
        needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
        made = self.batch.register_job_definition(
            jobDefinitionName="prints", type="container",
            containerProperties={
                "image": "any", "command": ["sh", "-c", script], "resourceRequirements": needs,
            },
        )  # fmt: skip
        most = _Most(self.pid)
        job_id = self.batch.submit_job(
            jobName="prints", jobQueue="default", jobDefinition=made["jobDefinitionArn"]
        )["jobId"]
        while True:
            (job,) = self.batch.describe_jobs(jobs=[job_id])["jobs"]
            if job["status"] in ("SUCCEEDED", "FAILED"):
                break
            time.sleep(0.05)
        if job["status"] == "FAILED":
            raise RuntimeError(f"the job failed: {job.get('statusReason')}")
        return (job["stoppedAt"] - job["startedAt"]) / 1000, most.stop()


class _Most(threading.Thread):
    """Watches how much memory the server and its Python children hold at most."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._over = threading.Event()
        self._found = {"server": 0, "runner": 0}
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.02):
            for pid, parents in _family(self._pid).items():
                status = _read(f"/proc/{pid}/status")
                if "\nVmHWM:" in status and (pid == self._pid or "python" in status[:30]):
                    size = int(status.split("\nVmHWM:")[1].split()[0]) // 1024
                    name = "server" if not parents else "runner"
                    self._found[name] = max(self._found[name], size)

    def stop(self) -> dict[str, int]:
        self._over.set()
        self.join()
        return self._found


def _family(root: int) -> dict[int, int]:
    """The processes below `root`, and how far below."""
    found, level, depth = {root: 0}, [root], 0
    while level:
        depth += 1
        children = [
            int(child)
            for pid in level
            for task in _listed(f"/proc/{pid}/task")
            for child in _read(f"/proc/{pid}/task/{task}/children").split()
        ]
        found |= dict.fromkeys(children, depth)
        level = children
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _shell(script: str) -> float:
    return _seconds(lambda: subprocess.run(["sh", "-c", script], check=True))


def _take_in(server: _Server, lines: int, folder: Path) -> Iterator[Finding]:
    pairs = [
        (
            lines / server.run(f"seq {lines}")[0],
            lines / _shell(f"seq {lines} | cat > {folder}/floor"),
        )
        for _ in range(PAIRS)
    ]
    yield paired(
        "logs/write", f"{lines:,} short lines of a job", "lines/s", pairs,
        beside="seq | cat > file", smaller=False,
    )  # fmt: skip


def _stay_small(server: _Server, megabytes: int) -> Iterator[Finding]:
    line = "x" * 99
    pairs, memories = [], []
    for _ in range(PAIRS):
        ours, memory = server.run(f"yes {line} | head -c {megabytes}000000")
        floor = _shell(f"yes {line} | head -c {megabytes}000000 | cat > /dev/null")
        pairs.append((megabytes / ours, megabytes / floor))
        memories.append(memory)
    yield paired(
        "logs/bytes", f"{megabytes} MB of a job in lines of 100", "MB/s", pairs,
        beside="cat > /dev/null", smaller=False,
    )  # fmt: skip
    for part in ("runner", "server"):
        most = [float(each[part]) for each in memories]
        yield alone(f"logs/memory_{part}", f"memory of the {part} meanwhile", "MiB", most)


def _give_out(folder: Path, lines: int) -> Iterator[Finding]:
    at = int(time.time() * 1000)
    with open(folder / "one", "w", encoding="ascii") as file:
        file.writelines(f"{at + n // 100} {n}\n" for n in range(lines))
    reads = open_reads(folder, ["one"])

    pairs = [
        (
            lines / _seconds(lambda: follow(reads, "one")),
            lines / _shell(f"cat {folder}/one > /dev/null"),
        )
        for _ in range(PAIRS)
    ]
    yield paired(
        "logs/read", f"GetLogEvents of all of {lines:,} lines", "lines/s", pairs,
        beside="cat", smaller=False,
    )  # fmt: skip
    late: dict[str, Any] = {"startFromHead": True, "startTime": at + lines // 100 - 1, "limit": 10}
    took = [
        _seconds(lambda: ask(reads, "GetLogEvents", logStreamName="one", **late)) * 1000
        for _ in range(9)
    ]
    yield alone("logs/late", f"GetLogEvents from the end of {lines:,} lines", "ms", took)
    reads.close()


def _merge(folder: Path) -> Iterator[Finding]:
    folder.mkdir()
    names = [f"s{number:04d}" for number in range(STREAMS)]
    for number, name in enumerate(names):
        with open(folder / name, "w", encoding="ascii") as file:
            file.writelines(f"{n * 10 + number % 7} {name} {n}\n" for n in range(LINES_EACH))
    reads = open_reads(folder, names)

    lines = STREAMS * LINES_EACH
    sort = f"cd {folder} && sort --merge --numeric-sort s* > /dev/null"
    pairs = [(lines / _seconds(lambda: merge(reads)), lines / _shell(sort)) for _ in range(PAIRS)]
    yield paired(
        "logs/merge", f"FilterLogEvents of {STREAMS} streams", "lines/s", pairs,
        beside="sort --merge", smaller=False,
    )  # fmt: skip
    reads.close()


if __name__ == "__main__":
    main(measure)
