"""What may stand at the cursor: answered for every press of Tab, so it imports next to nothing.

Commands and flags are read from the stored help texts, names from files that are here. AWS is never
asked, the local server neither: runs are those of the history, queues those of `batchml.toml` and
of the history.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_HELP = os.path.join(os.path.dirname(__file__), "help")
_TAIL = 256 * 1024  # bytes of the history that are read: some hundreds of runs
_MOST = 60  # runs, and sweeps
_SWEEP_TAG = "batchml:sweep"  # of runs that a sweep has made: ops/search.py
_HEAD = 1024  # bytes of a sweep's spec.json, which begins with its key and its name


class Word(NamedTuple):
    """A word that fits, and what it is."""

    text: str
    about: str = ""


class Answer(NamedTuple):
    words: list[Word]
    files: bool = False  # names of files fit, too


class Help(NamedTuple):
    """What a stored help text says of a command."""

    commands: dict[str, str]
    flags: dict[str, tuple[str, str]]  # flag -> what its value is called, or "", and what it does
    arguments: list[str]  # what each is called; "..." at the end for one that repeats


class World(NamedTuple):
    """Where the words come from."""

    environ: Mapping[str, str]
    here: str


def complete(words: list[str], world: World) -> Answer:
    """The words that fit the last of `words`, which is empty or begun; `batchml` is not in them."""
    *before, now = words
    if "--" in before:  # the run's own command
        return Answer([], files=True)
    path, given, values, waiting = _walk(before)
    help_ = read_help(path)
    if help_ is None:
        return Answer([])
    names = Names(world, values, given)
    flag, equals, begun = now.partition("=")
    if waiting or (equals and flag.startswith("--") and flag in help_.flags):
        answer = names.of(waiting or flag, help_.flags[waiting or flag][0], path)
        if waiting:
            return _fitting(answer, now)
        found = _fitting(answer, begun)
        return found._replace(words=[Word(f"{flag}={w.text}", w.about) for w in found.words])
    if now.startswith("-"):
        return _fitting(Answer([Word(name, what[1]) for name, what in help_.flags.items()]), now)
    if help_.commands:
        return _fitting(Answer([Word(*each) for each in help_.commands.items()]), now)
    place = min(len(given), len(help_.arguments) - 1)
    if place < 0 or (place < len(given) and not help_.arguments[place].endswith("...")):
        return Answer([])
    answer = names.of("", help_.arguments[place].removesuffix("..."), path)
    return _fitting(answer._replace(words=[w for w in answer.words if w.text not in given]), now)


def _fitting(answer: Answer, begun: str) -> Answer:
    seen: dict[str, Word] = {}
    for word in answer.words:
        if word.text.startswith(begun):
            seen.setdefault(word.text, word)
    return answer._replace(words=list(seen.values()))


def _walk(words: list[str]) -> tuple[list[str], list[str], dict[str, str], str]:
    """The command, its arguments, the values of its flags, and the flag whose value comes next."""
    path, given, values, waiting = ["batchml"], [], {}, ""
    help_ = read_help(path)
    for word in words:
        if help_ is None:
            break
        if waiting:
            values[waiting], waiting = word, ""
        elif word.startswith("-"):
            flag, equals, value = word.partition("=")
            if equals:
                values[flag] = value
            elif help_.flags.get(flag, ("", ""))[0]:
                waiting = flag
        elif word in help_.commands:
            path.append(word)
            help_ = read_help(path)
        else:
            given.append(word)
    return path, given, values, waiting


def read_help(path: list[str]) -> Help | None:
    """What the help of a command says; None where there is no such command."""
    try:
        with open(os.path.join(_HELP, f"{'-'.join(path)}.txt"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    return parse_help(lines, len(path))


def parse_help(lines: list[str], depth: int) -> Help:
    """`depth` words of the usage are the command itself."""
    usage = lines[0].split()[1 + depth :] if lines else []
    arguments = [_bare(word) for word in usage if word != "[OPTIONS]"]
    found = Help({}, {}, [] if "COMMAND" in arguments else arguments)
    section = ""
    for line in lines[1:]:
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        left, _, about = line.strip().partition("  ")
        if not line.startswith("  ") or line.startswith("   "):
            continue
        if section == "Commands" and left:
            found.commands[left] = about.strip()
        elif section == "Options" and left.startswith("-"):
            words = left.replace(",", " ").replace("/", " ").split()
            value = words.pop() if not words[-1].startswith("-") else ""
            found.flags.update((word, (value, about.strip())) for word in words)
    return found


def _bare(word: str) -> str:
    """`RUN...` for `{RUN...}` and `[RUN]...`."""
    many = "..." in word
    return word.replace(".", "").strip("[]{}").partition("[")[0] + ("..." if many else "")


_SHELLS = ("bash", "zsh", "fish")
_RETRIED = ("host-lost", "image-error", "app-error", "out-of-memory")  # model/job.py, Retry
# model/run.py and, of those that have failed, model/run.py, OutcomeClass
_STATES = (
    "SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED",
    *_RETRIED, "timed-out", "cancelled", "dependency-failed", "unschedulable", "unknown",
)  # fmt: skip


class Names:
    """What things are called here. What cannot be read has no names."""

    def __init__(self, world: World, values: Mapping[str, str], given: list[str]) -> None:
        self._world = world
        self._given = given
        self._file = _read_toml(_config(world))
        default = world.environ.get("BATCHML_ENV") or self._file.get("default") or "local"
        self._env = values.get("--env") or str(default)

    def of(self, flag: str, called: str, path: list[str]) -> Answer:
        """What fits a flag, or an argument by what it is called in the help."""
        group = path[1] if len(path) > 2 else ""
        by_flag: dict[str, Callable[[], Iterable[Word]]] = {
            "--env": self.environments,
            "--queue": self.queues,
            "--after": self.runs,
            "--image": self.images,
            "--job": self.job_names,
            "--status": lambda: map(Word, _STATES),
            "--retry-on": lambda: map(Word, _RETRIED),
            "--param": self.params,
            "-p": self.params,
            "--executor": lambda: map(Word, ("docker", "process")),
        }
        by_group = {
            "env": self.environments,
            "queue": self.queues,
            "compute": self.computes,
            "image": self.images,
        }
        if flag in by_flag:
            return Answer(list(by_flag[flag]()))
        if called == "RUN":
            return Answer(list(self.runs()))
        if called == "SWEEP":
            return Answer(list(self.sweeps()))
        if path == ["batchml", "sweep"] and not flag:
            return self.sweep_files()
        if called == "JOB":
            return Answer([*self.jobs(), *self.jobs_here()], files=True)
        if called == "SHELL":
            return Answer(list(map(Word, _SHELLS)))
        if called == "NAME" and group in by_group:
            return Answer(list(by_group[group]()))
        return Answer([], files=called in ("FILE", "DIR", "DEST", "FOLDER", "PATH"))

    def environments(self) -> Iterable[Word]:
        yield Word("local", "this machine")
        for name, table in _tables(self._file.get("env")):
            yield Word(name, str(table.get("region", "")))

    def queues(self) -> Iterable[Word]:
        named = [name for name, _ in _tables(self._environment().get("queues"))]
        used = [str(run.get("queue") or "") for run in self._history()]
        return (Word(name) for name in dict.fromkeys(["default", *named, *used]) if name)

    def computes(self) -> Iterable[Word]:
        return (Word(name) for name, _ in _tables(self._environment().get("compute")))

    def jobs(self) -> Iterable[Word]:
        for folder, about in self._folders("jobs"):
            yield from (Word(name, about) for name in _inside(folder, "job.toml"))

    def jobs_here(self) -> Iterable[Word]:
        """Folders of this one that are jobs."""
        here = _inside(self._world.here, "job.toml")
        return (Word(f"./{name}", "a job in this folder") for name in here)

    def sweep_files(self) -> Answer:
        """What `sweep` takes: a file, or a job that has one; `check` before it."""
        if self._given and self._given != ["check"]:
            return Answer([])
        check = [] if self._given else [Word("check", "say what it comes to, and send nothing")]
        jobs = [
            Word(name, about)
            for folder, about in self._folders("jobs")
            for name in _inside(folder, "sweep.toml")
        ]
        return Answer([*check, *jobs], files=True)

    def images(self) -> Iterable[Word]:
        for folder, about in self._folders("images"):
            yield from (Word(name, about) for name in _inside(folder, "Dockerfile"))

    def job_names(self) -> Iterable[Word]:
        yield from self.jobs()
        runs = (run for run in self._history() if not _is_of_sweep(run))
        yield from (Word(str(run.get("name") or "")) for run in runs)

    def params(self) -> Iterable[Word]:
        """The parameters of the job that the line names."""
        places = [self._given[0]] if self._given else []
        places += [
            os.path.join(folder, place) for place in places for folder, _ in self._folders("jobs")
        ]
        for place in places:
            file = _read_toml(os.path.join(self._world.here, place, "job.toml"))
            if file:
                table = file.get("params")
                found = table.items() if isinstance(table, dict) else ()
                return [Word(f"{name}=", f"{value} unless given") for name, value in found]
        return []

    def runs(self) -> Iterable[Word]:
        """Names first, which mean the newest run of that name; then short ids."""
        runs = [run for run in self._history() if run.get("job_id")]
        if runs:
            yield Word("@last", _about(runs[0]))
        runs = [run for run in runs if not _is_of_sweep(run)][:_MOST]
        yield from (Word(str(run.get("name") or run["job_id"]), _about(run)) for run in runs)
        for run in runs:
            yield Word(str(run["job_id"]).split("-", 1)[0], _about(run))

    def sweeps(self) -> Iterable[Word]:
        """Those of this machine: names first, which mean the newest of that name; then short keys.

        Those of other environments lie in AWS.
        """
        found = _newest(os.path.join(_home(self._world.environ), "sweeps"))
        if self._env != "local" or not found:
            return
        yield Word("@last", found[0][1])
        yield from (Word(name, key) for key, name in found)
        yield from (Word(key[:8], name) for key, name in found)

    def _environment(self) -> dict[str, Any]:
        return dict(_tables(self._file.get("env"))).get(self._env, {})

    def _folders(self, kind: str) -> list[tuple[str, str]]:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        installed = os.path.join(package, "share", kind)
        shipped = installed if os.path.isdir(installed) else os.path.join(package, "..", kind)
        return [(os.path.join(self._world.here, kind), ""), (shipped, "ships with batchml")]

    def _history(self) -> list[dict[str, Any]]:
        """The newest runs of the environment, newest first, as the history's lines tell them."""
        import json

        runs: dict[str, dict[str, Any]] = {}
        for line in _last_lines(os.path.join(_home(self._world.environ), "history.jsonl")):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if not isinstance(found, dict):
                continue
            name = str(found.get("key") or found.get("job_id") or "")
            if found.get("forgotten"):
                gone = found["forgotten"]
                runs = {name: run for name, run in runs.items() if run.get("env") != gone}
            elif name:
                runs.setdefault(name, {}).update(found)
        return [
            run
            for run in reversed(runs.values())
            if run.get("env") == self._env and not run.get("refused")
        ]


def _about(run: Mapping[str, Any]) -> str:
    parts = [run.get("name"), run.get("outcome") or run.get("status"), run.get("queue")]
    return ", ".join(str(part) for part in parts if part)


def _is_of_sweep(run: Mapping[str, Any]) -> bool:
    """A sweep's waves are many, and people speak of the sweep."""
    tags = run.get("tags")
    return isinstance(tags, dict) and _SWEEP_TAG in tags


def _newest(folder: str) -> list[tuple[str, str]]:
    """(key, name) of the newest sweeps whose boards lie there."""
    try:
        keys = os.listdir(folder)
    except OSError:
        return []
    found = []
    for key in keys:
        path = os.path.join(folder, key, "spec.json")
        try:
            found.append((os.stat(path).st_mtime, key, path))
        except OSError:
            continue
    named = []
    for _, key, path in sorted(found, reverse=True)[:_MOST]:
        with open(path, "rb") as file:
            name = file.read(_HEAD).partition(b'"name":"')[2].partition(b'"')[0]
        if name:
            named.append((key, name.decode("utf-8", "replace")))
    return named


def _tables(found: object) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(found, dict):
        return []
    return [(str(name), table) for name, table in found.items() if isinstance(table, dict)]


def _config(world: World) -> str:
    """`BATCHML_CONFIG`, else the nearest batchml.toml, as settings.py has it."""
    path = world.environ.get("BATCHML_CONFIG", "")
    folder = world.here
    while not path:
        file = os.path.join(folder, "batchml.toml")
        above = os.path.dirname(folder)
        if os.path.isfile(file) or above == folder:
            path = file
        folder = above
    return path


def _read_toml(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError):
        return {}


def _inside(folder: str, file: str) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [name for name in names if os.path.isfile(os.path.join(folder, name, file))]


def _home(environ: Mapping[str, str]) -> str:
    if environ.get("BATCHML_HOME"):
        return os.path.abspath(environ["BATCHML_HOME"])
    from platformdirs import user_state_dir

    return user_state_dir("batchml", appauthor=False)


def _last_lines(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > _TAIL else lines


def main(arguments: list[str]) -> int:
    """`__complete [WORD...]`: a line for each word that fits, `WORD TAB ABOUT`; `:files` first."""
    import sys

    try:
        answer = complete(arguments or [""], World(os.environ, os.getcwd()))
    except Exception:  # in the middle of somebody's typing nothing is worth a traceback
        return 1
    lines = [":files"] if answer.files else []
    lines += [f"{_clean(word.text)}\t{_clean(word.about)}" for word in answer.words]
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


def _clean(text: str) -> str:
    """Names come from files that anybody may have written, and go to a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
