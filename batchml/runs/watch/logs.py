"""Read the output of a run so far: all lines or the last lines, also of children and nodes."""

from collections.abc import Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.logs import LogLine, StreamReader
from batchml.clock import Clock
from batchml.context import PollIntervals
from batchml.model.logcheck import LogCheck
from batchml.model.run import Attempt, Run
from batchml.runs.watch.parts import OpenLog, PartSchedule, describe_missing_log
from batchml.runs.watch.poller import MAX_DESCRIBE, Describe, Limiter
from batchml.runtime.protocol.log_marks import parse_mark


class AttemptOutput(Struct, frozen=True):
    """The output of one attempt; `number` counts from 1, `child` as in the events of `follow`."""

    run: Run
    child: str
    number: int
    stream: str
    lines: Iterator[LogLine]  # iterating reads the log
    reader: StreamReader  # has the result of the reading: a missing log, a check

    @property
    def note(self) -> str:
        """A message about a missing or incomplete log, or ""; valid after the lines were read."""
        if self.reader.missing:
            over = self.run.status.is_terminal
            return describe_missing_log(self.run, self.stream, self.reader.missing, is_over=over)
        return self.check.describe(self.child) if self.check is not None else ""

    @property
    def check(self) -> LogCheck | None:
        """The embedded server's check of the log, for an attempt that has ended."""
        return self.reader.check

    @property
    def is_damaged(self) -> bool:
        return self.check is not None and self.check.is_damaged


def read_output(
    describe: Describe,
    open_log: OpenLog,
    run: Run,
    *,
    clock: Clock,
    pace: PollIntervals,
    attempt: int | None = None,
    since: int | None = None,
    last: int | None = None,
) -> Iterator[AttemptOutput]:
    """Yield the output of each attempt of the run, its children or nodes, in order, without marks.

    `attempt` selects one attempt by its number. `since` is in ms since the epoch. `last` is the
    number of lines at the end of each child.
    """
    limiter = Limiter(clock, pace.log_rate)
    for child, part in _parts(describe, run):
        found = [
            _read_attempt(open_log, part, child, number, each, since, limiter)
            for number, each in enumerate(part.attempts, start=1)
            if each.log_stream and attempt in (None, number)
        ]
        yield from found if last is None else _limit_to_last(found, last, limiter)


def _read_attempt(
    open_log: OpenLog,
    run: Run,
    child: str,
    number: int,
    attempt: Attempt,
    since: int | None,
    limiter: Limiter,
) -> AttemptOutput:
    name = f"{child}/{number}" if child and number > 1 else child
    reader = open_log(run, attempt.log_stream).restart(since)
    return AttemptOutput(
        run, name, number, attempt.log_stream, _read_lines(reader, limiter), reader
    )


def _read_lines(reader: StreamReader, limiter: Limiter) -> Iterator[LogLine]:
    """All lines so far. After as many lines as the end mark counts, no further call is made."""
    count, promised = 0, -1
    while True:
        limiter.take()
        page = reader.read_page()
        for line in page.lines:
            mark = parse_mark(line.message)
            if mark is None:
                count += 1
                yield line
            elif mark[0] == "end":
                promised = int(mark[1]["lines"])
        if page.is_end(count == promised):
            return


def _read_last_lines(reader: StreamReader, last: int, limiter: Limiter) -> list[LogLine]:
    limiter.take()
    lines = (line for line in reader.read_backwards() if parse_mark(line.message) is None)
    found = list(islice(lines, last))[::-1]
    reader.finish_check()
    return found


def _parts(describe: Describe, run: Run) -> Iterator[tuple[str, Run]]:
    """The run itself, or its children or nodes that AWS Batch returns, in their order."""
    if not (run.array_size or (run.nodes and run.node_index is None)):
        yield "", run
        return
    parts = PartSchedule(run)
    for start in range(0, parts.size, MAX_DESCRIBE):
        numbers = range(start, min(start + MAX_DESCRIBE, parts.size))
        found = describe([parts.job_id(number) for number in numbers])
        for number in numbers:
            part = found.get(parts.job_id(number))
            if part is not None:
                yield str(number), part


def _limit_to_last(
    attempts: list[AttemptOutput], last: int, limiter: Limiter
) -> list[AttemptOutput]:
    """The last lines of all attempts together, read from the end."""
    found = []
    for each in reversed(attempts):
        lines = _read_last_lines(each.reader, last, limiter)
        found.append(replace(each, lines=iter(lines)))
        last -= len(lines)
        if last <= 0:
            break
    return found[::-1]
