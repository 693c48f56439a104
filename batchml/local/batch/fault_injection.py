"""Failures on request, so that a person can rehearse them: the words for them, and what they mean.

    host-lost@60s     after 60 s of an attempt its host is gone: no TERM, no exit code
    node-lost@60s     after 60 s the host of another node than the main one is gone, drawn by chance
    spot@60s          after 60 s TERM, and the host is gone when the grace is over
    oom@60s           after 60 s the attempt is killed for memory
    throttle=20%      so many requests are refused, as AWS refuses those that come too fast
    no-capacity=5m    for so long after the server's start no job is placed
    seed=7            what is left to chance comes out the same again

The first of `host-lost`, `node-lost`, `spot` and `oom` is for a job's first attempt, the second for
its second, and so on: whoever lists two rehearses that both are survived. Without a time they
strike as soon as the program runs. `host-lost@60s=20%` strikes one job in five.

A job's tag `batchml:chaos` holds the same words with spaces between them (AWS's tags know no commas
and no %), and stands for that job in place of the server's.

Pure: what is left to chance depends on the seed and on what it is asked about.
"""

import re
from hashlib import sha256

from msgspec import Struct

from batchml.errors import UsageError, did_you_mean
from batchml.model.tables import parse_duration

TAG = "batchml:chaos"

HOST_LOST = "host-lost"
NODE_LOST = "node-lost"
SPOT = "spot"
OOM = "oom"
_FAULTS = (HOST_LOST, NODE_LOST, SPOT, OOM)
_OF_SERVER = ("throttle", "no-capacity", "seed")

MOST_FAULTS = 10  # as many as a job can have attempts

_WORD = re.compile(r"(?P<name>[^@=]*)(?:@(?P<after>[^@=]*))?(?:=(?P<value>[^@=]*))?")
_SEED = re.compile(r"[0-9]{1,15}")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


class Fault(Struct, frozen=True):
    """What becomes of an attempt that has run for `after` seconds."""

    kind: str
    after: int = 0
    chance: float = 1.0

    def __str__(self) -> str:
        after = f"@{_duration(self.after)}" if self.after else ""
        chance = f"={_percent(self.chance)}" if self.chance < 1 else ""
        return f"{self.kind}{after}{chance}"


class Chaos(Struct, frozen=True):
    """What a server, or the tag of a job, asks for. Times in seconds."""

    faults: tuple[Fault, ...] = ()  # of the first attempt, of the second, ...
    throttle: float = 0.0
    no_capacity: int = 0
    seed: int | None = None

    def __str__(self) -> str:
        """In the words in which it can be asked for again."""
        words = [str(fault) for fault in self.faults]
        words += [f"throttle={_percent(self.throttle)}"] if self.throttle else []
        words += [f"no-capacity={_duration(self.no_capacity)}"] if self.no_capacity else []
        words += [] if self.seed is None else [f"seed={self.seed}"]
        return ", ".join(words)


# --- words ----------------------------------------------------------------------------------


def parse(text: str, where: str = "--chaos") -> Chaos:
    """What the words ask for. Raises UsageError with all their mistakes."""
    chaos, mistakes = read(text)
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise UsageError(f"{where}: {count}, no server was started.\n{lines}")
    return chaos


def read(text: str) -> tuple[Chaos, list[str]]:
    """What the words ask for, as far as they are right, and every mistake."""
    reader = _Reader((*_FAULTS, *_OF_SERVER))
    for part in text.split(","):
        for word in part.split() or [""]:
            reader.take(word)
    return reader.result()


def read_tag(text: str) -> tuple[Chaos, list[str]]:
    """The same for a job's tag, which can ask for the faults of attempts alone."""
    reader = _Reader(_FAULTS)
    for word in text.split() or [""]:
        reader.take(word)
    return reader.result()


class _Reader:
    def __init__(self, known: tuple[str, ...]) -> None:
        self._known = known
        self._of_server = known != _FAULTS
        self._faults: list[Fault] = []
        self._others: dict[str, float] = {}
        self._mistakes: list[str] = []

    def result(self) -> tuple[Chaos, list[str]]:
        if len(self._faults) > MOST_FAULTS:
            count = len(self._faults)
            self._mistakes.append(
                f"{count} faults, one for each attempt: no job has more than {MOST_FAULTS} "
                f"attempts. Leave {count - MOST_FAULTS} out."
            )
        seed = self._others.get("seed")
        return Chaos(
            faults=tuple(self._faults),
            throttle=self._others.get("throttle", 0.0),
            no_capacity=int(self._others.get("no-capacity", 0)),
            seed=None if seed is None else int(seed),
        ), self._mistakes

    def take(self, word: str) -> None:
        found = _WORD.fullmatch(word)
        name = re.split("[@=]", word)[0]
        if not word:
            self._mistakes.append(f"a word is missing. Known: {', '.join(self._known)}.")
        elif name not in self._known:
            meant = did_you_mean(name, self._known) or f" Known: {', '.join(self._known)}."
            self._mistakes.append(f"{word!r}: {name!r} is not known here.{meant}")
        elif found is None:
            self._wrong(word, name)
        elif name in _FAULTS:
            self._fault(word, name, found["after"], found["value"])
        else:
            self._other(word, name, found["after"], found["value"])

    def _fault(self, word: str, name: str, after: str | None, value: str | None) -> None:
        seconds = 0 if after is None else parse_duration(after)
        chance = 1.0 if value is None else _part(value)
        by_chance_in_a_tag = value is not None and not self._of_server
        if seconds is None or chance is None or by_chance_in_a_tag:
            self._wrong(word, name)
        else:
            self._faults.append(Fault(name, seconds, chance))

    def _other(self, word: str, name: str, after: str | None, value: str | None) -> None:
        number: float | None = None
        if value and after is None:
            if name == "throttle":
                number = _part(value)
            elif name == "no-capacity":
                number = parse_duration(value) or None
            elif _SEED.fullmatch(value):
                number = int(value)
        if number is None:
            self._wrong(word, name)
        elif name in self._others:
            self._mistakes.append(f"{word!r}: {name} is there twice. Keep one.")
        else:
            self._others[name] = number

    def _wrong(self, word: str, name: str) -> None:
        chance = f", or {name}@60s=20% for a part of the jobs" if self._of_server else ""
        right = {
            "throttle": "the part of the requests, more than 0% and up to 100%: throttle=20%",
            "no-capacity": "for how long: no-capacity=5m",
            "seed": "a whole number: seed=7",
        }.get(name, f"{name}, or after how long: {name}@60s{chance}")
        self._mistakes.append(f"{word!r}: write {right}.")


def _part(text: str) -> float | None:
    """`20%` as 0.2; None for anything else, and for none or more than all."""
    found = _PERCENT.fullmatch(text)
    part = round(float(found[1]) / 100, 8) if found else 0.0
    return part if 0 < part <= 1 else None


def _percent(part: float) -> str:
    return f"{part * 100:.6f}".rstrip("0").rstrip(".") + "%"


def _duration(seconds: int) -> str:
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


# --- what is to happen ----------------------------------------------------------------------


def fault_of(server: Chaos | None, tag: str | None, sequence: int, number: int) -> Fault | None:
    """What is in store for attempt `number` of the job that was submitted as the `sequence`th."""
    chaos = server if tag is None else read_tag(tag)[0]
    if chaos is None or number > len(chaos.faults):
        return None
    fault = chaos.faults[number - 1]
    by_chance = _drawn(chaos.seed or 0, f"attempt/{sequence}/{number}") < fault.chance
    return fault if by_chance else None


def struck_node(server: Chaos | None, sequence: int, number: int, others: int) -> int:
    """Which of the `others` a `node-lost` strikes, from 0; all nodes of an attempt are told so."""
    seed = (server.seed if server else None) or 0
    return int(_drawn(seed, f"node/{sequence}/{number}") * others)


def is_throttled(chaos: Chaos | None, number: int) -> bool:
    """Whether the server's `number`th request is refused."""
    if chaos is None or not chaos.throttle:
        return False
    return _drawn(chaos.seed or 0, f"request/{number}") < chaos.throttle


def host_of(task_id: str) -> str:
    """The instance that an attempt is said to have lost: one for each, made up."""
    return f"i-{sha256(f'host/{task_id}'.encode()).hexdigest()[:17]}"


def _drawn(seed: int, what: str) -> float:
    """A number from 0 up to, not including, 1, as if drawn for this question."""
    drawn = sha256(f"{seed}/{what}".encode()).digest()
    return int.from_bytes(drawn[:6], "big") / (1 << 48)
