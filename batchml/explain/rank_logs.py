"""The lines of the rank that failed first, in a log that several ranks write. Pure."""

import re
from collections.abc import Sequence

from batchml.explain.clues import find_last_exception
from batchml.runtime.protocol.log_marks import LAST_LINES, SAME_TRACEBACK

# The labels that launchers and frameworks write before each line of a process: torch (the exception
# of a rank of an initialized group, and its warnings), torchrun --tee, mpirun --tag-output, Ray.
_PREFIX = re.compile(
    r"^(?:(?:\x1b\[[\d;]*m)*"
    r"(?:\[rank ?\d+\]:?|\[default\d+\]:|\[\d+,\d+\](?:<std\w+>:|:)|\([^()]*\bpid=\d+[^()]*\))"
    r"(?:\x1b\[[\d;]*m)* ?)+"
)
# Where torchrun begins its own report on a rank that has failed, after the rank's output.
_TORCHRUN_REPORT = re.compile(
    r"torch/distributed/elastic/multiprocessing/\S+ failed \(exitcode: |"
    r"torch\.distributed\.elastic\.\S+ \[ERROR\] failed \(exitcode: "
)

_REPEATED = f"batchml: {LAST_LINES}"
_INDENT = "  "

_LABEL = re.compile(r"\[r[0-9]+\] ")
_BEGAN = re.compile(r"batchml: generation [0-9]+: [^,]*, [0-9]+ ranks?(, from .*)?\.")
_RANK = re.compile(r"Rank ([0-9]+) ")
_SAME = re.compile(re.escape(SAME_TRACEBACK).replace(r"\{\}", "([0-9]+)") + "$")
_ENDED = re.compile(
    r"batchml: (?:a crash loop: .* The last of them: )?(Rank [0-9]+ on node [0-9]+.*)"
)


def program_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines of a log as the program wrote them, for all rules that search for a cause.

    Without the labels of ranks, without the lines of ranks that failed later, and without the
    report of a torchrun that the program itself started, if the error stands before it.
    """
    own = tuple(_SAME.sub("", _PREFIX.sub("", line)) for line in _keep_first_rank(lines))
    report = next((at for at, line in enumerate(own) if _TORCHRUN_REPORT.search(line)), len(own))
    return own[:report] if find_last_exception(own[:report]) else own


def _keep_first_rank(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines on starts of ranks, and the last output of the rank that failed first.

    The lines of several ranks are mixed in a log. At the end our supervisor names the rank that
    failed first; it repeats the last lines of that rank if the log does not have them. A log
    without this end keeps all lines, without the labels of ranks.
    """
    lines = tuple(lines)
    repetitions = [index for index, line in enumerate(lines) if line == _REPEATED]
    if repetitions:
        starts = [line for line in lines[: repetitions[-1]] if _BEGAN.fullmatch(line)]
        rest = lines[repetitions[-1] + 1 :]
        return (*starts, *(line.removeprefix(_INDENT) for line in rest))
    ended = _RANK.match(find_ended_rank(lines))
    own = f"[r{ended[1]}] " if ended else ""
    if not any(own and line.startswith(own) for line in lines):
        return tuple(_LABEL.sub("", line, count=1) for line in lines)
    same = (_SAME.search(line) for line in lines if line.startswith(own))
    labels = (own, *(f"[r{found[1]}] " for found in same if found))
    kept = (line for line in lines if line.startswith((*labels, "batchml: ")))
    return tuple(_LABEL.sub("", line, count=1) for line in kept)


def started_without_checkpoint(lines: Sequence[str]) -> bool:
    """Whether the last start in the log had no checkpoint; False if the log has no start."""
    starts = [began for line in lines if (began := _BEGAN.fullmatch(line))]
    return bool(starts) and not starts[-1][1]


def find_ended_rank(lines: Sequence[str]) -> str:
    """`Rank 3 on node 1 (10.0.0.7) ended with 9.`; empty if no rank ended the run."""
    found = [ended[1] for line in lines if (ended := _ENDED.fullmatch(line))]
    return found[-1] if found else ""
