"""The best trials of a sweep, and one trial in detail: as text, JSON, a command or a job."""

import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import duration, pad, printable
from batchml.context import Context
from batchml.errors import BatchmlError, NotFound, UsageError
from batchml.jobs.ignore import IGNORE_FILE
from batchml.jobs.written import note_written
from batchml.model.job import JobSpec
from batchml.model.names import join_shell
from batchml.model.run import DATA_VARIABLE
from batchml.model.sweep import Params, Trial
from batchml.runs.find import load_runs
from batchml.runs.outputs import (
    CopiedOutputs,
    OutputEntry,
    copy_outputs,
    open_outputs,
    refuse_no_folder,
    refuse_other_outputs,
)
from batchml.runs.package import unpack_code
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.sweep import checkpoint_prefix
from batchml.runtime.protocol.variables import folder_placeholders, format_value
from batchml.sweeps.commands.render import (
    confirmed_json,
    confirmed_lines,
    describe_best,
    front_lines,
    is_server_down,
    log_command,
    trial_json,
)
from batchml.sweeps.control.plan import params_of
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import count_failures
from batchml.sweeps.jobs import current_code, with_current_code
from batchml.sweeps.results import confirmed_trials, pareto_front, rank_trials
from batchml.sweeps.started import (
    SEED_VARIABLE,
    StartedSweep,
    command_line,
    local_folders,
    trial_command,
)
from batchml.sweeps.stores import SweepStore


def best_json(
    sweep: StartedSweep, trials: Sequence[Trial], state: SweepState
) -> list[dict[str, Any]]:
    confirmed = {each.trial.number: each for each in confirmed_trials(state, sweep.spec)}
    front = pareto_front(state, sweep.spec)
    documents = []
    for trial in trials:
        details = {**(trial_json(sweep, trial) or {})}
        details["command"] = trial_command(sweep, trial)
        details["confirmed"] = confirmed_json(confirmed.get(trial.number))
        documents.append(details | ({"isPareto": trial in front} if front else {}))
    return documents


def best_first(sweep: StartedSweep, state: SweepState) -> list[Trial]:
    """The trials with a result, best first; with several goals the Pareto front comes first."""
    front = pareto_front(state, sweep.spec)
    in_front = {trial.number for trial in front}
    ranked = rank_trials(state, sweep.spec)
    return [*front, *(trial for trial in ranked if trial.number not in in_front)]


def best_text(sweep: StartedSweep, trials: Sequence[Trial], state: SweepState) -> str:
    """The trials, each with its parameters and the command that runs it again."""
    blocks = [_block(sweep, trial) for trial in trials]
    front = pareto_front(state, sweep.spec)
    more = [*confirmed_lines(confirmed_trials(state, sweep.spec)), *front_lines(front)]
    if front and len(trials) > 1:
        more.append("They come first, sorted by the first goal; the others follow.")
    return "\n\n".join([*blocks, *(["\n".join(more)] if more else [])])


def _block(sweep: StartedSweep, trial: Trial) -> str:
    lines = [describe_best(sweep, trial)]
    width = max(map(len, trial.params), default=0)
    for name, value in trial.params.items():
        lines.append(printable(f"  {pad(name, width)}  {format_value(value)}"))
    lines.append(f"  {command_line(sweep, trial)}")
    named = folder_placeholders(sweep.job_spec.argv())
    if named:
        values = local_folders(sweep, trial)
        here = ", ".join(f"{{{name}}} is {values[name]}" for name in dict.fromkeys(named))
        lines.append(
            f"  Here {printable(here)}. As a run: batchml sweeps best {sweep.key} --get best && "
            "batchml submit best"
        )
    return "\n".join(lines)


def trial_job_file(sweep: StartedSweep, trial: Trial, code: "str | bool | None" = None) -> str:
    """A job.toml with the trial's parameters and seed. `code` replaces the job's own."""
    job = sweep.job_spec
    data = {name: each for name, each in sweep.environ.items() if name == DATA_VARIABLE}
    job = replace(job, env={**data, **job.env, SEED_VARIABLE: str(trial.seed)})
    if code is not None:
        job = replace(job, code=code)
    head = f"# {sweep.name} with the parameters of {describe_best(sweep, trial)}"
    origin = _origin(sweep, trial)
    return "\n".join([*map(printable, (head, origin)), job_file(job, params_of(trial, job.params))])


def no_best_trial(sweep: StartedSweep, state: SweepState) -> NotFound:
    """The error for a sweep without a best trial."""
    failed = count_failures(state)
    if failed:
        hint = f"{failed} trials failed: batchml sweeps report {sweep.key} groups the reasons."
    else:
        hint = "No trial has reported its metric yet."
    return NotFound("Best trial of sweep", sweep.name, [], hint)


def fetch_as_job(
    context: Context,
    sweep: StartedSweep,
    store: SweepStore,
    trial: Trial,
    state: SweepState,
    dest: Path,
    *,
    json_: bool,
) -> None:
    """Fetch a trial as a job: its code, a job.toml with its parameters, outputs and checkpoint."""
    is_new = not dest.exists()
    copied = fetch_trial(context, sweep, store, trial, dest)
    if is_new:  # it is a job of its own, and no code of a job whose folder it is in
        note_written(context.home, [dest])
    code = "." if sweep.code else None
    (dest / JOB).write_text(trial_job_file(sweep, trial, code) + "\n", "utf-8")
    counts = {"code": copied.code, "outputs": copied.outputs, "checkpoint": copied.checkpoint}
    if json_:
        details = best_json(sweep, [trial], state)[0]
        return print_json({**details, "folder": str(dest.absolute()), **counts})
    print_line(printable(str(dest)))
    parts = [f"{_describe_count(count)} of its {kind}" for kind, count in counts.items() if count]
    say(f"Trial {trial.number}: {', '.join([*parts, 'job.toml with its parameters'])}.")
    for why in copied.missing:
        say(printable(why))
    say_doubts(context, trial)
    if not sweep.code or copied.code:
        command = join_shell(["batchml", "submit", str(dest)])
        say(f"  run it:  {command}{context.env_option}")


def say_doubts(context: Context, trial: Trial) -> None:
    """Say why the model of a trial that has ended may be incomplete or missing."""
    can_ask = trial.state.is_ended and not is_server_down(context)
    run = _find_run(context, trial, []) if can_ask else None
    entries: list[OutputEntry] | None = []
    try:
        entries = list(open_outputs(context, run).entries()) if run is not None else None
    except NotFound:
        pass
    except BatchmlError:  # the outputs cannot be listed now
        entries = None
    for doubt in doubts(trial, entries):
        say(printable(f"Trial {trial.number}: {doubt}."))


def doubts(trial: Trial, outputs: Sequence[OutputEntry] | None) -> Iterator[str]:
    """Why a trial's model may be incomplete. `outputs`: its files; None: unknown. Pure."""
    if trial.why and trial.state.is_ended:
        yield f"{trial.why}. Files that it wrote last may be incomplete"
    if outputs is None:
        return
    if not outputs:
        yield "it has written no files to BATCHML_OUTPUT_DIR"
    empty = [entry.name for entry in outputs if not entry.size]
    if empty:
        more = f", and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        yield f"empty files in its outputs: {', '.join(empty[:_NAMED])}{more}"


def _describe_count(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


# --- One trial: its state, and why it ended -------------------------------------------------------


def find_trial(sweep: StartedSweep, state: SweepState, number: int) -> Trial:
    """The trial of a number. Raises NotFound."""
    trial = state.trials.get(number)
    if trial is None:
        last = max(state.trials, default=-1)
        hint = f"Trials are 0 to {last}." if last >= 0 else "It has no trials yet."
        raise NotFound(f"Trial of sweep {sweep.name}", str(number), [], hint)
    return trial


def trial_details_json(sweep: StartedSweep, trial: Trial, state: SweepState) -> dict[str, Any]:
    return best_json(sweep, [trial], state)[0] | {
        "exitCode": trial.exit_code,
        "why": trial.why or None,
        "attempt": trial.attempt or None,
        "seconds": trial.seconds,
        "lastLines": list(trial.tail),
    }


def describe_trial(context: Context, sweep: StartedSweep, trial: Trial, now: float) -> str:
    """A trial as text: a fact on each line, the last lines of a failed trial, the next commands."""
    facts = [(name, value) for name, value in _facts(sweep, trial, now) if value]
    commands = [
        (name, command) for name, command in _next_commands(context, sweep, trial) if command
    ]
    width = max(len(name) for name, _ in (*facts, *commands))
    lines = [f"{pad(name, width)}  {printable(value)}" for name, value in facts]
    if trial.tail:
        lines += ["its last lines:", *(f"  {printable(line)}" for line in trial.tail)]
    return "\n".join([*lines, *(f"{pad(name, width)}  {command}" for name, command in commands)])


def _facts(sweep: StartedSweep, trial: Trial, now: float) -> Iterator[tuple[str, str]]:
    code = f"exit code {trial.exit_code}"
    is_code_known = trial.exit_code in (None, 0) or code in trial.why
    yield "trial", f"{trial.number} of {sweep.name}"
    yield "state", trial.state.value + ("" if is_code_known else f", {code}")
    yield "why", trial.why
    yield "result", describe_best(sweep, trial) if trial.values else ""
    for name, value in trial.params.items():
        yield name, format_value(value)
    yield "confirms", f"trial {trial.confirms}" if trial.confirms is not None else ""
    yield "ran", duration(trial.ran(now)) if trial.started_at is not None else ""
    yield "job", trial.job_id
    yield "command", command_line(sweep, trial)


def _next_commands(
    context: Context, sweep: StartedSweep, trial: Trial
) -> Iterator[tuple[str, str]]:
    yield "log", log_command(context, trial)
    if trial.state.is_failure and trial.job_id:
        yield "explain", f"batchml explain {trial.job_id}{context.env_option}"
    if trial.state.is_ended:
        again = f"batchml sweeps rerun {sweep.key} --trial {trial.number}{context.env_option}"
        yield "run again", again


# --- Fetching a trial -----------------------------------------------------------------------------


_NAMED = 5  # empty files that are named
OUTPUTS, CHECKPOINT = "outputs", "checkpoint"  # folders in the destination
JOB = "job.toml"
MARK = "# Found by the sweep "  # the beginning of a line in a job.toml that was written by --get


def _origin(sweep: StartedSweep, trial: Trial) -> str:
    return f"{MARK}{sweep.key}, trial {trial.number}."


class TrialArtifacts(Struct, frozen=True):
    """The numbers of fetched files. `missing`: sentences that say why files are missing."""

    outputs: int
    checkpoint: int
    code: int = 0
    missing: tuple[str, ...] = ()


def fetch_trial(
    context: Context, sweep: StartedSweep, store: SweepStore, trial: Trial, dest: Path
) -> TrialArtifacts:
    """Copy the code to DEST, outputs to DEST/outputs and the checkpoint to DEST/checkpoint.

    Raises UsageError, before anything is written, if DEST has other files of those names, or
    another trial, or is a file; OSError, and the errors of the store.
    """
    missing: list[str] = []
    refuse_no_folder(dest)
    _refuse_other_trial(sweep, trial, dest)
    run = _find_run(context, trial, missing)
    if run is not None:
        refuse_other_outputs(context, run, dest / OUTPUTS)
    address = _code_address(sweep, store, trial, run)
    code = _copy_code(context, address, sweep.folder, dest, missing)
    folders = {name.partition("/")[0] for name in code}
    outputs = 0
    if run is not None:
        try:
            outputs = _copy_outputs(context, run, dest / _free_name(OUTPUTS, folders, trial))
        except BatchmlError as error:
            missing.append(f"Its outputs could not be fetched: {error}")
    checkpoint = _copy_checkpoint(store, trial, dest / _free_name(CHECKPOINT, folders, trial))
    if not checkpoint and sweep.platform.workspace:
        missing.append("Its checkpoint is in the environment's workspace.")
    return TrialArtifacts(outputs, checkpoint, len(code), tuple(missing))


def _find_run(context: Context, trial: Trial, missing: list[str]) -> FoundRun | None:
    """The run of the trial; None where it is no longer known."""
    try:
        return load_runs(context, [trial.job_id])[0] if trial.job_id else None
    except BatchmlError as error:
        missing.append(f"Its outputs could not be fetched: {error}")
        return None


def _code_address(
    sweep: StartedSweep, store: SweepStore, trial: Trial, found: FoundRun | None
) -> str:
    """The address of the code that the trial ran; code may have been sent more than once."""
    if not sweep.code:
        return ""
    if found is not None and found.run is not None:
        name = found.run.environment.get("BATCHML_CODE", "").rpartition("/")[2]
        if name:
            return f"{sweep.code.rpartition('/')[0]}/{name}"
    was_sent_later = current_code(sweep, store).at > (trial.started_at or 0.0)
    return sweep.code if was_sent_later else with_current_code(sweep, store).code


def _copy_code(
    context: Context, address: str, origin: str, dest: Path, missing: list[str]
) -> list[str]:
    """Copy the code that the trial ran, which was packed from `origin`. The names of its files."""
    try:
        with unpack_code(context, address) as folder:
            names = sorted(_files(Path(folder))) if folder else []
            _refuse_others(Path(folder), names, dest)
            dest.mkdir(parents=True, exist_ok=True)
            for name in names:
                (dest / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(folder) / name, dest / name)
            return names
    except NotFound:
        dest.mkdir(parents=True, exist_ok=True)
        missing.append(f"Its code is no longer stored. It was packed from {origin}.")
        return []


def _free_name(name: str, taken: set[str], trial: Trial) -> str:
    """The name of a folder beside the code, which may have a folder of the same name."""
    return f"{name}-of-trial-{trial.number}" if name in taken else name


def _files(folder: Path) -> Iterator[str]:
    """The files below a folder, without its job.toml, which the trial's job.toml replaces."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != JOB:
            yield name


def _refuse_other_trial(sweep: StartedSweep, trial: Trial, dest: Path) -> None:
    """Raise UsageError if DEST has another trial of this sweep or of another: files would mix."""
    job = dest / JOB
    lines = job.read_text("utf-8", "replace").splitlines() if job.is_file() else []
    # Version 0.1.0 named only the sweep.
    same = (_origin(sweep, trial), f"{MARK}{sweep.key}.")
    found = next((line for line in lines if line.startswith(MARK)), "")
    if found and found not in same:
        other = printable(found.removeprefix(MARK).rstrip("."))
        raise UsageError(
            f"--get {dest}: the folder has the best trial of another fetch (sweep {other}). "
            "Name a new folder, or delete this one first."
        )


def _refuse_others(folder: Path, names: list[str], dest: Path) -> None:
    """Raise UsageError rather than replace files of the user. Equal files may stay."""
    others = [
        name
        for name in names
        if os.path.lexists(dest / name)
        and not ((dest / name).is_file() and filecmp.cmp(folder / name, dest / name, shallow=False))
    ]
    job = dest / JOB
    if os.path.lexists(job) and not (job.is_file() and MARK in job.read_text("utf-8", "replace")):
        others.insert(0, JOB)
    if others:
        listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise UsageError(f"--get {dest}: the folder has another {listed}. Name a new folder.")


def _copy_outputs(context: Context, found: FoundRun, dest: Path) -> int:
    done = CopiedOutputs()
    try:
        for each in copy_outputs(context, found, dest):
            done = each if isinstance(each, CopiedOutputs) else done
    except NotFound:  # no outputs
        return 0
    return done.files + done.unchanged


def _copy_checkpoint(store: SweepStore, trial: Trial, dest: Path) -> int:
    """Copy a checkpoint from the store. Keys have no `..`, so all files land below `dest`."""
    prefix, count = checkpoint_prefix(trial.number), 0
    for key in store.keys(prefix):
        path = dest / key.removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        count += store.get_file(key, str(path))
    if count:
        own = dest / IGNORE_FILE
        own.write_text(f"# A checkpoint: {IGNORE_FILE} keeps it out of the code of runs.\n*\n")
    return count


# --- job.toml -------------------------------------------------------------------------------------


def job_file(job: JobSpec, params: Params) -> str:
    """A job.toml with these parameters in place of the job's own, without default values."""
    table = msgspec.to_builtins(replace(job, params={**job.params, **params}))
    return to_toml(_without_defaults(table, msgspec.to_builtins(JobSpec())))


def _without_defaults(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in table.items():
        if value is None or value == defaults.get(name):
            continue
        if isinstance(value, dict) and isinstance(defaults.get(name), dict):
            value = _without_defaults(value, defaults[name])
        kept[name] = value
    return kept


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML: values first, then a `[section]` for each table, `[[section]]` for lists of tables."""
    values = [f"{_key(name)} = {_value(each)}" for name, each in table.items() if _is_value(each)]
    parts = ["\n".join(values)] if values else []
    for name, each in table.items():
        if isinstance(each, dict):
            parts.append(_section(f"[{_key(name)}]", each))
        elif not _is_value(each):
            parts += [_section(f"[[{_key(name)}]]", table) for table in each]
    return "\n\n".join(parts)


def _section(head: str, table: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{_key(name)} = {_value(each)}" for name, each in table.items())])


def _is_value(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    return not (isinstance(value, list | tuple) and value and isinstance(value[0], dict))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # Basic strings of TOML have the escapes of JSON, and no bare DEL (TOML 1.0, String).
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        items = (f"{_key(name)} = {_value(each)}" for name, each in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _key(name: str) -> str:
    bare = name and all(char.isascii() and (char.isalnum() or char in "-_") for char in name)
    return name if bare else _value(name)
