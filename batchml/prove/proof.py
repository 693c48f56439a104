"""A proof under way: its commands, and how the answers to claims are read from their output."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.prove.children import CommandResult, Commands
from batchml.prove.claims import World
from batchml.prove.folder import ProofFolder
from batchml.prove.steps import ClaimAnswer

_FACT = re.compile(r"PROOF (\{.*\})")


class Proof:
    """The things that a step needs. `token`: a text that the programs of this proof write and read.

    `runs` are the job ids of runs that a later step uses, by a name of the steps.
    """

    def __init__(
        self, world: World, env: str, folder: ProofFolder, commands: Commands,
        options: Sequence[str], *, throw_away: bool,
    ) -> None:  # fmt: skip
        self.world = world
        self.env = env
        self.folder = folder
        self.commands = commands
        self.options = tuple(options)
        self.throw_away = throw_away
        self.token = folder.record.id
        self.runs: dict[str, str] = {}
        (folder.job / "token").write_text(self.token, "utf-8")

    def ask(
        self, *words: str, watch: Callable[[str], object] | None = None, limit: float = 1800.0,
        environ: Mapping[str, str] | None = None,
    ) -> CommandResult:  # fmt: skip
        """Run a command in the proof's environment; `words` may have a `--` before a command."""
        at = words.index("--") if "--" in words else len(words)
        return self.commands.run(
            *words[:at], "--env", self.env, *words[at:], watch=watch, limit=limit, environ=environ
        )

    def submit(
        self, mode: str, *words: str, wait: bool = True, environ: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Submit the probe in a mode; with `wait` follow it to its end."""
        flags = ["--wait"] if wait else ["--detach"]
        return self.ask("submit", str(self.folder.job), "-p", f"mode={mode}", *flags, "--json",
                        *words, environ=environ)  # fmt: skip

    def fetch(self, run: str, name: str, *flags: str) -> tuple[CommandResult, dict[str, str]]:
        """The outputs of a run, with `--checkpoints` its checkpoints: path -> text of the file."""
        target = Path(self.folder.record.work) / name
        result = self.ask("get", run, str(target), "--json", *flags)
        found = {
            str(path.relative_to(target)): path.read_text("utf-8", "replace")
            for path in sorted(target.rglob("*")) if path.is_file()
        }  # fmt: skip
        return result, found


Asker = Callable[[Proof], Iterator[ClaimAnswer]]  # the function of a step


class FactTable(Struct, frozen=True):
    """The facts that a probe printed, in order."""

    rows: tuple[Mapping[str, Any], ...] = ()

    def find(self, fact: str) -> Mapping[str, Any]:
        """The first fact of this name; empty if the probe has not printed it."""
        return next(iter(self.all(fact)), {})

    def all(self, fact: str) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row.get("fact") == fact]


def read_facts(text: str) -> FactTable:
    """The facts in a log. Lines that are cut are ignored."""
    rows = []
    for found in _FACT.finditer(text):
        try:
            row = json.loads(found[1])
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return FactTable(tuple(rows))


def answer(claim: str, held: bool, why: str = "", **facts: object) -> ClaimAnswer:
    """The answer to a claim. `why` is what is wrong if it does not hold."""
    return ClaimAnswer(claim, held, "" if held else why, facts)


def judge_order(numbers: Sequence[int], last: int) -> str:
    """What is wrong with the numbers of lines that should be 1 to `last`; "" if nothing is."""
    if list(numbers) == list(range(1, last + 1)):
        return ""
    missing = sorted(set(range(1, last + 1)) - set(numbers))
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if missing:
        return f"lines are missing: {_join(missing)}"
    if twice:
        return f"lines came twice: {_join(twice)}"
    return f"lines came in the order {_join(numbers)}"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def latencies(lines: Sequence[tuple[float, str]]) -> list[float]:
    """Seconds from the printing of each line in the run to its arrival here.

    `lines` are those of `logs -f`, with their arrival in seconds since the epoch.
    """
    found = []
    for arrived, line in lines:
        at = read_facts(line).find("line").get("at")
        if isinstance(at, int | float):
            found.append(arrived - at)
    return found
