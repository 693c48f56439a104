"""Turn the `#SBATCH` lines of a script into options of `batchml submit`.

An option without a counterpart is passed over with a notice if the run gives the same results
without it; else it is refused. Notices and mistakes name their lines. Source: sbatch(1), Slurm
24.05.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Literal

from msgspec import Struct

from batchml.errors import did_you_mean
from batchml.jobs.script import ScriptLine, sort_by_line
from batchml.model.job import AUTO, MIN_TIMEOUT
from batchml.model.names import to_name
from batchml.model.run import MAX_ARRAY

# --- Options --------------------------------------------------------------------------------------


# Options of one letter, and their long names.
SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile",
    "G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "v": "verbose", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip

# Options with a value that are read; then options without a value.
READ = frozenset((
    "account", "array", "auto-resume", "chdir", "container-image", "cpus-per-gpu", "cpus-per-task",
    "dependency", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mem",
    "mem-per-cpu", "mem-per-gpu", "nodes", "ntasks", "ntasks-per-node", "partition", "time",
))  # fmt: skip
READ_BARE = frozenset(("no-requeue", "requeue"))

_HOSTS = "the queue decides the hosts: choose a queue, or its compute in batchml.toml"
_LOGS = "all output is kept: batchml logs"
_MAIL = "no mail is sent. To wait for the run: batchml wait"
_CORES = "Linux chooses the cores and sockets"
_NO_GRES = "a run requests only vCPUs, memory and GPUs"

# Options that are passed over, and the notice about the reason; "": no notice.
PASSED_OVER = {
    "batch": _HOSTS, "comment": "use tags: --tag", "constraint": _HOSTS,
    "contiguous": _HOSTS, "core-spec": _CORES, "cores-per-socket": _CORES, "cpu-freq": _CORES,
    "deadline": "runs have no deadline, --timeout limits their time", "delay-boot": _HOSTS,
    "distribution": _CORES, "error": _LOGS, "exclude": _HOSTS,
    "exclusive": "request all vCPUs of a host to have it alone",
    "extra": "use tags: --tag", "extra-node-info": _CORES,
    "get-user-env": "use --set-env for the variables that the run needs", "gpu-bind": _CORES,
    "gpu-freq": _CORES,
    "gres-flags": _CORES, "hint": _CORES, "ignore-pbs": "#PBS lines are not read",
    "kill-on-invalid-dep": "a run whose dependency failed ends with it", "mail-type": _MAIL,
    "mail-user": _MAIL, "mem-bind": _CORES, "mincpus": _CORES,
    "network": "the hosts of a queue share a network",
    "nice": "queues have priorities, runs have none", "nodefile": _HOSTS, "nodelist": _HOSTS,
    "no-kill": "a run of several nodes ends with its main node",
    "ntasks-per-core": _CORES, "ntasks-per-socket": _CORES,
    "open-mode": _LOGS, "output": _LOGS, "overcommit": _CORES,
    "oversubscribe": "runs share hosts as vCPUs, memory and GPUs allow",
    "parsable": "to get the job's id: batchml submit --json", "power": _HOSTS,
    "prefer": _HOSTS, "priority": "queues have priorities, runs have none",
    "profile": "the usage of a run is always measured: batchml show",
    "propagate": "the container has limits of its own", "qos": "use queues: --queue",
    "quiet": "", "reboot": _HOSTS,
    "reservation": "use capacity_reservation of a compute environment in batchml.toml",
    "signal": "a run gets SIGTERM, [checkpoint] grace seconds before the kill",
    "sockets-per-node": _CORES, "spread-job": _HOSTS, "switches": _HOSTS,
    "thread-spec": _CORES, "threads-per-core": _CORES, "time-min": "only --time counts",
    "tmp": "disk_gib of a compute environment in batchml.toml sets the disk of hosts",
    "tres-bind": _CORES, "use-min-nodes": _HOSTS, "verbose": "",
    "wait-all-nodes": "all nodes of a run start together", "wckey": "use tags: --tag",
    "cluster-constraint": _HOSTS, "mcs-label": "use tags: --tag",
}  # fmt: skip
PASSED_OVER_BARE = frozenset((
    "contiguous", "ignore-pbs", "overcommit", "oversubscribe", "parsable", "quiet", "reboot",
    "spread-job", "use-min-nodes", "verbose",
))  # fmt: skip
MAYBE_BARE = frozenset(("exclusive", "get-user-env", "nice", "no-kill", "propagate"))

# Options that are refused, and the reason: without the option the run would give other results.
REFUSED = {
    "bb": "there are no burst buffers: put data in the workspace",
    "bbf": "there are no burst buffers: put data in the workspace",
    "begin": "a run starts as soon as the queue has room. Submit it later",
    "clusters": "choose an environment on the command line: --env",
    "container": "name the image: #BATCHML --image",
    "container-id": "name the image: #BATCHML --image",
    "container-mounts": "a run has /workspace, and no folders of hosts",
    "container-workdir": "a run works in the folder of its code package",
    "export-file": "name the variables: #BATCHML --set-env NAME=VALUE",
    "gpus-per-socket": "use --gpus-per-node",
    "help": "is for the command line",
    "hold": "runs cannot be held: submit it later, or --after another run",
    "input": "a run has no standard input: open the file in the script",
    "licenses": "batchml has no licenses, and scripts cannot use consumable resources of AWS Batch",
    "ntasks-per-gpu": "use --ntasks-per-node",
    "test-only": "is for the command line: batchml submit --dry-run",
    "tres-per-task": "use --cpus-per-task and --gpus-per-task",
    "uid": "a run belongs to the user who submits it",
    "wait": "is for the command line: batchml submit --wait",
    "wrap": "is for the command line: batchml submit -- COMMAND",
}
REFUSED_BARE = frozenset(("help", "hold", "test-only", "wait"))

KNOWN = READ | READ_BARE | PASSED_OVER.keys() | REFUSED.keys()
BARE = READ_BARE | PASSED_OVER_BARE | REFUSED_BARE


# --- Values ---------------------------------------------------------------------------------------
# Slurm's notations for times, sizes, GPUs, arrays and dependencies. The functions return None for
# a text that is not valid in Slurm.


_TIME = (
    r"(?:(?P<days>[0-9]{1,5})-(?P<hours>[0-9]{1,5})(?::(?P<minutes>[0-9]{1,5}))?"
    r"(?::(?P<seconds>[0-9]{1,5}))?"
    r"|(?P<h>[0-9]{1,5}):(?P<hm>[0-9]{1,5}):(?P<hs>[0-9]{1,5})"
    r"|(?P<m>[0-9]{1,9})(?::(?P<ms>[0-9]{1,9}))?)"
)
_SIZE = r"(?i)([0-9]{1,12})([KMGT]?)B?"
_UNITS = {"k": 1024, "": 1024**2, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_GPUS = r"(?:([A-Za-z][\w.-]*):)?([0-9]{1,5})"
_GRES = r"(?:gres[:/])?gpu(?::([A-Za-z][\w.-]*))?(?:[:=]([0-9]{1,5}))?(?:\(S:[0-9,-]+\))?"
_SPAN = r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?"
UNLIMITED = -1
MAX_TASKS = 1_000_000  # of an array


class GpuRequest(Struct, frozen=True):
    count: int
    kind: str = ""  # the type, such as "a100"; "": any


class ArrayTasks(Struct, frozen=True):
    ids: tuple[int, ...]
    limit: int = 0  # the most tasks that run at the same time; 0 for no limit


def parse_time(text: str) -> int | None:
    """Return the seconds of `90` (minutes), `90:30`, `1:30:00`, `2-12:30:00`; or UNLIMITED."""
    if text.lower() in ("unlimited", "infinite", "-1"):
        return UNLIMITED
    match = re.fullmatch(_TIME, text)
    if match is None:
        return None
    found = {name: int(value) for name, value in match.groupdict().items() if value}
    hours = found.get("days", 0) * 24 + found.get("hours", 0) + found.get("h", 0)
    minutes = sum(found.get(name, 0) for name in ("minutes", "hm", "m"))
    return (hours * 60 + minutes) * 60 + sum(found.get(n, 0) for n in ("seconds", "hs", "ms"))


def parse_size(text: str) -> int | None:
    """Return the bytes of `16G`, or of `512`, which is in MiB. 0 means all memory of a host."""
    match = re.fullmatch(_SIZE, text)
    return int(match[1]) * _UNITS[match[2].lower()] if match else None


def parse_gpus(text: str) -> GpuRequest | None:
    """Parse `2` or `a100:2`; None for several types, `a100:1,v100:1`."""
    match = re.fullmatch(_GPUS, text)
    return GpuRequest(int(match[2]), match[1] or "") if match else None


def parse_gres(text: str) -> tuple[GpuRequest | None, tuple[str, ...]]:
    """Parse `gpu:a100:2,nvme:1` into GPUs and other resources."""
    gpus, others = None, list[str]()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(_GRES, part)
        if match and gpus is None:
            gpus = GpuRequest(int(match[2] or 1), match[1] or "")
        elif part != "none":
            others.append(part)
    return gpus, tuple(others)


def parse_array(text: str) -> ArrayTasks | None:
    """Parse `0-15`, `1,3,5`, `0-15:4` or `0-15%4`; the ids are sorted, each once."""
    listed, percent, limit = text.partition("%")
    if percent and not re.fullmatch("[1-9][0-9]{0,8}", limit):
        return None
    ids: dict[int, None] = {}
    for part in listed.split(","):
        match = re.fullmatch(_SPAN, part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[3] or 1)
        if last < first or step < 1 or (last - first) // step + len(ids) >= MAX_TASKS:
            return None
        ids |= dict.fromkeys(range(first, last + 1, step))
    return ArrayTasks(tuple(sorted(ids)), int(limit) if percent else 0)


def format_ids(ids: tuple[int, ...]) -> str:
    """Write ids in their shortest form, `1-9:2,20`, which `parse_array` reads."""
    return ",".join(_spans(ids))


def _spans(ids: tuple[int, ...]) -> Iterator[str]:
    at = 0
    while at < len(ids):
        step = ids[at + 1] - ids[at] if at + 1 < len(ids) else 1
        end = at
        while end + 1 < len(ids) and ids[end + 1] - ids[end] == step:
            end += 1
        if end - at == 1:
            end = at  # two ids are no span, because the second may begin a longer one
        yield str(ids[at]) if end == at else f"{ids[at]}-{ids[end]}{f':{step}' if step > 1 else ''}"
        at = end + 1


def parse_dependencies(text: str) -> tuple[list[str], list[str]]:
    """Parse `afterok:A:B,afterok:C` into runs, and the parts that AWS Batch does not support."""
    if "?" in text:  # any of the dependencies would suffice
        return [], [text]
    runs, others = list[str](), list[str]()
    for part in text.split(","):
        kind, *words = part.split(":")
        if kind == "afterok" and words and all(words):
            runs += [word.partition("+")[0] for word in words]
        else:
            others.append(part)
    return runs, others


# --- Lines ----------------------------------------------------------------------------------------


_MIB = 1024**2
REQUEUE_ATTEMPTS = 3  # for --requeue
_AUTO = ("gpus", "gpus-per-node")  # options that take "auto"


class SlurmOption(Struct, frozen=True):
    """An option, and the number of its line."""

    line: int
    name: str
    value: str = ""


class SlurmRequest(Struct, frozen=True):
    """The meaning of the `#SBATCH` lines of a script."""

    options: dict[str, Any] = {}  # SubmitOptions
    variables: dict[str, str] = {}  # SLURM_* variables for the script
    folder: str = ""  # the value of --chdir
    mistakes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def read_slurm(lines: Sequence[ScriptLine], environ: Mapping[str, str]) -> SlurmRequest:
    """Read the lines. `environ` has the variables that `--export=NAME` passes on."""
    reader = _Reader(environ)
    for line in lines:
        reader.add(line)
    return reader.request()


class _Reader:
    """Collects the options of lines, then translates them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._given: dict[str, SlurmOption] = {}  # by name; the last of a repeated option
        self._mistakes: list[tuple[int, str]] = []
        self._notices: list[tuple[int, str]] = []

    # --- Options ------------------------------------------------------------------------------

    def add(self, line: ScriptLine) -> None:
        words = list(line.words)
        while words:
            word = words.pop(0)
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                if not self._is_known(line.number, name, word):
                    while words and not equals and not words[0].startswith("-"):  # its value
                        words.pop(0)
                    continue
            elif word.startswith("-") and len(word) > 1 and word[1] in SHORT:
                name, value = SHORT[word[1]], word[2:].removeprefix("=")
                equals = "=" if value else ""
                if name in BARE and value:
                    self._wrong(line.number, f"{word}: write each option separately.")
                    continue
            else:
                self._wrong(line.number, f"{word!r} is no option of sbatch.")
                continue
            if name in BARE:
                if equals:
                    self._wrong(line.number, f"--{name} takes no value.")
                    continue
            elif not equals and name not in MAYBE_BARE:
                if not words:
                    self._wrong(line.number, f"--{name} has no value.")
                    continue
                value = words.pop(0)
            self._keep(SlurmOption(line.number, name, value))

    def _is_known(self, line: int, name: str, word: str) -> bool:
        if name in KNOWN:
            return True
        if name in ("het-job", "hetjob", "packjob"):
            self._wrong(line, f"{word}: use [[groups]] of a job.toml for jobs of different shapes.")
        else:
            known = [f"--{each}" for each in KNOWN]
            self._wrong(line, f"{word} is no option of sbatch.{did_you_mean(f'--{name}', known)}")
        return False

    def _keep(self, given: SlurmOption) -> None:
        if given.name in REFUSED:
            self._wrong(given.line, f"--{given.name}: {REFUSED[given.name]}.")
        elif given.name in PASSED_OVER:
            why = PASSED_OVER[given.name]
            if why:
                self._notify(given.line, f"--{given.name} is passed over: {why}.")
        else:
            if given.name in ("requeue", "no-requeue"):
                self._given.pop("requeue", None)
                self._given.pop("no-requeue", None)
            self._given[given.name] = given

    def _wrong(self, line: int, words: str) -> None:
        self._mistakes.append((line, words))

    def _notify(self, line: int, words: str) -> None:
        self._notices.append((line, words))

    # --- Values -------------------------------------------------------------------------------

    def _value(self, name: str, read: Callable[[str], Any], form: str) -> Any:
        """Read the value of an option; None if it is missing, or wrong, which adds a mistake."""
        given = self._given.get(name)
        if given is None:
            return None
        value = read(given.value)
        if value is None:
            self._wrong(given.line, f"--{name}: found {given.value!r}. Write {form}.")
        return value

    def _count(self, name: str, form: str = "a number above 0") -> int | None:
        count: int | None = self._value(name, _positive, form)
        return count

    def _line(self, *names: str) -> int:
        """Return the last line with one of the options."""
        return max((self._given[each].line for each in names if each in self._given), default=0)

    def request(self) -> SlurmRequest:
        options: dict[str, Any] = {}
        variables: dict[str, str] = {}
        self._read_resources(options, variables)
        self._read_time(options)
        self._read_array(options, variables)
        self._read_dependency(options)
        self._read_names(options, variables)
        self._read_export(options)
        return SlurmRequest(
            {name: value for name, value in options.items() if value not in (None, {}, [])},
            variables,
            self._given["chdir"].value if "chdir" in self._given else "",
            _in_order(self._mistakes),
            _in_order(self._notices),
        )

    # --- The resources of a node --------------------------------------------------------------

    def _read_resources(self, options: dict[str, Any], variables: dict[str, str]) -> None:
        nodes = self._nodes()
        per_node = self._tasks_per_node(nodes)
        cpus = self._count("cpus-per-task")
        gpus = self._gpus(nodes, per_node)
        options["gpus"] = gpus
        gpus = 1 if gpus == AUTO else gpus  # sizes for each GPU are those of one
        per_gpu = self._count("cpus-per-gpu")
        vcpus = per_node * cpus if cpus else per_node if per_node > 1 else None
        if per_gpu and gpus and vcpus is None:
            vcpus = per_gpu * gpus
        options |= {"vcpus": vcpus, "nodes": nodes if nodes > 1 else None}
        mib = self._memory(vcpus or 1, gpus or 0)
        options["memory"] = f"{mib} MiB" if mib else None
        variables["SLURM_NTASKS_PER_NODE"] = str(per_node)
        variables["SLURM_CPUS_ON_NODE"] = str(vcpus or 1)
        if mib:
            variables["SLURM_MEM_PER_NODE"] = str(mib)
        if cpus:
            variables["SLURM_CPUS_PER_TASK"] = str(cpus)
        if gpus:
            variables["SLURM_GPUS"] = str(gpus * nodes)
            variables["SLURM_GPUS_ON_NODE"] = str(gpus)
        if "gpus-per-task" in self._given and gpus:
            variables["SLURM_GPUS_PER_TASK"] = str(max(1, gpus // per_node))

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
            self._notify(given.line, f"--nodes={given.value}: a run has a fixed number, {found}.")
        return found

    def _tasks_per_node(self, nodes: int) -> int:
        per_node, total = self._count("ntasks-per-node"), self._count("ntasks")
        if per_node or not total:
            return per_node or 1
        if total % nodes:
            text = f"--ntasks={total}: all {nodes} nodes must have the same number of tasks."
            self._wrong(self._line("ntasks"), text)
        return max(1, total // nodes)

    def _gpus(self, nodes: int, per_node: int) -> int | Literal["auto"] | None:
        """Return the GPUs of a node: of --gpus-per-node, else --gpus, --gpus-per-task or --gres.

        Slurm has no "auto": it is batchml's value of the first two.
        """
        if any(self._given[each].value == AUTO for each in _AUTO if each in self._given):
            return AUTO
        form = "a number, or TYPE:NUMBER of one type"
        found: GpuRequest | None = self._value("gpus-per-node", parse_gpus, form)
        total: GpuRequest | None = self._value("gpus", parse_gpus, form)
        per_task: GpuRequest | None = self._value("gpus-per-task", parse_gpus, form)
        if found is None and total is not None:
            if total.count % nodes:
                text = f"--gpus={total.count}: all {nodes} nodes must have the same number of GPUs."
                self._wrong(self._line("gpus"), text)
            found = GpuRequest(total.count // nodes, total.kind)
        if found is None and per_task is not None:
            found = GpuRequest(per_task.count * per_node, per_task.kind)
        given = self._given.get("gres")
        if given is not None:
            listed, others = parse_gres(given.value)
            found = found or listed
            if others:
                self._notify(given.line, f"--gres: {', '.join(others)} is passed over: {_NO_GRES}.")
        if found is not None and found.kind and found.count:
            names = ("gpus-per-node", "gpus", "gpus-per-task", "gres")
            self._notify(
                self._line(*names),
                f"the GPU type {found.kind} is passed over: the queue's compute environment "
                "decides the type.",
            )
        return found.count if found is not None and found.count else None

    def _memory(self, vcpus: int, gpus: int) -> int | None:
        """Return the MiB of a node."""
        form = "a size such as 16G; a bare number is MiB"
        option, count, size = "mem", 1, self._value("mem", parse_size, form)
        if size == 0:
            self._wrong(
                self._line("mem"), "--mem=0: a run cannot have all memory of a host. Write a size."
            )
        for name, units in (("mem-per-cpu", vcpus), ("mem-per-gpu", gpus)):
            if name in self._given and "mem" not in self._given:
                option, count, size = name, units, self._value(name, parse_size, form)
        if option == "mem-per-gpu" and not gpus and size:
            self._wrong(self._line(option), "--mem-per-gpu: the script requests no GPUs.")
        return max(1, ceil(size * count / _MIB)) if size else None

    # --- Other options ------------------------------------------------------------------------

    def _read_time(self, options: dict[str, Any]) -> None:
        form = "minutes, 90:30, 1:30:00, 2-12 (days-hours) or 2-12:30:00"
        found: int | None = self._value("time", parse_time, form)
        if not found or found == UNLIMITED:  # 0 means no limit in Slurm, too
            return
        options["timeout"] = f"{max(MIN_TIMEOUT, found)}s"
        if found < MIN_TIMEOUT:
            self._notify(
                self._line("time"), f"{found} s become {MIN_TIMEOUT}, AWS Batch's minimum."
            )

    def _read_array(self, options: dict[str, Any], variables: dict[str, str]) -> None:
        form = "ids such as 0-15, 1,3,5 or 0-15:4"
        found: ArrayTasks | None = self._value("array", parse_array, form)
        if found is None:
            return
        line, count = self._line("array"), len(found.ids)
        if count > MAX_ARRAY:
            self._wrong(line, f"--array: {count:,} tasks; AWS Batch allows {MAX_ARRAY:,}.")
        if found.limit:
            self._notify(
                line,
                f"%{found.limit} is passed over: tasks run at once if the queue has room.",
            )
        variables["BATCHML_SLURM_ARRAY"] = format_ids(found.ids)
        if count > 1:
            options["array"] = count

    def _read_dependency(self, options: dict[str, Any]) -> None:
        given = self._given.get("dependency")
        if given is None:
            return
        options["after"], others = parse_dependencies(given.value)
        if others:
            self._wrong(
                given.line,
                f"--dependency={','.join(others)}: AWS Batch supports only afterok:RUN, and commas "
                "between several of these.",
            )

    def _read_names(self, options: dict[str, Any], variables: dict[str, str]) -> None:
        texts = {
            name: self._given[name].value
            for name in ("job-name", "account", "container-image", "partition")
            if name in self._given
        }
        job_name = texts.get("job-name", "")
        options["name"] = to_name(job_name) if job_name else None
        options["image"] = texts.get("container-image", "").replace("#", "/") or None
        queue, comma, _ = texts.get("partition", "").partition(",")
        options["queue"] = queue or None
        if comma:
            self._notify(
                self._line("partition"),
                f"--partition={texts['partition']}: a run has one queue, here {queue}.",
            )
        if texts.get("account"):
            options["tags"] = {"account": texts["account"]}
            variables["SLURM_JOB_ACCOUNT"] = texts["account"]
        # On SageMaker HyperPod a step starts again, also in a job with --no-requeue.
        if self._value("auto-resume", {"0": False, "1": True}.get, "0 or 1"):
            options["auto_resume"] = True
        elif "requeue" in self._given:
            options["attempts"] = REQUEUE_ATTEMPTS
            self._notify(
                self._line("requeue"),
                f"--requeue: {REQUEUE_ATTEMPTS} attempts, if a host fails (#BATCHML --attempts N).",
            )
        elif "no-requeue" in self._given:
            options["attempts"] = 1

    def _read_export(self, options: dict[str, Any]) -> None:
        given = self._given.get("export")
        if given is None:
            return
        found: dict[str, str] = {}
        for word in filter(None, given.value.split(",")):
            name, equals, value = word.partition("=")
            if word in ("ALL", "NIL"):
                self._notify(
                    given.line,
                    f"--export={word}: a run does not get the variables of this shell. Name the "
                    "variables that it needs: --export=NAME or #BATCHML --set-env NAME=VALUE.",
                )
            elif word != "NONE" and (equals or name in self._environ):
                found[name] = value if equals else self._environ[name]
            elif word != "NONE":
                self._notify(
                    given.line, f"--export={name}: this variable is not set in this shell."
                )
        options["set_env"] = found


def _positive(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and 0 < int(text) < 10**7 else None


def _in_order(messages: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(sort_by_line(f"line {line}: {words}" for line, words in messages))
