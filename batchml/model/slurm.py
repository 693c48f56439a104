"""What the `#SBATCH` lines of a script ask for, in our words. Pure.

What has no counterpart here is told of where the run is right without it, and refused where it
would be another run. Every notice and mistake names its line.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from msgspec import Struct

from batchml.errors import did_you_mean
from batchml.model import slurm_options as options
from batchml.model.job import MIN_TIMEOUT
from batchml.model.run import MAX_ARRAY
from batchml.model.script import Line, by_line
from batchml.model.slurm_values import (
    UNLIMITED,
    Gpus,
    Tasks,
    dependencies,
    gpus,
    gres,
    seconds,
    size,
    spans,
    tasks,
)

_MIB = 1024**2
REQUEUED = 3  # attempts that --requeue stands for


class Given(Struct, frozen=True):
    """An option as a line gives it."""

    line: int
    name: str
    value: str = ""


class Asked(Struct, frozen=True):
    """`wanted` are arguments of `Client.order`, `facts` variables `SLURM_*` that scripts read, and
    `folder` where the script wants to work; "" where it does not say."""

    wanted: dict[str, Any] = {}
    facts: dict[str, str] = {}
    folder: str = ""
    mistakes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def read_slurm(lines: Sequence[Line], environ: Mapping[str, str]) -> Asked:
    """What the lines ask for. `environ` has the variables that `--export=NAME` takes along."""
    reader = _Reader(environ)
    for line in lines:
        reader.take(line)
    return reader.asked()


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._given: dict[str, Given] = {}  # the last of each counts
        self._mistakes: list[tuple[int, str]] = []
        self._notices: list[tuple[int, str]] = []

    # --- options ------------------------------------------------------------------------------

    def take(self, line: Line) -> None:
        words = list(line.words)
        while words:
            word = words.pop(0)
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                if not self._is_known(line.number, name, word):
                    while words and not equals and not words[0].startswith("-"):  # its value
                        words.pop(0)
                    continue
            elif word.startswith("-") and len(word) > 1 and word[1] in options.SHORT:
                name, value = options.SHORT[word[1]], word[2:].removeprefix("=")
                equals = "=" if value else ""
            else:
                self._wrong(line.number, f"{word!r} is no option of sbatch.")
                continue
            if name in options.BARE:
                if equals:
                    self._wrong(line.number, f"--{name} takes no value.")
                    continue
            elif not equals and name not in options.MAYBE_BARE:
                if not words:
                    self._wrong(line.number, f"--{name} has no value.")
                    continue
                value = words.pop(0)
            self._keep(Given(line.number, name, value))

    def _is_known(self, line: int, name: str, word: str) -> bool:
        if name in options.KNOWN:
            return True
        if name in ("het-job", "hetjob", "packjob"):
            self._wrong(line, f"{word}: unlike parts of one job are [[groups]] of a job.toml.")
        else:
            known = [f"--{each}" for each in options.KNOWN]
            self._wrong(line, f"{word} is no option of sbatch.{did_you_mean(f'--{name}', known)}")
        return False

    def _keep(self, given: Given) -> None:
        if given.name in options.REFUSED:
            self._wrong(given.line, f"--{given.name}: {options.REFUSED[given.name]}.")
        elif given.name in options.PASSED:
            why = options.PASSED[given.name]
            if why:
                self._say(given.line, f"--{given.name} is passed over: {why}.")
        else:
            if given.name in ("requeue", "no-requeue"):
                self._given.pop("requeue", None)
                self._given.pop("no-requeue", None)
            self._given[given.name] = given

    def _wrong(self, line: int, words: str) -> None:
        self._mistakes.append((line, words))

    def _say(self, line: int, words: str) -> None:
        self._notices.append((line, words))

    # --- values -------------------------------------------------------------------------------

    def _value(self, name: str, read: Callable[[str], Any], form: str) -> Any:
        """The value of an option; None where it was not given, or is wrong, which is noted."""
        given = self._given.get(name)
        if given is None:
            return None
        found = read(given.value)
        if found is None:
            self._wrong(given.line, f"--{name}: found {given.value!r}. Write {form}.")
        return found

    def _count(self, name: str, form: str = "a number above 0") -> int | None:
        found: int | None = self._value(name, _positive, form)
        return found

    def _line(self, *names: str) -> int:
        return max((self._given[each].line for each in names if each in self._given), default=0)

    def asked(self) -> Asked:
        wanted: dict[str, Any] = {}
        facts: dict[str, str] = {}
        self._shape(wanted, facts)
        self._time(wanted)
        self._array(wanted, facts)
        self._dependency(wanted)
        self._texts(wanted, facts)
        self._export(wanted)
        return Asked(
            {name: value for name, value in wanted.items() if value not in (None, {}, [])},
            facts,
            self._given["chdir"].value if "chdir" in self._given else "",
            _in_order(self._mistakes),
            _in_order(self._notices),
        )

    # --- what a node has ----------------------------------------------------------------------

    def _shape(self, wanted: dict[str, Any], facts: dict[str, str]) -> None:
        nodes = self._nodes()
        per_node = self._tasks_per_node(nodes)
        cpus = self._count("cpus-per-task")
        has_gpus = self._gpus(nodes, per_node)
        per_gpu = self._count("cpus-per-gpu")
        vcpus = per_node * cpus if cpus else per_node if per_node > 1 else None
        if per_gpu and has_gpus and vcpus is None:
            vcpus = per_gpu * has_gpus
        wanted |= {"vcpus": vcpus, "gpus": has_gpus, "nodes": nodes if nodes > 1 else None}
        mib = self._memory(vcpus or 1, has_gpus or 0)
        wanted["memory"] = f"{mib} MiB" if mib else None
        facts["SLURM_NTASKS_PER_NODE"] = str(per_node)
        facts["SLURM_CPUS_ON_NODE"] = str(vcpus or 1)
        if mib:
            facts["SLURM_MEM_PER_NODE"] = str(mib)
        if cpus:
            facts["SLURM_CPUS_PER_TASK"] = str(cpus)
        if has_gpus:
            facts["SLURM_GPUS"] = str(has_gpus * nodes)
            facts["SLURM_GPUS_ON_NODE"] = str(has_gpus)
        if "gpus-per-task" in self._given and has_gpus:
            facts["SLURM_GPUS_PER_TASK"] = str(max(1, has_gpus // per_node))

    def _nodes(self) -> int:
        given = self._given.get("nodes")
        if given is None:
            return 1
        least, dash, _ = given.value.partition("-")
        found = _positive(least)
        if found is None:
            self._wrong(given.line, f"--nodes: found {given.value!r}. Write a number above 0.")
            return 1
        if dash and given.value.partition("-")[2] != least:
            self._say(given.line, f"--nodes={given.value}: it is {found}, the number is fixed.")
        return found

    def _tasks_per_node(self, nodes: int) -> int:
        per_node, in_all = self._count("ntasks-per-node"), self._count("ntasks")
        if per_node:
            return per_node
        if not in_all:
            return 1
        if in_all % nodes:
            self._wrong(
                self._line("ntasks"),
                f"--ntasks={in_all}: each of {nodes} nodes has as many tasks as the others.",
            )
        return max(1, in_all // nodes)

    def _gpus(self, nodes: int, per_node: int) -> int | None:
        """GPUs of a node. The first of these that is given counts."""
        form = "a number, or TYPE:NUMBER of one type"
        found: Gpus | None = self._value("gpus-per-node", gpus, form)
        in_all: Gpus | None = self._value("gpus", gpus, form)
        each: Gpus | None = self._value("gpus-per-task", gpus, form)
        if found is None and in_all is not None:
            if in_all.count % nodes:
                self._wrong(
                    self._line("gpus"),
                    f"--gpus={in_all.count}: each of {nodes} nodes has as many as the others.",
                )
            found = Gpus(in_all.count // nodes, in_all.kind)
        if found is None and each is not None:
            found = Gpus(each.count * per_node, each.kind)
        given = self._given.get("gres")
        if given is not None:
            listed, others = gres(given.value)
            found = found or listed
            if others:
                self._say(given.line, f"--gres: {', '.join(others)} is passed over: {_NO_GRES}.")
        if found is not None and found.kind and found.count:
            names = ("gpus-per-node", "gpus", "gpus-per-task", "gres")
            self._say(
                self._line(*names),
                f"GPUs of the type {found.kind} are not asked for by a run: the queue's compute "
                "environment has a type.",
            )
        return found.count if found is not None and found.count else None

    def _memory(self, vcpus: int, has_gpus: int) -> int | None:
        """MiB of a node."""
        form = "a size such as 16G; a bare number is MiB"
        whole, factor, of = self._value("mem", size, form), 1, "mem"
        if whole == 0:
            self._wrong(
                self._line("mem"), "--mem=0: all of a host cannot be asked for. Write how much."
            )
        for name, count in (("mem-per-cpu", vcpus), ("mem-per-gpu", has_gpus)):
            if name in self._given and "mem" not in self._given:
                whole, factor, of = self._value(name, size, form), count, name
        if of == "mem-per-gpu" and not has_gpus and whole:
            self._wrong(self._line(of), "--mem-per-gpu: no GPUs are asked for.")
        return max(1, ceil(whole * factor / _MIB)) if whole else None

    # --- the rest -----------------------------------------------------------------------------

    def _time(self, wanted: dict[str, Any]) -> None:
        form = "minutes, 90:30, 1:30:00, 2-12 (days-hours) or 2-12:30:00"
        found: int | None = self._value("time", seconds, form)
        if found is None or found == UNLIMITED:
            return
        if not found:  # as Slurm has it
            return
        wanted["timeout"] = f"{max(MIN_TIMEOUT, found)}s"
        if found < MIN_TIMEOUT:
            self._say(self._line("time"), f"{found} s become {MIN_TIMEOUT}: AWS Batch's least.")

    def _array(self, wanted: dict[str, Any], facts: dict[str, str]) -> None:
        form = "ids such as 0-15, 1,3,5 or 0-15:4"
        found: Tasks | None = self._value("array", tasks, form)
        if found is None:
            return
        line, count = self._line("array"), len(found.ids)
        if count > MAX_ARRAY:
            self._wrong(line, f"--array: {count:,} tasks; AWS Batch takes {MAX_ARRAY:,}.")
        if found.limit:
            self._say(
                line,
                f"%{found.limit} is passed over: as many run at once as the queue has room for.",
            )
        facts["BATCHML_SLURM_ARRAY"] = spans(found.ids)
        if count > 1:
            wanted["array"] = count

    def _dependency(self, wanted: dict[str, Any]) -> None:
        given = self._given.get("dependency")
        if given is None:
            return
        wanted["after"], others = dependencies(given.value)
        if others:
            self._wrong(
                given.line,
                f"--dependency={','.join(others)}: AWS Batch knows afterok:RUN alone, several of "
                "them with a comma.",
            )

    def _texts(self, wanted: dict[str, Any], facts: dict[str, str]) -> None:
        texts = {
            name: self._given[name].value
            for name in ("job-name", "account", "container-image", "partition")
            if name in self._given
        }
        wanted["name"] = _as_name(texts.get("job-name", "")) or None
        wanted["image"] = texts.get("container-image", "").replace("#", "/") or None
        queue, comma, _ = texts.get("partition", "").partition(",")
        wanted["queue"] = queue or None
        if comma:
            self._say(
                self._line("partition"),
                f"--partition={texts['partition']}: it is {queue}, a run is in one queue.",
            )
        if texts.get("account"):
            wanted["tags"] = {"account": texts["account"]}
            facts["SLURM_JOB_ACCOUNT"] = texts["account"]
        if "requeue" in self._given:
            wanted["attempts"] = REQUEUED
            self._say(
                self._line("requeue"),
                f"--requeue: {REQUEUED} attempts, if a host is lost (#BATCHML --attempts N).",
            )
        elif "no-requeue" in self._given:
            wanted["attempts"] = 1

    def _export(self, wanted: dict[str, Any]) -> None:
        given = self._given.get("export")
        if given is None:
            return
        found: dict[str, str] = {}
        for word in filter(None, given.value.split(",")):
            name, equals, value = word.partition("=")
            if word in ("ALL", "NIL"):
                self._say(
                    given.line,
                    f"--export={word}: variables of this shell do not travel; name those that "
                    "matter, --export=NAME or #BATCHML --set-env NAME=VALUE.",
                )
            elif word != "NONE" and (equals or name in self._environ):
                found[name] = value if equals else self._environ[name]
            elif word != "NONE":
                self._say(given.line, f"--export={name}: it is not set here.")
        wanted["set_env"] = found


_NO_GRES = "a run asks for vCPUs, memory and GPUs"


def _positive(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and 0 < int(text) < 10**7 else None


def _as_name(text: str) -> str:
    """A name as AWS Batch takes it; Slurm takes nearly any."""
    from batchml.model.names import to_name

    return to_name(text) if text else ""


def _in_order(said: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(by_line(f"line {line}: {words}" for line, words in said))
