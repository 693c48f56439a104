"""Write a commented `batchml.toml` and a first job: all files or none."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from batchml.config.environments import read_environments
from batchml.errors import ConfigError, UsageError
from batchml.model.environment import LOCAL
from batchml.setup.templates import CONFIG, JOB, TRAIN

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
