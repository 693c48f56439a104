"""What one attempt of a program shows: numbers that it prints, files that it writes, its memory."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct

from batchml.model.job import MAX_PATTERN, MAX_PATTERNS
from batchml.runtime.entry.folders import size_text
from batchml.runtime.entry.outputs import KEPT

_MAX_LINES = 20_000  # of the output that are searched
_MAX_METRICS = 8
_MAX_LINE = 2_000  # characters of a line

# A loss that diverges is printed as `nan`: a pattern without it would keep the value before.
_NOT_FINITE = r"[-+]?(?:nan|inf)\b"
_SIMPLE_NUMBER = "nan|-?inf|[0-9.eE+-]+"
_NUMBER = rf"(?:[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|{_NOT_FINITE})"
_WORD = r"[A-Za-z_][\w/@.-]*"
# A name begins after something else than a letter: in `Train loss: 1` the name is `Train loss`.
_START = r"(?:^|[^A-Za-z_\s]\s*)"
_START_BEFORE = re.compile(rf"{_START}$")
# `loss=0.5`, `"loss": 0.5`, `Average loss: 0.5`.
_NAMED = re.compile(
    rf"(?<![\w/@.-])(?P<name>{_WORD}(?: {_WORD}){{0,2}})(?P<between>[\"']?\s*[=:]\s*)"
    rf"(?P<value>{_NUMBER})(?=(?P<after>\S*))"
)
# `loss 2.31`: only for names that are metrics, and numbers with a point.
_SPACED = re.compile(
    rf"(?<![\w/@.-])(?P<name>{_WORD}(?: {_WORD})?)(?P<between>\s+)"
    rf"(?P<value>[-+]?\d+\.\d+(?:[eE][-+]?\d+)?|{_NOT_FINITE})(?=(?P<after>\S*))"
)
# `Accuracy: 9842/10000 (98%)`: the share is the value.
_SHARE = re.compile(
    rf"(?<![\w/@.-])(?P<name>{_WORD}(?: {_WORD}){{0,2}})(?P<between>\s*[=:]\s*\d+/\d+\s*\()"
    rf"(?P<value>{_NUMBER})(?=(?P<after>%))"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

# The best value of a metric whose name contains one of these words.
_LESS_IS_BETTER = (
    "loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "nll", "bpc",
    "bpb",
)  # fmt: skip
_MORE_IS_BETTER = (
    "acc", "accuracy", "f1", "auc", "bleu", "rouge", "precision", "recall", "reward", "score",
    "map", "iou", "dice", "r2", "psnr", "ssim",
)  # fmt: skip
# Numbers that are no metrics, by the last word of their name.
_NOT_METRICS = frozenset((
    "at", "batch", "batches", "count", "date", "device", "dim", "dims", "elapsed", "epoch",
    "epochs", "eta", "from", "gpu", "gpus", "hours", "id", "in", "index", "it", "items", "iter",
    "iteration", "iterations", "iters", "layers", "length", "line", "lr", "max", "min", "ms",
    "nodes", "num", "number", "of", "params", "pid", "port", "rank", "s", "samples", "sec",
    "seconds", "seed", "shape", "size", "speed", "step", "steps", "throughput", "time", "to",
    "tokens", "total", "version", "workers",
))  # fmt: skip
_UNITS = re.compile(r"/\d|:\d|x\d|(?:ms|s|sec|it/s|[KMGT]i?B)\b", re.IGNORECASE)

# Folders of data that a program downloads: nobody wants them back with the outputs.
DATA_FOLDERS = ("data", "datasets", "dataset", "cache")


class FoundMetric(Struct, frozen=True):
    """A metric in the output. `line` is the first line that has it."""

    name: str
    pattern: str
    best: str  # "min", "max" or ""
    line: str


class Observation(Struct, frozen=True):
    """One attempt. `files` are the paths that it wrote below its working folder, with their bytes.
    `memory_mib` is the most that was measured; 0 without a measurement. `is_whole`: the program
    ended by itself, without an error. `placed` are files in folders of the run, by the name that
    the command has for them: `{outputs}/figure.png`.
    """

    metrics: tuple[FoundMetric, ...] = ()
    files: tuple[tuple[str, int], ...] = ()
    memory_mib: float = 0.0
    end: str = ""  # how the attempt ended, as a sentence
    is_whole: bool = True
    placed: tuple[tuple[str, int], ...] = ()


# --- Metrics --------------------------------------------------------------------------------------


def find_metrics(output: Iterable[str]) -> tuple[FoundMetric, ...]:
    """The metrics in the lines of an output, those with known names first, then by frequency."""
    lines = [_ANSI.sub("", line)[:_MAX_LINE] for line in islice(output, _MAX_LINES)]
    seen: dict[str, list[_Hit]] = {}
    for line in lines:
        for hit in _hits(line):
            seen.setdefault(hit.name, []).append(hit)
    chosen = [name for name, hits in seen.items() if _is_metric(name, [hit.value for hit in hits])]
    chosen.sort(key=lambda name: (not best_of(name), -len(seen[name])))
    found: dict[str, FoundMetric] = {}
    for name in chosen:
        pattern = _pattern(seen[name], lines)
        metric = FoundMetric(_key(name), pattern, best_of(name), seen[name][0].line.strip())
        found.setdefault(metric.name, metric)
    return tuple(found.values())[:_MAX_METRICS]


class _Hit(NamedTuple):
    """A number with a name. `between` is the text between them: `: `; `before` is in front."""

    before: str
    name: str
    between: str
    value: str
    line: str


def _hits(line: str) -> Iterator[_Hit]:
    for pattern in (_NAMED, _SPACED, _SHARE):
        for match in pattern.finditer(line):
            is_metric = pattern is not _SPACED or best_of(match["name"])
            start = _START_BEFORE.search(line, 0, match.start())
            if is_metric and start and not _UNITS.match(match["after"]):
                yield _Hit(start[0], match["name"], match["between"], match["value"], line)


def _is_metric(name: str, values: Sequence[str]) -> bool:
    words = _words(name)
    is_setting = words[-1:] == ["rate"] and "learning" in words
    if not words or words[-1] in _NOT_METRICS or is_setting or len(name) > 40:
        return False
    if best_of(name):
        return True
    return len(set(values)) > 1 and any(not each.lstrip("+-").isdigit() for each in values)


def _words(name: str) -> list[str]:
    return [each for each in re.split(r"[^a-z0-9]+", name.lower()) if each]


def best_of(name: str) -> str:
    """`min` or `max` if the name says which value is the best."""
    words = _words(name)
    if any(word in _LESS_IS_BETTER or word.endswith("loss") for word in words):
        return "min"
    return "max" if any(word in _MORE_IS_BETTER for word in words) else ""


def _key(name: str) -> str:
    """`average_loss` for `Average loss`."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_").lower()


def _pattern(hits: Sequence[_Hit], lines: Sequence[str]) -> str:
    """The pattern of job.toml: the simplest one that finds these numbers, and no others."""
    expected = Counter(hit.value for hit in hits)
    before, name, between = (_escape(text) for text in hits[0][:3])
    between = re.sub(r"\d+", r"\\d+", between)
    simple = f"{name}{between}({_SIMPLE_NUMBER})"
    spaced = re.sub(r"\s+", r"\\s+", simple)
    first = spaced if "  " in simple else simple
    before = re.sub(r"\d", r"\\d", before)  # `\d acc` of `loss 0.31 acc 0.9`
    for pattern in (first, spaced, f"{before}{first}", rf"(?:^|\W){spaced}"):
        found = Counter(value for line in lines for value in re.findall(pattern, line))
        if found == expected:
            return pattern
    return rf"{_START}{re.escape(name)}[\"']?\s*[=:\s]\s*({_NUMBER})"


def _escape(text: str) -> str:
    """Like re.escape, which also escapes characters that need none outside of brackets."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


# --- Files ----------------------------------------------------------------------------------------


def written_files(outputs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The files of the working folder among a run's outputs, without those of data folders."""
    prefix = f"{KEPT}/"
    found = ((name.removeprefix(prefix), size) for name, size in outputs if name.startswith(prefix))
    return tuple(sorted((name, size) for name, size in found if not _is_data(name)))


def placed_files(outputs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The program's files in `{outputs}` and `{checkpoints}`, without the logs of its ranks."""
    others = (f"{KEPT}/", "ranks/rank-")
    found = ((name, size) for name, size in outputs if not name.startswith(others))
    return tuple(
        (name if name.startswith("{checkpoints}/") else f"{{outputs}}/{name}", size)
        for name, size in found
    )


def _is_data(name: str) -> bool:
    return any(part.lower() in DATA_FOLDERS for part in PurePosixPath(name).parts[:-1])


def keep_patterns(files: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Patterns of `keep` for these files: `runs/**` for a folder, `*.pt` for a kind of file.

    None if they are too many or too long for `keep`: without patterns all files are kept.
    """
    found: dict[str, None] = {}
    for name, _ in files:
        path = PurePosixPath(name)
        if len(path.parts) > 1:
            found[f"{_plain(path.parts[0])}/**"] = None
        else:
            found[f"*{_plain(path.suffix)}" if path.suffix and path.stem else _plain(name)] = None
    is_possible = len(found) <= MAX_PATTERNS and all(len(each) <= MAX_PATTERN for each in found)
    return tuple(found) if is_possible else ()


def _plain(name: str) -> str:
    """The name as a pattern: `?` stands for characters that have a meaning there."""
    return "".join("?" if each in "*[]!\\" or not each.isprintable() else each for each in name)


def describe_files(files: Sequence[tuple[str, int]]) -> str:
    """`model.pt (4 MiB), log.txt (1 KiB) and 3 more`"""
    shown = ", ".join(f"{name} ({size_text(size)})" for name, size in files[:3])
    return f"{shown} and {len(files) - 3} more" if len(files) > 3 else shown


def memory_to_request(peak_mib: float) -> str:
    """Half more than the peak, in whole GiB; at least the default of 2 GiB."""
    return f"{max(2, -(-int(peak_mib * 1.5) // 1024))} GiB"
