"""Today's code for a sweep that was started with other: what it runs from its next wave on."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.client.luggage import Depot, put
from batchml.client.submission import Tell
from batchml.client.sweeping.freezing import Frozen
from batchml.errors import BatchmlError, NotFound, UsageError
from batchml.ops.code import CodeArchive, pack

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.runtime.storage.store import Store

CODE = "code.json"  # on the board, once other code was sent


class Coded(Struct, frozen=True):
    """The code of the waves to come. Only a name: it lies where all of the sweep's code lies."""

    name: str  # of the archive
    at: float  # when it was sent, in seconds since the epoch


def coded(frozen: Frozen, board: "Store") -> Coded:
    """The code that the next wave runs. Raises StoreError."""
    data = board.get(CODE)
    try:
        found = msgspec.json.decode(data, type=Coded) if data else None
    except msgspec.DecodeError:
        found = None
    if found is None or "/" in found.name:
        return Coded(frozen.code.rpartition("/")[2], frozen.created_at)
    return found


def with_code(frozen: Frozen, board: "Store") -> Frozen:
    """As the next wave takes it: with the code that was sent last. Raises StoreError."""
    if not frozen.code:
        return frozen
    codes = frozen.code.rpartition("/")[0]
    return replace(frozen, code=f"{codes}/{coded(frozen, board).name}")


def check_code(place: "Place", frozen: Frozen, board: "Store") -> None:
    """Raise NotFound where the code is gone that the next trials would run; in AWS one call."""
    code = with_code(frozen, board).code
    if not code or _is_kept(place, code):
        return
    raise NotFound(
        "Code of the sweep", frozen.name, [],
        f"Its trials would run {code}, which is gone, so nothing was asked of it. Send the code as "
        f"it is now with --code of `batchml sweeps resume {frozen.key}` or `batchml sweeps rerun "
        f"{frozen.key} --trial N`, or start a new sweep: batchml sweep FILE",
    )  # fmt: skip


def _is_kept(place: "Place", code: str) -> bool:
    if not code.startswith("s3://"):
        return Path(code).is_file()
    from batchml.aws.s3 import Bucket

    bucket, _, key = code.removeprefix("s3://").partition("/")
    return Bucket(place.connect(), bucket).has(key)


def send_code(
    place: "Place",
    frozen: Frozen,
    board: "Store",
    *,
    include_secrets: bool = False,
    tell: Tell = lambda _: None,
) -> bool:
    """Have its trials run the code as it is now, from the next wave on; whether that is other code.

    Raises UsageError for a job without code of its own, or whose folder is gone, ConfigError for
    code that cannot travel, and what sending it raises.
    """
    if not frozen.code:
        raise UsageError("--code: its job has `code = false`, so the code is in the image.")
    if not Path(frozen.folder).is_dir():
        raise UsageError(f"--code: {frozen.folder}, whose files travelled, is not there.")
    archive = _archive(place, frozen, include_secrets)
    bucket = frozen.runs.removeprefix("s3://").partition("/")[0]
    if not place.settings.is_local:
        place.home.prepare()
    put(place, Depot(frozen.code.rpartition("/")[0], bucket), archive, None, tell)
    if archive.name == coded(frozen, board).name:
        tell("The code is what its trials ran already.")
        return False
    board.put(CODE, msgspec.json.encode(Coded(archive.name, place.clock.now())))
    return True


def old_code(place: "Place", frozen: Frozen, board: "Store") -> str:
    """That trials will run other code than lies there now, in one line; "" where they do not.

    Nothing is said of what cannot be compared. Raises StoreError.
    """
    if not frozen.code or not Path(frozen.folder).is_dir():
        return ""
    known = coded(frozen, board)
    try:
        if _archive(place, frozen, include_secrets=True).name == known.name:
            return ""
    except BatchmlError:
        return ""
    sent = datetime.fromtimestamp(known.at).astimezone()
    day = "" if place.clock.now() - known.at < 12 * 3600 else f"{sent:%Y-%m-%d} "
    return f"With the code of {day}{sent:%H:%M}; {frozen.folder} differs now: --code sends it."


def _archive(place: "Place", frozen: Frozen, include_secrets: bool) -> CodeArchive:
    return pack(Path(frozen.folder), place.home.root, include_secrets)
