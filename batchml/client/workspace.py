"""The workspace of an environment: one protocol, whether it is a folder here or a file system."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from batchml.model.workspace import Entry, Report, Watch

if TYPE_CHECKING:
    from batchml.client.place import Place


class Workspace(Protocol):
    """The folder that all runs of an environment share.

    Paths are below the workspace, `/` between their parts; `""` is all of it, and `/workspace/x` is
    `x`. All methods raise UsageError for a path that leads out of it, NotFound for one that is not
    there, and TransferFailed where a transfer could not be finished: the same call goes on.
    """

    @property
    def where(self) -> str:
        """Where it is, for people: a folder of this machine, a file system."""

    @property
    def archive_place(self) -> str:
        """Where `archive` and `restore` go unless they are told: a folder, or s3://BUCKET/PREFIX."""

    def ls(self, path: str = "", *, deep: bool = False) -> list[Entry]:
        """What lies in a folder, by name; with `deep` all below it. Of a file, the file."""

    def push(
        self, sources: Sequence[Path], dest: str, watch: Watch, *, checksum: bool = False
    ) -> Report:
        """Copy files and folders of this machine into the workspace.

        One source becomes `dest`; several, or a `dest` that ends with a slash, go into it. Empty:
        each under its own name. `checksum` compares contents where size and time are the same.
        """

    def pull(self, path: str, dest: Path | None, watch: Watch, *, checksum: bool = False) -> Report:
        """Copy a file or folder out; None: into the current folder, under its own name."""

    def archive(
        self, to: str, watch: Watch, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        """Bring the archive at `to` (empty: `archive_place`) to what the workspace holds.

        It is complete when the report has nothing missing. `delete` then frees what is archived;
        `overwrite` lets go of what was freed, where the workspace has another of that name.
        """

    def restore(
        self, source: str, watch: Watch, *, partial: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        """Bring back what is missing, from a complete archive; `partial`: from any.

        `overwrite`: also what is another here than in the archive, which else stays and is named.
        """

    def remove(self, paths: Sequence[str], watch: Watch) -> Report:
        """Delete files and folders for good, of links the link. `removed` is how many files."""


def find_workspace(place: "Place", tell: Callable[[str], None]) -> Workspace:
    """The workspace of an environment; `tell` hears what is done for it meanwhile, such as a run
    that carries. Raises NotFound for an environment that has none.
    """
    if place.settings.is_local:
        from batchml.client.workspace_local import LocalWorkspace
        from batchml.local.deletion_guard import running

        home = place.home
        home.prepare()
        return LocalWorkspace(home.root, place.here, lambda: running(home))
    from batchml.client.workspace_aws import find

    return find(place, tell)
