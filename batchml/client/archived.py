"""Whether all that is in a workspace is in its archive, so that its file system may go."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchml.errors import UsageError
from batchml.runtime.transfer.manifest import COMPLETE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchml.client.place import Place
    from batchml.model.run import Run

_REMEMBERED = 86_400.0  # seconds; AWS Batch: "at least 24 hours"
# Carriers that leave the workspace as it was.
_READERS = ("workspace-archive", "workspace-list", "workspace-pull", "workspace-verify")


def check_archived(place: "Place", allowed: Sequence[str]) -> str:
    """What is said of the archive before its file system goes.

    Raises UsageError where the archive is not complete, or older than the last run; a file system
    that is named in `allowed` may go all the same.
    """
    from batchml.aws.s3 import Bucket
    from batchml.client.known import read_outputs
    from batchml.client.workspace_aws import ARCHIVE

    outputs = read_outputs(place)
    file_system, bucket = outputs.get("FileSystemId", ""), outputs.get("BucketName", "")
    if not file_system or not bucket:
        return "There is no file system to delete."
    if file_system in allowed:
        return f"{file_system} goes without a look at its archive."
    found = Bucket(place.connect(), bucket).get(f"{ARCHIVE}/{COMPLETE}")
    why = why_not(found, _runs(place), place.clock.now())
    if why:
        raise UsageError(
            f"Nothing was changed: {why}. First: batchml workspace archive --env {place.env}. What "
            f"is not archived may go with --allow-loss {file_system}."
        )
    return f"s3://{bucket}/{ARCHIVE} holds {holds(found)}."


def why_not(complete: bytes | None, runs: "Iterable[Run]", now: float) -> str:
    """Why a file system has to stay; empty where all of it is archived. Pure.

    `complete` is the paper that says an archive is whole. Nobody but runs writes to a workspace,
    and of older ones than a day none may be remembered.
    """
    try:
        at = float(json.loads(complete or b"{}")["at"])
    except (ValueError, TypeError, KeyError):
        return "there is no complete archive of the workspace"
    if at < now - _REMEMBERED:
        return f"the archive is of {_time(at)}, and what ran since may be forgotten"
    for run in runs:
        if run.name in _READERS:
            continue
        if not run.status.is_terminal:
            return f"{run.name} ({run.job_id}) has not ended"
        if (run.stopped_at or 0) / 1000 > at:
            return f"{run.name} ({run.job_id}) has ended after the archive of {_time(at)}"
    return ""


def holds(complete: bytes | None) -> str:
    from batchml.runtime.entry.folders import size_text

    told = json.loads(complete or b"{}")
    count = int(told.get("files", 0))
    files = "1 file" if count == 1 else f"{count} files"
    return f"{files}, {size_text(int(told.get('bytes', 0)))}, as of {_time(float(told['at']))}"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def _runs(place: "Place") -> "Iterable[Run]":
    """Runs of the environment that AWS Batch remembers: for at least a day after their end."""
    there = set(place.batch.queues())
    for queue in place.settings.environment.queues:
        name = place.queue(queue)
        if name in there:
            yield from place.batch.list_recent(name)
