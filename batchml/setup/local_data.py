"""Delete workspace, data sets and volumes of a state folder: `local reset --delete-data`."""

from batchml.context import Context
from batchml.errors import TransferFailed, UsageError
from batchml.local.deletion_guard import NAMES, WORKSPACE, delete_data, describe_losses, find_losses
from batchml.workspace.commands import show_progress
from batchml.workspace.local import LocalWorkspace, track_progress


class LocalData:
    """The workspace, data sets and volumes of a state folder, and the archive of the workspace."""

    def __init__(self, context: Context, archive: str, allowed: tuple[str, ...]) -> None:
        """`archive`: the location that the user gave. `allowed`: names of data that may be lost."""
        unknown = [name for name in allowed if name not in NAMES]
        if unknown:
            raise UsageError(f"--allow-loss {unknown[0]}: choose {' or '.join(NAMES)}.")
        self._home, self._allowed, self._given = context.home, allowed, archive
        self._clock = context.clock
        _, self._store = LocalWorkspace(self._home.root, context.here).open_archive(archive)

    def check(self, so_far: str, reads: bool = False) -> None:
        """Raise TransferFailed if data would be lost. `so_far`: what was done until now.

        With `reads`, the whole archive is read and verified, not only its manifest.
        """
        with show_progress(self._clock) as watch:
            reads = reads and WORKSPACE not in self._allowed
            found = find_losses(self._home, self._store, track_progress(watch) if reads else None)
        lines = describe_losses(found, self._allowed)
        if not lines:
            return
        names = [loss.name for loss in found if loss.name not in self._allowed]
        to = f" --to {self._given}" if self._given else ""
        commands = [f"  batchml workspace archive{to}   # keeps it"] if WORKSPACE in names else []
        flags = " ".join(f"--allow-loss {name}" for name in names)
        commands.append(f"  {flags}   # with this command: allows the loss")
        raise TransferFailed("\n".join([f"Data would be lost: {so_far}.", *lines, *commands]))

    def delete(self) -> None:
        """Delete all of it."""
        delete_data(self._home, self._store)

    @property
    def restore_hint(self) -> str:
        """How to restore the archived workspace."""
        command = "batchml workspace restore" + (f" --from {self._given}" if self._given else "")
        return f"To restore the archived files: {command}"
