"""What a run takes along: the archive of its code, and where that and a long command are put."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.errors import ConfigError
from batchml.ops.code import CodeArchive, pack
from batchml.ops.delivery import FolderShelf, Shelf, deliver, told

if TYPE_CHECKING:
    from batchml.aws.batch.requests import Document
    from batchml.client.known import Known
    from batchml.client.order import Order, Ordered
    from batchml.client.place import Place
    from batchml.ops.sources import ImageSource


_CODE = "code"  # the folder of the bucket that jobs may read: cfn/roles.yaml

# In the registry that `batchml image push` pushes to.
_OURS = re.compile(r"\.dkr\.ecr\.[a-z0-9.-]+/batchml/[^/]+$")


class Depot(Struct, frozen=True):
    """Where what travels is put: a folder of this machine, or a bucket.

    `is_read` is False for a run whose image has nothing that would fetch it.
    """

    codes: str  # archives and documents, by content; empty where there is no place for them
    bucket: str = ""
    is_read: bool = True

    @property
    def documents(self) -> str:
        return self.codes if self.is_read else ""

    def address(self, archive: CodeArchive | None) -> str:
        """Where a run finds its code; empty without any."""
        return f"{self.codes}/{archive.name}" if archive else ""

    def store(self, key: str) -> str:
        """Where a run keeps what outlives it; in AWS only, `local` gives it folders."""
        return f"s3://{self.bucket}/runs/{key}" if self.bucket and self.is_read else ""


def find_depot(
    place: "Place", known: "Known | None", image: str, source: "ImageSource | None"
) -> Depot:
    """The depot of an environment, for a run of this image; one without a bucket has no place."""
    if known is None:
        return Depot(str(place.home.code))
    bucket = known.outputs().get("BucketName", "")
    is_read = source is not None or _OURS.search(image) is not None
    return Depot(f"s3://{bucket}/{_CODE}" if bucket else "", bucket, is_read)


def code_folder(ordered: "Ordered") -> Path | None:
    """The folder whose files travel; None where none do."""
    code = ordered.spec.code
    return None if code is False else ordered.folder if code is True else ordered.folder / code


def pack_code(
    place: "Place", order: "Order", ordered: "Ordered", depot: Depot, notices: list[str]
) -> CodeArchive | None:
    """The archive of the job's code; None where none is to travel. Raises ConfigError."""
    spec, folder, source = ordered.spec, ordered.folder, code_folder(ordered)
    if source is None:
        return None
    if not source.is_dir():
        raise ConfigError(str(folder / "job.toml"), [f"code: {source} is not a folder."])
    if not depot.is_read:
        raise ConfigError(
            spec.name,
            [
                f"code: {spec.image} is not an image that batchml built, so nothing in it would "
                f"fetch and unpack the folder in {place.env}. Set code = false and put the code "
                f"into the image, or name a folder below images/ whose Dockerfile builds on it."
            ],
        )
    if not depot.codes:
        raise ConfigError(
            place.env,
            [
                f"code: the environment has no bucket for it. Make one with "
                f"`batchml setup --env {place.env}`, or put the code into the image and set "
                f"code = false."
            ],
        )
    # The state folder holds keys, and every archive before this one.
    archive = pack(source, place.home.root, order.include_secrets)
    if archive.left_out:
        names = ", ".join(archive.left_out[:5]) + (", ..." if len(archive.left_out) > 5 else "")
        notices.append(f"Left behind, not being files of this folder: {names}.")
    return archive


def put(
    place: "Place",
    depot: Depot,
    archive: CodeArchive | None,
    document: "Document | None",
    tell: Callable[[str], None],
) -> None:
    """Put code and document where the run finds them, unless they are there; one look for each."""
    shelf: Shelf = FolderShelf(place.home.code)
    prefix = ""
    if depot.bucket:
        from batchml.aws.s3 import Bucket

        shelf, prefix = Bucket(place.connect(), depot.bucket), f"{_CODE}/"
    if document is not None:
        data = document.data
        deliver(shelf, prefix + document.name, lambda: data)
    if archive is not None:
        sent = deliver(shelf, prefix + archive.name, lambda: archive.data)
        if archive.files and (sent or depot.bucket):
            tell(told(archive, sent))
