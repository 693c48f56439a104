"""Fault injection: the syntax of `--chaos` and of the tag `batchml:chaos`, and random choices.

    host-lost@60s     60 s into an attempt its host is lost: no TERM, no exit code
    node-lost@60s     after 60 s the host of a random node other than the main node is lost
    spot@60s          after 60 s TERM, and the host is lost at the end of the grace period
    oom@60s           after 60 s the attempt is killed as if it had run out of memory
    throttle=20%      20% of the requests are refused, as AWS refuses requests above its rate limit
    no-capacity=5m    for 5 minutes after the server's start no job is placed
    seed=7            makes the random choices repeatable

Of the faults `host-lost`, `node-lost`, `spot` and `oom` in a list, the first applies to a job's
first attempt, the second to its second attempt, and so on. Without a time the fault is injected as
soon as the program runs. `host-lost@60s=20%` applies to one job in five.

A job's tag `batchml:chaos` has the same syntax with spaces as separators (AWS's tags allow neither
commas nor %), and replaces the server's faults for that job.

Pure: random choices depend only on the seed and on the subject of the choice.
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
_SERVER_SETTINGS = ("throttle", "no-capacity", "seed")

MOST_FAULTS = 10  # the maximum number of attempts of a job

_WORD = re.compile(r"(?P<name>[^@=]*)(?:@(?P<after>[^@=]*))?(?:=(?P<value>[^@=]*))?")
_SEED = re.compile(r"[0-9]{1,15}")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


class Fault(Struct, frozen=True):
    """A fault that is injected into an attempt after it has run for `after` seconds."""

    kind: str
    after: int = 0
    chance: float = 1.0

    def __str__(self) -> str:
        after = f"@{_duration(self.after)}" if self.after else ""
        chance = f"={_percent(self.chance)}" if self.chance < 1 else ""
        return f"{self.kind}{after}{chance}"


class Chaos(Struct, frozen=True):
    """The faults that a server's `--chaos` or a job's tag requests. Times in seconds."""

    faults: tuple[Fault, ...] = ()  # for the first attempt, the second, ...
    throttle: float = 0.0
    no_capacity: int = 0
    seed: int | None = None

    def __str__(self) -> str:
        """The same faults in the syntax of `parse`."""
        words = [str(fault) for fault in self.faults]
        words += [f"throttle={_percent(self.throttle)}"] if self.throttle else []
        words += [f"no-capacity={_duration(self.no_capacity)}"] if self.no_capacity else []
        words += [] if self.seed is None else [f"seed={self.seed}"]
        return ", ".join(words)


# --- Syntax ---------------------------------------------------------------------------------------


def parse(text: str) -> Chaos:
    """Parse a list of faults. Raises UsageError with all mistakes."""
    chaos, mistakes = read(text)
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise UsageError(f"--chaos: {count}, no server was started.\n{lines}")
    return chaos


def read(text: str) -> tuple[Chaos, list[str]]:
    """Parse a list of faults: the valid ones, and every mistake."""
    reader = _Reader((*_FAULTS, *_SERVER_SETTINGS))
    for part in text.split(","):
        for word in part.split() or [""]:
            reader.take(word)
    return reader.result()


def read_tag(text: str) -> tuple[Chaos, list[str]]:
    """Parse a job's tag, which accepts only faults of attempts."""
    reader = _Reader(_FAULTS)
    for word in text.split() or [""]:
        reader.take(word)
    return reader.result()


class _Reader:
    def __init__(self, known: tuple[str, ...]) -> None:
        self._known = known
        self._of_server = known != _FAULTS
        self._faults: list[Fault] = []
        self._settings: dict[str, float] = {}
        self._mistakes: list[str] = []

    def result(self) -> tuple[Chaos, list[str]]:
        if len(self._faults) > MOST_FAULTS:
            count = len(self._faults)
            self._mistakes.append(
                f"{count} faults, one for each attempt: no job has more than {MOST_FAULTS} "
                f"attempts. Leave {count - MOST_FAULTS} out."
            )
        seed = self._settings.get("seed")
        return Chaos(
            faults=tuple(self._faults),
            throttle=self._settings.get("throttle", 0.0),
            no_capacity=int(self._settings.get("no-capacity", 0)),
            seed=None if seed is None else int(seed),
        ), self._mistakes

    def take(self, word: str) -> None:
        found = _WORD.fullmatch(word)
        name = re.split("[@=]", word)[0]
        if not word:
            self._mistakes.append(f"an entry is missing. Known: {', '.join(self._known)}.")
        elif name not in self._known:
            meant = did_you_mean(name, self._known) or f" Known: {', '.join(self._known)}."
            scope = "" if self._of_server else " for a single job"
            self._mistakes.append(f"{word!r}: there is no fault {name!r}{scope}.{meant}")
        elif found is None:
            self._add_mistake(word, name)
        elif name in _FAULTS:
            self._add_fault(word, name, found["after"], found["value"])
        else:
            self._add_setting(word, name, found["after"], found["value"])

    def _add_fault(self, word: str, name: str, after: str | None, value: str | None) -> None:
        seconds = 0 if after is None else parse_duration(after)
        chance = 1.0 if value is None else _parse_fraction(value)
        by_chance_in_a_tag = value is not None and not self._of_server
        if seconds is None or chance is None or by_chance_in_a_tag:
            self._add_mistake(word, name)
        else:
            self._faults.append(Fault(name, seconds, chance))

    def _add_setting(self, word: str, name: str, after: str | None, value: str | None) -> None:
        number: float | None = None
        if value and after is None:
            if name == "throttle":
                number = _parse_fraction(value)
            elif name == "no-capacity":
                number = parse_duration(value) or None
            elif _SEED.fullmatch(value):
                number = int(value)
        if number is None:
            self._add_mistake(word, name)
        elif name in self._settings:
            self._mistakes.append(f"{word!r}: {name} is given twice. Keep one.")
        else:
            self._settings[name] = number

    def _add_mistake(self, word: str, name: str) -> None:
        chance = f", or {name}@60s=20% for a part of the jobs" if self._of_server else ""
        right = {
            "throttle": "the part of the requests, more than 0% and up to 100%: throttle=20%",
            "no-capacity": "for how long: no-capacity=5m",
            "seed": "a whole number: seed=7",
        }.get(name, f"{name}, or with a delay {name}@60s{chance}")
        self._mistakes.append(f"{word!r}: write {right}.")


def _parse_fraction(text: str) -> float | None:
    """Parse `20%` to 0.2; None for other texts, for 0% and for more than 100%."""
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


# --- Decisions ------------------------------------------------------------------------------------


def fault_of(server: Chaos | None, tag: str | None, sequence: int, number: int) -> Fault | None:
    """The fault for attempt `number` of the job with this sequence number, or None."""
    chaos = server if tag is None else read_tag(tag)[0]
    if chaos is None or number > len(chaos.faults):
        return None
    fault = chaos.faults[number - 1]
    is_drawn = _draw(chaos.seed or 0, f"attempt/{sequence}/{number}") < fault.chance
    return fault if is_drawn else None


def choose_node(server: Chaos | None, sequence: int, number: int, others: int) -> int:
    """The node that `node-lost` loses, as an index from 0 of the `others`. Each node of an attempt
    gets the same result.
    """
    seed = (server.seed if server else None) or 0
    return int(_draw(seed, f"node/{sequence}/{number}") * others)


def is_throttled(chaos: Chaos | None, number: int) -> bool:
    """Whether to refuse the server's request with this number."""
    if chaos is None or not chaos.throttle:
        return False
    return _draw(chaos.seed or 0, f"request/{number}") < chaos.throttle


def host_of(task_id: str) -> str:
    """The made-up id of the instance that an attempt is reported to have lost."""
    return f"i-{sha256(f'host/{task_id}'.encode()).hexdigest()[:17]}"


def _draw(seed: int, subject: str) -> float:
    """A repeatable random number from 0 to below 1 for this subject."""
    drawn = sha256(f"{seed}/{subject}".encode()).digest()
    return int.from_bytes(drawn[:6], "big") / (1 << 48)
