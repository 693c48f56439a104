"""What a trial leaves behind: its outputs, its checkpoint and its code, as a job in a folder."""

import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import BatchmlError, NotFound, UsageError
from batchml.jobs.ignore import OWN_FILE
from batchml.model.job import JobSpec
from batchml.model.sweep import Params, Trial
from batchml.runs.find import recall
from batchml.runs.outputs import CopiedOutputs, outputs
from batchml.runs.rerun.resubmit import unpacked
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.sweep_store import checkpoint_prefix
from batchml.sweeps.code_update import current_code, with_current_code
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.stores import SweepStore

OUTPUTS, CHECKPOINT = "outputs", "checkpoint"  # folders in the destination
JOB = "job.toml"
MARK = "# Found by the sweep "  # begins a line of the job.toml that is written there


class TrialArtifacts(Struct, frozen=True):
    """Numbers of files. `missing`: why files of a kind are missing, as sentences."""

    outputs: int
    checkpoint: int
    code: int = 0
    missing: tuple[str, ...] = ()


def fetch_trial(
    context: Context, sweep: StartedSweep, store: SweepStore, trial: Trial, dest: Path
) -> TrialArtifacts:
    """Copy the code to DEST, outputs to DEST/outputs and the checkpoint to DEST/checkpoint.

    Raises UsageError, before anything is written, if DEST has other files of those names; OSError,
    and the errors of the store.
    """
    missing: list[str] = []
    found = _find_run(context, trial, missing)
    code = _copy_code(
        context, _code_address(sweep, store, trial, found), sweep.folder, dest, missing
    )
    folders = {name.partition("/")[0] for name in code}
    outputs = 0
    if found is not None:
        try:
            outputs = _copy_outputs(context, found, dest / _free_name(OUTPUTS, folders, trial))
        except BatchmlError as error:
            missing.append(f"Its outputs cannot be had: {error}")
    checkpoint = _copy_checkpoint(store, trial, dest / _free_name(CHECKPOINT, folders, trial))
    if not checkpoint and sweep.platform.workspace:
        missing.append("Its checkpoint is in the environment's workspace.")
    return TrialArtifacts(outputs, checkpoint, len(code), tuple(missing))


def _find_run(context: Context, trial: Trial, missing: list[str]) -> FoundRun | None:
    """The run of the trial; None where it is no longer known."""
    try:
        return recall(context, [trial.job_id])[0] if trial.job_id else None
    except BatchmlError as error:
        missing.append(f"Its outputs cannot be had: {error}")
        return None


def _code_address(
    sweep: StartedSweep, store: SweepStore, trial: Trial, found: FoundRun | None
) -> str:
    """The address of the code that the trial ran. Other code may have been sent since or before."""
    if not sweep.code:
        return ""
    if found is not None and found.run is not None:
        name = found.run.environment.get("BATCHML_CODE", "").rpartition("/")[2]
        if name:
            return f"{sweep.code.rpartition('/')[0]}/{name}"
    is_since = current_code(sweep, store).at > (trial.started_at or 0.0)
    return sweep.code if is_since else with_current_code(sweep, store).code


def _copy_code(
    context: Context, address: str, origin: str, dest: Path, missing: list[str]
) -> list[str]:
    """Copy the code that the trial ran, which was packed from `origin`. The names of its files."""
    try:
        with unpacked(context, address) as folder:
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
    """The files below a folder, without its own job.toml, which the trial's replaces."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != JOB:
            yield name


def _refuse_others(folder: Path, names: list[str], dest: Path) -> None:
    """Raise UsageError rather than replace files of the user. Equal files may stay."""
    others = [
        name
        for name in names
        if os.path.lexists(dest / name) and not _is_same(folder / name, dest / name)
    ]
    job = dest / JOB
    if os.path.lexists(job) and not (job.is_file() and MARK in job.read_text("utf-8", "replace")):
        others.insert(0, JOB)
    if others:
        listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise UsageError(f"--get {dest}: it has another {listed}. Name a new folder.")


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _copy_outputs(context: Context, found: FoundRun, dest: Path) -> int:
    done = CopiedOutputs()
    try:
        for each in outputs(context, found, dest):
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
        own = dest / OWN_FILE
        own.write_text(f"# A checkpoint: {OWN_FILE} keeps it out of the code of runs.\n*\n")
    return count


# --- job.toml -------------------------------------------------------------------------------------


def job_file(job: JobSpec, params: Params) -> str:
    """A job.toml with these parameters in place of the job's own, without default values."""
    table = msgspec.to_builtins(replace(job, params={**job.params, **params}))
    return to_toml(_without_defaults(table, msgspec.to_builtins(JobSpec())))


def _without_defaults(table: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if value is None or value == usual.get(name):
            continue
        if isinstance(value, dict) and isinstance(usual.get(name), dict):
            value = _without_defaults(value, usual[name])
        found[name] = value
    return found


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML: values first, then a `[section]` for each table, `[[section]]` for lists of tables."""
    values = [f"{_key(name)} = {_value(each)}" for name, each in table.items() if _is_value(each)]
    parts = ["\n".join(values)] if values else []
    for name, each in table.items():
        if isinstance(each, dict):
            parts.append(_section(f"[{_key(name)}]", each))
        elif not _is_value(each):
            parts += [_section(f"[[{_key(name)}]]", one) for one in each]
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
        return (
            f"{{ {', '.join(f'{_key(name)} = {_value(each)}' for name, each in value.items())} }}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _key(name: str) -> str:
    bare = name and all(char.isascii() and (char.isalnum() or char in "-_") for char in name)
    return name if bare else _value(name)
