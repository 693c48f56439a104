"""Completions for the shell: run at every press of Tab, so it imports next to nothing.

Commands and flags come from the stored help texts, names from local files. Neither AWS nor the
local server is asked: runs come from the history, queues from `batchml.toml` and the history.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_HELP = os.path.join(os.path.dirname(__file__), "help")
_TAIL = 256 * 1024  # bytes of the history that are read: some hundreds of runs
_MOST = 60  # the most runs, and sweeps, that are listed
_SWEEP_TAG = "batchml:sweep"  # the tag of a sweep's runs: runs/search.py
_HEAD = 1024  # bytes of a sweep's spec.json, which begins with its key and its name


class CompletionWord(NamedTuple):
    """A word that fits, and a description."""

    text: str
    about: str = ""


class Completions(NamedTuple):
    words: list[CompletionWord]
    files: bool = False  # file names are completions, too


class Help(NamedTuple):
    """A command's stored help text, parsed."""

    commands: dict[str, str]
    flags: dict[str, tuple[str, str]]  # flag -> what its value is called, or "", and what it does
    arguments: list[str]  # what each is called; "..." at the end for one that repeats


class CompletionSources(NamedTuple):
    """Where words come from: the environment, the folder, the state folder."""

    environ: Mapping[str, str]
    here: str


def complete(words: list[str], world: CompletionSources) -> Completions:
    """The completions of the last of `words`, which may be empty; `batchml` is not among them."""
    *before, now = words
    if "--" in before:  # the run's own command
        return Completions([], files=True)
    path, given, values, waiting = _walk(before)
    help_ = read_help(path)
    if help_ is None:
        return Completions([])
    names = Names(world, values, given)
    flag, equals, begun = now.partition("=")
    if waiting or (equals and flag.startswith("--") and flag in help_.flags):
        answer = names.of(waiting or flag, help_.flags[waiting or flag][0], path)
        if waiting:
            return _fitting(answer, now)
        found = _fitting(answer, begun)
        return found._replace(
            words=[CompletionWord(f"{flag}={w.text}", w.about) for w in found.words]
        )
    if now.startswith("-"):
        return _fitting(
            Completions([CompletionWord(name, what[1]) for name, what in help_.flags.items()]), now
        )
    if help_.commands:
        return _fitting(
            Completions([CompletionWord(*each) for each in help_.commands.items()]), now
        )
    place = min(len(given), len(help_.arguments) - 1)
    if place < 0 or (place < len(given) and not help_.arguments[place].endswith("...")):
        return Completions([])
    answer = names.of("", help_.arguments[place].removesuffix("..."), path)
    return _fitting(answer._replace(words=[w for w in answer.words if w.text not in given]), now)


def _fitting(answer: Completions, begun: str) -> Completions:
    seen: dict[str, CompletionWord] = {}
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
    """The parsed help of a command; None where there is no such command."""
    try:
        with open(os.path.join(_HELP, f"{'-'.join(path)}.txt"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    return parse_help(lines, len(path))


def parse_help(lines: list[str], depth: int) -> Help:
    """Parse a help text; the first `depth` words of the usage are the command itself."""
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
        if section == "Options" and left.startswith("-"):
            words = left.replace(",", " ").replace("/", " ").split()
            value = words.pop() if not words[-1].startswith("-") else ""
            found.flags.update((word, (value, about.strip())) for word in words)
        elif section not in ("", "Options") and about and "COMMAND" in arguments:
            found.commands[left] = about.strip()
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
    """Names of runs, queues, jobs and sweeps. Files that cannot be read yield none."""

    def __init__(
        self, world: CompletionSources, values: Mapping[str, str], given: list[str]
    ) -> None:
        self._world = world
        self._given = given
        self._file = _read_toml(_config(world))
        default = world.environ.get("BATCHML_ENV") or self._file.get("default") or "local"
        self._env = values.get("--env") or str(default)

    def of(self, flag: str, called: str, path: list[str]) -> Completions:
        """Names that fit a flag, or an argument by its name in the help."""
        group = path[1] if len(path) > 2 else ""
        by_flag: dict[str, Callable[[], Iterable[CompletionWord]]] = {
            "--env": self.environments,
            "--queue": self.queues,
            "--after": self.runs,
            "--image": self.images,
            "--job": self.job_names,
            "--status": lambda: map(CompletionWord, _STATES),
            "--retry-on": lambda: map(CompletionWord, _RETRIED),
            "--param": self.params,
            "-p": self.params,
            "--executor": lambda: map(CompletionWord, ("docker", "process")),
        }
        by_group = {
            "env": self.environments,
            "queue": self.queues,
            "compute": self.computes,
            "image": self.images,
        }
        if flag in by_flag:
            return Completions(list(by_flag[flag]()))
        if called == "RUN":
            return Completions(list(self.runs()))
        if called == "SWEEP":
            return Completions(list(self.sweeps()))
        if path == ["batchml", "sweep"] and not flag:
            return self.sweep_files()
        if called == "JOB":
            return Completions([*self.jobs(), *self.jobs_here()], files=True)
        if called == "SHELL":
            return Completions(list(map(CompletionWord, _SHELLS)))
        if called == "NAME" and group in by_group:
            return Completions(list(by_group[group]()))
        return Completions([], files=called in ("FILE", "DIR", "DEST", "FOLDER", "PATH"))

    def environments(self) -> Iterable[CompletionWord]:
        yield CompletionWord("local", "this machine")
        for name, table in _tables(self._file.get("env")):
            yield CompletionWord(name, str(table.get("region", "")))

    def queues(self) -> Iterable[CompletionWord]:
        named = [name for name, _ in _tables(self._environment().get("queues"))]
        used = [str(run.get("queue") or "") for run in self._history()]
        return (CompletionWord(name) for name in dict.fromkeys(["default", *named, *used]) if name)

    def computes(self) -> Iterable[CompletionWord]:
        return (CompletionWord(name) for name, _ in _tables(self._environment().get("compute")))

    def jobs(self) -> Iterable[CompletionWord]:
        for folder, about in self._folders("jobs"):
            yield from (CompletionWord(name, about) for name in _inside(folder, "job.toml"))

    def jobs_here(self) -> Iterable[CompletionWord]:
        """Folders below this one that are jobs."""
        here = _inside(self._world.here, "job.toml")
        return (CompletionWord(f"./{name}", "a job in this folder") for name in here)

    def sweep_files(self) -> Completions:
        """Words that `sweep` takes: a file, or a job that has one; `check` before it."""
        if self._given and self._given != ["check"]:
            return Completions([])
        check = (
            []
            if self._given
            else [CompletionWord("check", "say what it comes to, and send nothing")]
        )
        jobs = [
            CompletionWord(name, about)
            for folder, about in self._folders("jobs")
            for name in _inside(folder, "sweep.toml")
        ]
        return Completions([*check, *jobs], files=True)

    def images(self) -> Iterable[CompletionWord]:
        for folder, about in self._folders("images"):
            yield from (CompletionWord(name, about) for name in _inside(folder, "Dockerfile"))

    def job_names(self) -> Iterable[CompletionWord]:
        yield from self.jobs()
        runs = (run for run in self._history() if not _is_of_sweep(run))
        yield from (CompletionWord(str(run.get("name") or "")) for run in runs)

    def params(self) -> Iterable[CompletionWord]:
        """The parameters of the job on the command line."""
        places = [self._given[0]] if self._given else []
        places += [
            os.path.join(folder, place) for place in places for folder, _ in self._folders("jobs")
        ]
        for place in places:
            file = _read_toml(os.path.join(self._world.here, place, "job.toml"))
            if file:
                table = file.get("params")
                found = table.items() if isinstance(table, dict) else ()
                return [
                    CompletionWord(f"{name}=", f"{value} unless given") for name, value in found
                ]
        return []

    def runs(self) -> Iterable[CompletionWord]:
        """Names first, which mean the newest run of that name; then short ids."""
        runs = [run for run in self._history() if run.get("job_id")]
        if runs:
            yield CompletionWord("@last", _about(runs[0]))
        runs = [run for run in runs if not _is_of_sweep(run)][:_MOST]
        yield from (
            CompletionWord(str(run.get("name") or run["job_id"]), _about(run)) for run in runs
        )
        for run in runs:
            yield CompletionWord(str(run["job_id"]).split("-", 1)[0], _about(run))

    def sweeps(self) -> Iterable[CompletionWord]:
        """Sweeps of this machine: names first, which mean the newest of that name; then short keys.

        Sweeps of other environments lie in AWS.
        """
        found = _newest(os.path.join(_home(self._world.environ), "sweeps"))
        if self._env != "local" or not found:
            return
        yield CompletionWord("@last", found[0][1])
        yield from (CompletionWord(name, key) for key, name in found)
        yield from (CompletionWord(key[:8], name) for key, name in found)

    def _environment(self) -> dict[str, Any]:
        return dict(_tables(self._file.get("env"))).get(self._env, {})

    def _folders(self, kind: str) -> list[tuple[str, str]]:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        installed = os.path.join(package, "share", kind)
        shipped = installed if os.path.isdir(installed) else os.path.join(package, "..", kind)
        return [(os.path.join(self._world.here, kind), ""), (shipped, "ships with batchml")]

    def _history(self) -> list[dict[str, Any]]:
        """The newest runs of the environment, newest first, from the history."""
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
    """Runs of sweeps are left out: people name the sweep."""
    tags = run.get("tags")
    return isinstance(tags, dict) and _SWEEP_TAG in tags


def _newest(folder: str) -> list[tuple[str, str]]:
    """(key, name) of the newest sweeps in the folder."""
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


def _config(world: CompletionSources) -> str:
    """`BATCHML_CONFIG`, else the nearest batchml.toml, as config/settings.py has it."""
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
    """`__complete [WORD...]`: a line for each completion, `WORD TAB ABOUT`; `:files` first."""
    import sys

    try:
        answer = complete(arguments or [""], CompletionSources(os.environ, os.getcwd()))
    except Exception:  # no traceback while the user is typing
        return 1
    lines = [":files"] if answer.files else []
    lines += [f"{_clean(word.text)}\t{_clean(word.about)}" for word in answer.words]
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


def _clean(text: str) -> str:
    """Text without control characters: names come from files that anybody may have written."""
    return "".join(char if char.isprintable() else "?" for char in text)


# The scripts that `batchml completion SHELL` prints. Each asks `batchml __complete WORD...`.

BASH = r"""# batchml: completion for bash. In ~/.bashrc: eval "$(batchml completion bash)"
_batchml() {
    local line="${COMP_LINE:0:COMP_POINT}" word about
    local -a words=()
    # Split by spaces alone: bash would split --env=dev and RUN:3, too.
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    local now="${words[${#words[@]}-1]}"
    # What bash takes for the beginning of the word stays as it is.
    local kept="${now%"${now##*[:=]}"}"
    COMPREPLY=()
    while IFS=$'\t' read -r word about; do
        if [[ "$word" == :files ]]; then
            compopt -o default
        else
            COMPREPLY+=("${word#"$kept"}")
            [[ "$word" == *= ]] && compopt -o nospace
        fi
    done < <(command "${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
}
complete -o nosort -F _batchml batchml
"""

ZSH = r"""#compdef batchml
# batchml: completion for zsh. In ~/.zshrc, after compinit: eval "$(batchml completion zsh)"
_batchml() {
    local line word about files=0
    local -a plain plain_about open open_about
    for line in "${(@f)$(command $words[1] __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -z $line ]] && continue
        if [[ $line == :files ]]; then files=1; continue; fi
        word=${line%%$'\t'*}
        about=${line#*$'\t'}
        if [[ $word == *= ]]; then
            open+=("$word"); open_about+=("$word${about:+  -- $about}")
        else
            plain+=("$word"); plain_about+=("$word${about:+  -- $about}")
        fi
    done
    (( $#plain )) && compadd -V batchml -l -d plain_about -a plain
    (( $#open )) && compadd -V batchml -S '' -l -d open_about -a open
    (( files )) && _files
}
if [[ $funcstack[1] == _batchml ]]; then _batchml "$@"; else compdef _batchml batchml; fi
"""

FISH = r"""# batchml: completion for fish.
# batchml completion fish > ~/.config/fish/completions/batchml.fish
function __batchml_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l answer (command $words[1] __complete $words[2..-1] 2>/dev/null)
    if test "$answer[1]" = :files
        set -e answer[1]
        __fish_complete_path (commandline -ct)
    end
    string join \n -- $answer
end
complete -c batchml -f -k -a '(__batchml_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
