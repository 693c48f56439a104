"""Refuse to delete the file system of a workspace in AWS before everything in it is archived."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from batchml.aws.s3 import BucketStore
from batchml.context import Context, read_stack_outputs
from batchml.errors import UsageError
from batchml.model.run import Run
from batchml.runtime.entry.folders import size_text
from batchml.runtime.transfer.manifest import COMPLETE
from batchml.workspace.remote import ARCHIVE_PREFIX

_REMEMBERED = 86_400.0  # seconds for which AWS Batch surely lists ended runs: "at least 24 hours"
# Names of transfer runs that do not change the workspace.
_READERS = ("workspace-archive", "workspace-list", "workspace-pull", "workspace-verify")


def check_archived(context: Context, allowed: Sequence[str]) -> str:
    """Check that a file system may be deleted; return a sentence about its archive.

    Raises UsageError if the archive is incomplete, or older than the last run, unless `allowed`
    names the file system.
    """
    outputs = read_stack_outputs(context)
    file_system, bucket = outputs.get("FileSystemId", ""), outputs.get("BucketName", "")
    if not file_system or not bucket:
        return "There is no file system to delete."
    if file_system in allowed:
        return f"{file_system} is deleted without a check of its archive."
    found = BucketStore(context.connect(), bucket).get(f"{ARCHIVE_PREFIX}/{COMPLETE}")
    why = reason_to_keep(found, _runs(context), context.clock.now())
    if why:
        raise UsageError(
            f"Nothing was changed: {why}. First: batchml workspace archive --env {context.env}. To "
            f"delete files that are not archived: --allow-loss {file_system}."
        )
    return f"s3://{bucket}/{ARCHIVE_PREFIX} holds {describe_archive(found)}."


def reason_to_keep(complete: bytes | None, runs: Iterable[Run], now: float) -> str:
    """Say why a file system has to stay; "" if all its files are archived. Pure.

    `complete` is the content of the file that marks an archive as complete, `now` is in seconds
    since the epoch. Only runs write to a workspace, and AWS Batch may have forgotten runs that
    ended more than a day ago.
    """
    try:
        at = float(json.loads(complete or b"{}")["at"])
    except (ValueError, TypeError, KeyError):
        return "there is no complete archive of the workspace"
    if at < now - _REMEMBERED:
        return f"the archive is of {_time(at)}, and AWS Batch may have forgotten later runs"
    for run in runs:
        if run.name in _READERS:
            continue
        if not run.status.is_terminal:
            return f"{run.name} ({run.job_id}) has not ended"
        if (run.stopped_at or 0) / 1000 > at:
            return f"{run.name} ({run.job_id}) ended after the archive of {_time(at)}"
    return ""


def describe_archive(complete: bytes | None) -> str:
    document = json.loads(complete or b"{}")
    count, size = int(document.get("files", 0)), int(document.get("bytes", 0))
    files = "1 file" if count == 1 else f"{count} files"
    return f"{files}, {size_text(size)}, as of {_time(float(document['at']))}"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def _runs(context: Context) -> Iterable[Run]:
    """Yield the environment's runs that AWS Batch remembers, for at least a day after their end."""
    existing = set(context.batch.queues())
    for queue in context.settings.environment.queues:
        name = context.queue(queue)
        if name in existing:
            yield from context.batch.list_recent(name)
