"""Register, find and deregister job definitions, and find old ones that no run needs."""

import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from batchml.aws.batch.definitions import DefinitionApi, DefinitionRevision
from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.requests import dated_registration
from batchml.clock import Clock
from batchml.config.environments import read_environments
from batchml.errors import ConfigError, NotFound, UsageError
from batchml.model.environment import LOCAL
from batchml.setup.templates import CONFIG, JOB, TRAIN

A_SECOND = 10  # deregistrations a second; AWS Batch accepts 50 calls of all kinds


def register(api: JobApi, request: Mapping[str, Any], now: float) -> bool:
    """Register a definition unless an active one exists; the name depends on the content.

    Returns whether it was registered. `now` in seconds since the epoch.
    """
    if api.has_definition(request["jobDefinitionName"]):
        return False
    api.register(dated_registration(request, now))
    return True


def find_definitions(definitions: DefinitionApi, asked: str) -> list[DefinitionRevision]:
    """The active revisions that `NAME` or `NAME:REVISION` means. Raises NotFound."""
    name, _, revision = asked.partition(":")
    found = definitions.active(name)
    chosen = [each for each in found if revision in ("", str(each.revision))]
    if not chosen:
        known = [each.full_name for each in found or definitions.active() if found or each.job]
        hint = "To list active definitions: batchml jobdef list --all"
        raise NotFound("Job definition", asked, known[:20], hint)
    return chosen


def find_old(
    definitions: Iterable[DefinitionRevision],
    env: str,
    keep: Collection[str],
    now: float,
    older_than: int,
) -> list[DefinitionRevision]:
    """The definitions of an environment that are old, and not the newest of a job in `keep`.

    Old: registered more than `older_than` seconds before `now`, rounded up to whole days. A
    definition without a date is old: an earlier version registered it. Runs may still use a result:
    see `unused`.
    """
    ours = [each for each in definitions if each.job and each.env == env]
    newest: dict[str, str] = {}
    for each in ours:
        newest[each.job] = max(newest.get(each.job, ""), each.registered)
    limit = datetime.fromtimestamp(now, UTC) - timedelta(seconds=older_than)
    return [
        each
        for each in ours
        if _is_before(each.registered, limit)
        and not (each.job in keep and each.registered == newest[each.job])
    ]


def _is_before(day: str, limit: datetime) -> bool:
    """Whether a whole day lies before the limit."""
    try:
        end = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)
    except ValueError:
        return True
    return end <= limit


def unused(
    candidates: Iterable[DefinitionRevision], is_used: Callable[[DefinitionRevision], bool]
) -> Iterator[DefinitionRevision]:
    """The definitions that no run uses; `is_used` is called for one after the other."""
    for each in candidates:
        if not is_used(each):
            yield each


def deregister(
    forget: Callable[[str], None], chosen: Sequence[DefinitionRevision], clock: Clock
) -> Iterator[DefinitionRevision]:
    """Deregister definitions by `forget`, and yield each one after it is done.

    The rate is limited, so that the account's other calls are not throttled.
    """
    for place, each in enumerate(chosen):
        if place:
            clock.sleep(1 / A_SECOND)
        forget(each.full_name)
        yield each


# --- init -----------------------------------------------------------------------------------------
# Write a commented `batchml.toml` and a first job: all files or none.


CONFIG_NAME = "batchml.toml"
FIRST_JOB = "hello"

_SUFFIX = ".batchml-init"


def first_files(env: str, region: str) -> dict[str, str]:
    """Path -> text of the files for an environment in AWS.

    Raises UsageError for a name or a region that is not possible.
    """
    if env == LOCAL:
        raise UsageError(
            f"--env {env}: `local` is built in. Name an environment in AWS, such as --env dev."
        )
    config = CONFIG.replace("@ENV@", env).replace("@REGION@", region)
    try:
        read_environments(tomllib.loads(config), CONFIG_NAME)
    except ConfigError as error:
        raise UsageError("--env, --region: " + " ".join(error.mistakes)) from error
    except tomllib.TOMLDecodeError as error:  # a name with a quote or a newline in it
        text = f"--env {env!r}, --region {region!r}: names have letters, digits and hyphens."
        raise UsageError(text) from error
    job = f"jobs/{FIRST_JOB}"
    return {CONFIG_NAME: config, f"{job}/job.toml": JOB, f"{job}/train.py": TRAIN}


def write_files(folder: Path, files: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write `files` below `folder`; after a failure nothing is changed.

    Raises UsageError if a file exists and `force` is not set; OSError.
    """
    targets = {folder / name: text for name, text in files.items()}
    there = [str(path.relative_to(folder)) for path in targets if os.path.lexists(path)]
    if there and not force:
        are = "exists" if len(there) == 1 else "exist"
        raise UsageError(f"{', '.join(there)} {are} in {folder}. Replace with --force.")
    made: list[Path] = []
    try:
        for path, text in targets.items():
            made += _make_folder(path.parent)
            _beside(path, "new").write_text(text, "utf-8")
        _swap(list(targets), force=force)
    except BaseException:
        _tidy(targets, made)
        raise
    _tidy(targets, [])
    return list(targets)


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the created folders, the outermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}{_SUFFIX}-{what}")


def _swap(paths: list[Path], *, force: bool) -> None:
    """Put the new files in place; after a failure put the old files back."""
    done: list[Path] = []
    try:
        for path in paths:
            if force and os.path.lexists(path):
                path.rename(_beside(path, "old"))
            done.append(path)
            os.link(_beside(path, "new"), path)  # fails if another process was faster
    except BaseException:
        for path in done:
            if _is_ours(path):
                path.unlink()
            if os.path.lexists(_beside(path, "old")):
                _beside(path, "old").rename(path)
        raise


def _is_ours(path: Path) -> bool:
    return path.exists() and path.samefile(_beside(path, "new"))


def _tidy(paths: Mapping[Path, str], made: list[Path]) -> None:
    for path in paths:
        for what in ("new", "old"):
            _beside(path, what).unlink(missing_ok=True)
    for folder in reversed(made):
        try:
            folder.rmdir()
        except OSError:  # another process put a file there
            pass
