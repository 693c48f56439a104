"""How a benchmark is run: alone (`python -m benchmarks.NAME [--full]`), or by `make bench`.

By `make bench` each runs in a process of its own that prints a line of JSON for each finding, so
that a benchmark that is too slow, or fails, loses only the rows that it has not printed.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from benchmarks import results
from benchmarks.rows import Curve, Finding, LeftOut, Row, is_wanted, number, table

Measure = Callable[[bool], Iterator[Finding]]  # full size? -> what is found, as it is found
_GRACE = 20.0  # seconds to stop its servers, for a benchmark that is interrupted
_FINDING = msgspec.json.Decoder(Finding)


def main(measure: Measure, arguments: Sequence[str] | None = None) -> None:
    """The command of a benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="at full size, which may take long")
    parser.add_argument("--only", default="", metavar="ROWS", help="names of rows, with commas")
    parser.add_argument("--lines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # An interrupted benchmark still stops its servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = [name for name in options.only.split(",") if name]
    found: list[Finding] = []
    for each in _until_complete(measure(options.full), wanted):
        found.append(each)
        if options.lines:
            sys.stdout.buffer.write(msgspec.json.encode(each) + b"\n")
            sys.stdout.flush()
        elif isinstance(each, Row):
            print(f"{each.name} ...", file=sys.stderr, flush=True)
    if not options.lines:
        _print(found)


def _until_complete(findings: Iterator[Finding], wanted: Sequence[str]) -> Iterator[Finding]:
    """The wanted ones; it ends once each single row that is named has come."""
    left = {name for name in wanted if "/" in name}
    with contextlib.closing(findings):  # type: ignore[type-var]
        for each in findings:
            if is_wanted(each.name, wanted):
                yield each
            left.discard(each.name)
            if wanted and not left and all("/" in name for name in wanted):
                return


def _print(found: Sequence[Finding]) -> None:
    kept = results.load_committed(results.this_machine()).plain_rows()
    rows = [each for each in found if isinstance(each, Row)]
    if rows:
        print(table(rows, kept))
    for each in found:
        if isinstance(each, Curve):
            points = "  ".join(f"{size:,}: {number(cost)}" for size, cost in each.points)
            print(f"{each.title} ({each.unit}): {points}")
        elif isinstance(each, LeftOut):
            print(f"{each.name}: left out: {each.why}")


class Benchmark(msgspec.Struct, frozen=True):
    """A module of benchmarks, as `make bench` knows it."""

    name: str
    seconds: float  # that it takes about, at its small size, on two cores
    left_out: str = ""  # why `make bench` does not run it unless ROWS= names it


def run(benchmark: Benchmark, wanted: Sequence[str], limit: float) -> Iterator[Finding]:
    """What one benchmark finds in a process of its own, within so many seconds."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", "--lines"]
    if wanted:
        command += ["--only", ",".join(wanted)]
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=results.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    with _Alarm(process, limit), process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            try:
                yield _FINDING.decode(line)
            except msgspec.MsgspecError:
                continue  # a line that a program below it printed
        said = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
    if time.monotonic() - begun >= limit:
        yield LeftOut(name=benchmark.name, why=f"the rest was not done after {limit:.0f} s")
    elif process.returncode != 0:
        last = said[-1] if said else f"exit code {process.returncode}"
        yield LeftOut(name=benchmark.name, why=last, failed=True)


class _Alarm:
    """Interrupts a process after some time, and ends it if that does not help."""

    def __init__(self, process: "subprocess.Popen[bytes]", limit: float) -> None:
        self._process, self._limit = process, limit

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._limit, _GRACE)
        self._rung = False

    def _ring(self, *_: Any) -> None:
        if self._rung:
            self._process.kill()
        else:
            self._process.send_signal(signal.SIGINT)
        self._rung = True

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
