"""What `local reset` asks, and what it needs to know before it deletes data."""

import sys
from typing import TYPE_CHECKING

import typer

from batchml.errors import TransferFailed, UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.local.home import Home

_WORD = "delete"


class Data:
    """The workspace, data sets and volumes of a state folder, about to be deleted."""

    def __init__(self, place: "Place", archive: str, allowed: tuple[str, ...]) -> None:
        from batchml.client.workspace_local import LocalWorkspace
        from batchml.local.deletion_guard import NAMES

        unknown = [name for name in allowed if name not in NAMES]
        if unknown:
            raise UsageError(f"--allow-loss {unknown[0]}: it is {' or '.join(NAMES)}.")
        self._home, self._allowed, self._given = place.home, allowed, archive
        self._clock = place.clock
        workspace = LocalWorkspace(self._home.root, place.here)
        self._place, self._vault = workspace.open_archive(archive)

    def check(self, so_far: str, reads: bool = False) -> None:
        """Raise TransferFailed where something would be lost. `so_far` is what was done.

        `reads`: all of the archive, and not only its papers.
        """
        from batchml.cli.transfers import shown
        from batchml.client.workspace_local import account
        from batchml.local.deletion_guard import WORKSPACE, losses, told

        with shown(self._clock) as watch:
            reads = reads and WORKSPACE not in self._allowed
            found = losses(self._home, self._vault, account(watch) if reads else None)
        lines = told(found, self._allowed)
        if not lines:
            return
        names = [loss.name for loss in found if loss.name not in self._allowed]
        to = f" --to {self._given}" if self._given else ""
        ways = [f"  batchml workspace archive{to}   # keeps it"] if "workspace" in names else []
        allow = " ".join(f"--allow-loss {name}" for name in names)
        ways.append(f"  {allow}   # with this command: it may go")
        raise TransferFailed("\n".join([f"Data would be lost: {so_far}.", *lines, *ways]))

    def empty(self) -> None:
        from batchml.local.deletion_guard import empty

        empty(self._home, self._vault)

    @property
    def way_back(self) -> str:
        back = "batchml workspace restore" + (f" --from {self._given}" if self._given else "")
        return f"What was archived comes back with: {back}"


def ask(home: "Home", data: Data | None) -> None:
    """Have the user say that all may go. Raises UsageError where nobody can be asked."""
    if not sys.stdin.isatty():
        more = ", workspace, data sets and volumes" if data is not None else ""
        raise UsageError(
            f"This forgets every local job and sweep, and their outputs{more}. Say so with --yes."
        )
    if data is None:
        typer.confirm(f"Forget every job, sweep, log and output in {home.root}?", abort=True)
        return
    print(
        f"This deletes every job, sweep, log and output in {home.root}, its workspace, data sets "
        f"and volumes."
    )
    if typer.prompt(f"Type {_WORD} to do it", default="", show_default=False) != _WORD:
        raise UsageError("Nothing was done.")
