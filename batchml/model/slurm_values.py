"""Slurm's ways to write times, sizes, GPUs, arrays and dependencies. Pure.

Source: the manual page of sbatch(1), Slurm 24.05. Each function returns None for what is not
written as that page says.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,5})-(?P<hours>[0-9]{1,5})(?::(?P<minutes>[0-9]{1,5}))?"
    r"(?::(?P<seconds>[0-9]{1,5}))?"
    r"|(?P<h>[0-9]{1,5}):(?P<hm>[0-9]{1,5}):(?P<hs>[0-9]{1,5})"
    r"|(?P<m>[0-9]{1,9})(?::(?P<ms>[0-9]{1,9}))?)"
)
_SIZE = re.compile(r"([0-9]{1,12})([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"k": 1024, "": 1024**2, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_GPUS = re.compile(r"(?:([A-Za-z][\w.-]*):)?([0-9]{1,5})")
_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::([A-Za-z][\w.-]*))?(?:[:=]([0-9]{1,5}))?(?:\(S:[0-9,-]+\))?"
)
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
UNLIMITED = -1
MOST_TASKS = 1_000_000  # ids of an array that are looked at


class Gpus(Struct, frozen=True):
    count: int
    kind: str = ""  # "a100", where it is named


class Tasks(Struct, frozen=True):
    """The ids of an array. `limit` is how many may run at once; 0: no limit."""

    ids: tuple[int, ...]
    limit: int = 0


def seconds(text: str) -> int | None:
    """`90`, `90:30` (minutes), `1:30:00`, `2-12`, `2-12:30`, `2-12:30:00`; UNLIMITED is -1."""
    if text.lower() in ("unlimited", "infinite", "-1"):
        return UNLIMITED
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    found = {name: int(value) for name, value in match.groupdict().items() if value}
    hours = found.get("days", 0) * 24 + found.get("hours", 0) + found.get("h", 0)
    minutes = sum(found.get(name, 0) for name in ("minutes", "hm", "m"))
    return (hours * 60 + minutes) * 60 + sum(found.get(n, 0) for n in ("seconds", "hs", "ms"))


def size(text: str) -> int | None:
    """Bytes; `16G`, `512` in MiB, all powers of 1024. 0 is all that a host has."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) * _UNITS[match[2].lower()] if match else None


def gpus(text: str) -> Gpus | None:
    """`2`, `a100:2`; several kinds at once, `a100:1,v100:1`, are None."""
    match = _GPUS.fullmatch(text)
    return Gpus(int(match[2]), match[1] or "") if match else None


def gres(text: str) -> tuple[Gpus | None, tuple[str, ...]]:
    """The GPUs of `gpu:a100:2,nvme:1`, and what else is named there."""
    found, others = None, list[str]()
    for part in filter(None, text.split(",")):
        match = _GRES.fullmatch(part)
        if match and found is None:
            found = Gpus(int(match[2] or 1), match[1] or "")
        elif part != "none":
            others.append(part)
    return found, tuple(others)


def tasks(text: str) -> Tasks | None:
    """The ids of `0-15`, `1,3,5`, `0-15:4`, `0-15%4`, in their order, each once."""
    listed, percent, limit = text.partition("%")
    if percent and not re.fullmatch("[1-9][0-9]{0,8}", limit):
        return None
    ids: dict[int, None] = {}
    for part in listed.split(","):
        match = _SPAN.fullmatch(part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[3] or 1)
        if last < first or step < 1 or (last - first) // step + len(ids) >= MOST_TASKS:
            return None
        ids |= dict.fromkeys(range(first, last + 1, step))
    return Tasks(tuple(sorted(ids)), int(limit) if percent else 0)


def spans(ids: tuple[int, ...]) -> str:
    """Ids as short as they can be said: `1-9:2,20`. `tasks` reads the same ids from it."""
    return ",".join(_spans(ids))


def _spans(ids: tuple[int, ...]) -> Iterator[str]:
    at = 0
    while at < len(ids):
        step = ids[at + 1] - ids[at] if at + 1 < len(ids) else 1
        end = at
        while end + 1 < len(ids) and ids[end + 1] - ids[end] == step:
            end += 1
        if end - at == 1:
            end = at  # two are no span: the second may begin one
        yield str(ids[at]) if end == at else f"{ids[at]}-{ids[end]}{f':{step}' if step > 1 else ''}"
        at = end + 1


def dependencies(text: str) -> tuple[list[str], list[str]]:
    """The runs of `afterok:A:B,afterok:C`, and the parts that say anything else."""
    found, others = list[str](), list[str]()
    for part in re.split("[,?]", text):
        kind, *words = part.split(":")
        if kind == "afterok" and words and all(words):
            found += [word.partition("+")[0] for word in words]
        else:
            others.append(part)
    if "?" in text:
        return [], [text]  # any of them is enough, which AWS Batch does not know
    return found, others
