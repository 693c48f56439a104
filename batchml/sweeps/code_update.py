"""Give a started sweep the present code, which its next batches of trials run."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.s3 import BucketStore
from batchml.context import Notify
from batchml.errors import BatchmlError, NotFound, UsageError
from batchml.jobs.code import CodeArchive, pack
from batchml.runs.package import PackageStore, put
from batchml.sweeps.started import StartedSweep

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.runtime.storage.store import Store

CODE = "code.json"  # in the sweep's store, once other code was sent


class CodeUpdate(Struct, frozen=True):
    """The code of the next batches. Only a name: all archives of the sweep are in one place."""

    name: str  # of the archive
    at: float  # when it was sent, in seconds since the epoch


def current_code(sweep: StartedSweep, store: "Store") -> CodeUpdate:
    """The code that the next batch runs. Raises StoreError."""
    data = store.get(CODE)
    try:
        found = msgspec.json.decode(data, type=CodeUpdate) if data else None
    except msgspec.DecodeError:
        found = None
    if found is None or "/" in found.name:
        return CodeUpdate(sweep.code.rpartition("/")[2], sweep.created_at)
    return found


def with_current_code(sweep: StartedSweep, store: "Store") -> StartedSweep:
    """The sweep with the code that was sent last, for the next batch. Raises StoreError."""
    if not sweep.code:
        return sweep
    codes = sweep.code.rpartition("/")[0]
    return replace(sweep, code=f"{codes}/{current_code(sweep, store).name}")


def check_code(context: "Context", sweep: StartedSweep, store: "Store") -> None:
    """Raise NotFound if the code that the next trials would run is gone. One call in AWS."""
    code = with_current_code(sweep, store).code
    if not code or _exists(context, code):
        return
    raise NotFound(
        "Code of the sweep", sweep.name, [],
        f"Its trials would run {code}, which is gone, so nothing was requested. Send the present "
        f"code with --code of `batchml sweeps resume {sweep.key}` or `batchml sweeps rerun "
        f"{sweep.key} --trial N`, or start a new sweep: batchml sweep FILE",
    )  # fmt: skip


def _exists(context: "Context", code: str) -> bool:
    if not code.startswith("s3://"):
        return Path(code).is_file()
    bucket, _, key = code.removeprefix("s3://").partition("/")
    return BucketStore(context.connect(), bucket).has(key)


def send_code(
    context: "Context",
    sweep: StartedSweep,
    store: "Store",
    *,
    include_secrets: bool = False,
    tell: Notify = lambda _: None,
) -> bool:
    """Send the present code, which trials run from the next batch on. Whether it is other code.

    Raises UsageError for a job without code of its own or whose folder is gone, ConfigError for
    code that cannot be packed, and what sending it raises.
    """
    if not sweep.code:
        raise UsageError("--code: its job has `code = false`, so the code is in the image.")
    if not Path(sweep.folder).is_dir():
        raise UsageError(f"--code: {sweep.folder}, the folder of the code, does not exist.")
    archive = _archive(context, sweep, include_secrets)
    bucket = sweep.runs.removeprefix("s3://").partition("/")[0]
    if not context.settings.is_local:
        context.home.prepare()
    put(context, PackageStore(sweep.code.rpartition("/")[0], bucket), archive, None, tell)
    if archive.name == current_code(sweep, store).name:
        tell("The code is the same as before.")
        return False
    store.put(CODE, msgspec.json.encode(CodeUpdate(archive.name, context.clock.now())))
    return True


def describe_old_code(context: "Context", sweep: StartedSweep, store: "Store") -> str:
    """One line for trials that will run other code than the folder has now; otherwise "".

    Also "" where the two cannot be compared. Raises StoreError.
    """
    if not sweep.code or not Path(sweep.folder).is_dir():
        return ""
    known = current_code(sweep, store)
    try:
        if _archive(context, sweep, include_secrets=True).name == known.name:
            return ""
    except BatchmlError:
        return ""
    sent = datetime.fromtimestamp(known.at).astimezone()
    day = "" if context.clock.now() - known.at < 12 * 3600 else f"{sent:%Y-%m-%d} "
    return f"Runs the code of {day}{sent:%H:%M}; {sweep.folder} has changed since: --code sends it."


def _archive(context: "Context", sweep: StartedSweep, include_secrets: bool) -> CodeArchive:
    return pack(Path(sweep.folder), context.home.root, include_secrets)
