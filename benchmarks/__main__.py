"""`make bench`: every benchmark within fifteen minutes, as a table and as JSON.

    python -m benchmarks [ROWS]

ROWS are names of benchmarks or of rows, with commas. A benchmark that fails is said and gives exit
code 1; a slow one never does.
"""

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from benchmarks import page, results
from benchmarks.rows import Curve, Finding, LeftOut, Row, headline, is_wanted, table
from benchmarks.running import Benchmark, run

LIMIT = 14.5 * 60  # seconds
_LONGER = 2.5  # times the usual seconds, after which a benchmark is interrupted
_LONG = "it takes minutes: make bench ROWS={}"

BENCHMARKS = (
    Benchmark("startup", 40),
    Benchmark("completion", 15),
    Benchmark("submits", 40),
    Benchmark("array", 60),
    Benchmark("server", 40),
    Benchmark("logs", 40),
    Benchmark("curves", 180),
    Benchmark("workspace", 60),
    Benchmark("sweep_trial", 20),
    Benchmark("sweep_local", 40),
    Benchmark("usage", 15),
    Benchmark("tail", 60),
    Benchmark("lenet", 60),
    Benchmark("gang", 60),
    Benchmark("ddp", 60),
    Benchmark("sweep_quality", 60),
    Benchmark("threads", 120, _LONG),
    Benchmark("scaling", 300, _LONG),
    Benchmark("ray_gang", 200, _LONG),
    Benchmark("environments", 200, _LONG),
    Benchmark("sweep_lenet", 120, _LONG),
)


def chosen(wanted: Sequence[str]) -> list[Benchmark]:
    """The benchmarks to run. Raises SystemExit for a name that none has."""
    names = [each.name for each in BENCHMARKS]
    unknown = [name for name in wanted if name.partition("/")[0] not in names]
    if unknown:
        sys.exit(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(names)}")
    if not wanted:
        return [each for each in BENCHMARKS if not each.left_out]
    asked = {name.partition("/")[0] for name in wanted}
    return [each for each in BENCHMARKS if each.name in asked]


def measure(benchmarks: Sequence[Benchmark], wanted: Sequence[str]) -> list[Finding]:
    found: list[Finding] = []
    end = time.monotonic() + LIMIT
    for each in benchmarks:
        left = end - time.monotonic()
        if left < 5 and not wanted:
            found.append(LeftOut(name=each.name, why="the fifteen minutes were over"))
            continue
        print(f"{each.name} ...", end=" ", file=sys.stderr, flush=True)
        own = [name for name in wanted if name.partition("/")[0] == each.name]
        begun = time.monotonic()
        most = _LONGER * each.seconds
        found += run(each, own, most if wanted else min(most, left))
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return found


def missing(found: Sequence[Finding], wanted: Sequence[str]) -> list[str]:
    """The names that nothing was found for."""
    return [
        name for name in wanted
        if not any(is_wanted(each.name, [name]) or name.startswith(f"{each.name}/")
                   for each in found)
    ]  # fmt: skip


def report(found: Sequence[Finding], before: results.Results) -> str:
    """What is printed, with what got worse at its top."""
    rows = [each for each in found if isinstance(each, Row)]
    kept = before.plain_rows()
    lines = [*headline(rows, kept), ""]
    lines += [table(rows, kept)] if rows else []
    for each in found:
        if isinstance(each, LeftOut):
            lines.append(f"{'FAILED' if each.failed else 'left out'}: {each.name}: {each.why}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    wanted = [name for word in arguments for name in word.split(",") if name]
    benchmarks = chosen(wanted)
    machine = results.this_machine()
    before = results.load_committed(machine)
    found = measure(benchmarks, wanted)
    if not wanted:
        found += [LeftOut(name=each.name, why=each.left_out.format(each.name))
                  for each in BENCHMARKS if each.left_out]  # fmt: skip
    found += [LeftOut(name=name, why="there is no such row", failed=True)
              for name in missing(found, wanted)]  # fmt: skip
    kept = results.merge(
        results.load(machine),
        [each for each in found if isinstance(each, Row)],
        [each for each in found if isinstance(each, Curve)],
        date=datetime.now(UTC).strftime("%Y-%m-%d"), commit=results.commit(),
        versions=results.versions(), modules=[each.name for each in BENCHMARKS],
    )  # fmt: skip
    print(f"{machine.kind}, {kept.versions}, commit {results.commit()}")
    print(report(found, before))
    print(f"Kept in {results.save(kept).relative_to(results.ROOT)}.")
    page.write(results.load(machine))  # with the digits that are kept
    print(f"Shown in {page.PAGE.relative_to(results.ROOT)}.")
    return int(any(isinstance(each, LeftOut) and each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
