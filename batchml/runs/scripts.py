"""Make the request of a script: its lines `#BATCHML` and `#SBATCH` are options.

Lines `#BATCHML` take precedence over lines `#SBATCH`, and flags of the command line over both.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from batchml.errors import ConfigError, InputNotFound, did_you_mean
from batchml.jobs.script import (
    OURS,
    Script,
    ScriptLine,
    is_script_name,
    looks_like_script,
    read_script,
    sort_by_line,
)
from batchml.model.job import JobSpec
from batchml.model.names import to_name
from batchml.model.params import with_params
from batchml.runs.options import OptionRow, RunRequest, SubmitOptions, option_rows, to_request
from batchml.runtime.protocol.launch import PACKED, SCRIPT_RUNNER
from batchml.runtime.protocol.variables import ALL, SLURM

if TYPE_CHECKING:
    from batchml.context import Context

STDIN = "-"
PROGRAM = ".py"  # a file with this suffix and without #! is a program for python
MAX_SCRIPT = 1024**2  # bytes; a larger file is not a script

_NAMED_STDIN = "stdin"

# Flags that a script cannot set: they change what the command does, not the run.
_COMMAND_FLAGS = {
    "--wait", "--detach", "--dry-run", "--offline",
    "--env", "--project", "--json", "--cancel-on-interrupt",
}  # fmt: skip


def check_script_exists(context: "Context", job: str) -> None:
    """Raise InputNotFound for a name such as `train.sh`, if there is no such file or folder."""
    folders = (context.folder, *context.job_folders)
    if any((folder / job).exists() for folder in folders):
        return
    if is_script_name(Path(job).name) or job.endswith(PROGRAM):
        beside = (context.folder / job).parent
        suffix, above = Path(job).suffix, Path(job).parent
        known = (str(above / each.name) for each in beside.glob(f"*{suffix}"))
        raise InputNotFound("File", job, [], did_you_mean(job, known).strip())


def is_script(context: "Context", job: str | None) -> bool:
    """Whether the JOB of a command line is a script: `-`, or a file that looks like one."""
    if job is None or job == STDIN:
        return job == STDIN
    path = context.folder / job
    if path.name == "job.toml" or not path.is_file() or path.stat().st_size > MAX_SCRIPT:
        return False
    try:
        return looks_like_script(path.name, path.read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return False


def apply_script(
    context: "Context",
    request: RunRequest,
    notices: list[str],
    *,
    read: Callable[[], bytes] = lambda: sys.stdin.buffer.read(MAX_SCRIPT + 1),
    environ: Mapping[str, str] = os.environ,
) -> RunRequest:
    """Add the options of the script that a request names; another request is returned unchanged.

    `notices` gets messages about lines without effect. `read` reads the script from stdin for `-`.
    `environ` has the variables that `#SBATCH --export=NAME` passes on.

    Raises ConfigError with all mistakes of the script's lines, and InputNotFound.
    """
    from batchml.jobs.slurm import read_slurm
    from batchml.runtime.entry.script import ARRAY, interpreter

    if request.job is None:
        typed = (request.command or ()) if request.spec is None else ()
        paths = [context.folder / word for word in typed if os.path.isfile(context.folder / word)]
        notices += _unused_job_notice(paths[0]) if paths else []
        return request
    if not is_script(context, request.job):
        check_script_exists(context, request.job)
        return _as_command(context, request, request.job, notices)

    path = None if request.job == STDIN else context.folder / request.job
    shown = request.job if path else "The script on stdin"
    text = _decode(shown, path.read_bytes() if path else read())
    program = interpreter(text.encode().split(b"\n", 1)[0])
    script = read_script(text, program)
    ours, wrong = read_options(script.ours)
    slurm = read_slurm(script.slurms, environ)
    mistakes = sort_by_line([*script.mistakes, *wrong, *slurm.mistakes])
    if mistakes:
        raise ConfigError(shown, mistakes)
    messages = sort_by_line((*_login_notice(program, script), *script.notices, *slurm.notices))
    notices += [f"{shown}, {words}" for words in messages]
    notices += _unused_job_notice(path) if path else []
    folder = _code_folder(context, path, slurm.folder, shown)
    command = _command(path, folder, text, request.command or ())
    lower = _merge_requests(
        to_request(options=ours), to_request(options=cast(SubmitOptions, slurm.options))
    )
    merged = _merge_requests(replace(request, job=None, command=command, folder=str(folder)), lower)
    if merged.changes.get("queue") and not request.changes.get("queue"):
        line = _queue_line(script, environ)
        merged = replace(merged, queue_at=f"{path.name if path else shown}, line {line}")
    variables = dict(slurm.variables)
    # The flag --array replaces the task ids of the script.
    if merged.array != slurm.options.get("array"):
        variables.pop(ARRAY, None)
    if not merged.changes.get("name"):
        name = Path(request.job).stem if path else _NAMED_STDIN
        merged = replace(merged, changes={**merged.changes, "name": to_name(name)})
    return _with_slurm_variables(merged, script, variables)


def _login_notice(program: list[str], script: Script) -> list[str]:
    from batchml.runtime.entry.script import without_login

    if not script.has_slurm or without_login(program) == program:
        return []
    return [
        f"line 1: {' '.join(program)} is run without {program[1]}: a login profile would "
        "replace PATH, and the programs of the image would not be found."
    ]


def _as_command(
    context: "Context", request: RunRequest, job: str, notices: list[str]
) -> RunRequest:
    """`python train.py ARGUMENTS {params}` for the job `train.py`; other requests stay as they are.

    Arguments are the words after `--`.
    """
    path = context.folder / job
    if not (job.endswith(PROGRAM) and path.is_file()):
        return request
    folder = _code_folder(context, path, "", job)
    program = path.resolve().relative_to(folder.resolve()).as_posix()
    # `{params}` at the end: for argparse the last of two equal flags counts.
    command = ("python", program, *(request.command or ()), f"{{{ALL}}}")
    words = with_params(JobSpec(command=command), request.params, job).argv()
    notices.append(f"{job} runs as the command: {shlex.join(words)}")
    notices += _unused_job_notice(path)
    return replace(request, job=None, command=command, folder=str(folder))


def _unused_job_notice(path: Path) -> list[str]:
    """A message if the folder of a program has a job.toml, which its command does not use."""
    if not (path.parent / "job.toml").is_file():
        return []
    return [
        f"The job.toml beside {path.name} is not used, nor its [metrics]: "
        f"batchml submit {path.parent}"
    ]


def _decode(shown: str, data: bytes) -> str:
    if len(data) > MAX_SCRIPT:
        raise ConfigError(shown, [f"it is larger than {MAX_SCRIPT // 1024} KiB."])
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(shown, ["it is not UTF-8 text."]) from None


def _code_folder(context: "Context", path: Path | None, named: str, shown: str) -> Path:
    """The folder that is sent as code: the folder of `--chdir`, else the current folder, as for
    sbatch; the script's folder if the script is not below the current folder.
    """
    if named:
        folder = context.folder / named
        if not folder.is_dir():
            raise ConfigError(shown, [f"--chdir: {folder} is not a folder."])
        return folder
    if path is None or path.resolve().is_relative_to(context.folder.resolve()):
        return context.folder
    return path.resolve().parent


def _command(
    path: Path | None, folder: Path, text: str, arguments: tuple[str, ...]
) -> tuple[str, ...]:
    """The command that runs the script: from the code, or else packed into the command."""
    from batchml.runtime.entry.script import pack

    if path is not None and path.resolve().is_relative_to(folder.resolve()):
        return (*SCRIPT_RUNNER, path.resolve().relative_to(folder.resolve()).as_posix(), *arguments)
    name = path.name if path else _NAMED_STDIN
    return (*SCRIPT_RUNNER, PACKED, pack(text.encode()), name, *arguments)


def _merge_requests(upper: RunRequest, lower: RunRequest) -> RunRequest:
    """The request with the options of both; `upper` takes precedence."""
    return replace(
        upper,
        changes=_merge_tables(upper.changes, lower.changes),
        params={**lower.params, **upper.params},
        tags={**lower.tags, **upper.tags},
        after=upper.after or lower.after,
        share=upper.share or lower.share,
        array=lower.array if upper.array is None else upper.array,
        max_cost=lower.max_cost if upper.max_cost is None else upper.max_cost,
        auto_resume=upper.auto_resume or lower.auto_resume,
        strict_resources=upper.strict_resources or lower.strict_resources,
        include_secrets=upper.include_secrets or lower.include_secrets,
    )


def _merge_tables(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(lower)
    for name, value in upper.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = _merge_tables(value, found[name])
        elif value is not None:
            found[name] = value
    return found


def _queue_line(script: Script, environ: Mapping[str, str]) -> int:
    """The number of the line that sets the queue: the last `#BATCHML`, else the last `#SBATCH`."""
    from batchml.jobs.slurm import read_slurm

    ours = [line.number for line in script.ours if read_options([line])[0].get("queue")]
    if ours:
        return ours[-1]
    return max(
        (each.number for each in script.slurms if read_slurm([each], environ).options.get("queue")),
        default=1,
    )


def with_slurm_sizes(spec: "JobSpec") -> "JobSpec":
    """A job with Slurm's variables, with the job's real sizes in them; another job unchanged.

    Flags of the command line, or this machine, may change the sizes that the script requests.
    """
    if not spec.env.get(SLURM):
        return spec
    from batchml.runtime.protocol.variables import number_of

    has, env = spec.resources, dict(spec.env)
    tasks = max(1, number_of(str(env.get("SLURM_NTASKS_PER_NODE", "")), 1))
    env |= {"SLURM_CPUS_ON_NODE": str(has.vcpus), "SLURM_MEM_PER_NODE": str(has.memory_mib)}
    gpus = has.gpu_count
    for name in [name for name in env if name.startswith("SLURM_GPUS") and not gpus]:
        del env[name]
    if gpus:
        env |= {"SLURM_GPUS": str(gpus * spec.nodes), "SLURM_GPUS_ON_NODE": str(gpus)}
    for name, count in (("SLURM_CPUS_PER_TASK", has.vcpus), ("SLURM_GPUS_PER_TASK", gpus)):
        if name in env:
            most = max(1, count // tasks)
            env[name] = str(min(number_of(str(env[name]), most), most))
    return replace(spec, env=env)


def _with_slurm_variables(
    request: RunRequest, script: Script, variables: Mapping[str, str]
) -> RunRequest:
    """The request with the variables that Slurm would set.

    A script without `#SBATCH` lines gets none: programs that find them assume a Slurm cluster.
    """
    if not script.has_slurm:
        return request
    slurm = {SLURM: "1", "SLURM_JOB_NAME": request.changes["name"], **variables}
    env = {**slurm, **(request.changes.get("env") or {})}
    return replace(request, changes={**request.changes, "env": env})


# --- Lines #BATCHML -------------------------------------------------------------------------------


def read_options(lines: Sequence[ScriptLine]) -> tuple[SubmitOptions, list[str]]:
    """The options that lines `#BATCHML` set, and all mistakes in the lines.

    If a flag is given twice, the last one counts, as on a command line.
    """
    found: dict[str, Any] = {}
    mistakes: list[str] = []
    for line in lines:
        words = list(line.words)
        while words:
            wrong = _read_flag(words, found)
            if wrong:
                mistakes.append(f"line {line.number}: {wrong}")
    return cast(SubmitOptions, found), mistakes


@cache
def _flags() -> dict[str, OptionRow]:
    """Flag -> option, with the short flags."""
    rows = option_rows().values()
    return {row.flag: row for row in rows} | {
        row.option.short: row for row in rows if row.option.short
    }


def _read_flag(words: list[str], found: dict[str, Any]) -> str:
    """Move one flag with its value from `words` to `found`; a mistake in it, or ""."""
    word = words.pop(0)
    flag, equals, value = word.partition("=")
    short = word[:2]
    if short in _flags() and len(word) > 2:  # -pNAME=VALUE
        flag, equals, value = short, "=", word[2:]
    if flag in _COMMAND_FLAGS:
        return f"{flag} belongs on the command line: it says what the command does, not the run."
    row = _flags().get(flag)
    if row is None:
        while words and not words[0].startswith("-"):  # the values of the unknown flag
            words.pop(0)
        return f"{OURS} {word}: not a flag of batchml submit.{did_you_mean(flag, _flags())}"
    if row.type is bool:
        found[row.name] = True
        return f"{flag}: takes no value." if equals else ""
    if not equals:
        if not words or (words[0].startswith("--") and words[0].partition("=")[0] in _flags()):
            return f"{row.flag}: has no value."
        value = words.pop(0)
    return _set_option(row, value, found)


def _set_option(row: OptionRow, value: str, found: dict[str, Any]) -> str:
    if row.type in (int, float):
        number = row.read_number(value)
        if number is None:
            return f"{row.flag}: found {value!r}. Give {row.expected}."
        found[row.name] = number
    elif row.type is dict:
        key, equals, text = value.partition("=")
        if not equals or not key:
            return f"{row.flag} {value}: write it as NAME=VALUE."
        found.setdefault(row.name, {})[key] = text
    elif row.type is list:
        found.setdefault(row.name, []).append(value)
    else:
        found[row.name] = value
    return ""
