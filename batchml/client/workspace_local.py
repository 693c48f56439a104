"""The workspace of `local`: a folder of this machine."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchml.errors import NotFound, TransferFailed, UsageError
from batchml.model.workspace import Entry, Progress, Report, Watch, below
from batchml.ops.workspace import Way, landing, ways
from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer import tree as carry_tree
from batchml.runtime.transfer.archive import archive, archive_and_free
from batchml.runtime.transfer.backends import Vault, open_vault
from batchml.runtime.transfer.main import listing
from batchml.runtime.transfer.parallel import Account
from batchml.runtime.transfer.receive import FolderSource, Result, receive, together
from batchml.runtime.transfer.remove import remove
from batchml.runtime.transfer.restore import Incomplete, restore
from batchml.runtime.transfer.tree import CarryError, Tree


class LocalWorkspace:
    """The methods are `Workspace`'s. `home` is the state folder, `here` the user's."""

    def __init__(self, home: Path, here: Path, running: Callable[[], int] = lambda: 0) -> None:
        self._root = home / "workspace"
        self._default = home / "archive"
        self._here = here
        self._running = running
        self._tree = Tree(str(self._root))

    @property
    def where(self) -> str:
        return str(self._root)

    @property
    def archive_place(self) -> str:
        return str(self._default)

    def ls(self, path: str = "", *, deep: bool = False) -> list[Entry]:
        self._root.mkdir(parents=True, exist_ok=True)
        name = self._inside(path)
        with _missing(path):
            return [as_entry(each) for each in listing(self._tree, name, deep)]

    def push(
        self, sources: Sequence[Path], dest: str, watch: Watch, *, checksum: bool = False
    ) -> Report:
        self._root.mkdir(parents=True, exist_ok=True)
        slash = "/" if dest.endswith("/") else ""
        found = ways([self._here / each for each in sources], self._inside(dest) + slash,
                     self._is_folder)  # fmt: skip
        done = Result()
        for way in found:
            self._refuse_itself(way)
            done = together(done, self._push(way, watch, checksum))
        return as_report("push", self.where, done)

    def _push(self, way: Way, watch: Watch, checksum: bool) -> Result:
        top = way.source if way.is_folder else way.source.parent
        source = FolderSource(Tree(str(top)), "" if way.is_folder else way.source.name)
        with told():
            done = receive(source, self._tree, way.name, account(watch), "pushing", checksum)
        return _named(done, way.name if way.is_folder else "")

    def pull(self, path: str, dest: Path | None, watch: Watch, *, checksum: bool = False) -> Report:
        name = self._inside(path)
        there = self._tree.look(name)
        if there is None:
            raise _no_such(path)
        target = landing(below(path) or name, there.kind == carry_tree.FOLDER, dest, self._here)
        source = FolderSource(self._tree, name)
        tree, onto = (
            (Tree(str(target)), "")
            if there.kind == carry_tree.FOLDER
            else (Tree(str(target.parent)), target.name)
        )
        with told():
            done = receive(source, tree, onto, account(watch), "pulling", checksum)
        return as_report("pull", str(target), done)

    def archive(
        self, to: str, watch: Watch, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        if delete:
            self._refuse_at_work("nothing was archived")
        self._root.mkdir(parents=True, exist_ok=True)
        place, vault = self.open_archive(to)
        with told():
            if not delete:
                done = archive(self._tree, vault, account(watch), checksum, overwrite=overwrite)
            else:
                done = archive_and_free(
                    self._tree, vault, account(watch), checksum, overwrite,
                    lambda: self._refuse_at_work("all is archived, and nothing was freed"),
                )  # fmt: skip
        return as_report("archive", place, done)

    def restore(
        self, source: str, watch: Watch, *, partial: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        place, vault = self.open_archive(source)
        with told():
            try:
                done = restore(
                    vault, self._tree, account(watch), partial, checksum, overwrite=overwrite
                )
            except Incomplete as error:
                raise TransferFailed(
                    f"{place}: {error}. Nothing was written. Finish it where the files are "
                    "(batchml workspace archive), or take what there is: --partial"
                ) from error
        return as_report("restore", place, done)

    def _refuse_at_work(self, so_far: str) -> None:
        """Nothing is deleted under runs. Raises UsageError."""
        if count := self._running():
            words = "1 run goes on and works" if count == 1 else f"{count} runs go on and work"
            raise UsageError(
                f"{words} with the workspace, checkpoints among it: {so_far}. Wait for them "
                "(batchml wait), or archive without --delete."
            )

    def remove(self, paths: Sequence[str], watch: Watch) -> Report:
        return as_report("rm", self.where, remove(self._tree, map(self._itself, paths)))

    def _itself(self, path: str) -> str:
        """As `_inside`, but of a link the link."""
        above, _, name = self._inside_words(path).rpartition("/")
        return carry_tree.joined(self._inside(above), name)

    def open_archive(self, given: str = "") -> tuple[str, Vault]:
        """Where an archive is, and the archive. Raises UsageError for a place that none can be."""
        place = given or self.archive_place
        if not place.startswith("s3://"):
            if "://" in place:
                raise UsageError(f"{place}: an archive is a folder, or s3://BUCKET/PREFIX.")
            place = os.path.realpath(self._here / place)
            root = os.path.realpath(self._root)
            if f"{place}/".startswith(f"{root}/") or f"{root}/".startswith(f"{place}/"):
                raise UsageError(
                    f"{place} and the workspace lie in each other: name another folder."
                )
        with told():
            return place, open_vault(place, os.environ)

    def _inside(self, path: str) -> str:
        """A path below the workspace, links on the way followed. Raises UsageError."""
        real = os.path.realpath(self._root)
        end = os.path.realpath(os.path.join(real, self._inside_words(path)))
        if end != real and not end.startswith(f"{real}/"):
            raise UsageError(f"{path!r} leads out of the workspace, to {end}.")
        return os.path.relpath(end, real) if end != real else ""

    def _inside_words(self, path: str) -> str:
        """A path below the workspace, by its words. Raises UsageError."""
        real = os.path.realpath(self._root)
        if path == real or path.startswith((f"{real}/", f"{self._root}/")):  # as a program has it
            path = os.path.relpath(path, real if path.startswith(real) else self._root)
        return below(path)

    def _is_folder(self, name: str) -> bool:
        found = self._tree.look(name)
        return found is not None and found.kind == carry_tree.FOLDER

    def _refuse_itself(self, way: Way) -> None:
        root, source = os.path.realpath(self._root), str(way.source)
        if way.is_folder and f"{root}/".startswith(f"{source.rstrip('/')}/"):
            raise UsageError(f"The workspace itself lies in {source}: push what else is in it.")


def account(watch: Watch) -> Account:
    return Account(lambda now: watch(Progress(*now)))


def as_entry(entry: carry_tree.Entry) -> Entry:
    return Entry(*entry[:3], *entry[3:7])  # type: ignore[arg-type]


def as_report(verb: str, place: str, done: Result) -> Report:
    return Report(
        verb, place, done.files, done.size, done.unchanged, done.removed,
        tuple(map(str, done.left_out)), tuple(map(str, done.missing)),
    )  # fmt: skip


@contextmanager
def told() -> Iterator[None]:
    """What ends a transfer, in our words."""
    try:
        yield
    except StoreError as error:
        hint = ""
        if not os.environ.get("AWS_ACCESS_KEY_ID") and "key" in str(error):
            hint = '\nGive it keys: eval "$(aws configure export-credentials --format env)"'
        raise TransferFailed(f"{error}. The same command goes on where it was.{hint}") from error
    except CarryError as error:
        raise TransferFailed(f"{error}.") from error


@contextmanager
def _missing(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise _no_such(path) from None


def _no_such(path: str) -> NotFound:
    return NotFound("In the workspace,", path, [], "See what is there: batchml workspace ls")


def _named(done: Result, above: str) -> Result:
    """With paths from the workspace on."""

    def moved(names: tuple[carry_tree.LeftOut, ...]) -> tuple[carry_tree.LeftOut, ...]:
        return tuple(each._replace(path=carry_tree.joined(above, each.path)) for each in names)

    return done._replace(left_out=moved(done.left_out), missing=moved(done.missing))
