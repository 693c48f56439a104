"""The workspace of an environment in AWS: a file system that this machine cannot mount.

Files travel through the environment's bucket, and a carrier brings them in or out
(`client/carriers.py`). One of FSx for Lustre is linked to the bucket: `client/workspace_linked.py`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchml.client.linked_files import tree_of
from batchml.client.workspace_local import account, as_entry, as_report, told
from batchml.errors import BatchmlError, NotFound, TransferFailed, UsageError
from batchml.model.workspace import MOUNT, Entry, Report, Watch, below, ignore
from batchml.ops.workspace import landing, ways
from batchml.runtime.transfer.archive import archive
from batchml.runtime.transfer.backends import Vault, open_vault
from batchml.runtime.transfer.main import MARK
from batchml.runtime.transfer.manifest import read_book
from batchml.runtime.transfer.receive import Result, receive, together
from batchml.runtime.transfer.restore import ArchiveSource, held
from batchml.runtime.transfer.tree import Tree, from_line
from batchml.runtime.transfer.worker import LISTING

if TYPE_CHECKING:
    from batchml.client.carriers import Carriers
    from batchml.client.place import Place
    from batchml.client.workspace import Workspace
    from batchml.model.run import Run
    from batchml.runtime.storage.store import Store

ARCHIVE = "workspace"  # below the bucket; of FSx what it is linked to: cfn/storage.yaml
_ASKED = 2  # runs, one after the other
_PATIENCE = 20.0  # seconds for each
STAGED = "runs/carry"  # below the bucket: what is on its way; a rule of the bucket empties it

# `opener(s3://BUCKET/PREFIX)` -> what is stored there
Opener = Callable[[str], Vault]
# `ask(command)` -> what it prints in a run that is RUNNING; None where none can be asked
Ask = Callable[[tuple[str, ...]], bytes | None]


def find(place: "Place", tell: Callable[[str], None] = lambda words: None) -> "Workspace":
    """The workspace of an environment; of one that shares it, the other's.

    `tell` hears, in words, of the runs that carry. Raises NotFound where there is none, and what
    reading the stacks raises.
    """
    from batchml.aws.s3 import Bucket
    from batchml.client.carriers import Runs
    from batchml.client.known import open_known

    place = owner_of(place)
    known = open_known(place)
    outputs = known.outputs()
    bucket, file_system = outputs.get("BucketName", ""), outputs.get("FileSystemId", "")
    if not bucket or not file_system:
        raise NotFound("Workspace", place.env, [], _why_none(place))
    session = place.connect()
    environ = session.variables(os.environ)

    def opener(url: str) -> Vault:
        return open_vault(url, environ)

    def at_work() -> int:
        return unfinished(place)

    carriers = Runs(place, Bucket(session, bucket), tell)
    if not outputs.get("LustreMountName"):
        return CarriedWorkspace(
            place, bucket, file_system, carriers, opener, at_work,
            lambda command: ask_running(place, command),
        )  # fmt: skip
    from batchml.aws.fsx import FileSystems
    from batchml.client.workspace_linked import LinkedWorkspace
    from batchml.model.names import new_token
    from batchml.ops.linked import Linked
    from batchml.runtime.transfer.backends import PosixVault

    linked = Linked(FileSystems(session), file_system, place.clock, lambda: new_token(os.urandom))
    vault = PosixVault.open(f"s3://{bucket}/{ARCHIVE}", environ)
    return LinkedWorkspace(
        place, bucket, file_system, carriers, opener, at_work, linked, vault,
        Bucket(session, bucket),
    )  # fmt: skip


def ask_running(place: "Place", command: tuple[str, ...]) -> bytes | None:
    """What a command prints in a run of the environment that is RUNNING now, for one that is spares
    a carrier; None where there is none, or where nobody can go in."""
    from batchml.client.doors import Seat, ask_inside

    try:
        running = _running(place)
    except BatchmlError:
        return None
    for run in running[:_ASKED]:
        try:
            found = ask_inside(place, Seat(run), command, _PATIENCE)
        except BatchmlError:
            continue
        if found.code == 0:
            return found.out
    return None


def _running(place: "Place") -> "list[Run]":
    there = set(place.batch.queues())
    names = [place.queue(each) for each in place.settings.environment.queues]
    return [
        run
        for name in names
        if name in there
        for run in place.batch.list_recent(name)
        if run.status.value == "RUNNING" and not (run.array_size or run.nodes)
    ]


def listing_command(path: str) -> tuple[str, ...]:
    """What lists a folder of the workspace inside a container."""
    command = ("python", "-m", "batchml.runtime.transfer.main", "list", MOUNT)
    return (*command, f"--below={path}") if path else command


def read_listing(printed: bytes | None) -> list[Entry] | None:
    """What `listing_command` printed; None where it is no list. Pure."""
    lines = (printed or b"").decode("utf-8", "replace").splitlines()
    said = next((each for each in reversed(lines) if each.startswith(MARK)), "")
    try:
        found = json.loads(said.removeprefix(MARK))["entries"]
        return [as_entry(from_line(json.dumps(each))) for each in found]
    except (ValueError, TypeError, KeyError):
        return None


def unfinished(place: "Place") -> int:
    """How many runs have not ended, at least, here and where the workspace is shared.

    A queue that was not made yet has none.
    """
    from batchml.aws.batch.resources import ComputeApi
    from batchml.aws.naming import queue_name
    from batchml.model.environment import sharers

    api, known = ComputeApi(place.connect()), place.settings.environments
    there = api.queues()
    names = {
        queue_name(env, known[env], queue)
        for env in (place.env, *sharers(place.env, known))
        for queue in known[env].queues
    }
    return sum(api.unfinished(name) for name in sorted(names & set(there)))


def owner_of(place: "Place") -> "Place":
    """The place of the environment whose workspace it is."""
    owner = place.settings.environment.storage.shared_with
    if not owner:
        return place
    from batchml.settings import Setting

    env = Setting(owner, f"env.{place.env}.storage.shared_with")
    place.settings.check(owner)
    return place.with_settings(replace(place.settings, env=env))


def _why_none(place: "Place") -> str:
    if place.settings.environment.storage.workspace == "none":
        return f'It has none: env.{place.env}.storage.workspace = "none".'
    return f"It is made by batchml setup --env {place.env}."


class CarriedWorkspace:
    """One that only carriers reach: EFS. The methods are `Workspace`'s."""

    kind = "EFS"

    def __init__(
        self,
        place: "Place",
        bucket: str,
        file_system: str,
        carriers: "Carriers",
        opener: Opener,
        at_work: Callable[[], int],
        ask: Ask = lambda command: None,
    ) -> None:
        self._place, self._bucket, self._id = place, bucket, file_system
        self._carriers, self._open = carriers, opener
        self._at_work = at_work  # how many runs have not ended, at least
        self._ask = ask

    @property
    def where(self) -> str:
        return f"{self.kind} {self._id} of {self._place.env}"

    @property
    def archive_place(self) -> str:
        return f"s3://{self._bucket}/{ARCHIVE}"

    def ls(self, path: str = "", *, deep: bool = False) -> list[Entry]:
        name = below(path)
        near = None if deep else read_listing(self._ask(listing_command(name)))
        if near is not None:
            return near
        self._do({"verb": "list", "path": name, "deep": deep}, ignore, path)
        lines = self._carriers.fetch(LISTING).decode("ascii").splitlines()
        return [as_entry(from_line(line)) for line in lines]

    def push(
        self, sources: Sequence[Path], dest: str, watch: Watch, *, checksum: bool = False
    ) -> Report:
        slash = "/" if dest.endswith("/") else ""
        found = ways([self._place.here / each for each in sources], below(dest) + slash, unknown)
        done, staged = Result(), []
        for way in found:
            place = self._staging("push", str(way.source), way.name)
            with told():
                vault = self._open(place)
                vault.proves = True  # who takes it from there compares it
                one = archive(
                    tree_of(way), vault, account(_saying(watch, "sending")), checksum,
                    overwrite=True,
                )  # fmt: skip
            done = together(done, one)
            staged.append({"place": place, "below": way.into})
        if done.missing:
            return as_report("push", self.where, done)
        report = self._carry({"verb": "push", "staged": staged, "checksum": checksum}, watch)
        self._unstage(each["place"] for each in staged)
        left_out = tuple(map(str, done.left_out)) + report.left_out
        return replace(report, verb="push", place=self.where, left_out=left_out)

    def pull(self, path: str, dest: Path | None, watch: Watch, *, checksum: bool = False) -> Report:
        name = below(path)
        staging = self._staging("pull", name)
        found = self._do({"verb": "pull", "path": name, "place": staging}, watch, path)
        carried, is_folder = self._report(found), found.get("kind") != "file"
        vault = self._open(staging)
        with told():
            entries = held(read_book(vault))
        target = landing(name, is_folder, dest, self._place.here)
        source, onto = landed(ArchiveSource(vault, entries, str(target)), target, is_folder)
        with told():
            done = receive(source, onto, "", account(watch), "pulling", checksum)
        if not carried.missing and not done.missing:
            self._unstage([staging])
        report = as_report("pull", str(target), done)
        return replace(
            report, left_out=carried.left_out + report.left_out,
            missing=carried.missing + report.missing, notes=carried.notes,
        )  # fmt: skip

    def archive(
        self, to: str, watch: Watch, *, delete: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        place = self._asked(to)
        if delete:
            self._refuse_at_work()
        order = {"verb": "archive", "place": place, "delete": delete, "checksum": checksum,
                 "overwrite": overwrite}  # fmt: skip
        return replace(self._carry(order, watch), verb="archive", place=place)

    def restore(
        self, source: str, watch: Watch, *, partial: bool = False, checksum: bool = False,
        overwrite: bool = False,
    ) -> Report:  # fmt: skip
        place = self._asked(source)
        order = {"verb": "restore", "place": place, "partial": partial, "checksum": checksum,
                 "overwrite": overwrite}  # fmt: skip
        return replace(self._carry(order, watch), verb="restore", place=place)

    def remove(self, paths: Sequence[str], watch: Watch) -> Report:
        order = {"verb": "remove", "paths": [below(each) for each in paths]}
        return replace(self._carry(order, watch), verb="rm", place=self.where)

    # --- what they have in common -----------------------------------------------------------------

    def _carry(self, order: Mapping[str, Any], watch: Watch) -> Report:
        return self._report(self._do(order, watch))

    def _do(self, order: Mapping[str, Any], watch: Watch, path: str = "") -> dict[str, Any]:
        """Let a carrier do it; what it says. Raises NotFound, TransferFailed, CarrierFailed."""
        found = self._carriers.carry(order, watch)
        if found.get("absent"):
            raise NotFound("In the workspace,", path, [], f"Look: {self._command('ls')}")
        if found.get("error"):
            raise TransferFailed(f"{found['error']}. The same command goes on where it was.")
        return found

    def _report(self, found: Mapping[str, Any]) -> Report:
        cost = self._carriers.cost()
        return Report(
            files=found.get("files", 0),
            size=found.get("bytes", 0),
            unchanged=found.get("unchanged", 0),
            removed=found.get("removed", 0),
            left_out=tuple(found.get("leftOut", ())),
            missing=tuple(found.get("missing", ())),
            notes=(f"The run that carried it: {cost}",) if cost else (),
        )

    def _asked(self, place: str) -> str:
        """The place of an archive. Raises UsageError for one that no carrier reaches."""
        if place and not place.startswith("s3://"):
            raise UsageError(
                f"{place}: runs in AWS do not reach that. Give s3://BUCKET/PREFIX; or copy files "
                f"to this machine with {self._command('pull')}."
            )
        return place.rstrip("/") or self.archive_place

    def _command(self, verb: str) -> str:
        return f"batchml workspace {verb} --env {self._place.env}"

    def _refuse_at_work(self) -> None:
        """Nothing is deleted under runs. Raises UsageError."""
        count = self._at_work()
        if count:
            words = "1 run goes on" if count == 1 else f"{count} runs go on"
            raise UsageError(
                f"{words} in {self._place.env}, and may work with the workspace: nothing was "
                f"archived. Wait for them, or archive without --delete."
            )

    def _staging(self, *words: str) -> str:
        """Where something is on its way: the same place for the same, so that it can go on."""
        digest = hashlib.sha256("\0".join((self._place.env, *words)).encode()).hexdigest()
        return f"s3://{self._bucket}/{STAGED}/{digest[:24]}"

    def _unstage(self, places: Any) -> None:
        """Remove what has arrived. What stays for any reason, a rule of the bucket removes."""
        for place in places:
            try:
                store: Store = self._open(place)
                store.delete(*store.keys(""))
            except (BatchmlError, OSError):
                continue


def _saying(watch: Watch, doing: str) -> Watch:
    return lambda now: watch(replace(now, doing=doing))


def unknown(_: str) -> bool:
    """Nobody here knows what is a folder there. What is in the way is told by the carrier."""
    return False


def landed(source: Any, target: Path, is_folder: bool) -> tuple[Any, Tree]:
    """A source and the folder into which it goes: a file under the name that it is to have."""
    if is_folder:
        return source, Tree(str(target))
    return Renamed(source, target.name), Tree(str(target.parent))


class Renamed:
    """A source of one file, under another name."""

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._name = source, name
        self._was = ""

    def entries(self, left_out: Any) -> Any:
        for entry in self._source.entries(left_out):
            self._was = entry.path
            yield entry._replace(path=self._name)

    def open(self, entry: Any) -> Any:
        return self._source.open(entry._replace(path=self._was))
