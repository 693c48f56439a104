"""Complete a command line in the shell. It runs at every press of Tab, so it imports little.

Commands and flags come from the stored help texts. Names come from local files, without a request
to AWS or the embedded AWS Batch: runs from the history, queues from `batchml.toml` and the history.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_HELP = os.path.join(os.path.dirname(__file__), "help")
_HISTORY_BYTES = 256 * 1024  # read from the end of the history: some hundreds of runs
_MAX_NAMES = 60  # of runs, and of sweeps, that are offered
# Tags of runs that users do not submit: of sweeps, and watchers of runs (runs/names.py, is_listed).
_UNLISTED_TAGS = {"batchml:sweep", "batchml:watches"}
# Read from a sweep's spec.json, which begins with its key, its name and its project.
_SPEC_BYTES = 1024


class CompletionWord(NamedTuple):
    """A word that completes the line, and its description."""

    text: str
    about: str = ""


class Completions(NamedTuple):
    words: list[CompletionWord]
    files: bool = False  # the shell also offers file names


class HelpText(NamedTuple):
    """A command's stored help text, parsed."""

    commands: dict[str, str]  # subcommand -> description
    flags: dict[str, tuple[str, str]]  # flag -> placeholder of its value or "", and description
    arguments: list[str]  # their placeholders; "RUN..." for an argument that may be repeated


class CompletionSources(NamedTuple):
    """The environment variables and the folder by which the files with names are found."""

    environ: Mapping[str, str]
    folder: str


def complete(words: list[str], sources: CompletionSources) -> Completions:
    """Complete the last of `words`, which may be empty; `batchml` is not among them."""
    *before, last = words
    if "--" in before:  # the run's own command follows
        return Completions([], files=True)
    path, arguments, values, open_flag = _parse_line(before)
    help_text = read_help(path)
    if help_text is None:
        return Completions([])
    names = Names(sources, values, arguments)
    flag, equals, begun = last.partition("=")
    if open_flag:
        offered = names.for_value(open_flag, help_text.flags[open_flag][0], path)
        return _starting_with(last, offered)
    if equals and flag.startswith("--") and flag in help_text.flags:
        offered = _starting_with(begun, names.for_value(flag, help_text.flags[flag][0], path))
        words_with_flag = [CompletionWord(f"{flag}={w.text}", w.about) for w in offered.words]
        return offered._replace(words=words_with_flag)
    if last.startswith("-"):
        flags = [CompletionWord(name, about) for name, (_, about) in help_text.flags.items()]
        return _starting_with(last, Completions(flags))
    if help_text.commands:
        commands = [CompletionWord(*row) for row in help_text.commands.items()]
        return _starting_with(last, Completions(commands))
    number = min(len(arguments), len(help_text.arguments) - 1)
    if number < 0 or (number < len(arguments) and not help_text.arguments[number].endswith("...")):
        return Completions([])
    offered = names.for_value("", help_text.arguments[number].removesuffix("..."), path)
    new = [word for word in offered.words if word.text not in arguments]
    return _starting_with(last, offered._replace(words=new))


def _starting_with(begun: str, offered: Completions) -> Completions:
    """Keep the words that start with `begun`, the first of each text."""
    words: dict[str, CompletionWord] = {}
    for word in offered.words:
        if word.text.startswith(begun):
            words.setdefault(word.text, word)
    return offered._replace(words=list(words.values()))


def _parse_line(words: list[str]) -> tuple[list[str], list[str], dict[str, str], str]:
    """Return the command, its arguments, the values of its flags, and a last flag without value."""
    path, arguments, values, open_flag = ["batchml"], [], {}, ""
    help_text = read_help(path)
    for word in words:
        if help_text is None:
            break
        if open_flag:
            values[open_flag], open_flag = word, ""
        elif word.startswith("-"):
            flag, equals, value = word.partition("=")
            if equals:
                values[flag] = value
            elif help_text.flags.get(flag, ("", ""))[0]:
                open_flag = flag
        elif word in help_text.commands:
            path.append(word)
            help_text = read_help(path)
        else:
            arguments.append(word)
    return path, arguments, values, open_flag


def read_help(path: list[str]) -> HelpText | None:
    """Read and parse the help text of a command; None if there is no such command."""
    try:
        with open(os.path.join(_HELP, f"{'-'.join(path)}.txt"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    return parse_help(lines, len(path))


def parse_help(lines: list[str], depth: int) -> HelpText:
    """Parse a help text. The command has `depth` words: 2 for `batchml submit`."""
    usage = lines[0].split()[1 + depth :] if lines else []
    arguments = [_placeholder(word) for word in usage if word != "[OPTIONS]"]
    parsed = HelpText({}, {}, [] if "COMMAND" in arguments else arguments)
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
            parsed.flags.update((word, (value, about.strip())) for word in words)
        elif section not in ("", "Options") and about and "COMMAND" in arguments:
            parsed.commands[left] = about.strip()
    return parsed


def _placeholder(word: str) -> str:
    """Return `RUN...` for `{RUN...}` and `[RUN]...`."""
    repeats = "..." in word
    return word.replace(".", "").strip("[]{}").partition("[")[0] + ("..." if repeats else "")


_SHELLS = ("bash", "zsh", "fish")
_RETRIED = ("host-lost", "image-error", "app-error", "out-of-memory")  # Retry of model/job.py
_LAUNCHED = ("plain", "torchrun", "mpi", "ray")  # Launch.kind of model/job.py
# JobStatus and OutcomeClass of model/run.py
_STATES = (
    "SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED",
    *_RETRIED, "timed-out", "cancelled", "dependency-failed", "unschedulable", "unknown",
)  # fmt: skip


class Names:
    """Names of runs, queues, jobs and sweeps. Files that cannot be read are passed over.

    `values` and `arguments` are those of the command line so far.
    """

    def __init__(
        self, sources: CompletionSources, values: Mapping[str, str], arguments: list[str]
    ) -> None:
        self._environ, self._folder = sources
        self._arguments = arguments
        self._file = _read_toml(_config_path(sources))
        default = self._environ.get("BATCHML_ENV") or self._file.get("default") or "local"
        self._env = values.get("--env") or str(default)
        self._project = values.get("--project") or self._environ.get("BATCHML_PROJECT") or ""
        self._own_project = ""

    def for_value(self, flag: str, placeholder: str, path: list[str]) -> Completions:
        """Offer values of a flag, or of an argument (`flag` is "") by its placeholder."""
        group = path[1] if len(path) > 2 else ""
        by_flag: dict[str, Callable[[], Iterable[CompletionWord]]] = {
            "--env": self.environments,
            "--project": self.projects,
            "--queue": self.queues,
            "--after": self.runs,
            "--image": self.images,
            "--job": self.job_names,
            "--status": lambda: map(CompletionWord, _STATES),
            "--retry-on": lambda: map(CompletionWord, _RETRIED),
            "--launch": lambda: map(CompletionWord, _LAUNCHED),
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
        if placeholder == "RUN":
            return Completions(list(self.runs()))
        if placeholder == "SWEEP":
            return Completions(list(self.sweeps()))
        if path == ["batchml", "sweep"] and not flag:
            return self.sweep_files()
        if placeholder == "JOB":
            return Completions([*self.jobs(), *self.jobs_here()], files=True)
        if placeholder == "SHELL":
            return Completions(list(map(CompletionWord, _SHELLS)))
        if placeholder == "NAME" and group in by_group:
            return Completions(list(by_group[group]()))
        return Completions([], files=placeholder in ("FILE", "DIR", "DEST", "FOLDER", "PATH"))

    def environments(self) -> Iterable[CompletionWord]:
        yield CompletionWord("local", "this machine")
        for name, table in _tables(self._file.get("env")):
            yield CompletionWord(name, str(table.get("region", "")))

    def queues(self) -> Iterable[CompletionWord]:
        described = [name for name, _ in _tables(self._environment().get("queues"))]
        used = [str(run.get("queue") or "") for run in self._own_runs()]
        names = dict.fromkeys(["default", *described, *used])
        return (CompletionWord(name) for name in names if name)

    def computes(self) -> Iterable[CompletionWord]:
        return (CompletionWord(name) for name, _ in _tables(self._environment().get("compute")))

    def jobs(self) -> Iterable[CompletionWord]:
        for folder, about in self._folders("jobs"):
            yield from (CompletionWord(name, about) for name in _inside(folder, "job.toml"))

    def jobs_here(self) -> Iterable[CompletionWord]:
        """Offer the jobs in the current folder."""
        names = _inside(self._folder, "job.toml")
        return (CompletionWord(f"./{name}", "a job in this folder") for name in names)

    def sweep_files(self) -> Completions:
        """Offer arguments of `sweep`: `check`, jobs with a sweep.toml, and files."""
        if self._arguments and self._arguments != ["check"]:
            return Completions([])
        check = CompletionWord("check", "print the forecast, and send nothing")
        jobs = [
            CompletionWord(name, about)
            for folder, about in self._folders("jobs")
            for name in _inside(folder, "sweep.toml")
        ]
        return Completions([*jobs] if self._arguments else [check, *jobs], files=True)

    def images(self) -> Iterable[CompletionWord]:
        for folder, about in self._folders("images"):
            yield from (CompletionWord(name, about) for name in _inside(folder, "Dockerfile"))

    def job_names(self) -> Iterable[CompletionWord]:
        yield from self.jobs()
        runs = filter(_is_listed, self._own_runs())
        yield from (CompletionWord(str(run.get("name") or "")) for run in runs)

    def params(self) -> Iterable[CompletionWord]:
        """Offer the parameters of the job on the command line."""
        for job in self._arguments[:1]:
            folders = [job, *(os.path.join(folder, job) for folder, _ in self._folders("jobs"))]
            for folder in folders:
                file = _read_toml(os.path.join(self._folder, folder, "job.toml"))
                if file:
                    table = file.get("params")
                    params = table.items() if isinstance(table, dict) else ()
                    return [CompletionWord(f"{name}=", f"default: {text}") for name, text in params]
        return []

    def runs(self) -> Iterable[CompletionWord]:
        """Offer names of the project, each for the newest run of that name, then short ids."""
        # People name a sweep, and rarely one of its runs.
        runs = [run for run in self._own_runs() if run.get("job_id") and _is_listed(run)]
        runs = runs[:_MAX_NAMES]
        if runs:
            yield CompletionWord("@last", _describe(runs[0]))
        for run in runs:
            yield CompletionWord(str(run.get("name") or run["job_id"]), _describe(run))
        for run in runs:
            yield CompletionWord(str(run["job_id"]).split("-", 1)[0], _describe(run))

    def sweeps(self) -> Iterable[CompletionWord]:
        """Offer names of the project's `local` sweeps, then short keys. Other environments keep
        theirs in AWS.
        """
        if self._env != "local":
            return
        every = _newest_sweeps(os.path.join(_home(self._environ), "sweeps"))
        sweeps = [(key, name) for key, name, project in every if self._is_own(project)]
        if not sweeps:
            return
        yield CompletionWord("@last", sweeps[0][1])
        yield from (CompletionWord(name, key) for key, name in sweeps)
        yield from (CompletionWord(key[:8], name) for key, name in sweeps)

    def projects(self) -> Iterable[CompletionWord]:
        """Offer the names of projects with runs in the environment."""
        from batchml.config.project import project_name

        found = dict.fromkeys(str(run.get("project") or "") for run in self._history())
        return (CompletionWord(project_name(each)) for each in found if each)

    def _own_runs(self) -> list[dict[str, Any]]:
        return [run for run in self._history() if self._is_own(run.get("project"))]

    def _is_own(self, project: object) -> bool:
        """Whether this is the project of the command line, or else of the folder."""
        from batchml.config.project import folder_project, project_name

        if self._project:  # a word that the user typed: an identity, or a folder's name
            return bool(project) and self._project in (project, project_name(str(project)))
        if not self._own_project:
            self._own_project = str(self._file.get("project") or folder_project(self._folder))
        return project == self._own_project

    def _environment(self) -> dict[str, Any]:
        return dict(_tables(self._file.get("env"))).get(self._env, {})

    def _folders(self, kind: str) -> list[tuple[str, str]]:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        installed = os.path.join(package, "share", kind)
        shipped = installed if os.path.isdir(installed) else os.path.join(package, "..", kind)
        return [(os.path.join(self._folder, kind), ""), (shipped, "ships with batchml")]

    def _history(self) -> list[dict[str, Any]]:
        """Read the newest runs of the environment from the history, the newest first."""
        import json

        runs: dict[str, dict[str, Any]] = {}
        for line in _last_lines(os.path.join(_home(self._environ), "history.jsonl")):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if not isinstance(entry, dict):
                continue
            key = str(entry.get("key") or entry.get("job_id") or "")
            if entry.get("forgotten"):  # the name of an environment
                runs = {k: run for k, run in runs.items() if run.get("env") != entry["forgotten"]}
            elif key:
                runs.setdefault(key, {}).update(entry)
        return [
            run
            for run in reversed(runs.values())
            if run.get("env") == self._env and not run.get("refused")
        ]


def _describe(run: Mapping[str, Any]) -> str:
    parts = [run.get("name"), run.get("outcome") or run.get("status"), run.get("queue")]
    return ", ".join(str(part) for part in parts if part)


def _is_listed(run: Mapping[str, Any]) -> bool:
    tags = run.get("tags")
    is_of_other_run = isinstance(tags, dict) and bool(_UNLISTED_TAGS & tags.keys())
    return not (is_of_other_run or run.get("gang"))


def _newest_sweeps(folder: str) -> list[tuple[str, str, str]]:
    """Return (key, name, project) of the newest sweeps in the folder, the newest first."""
    paths = [(key, os.path.join(folder, key, "spec.json")) for key in _inside(folder, "spec.json")]
    newest = sorted(((os.stat(path).st_mtime, key, path) for key, path in paths), reverse=True)
    named = []
    for _, key, path in newest[:_MAX_NAMES]:
        with open(path, "rb") as file:
            begin = file.read(_SPEC_BYTES)
        name, project = (
            begin.partition(b'"%s":"' % member)[2].partition(b'"')[0].decode("utf-8", "replace")
            for member in (b"name", b"project")
        )
        if name:
            named.append((key, name, project))
    return named


def _tables(value: object) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of a TOML table, by name; none for another value."""
    if not isinstance(value, dict):
        return []
    return [(str(name), table) for name, table in value.items() if isinstance(table, dict)]


def _config_path(sources: CompletionSources) -> str:
    """Find the file as config/settings.py does: BATCHML_CONFIG, else the nearest batchml.toml."""
    path = sources.environ.get("BATCHML_CONFIG", "")
    folder = sources.folder
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
    """Return the names of the subfolders that have the file."""
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
            file.seek(max(0, size - _HISTORY_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > _HISTORY_BYTES else lines


def main(arguments: list[str]) -> int:
    """`batchml __complete [WORD...]`: print a line `WORD TAB DESCRIPTION` for each completion.

    The first line is `:files` if file names are completions, too.
    """
    import sys

    try:
        found = complete(arguments or [""], CompletionSources(os.environ, os.getcwd()))
    except Exception:  # no traceback while the user is typing
        return 1
    lines = [":files"] if found.files else []
    lines += [f"{_clean(word.text)}\t{_clean(word.about)}" for word in found.words]
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


def _clean(text: str) -> str:
    """Replace control characters: names come from files that anybody may have written."""
    return "".join(char if char.isprintable() else "?" for char in text)


# The scripts that `batchml completion SHELL` prints. Each asks `batchml __complete WORD...`.

BASH = r"""# batchml: completion for bash. In ~/.bashrc: eval "$(batchml completion bash)"
_batchml() {
    local line="${COMP_LINE:0:COMP_POINT}" word about
    local -a words=()
    # Split at spaces only: bash would also split --env=dev and RUN:3.
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    local last="${words[${#words[@]}-1]}"
    # Bash replaces only the part after the last : or =, so leave out the part before it.
    local kept="${last%"${last##*[:=]}"}"
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
