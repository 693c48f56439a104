"""What a carrier does in its container: an order in, a report out, between workspace and bucket.

    python -m batchml.runtime.transfer.worker

The order is JSON in `BATCHML_CARRY`: a verb with what it takes. Report, progress and what else
there is go to the run's own place in the bucket. A carrier that is stopped or loses its host goes
on where it was: its next attempt has the same order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Dict, List, Optional

from batchml.runtime.storage.store import Store, StoreError, open_store
from batchml.runtime.transfer.archive import archive, archive_and_free
from batchml.runtime.transfer.backends import Vault, open_posix
from batchml.runtime.transfer.main import in_words, listing, told
from batchml.runtime.transfer.manifest import read_book
from batchml.runtime.transfer.parallel import Account, Progress
from batchml.runtime.transfer.receive import Result, receive, together
from batchml.runtime.transfer.remove import remove
from batchml.runtime.transfer.restore import ArchiveSource, held, restore, verify
from batchml.runtime.transfer.tree import CarryError, Entry, LeftOut, Tree, to_line

ORDER = "BATCHML_CARRY"
DONE = "carry/report.json"
UNDER_WAY = "carry/progress.json"
LISTING = "carry/listing.jsonl"
TEMPORARY = 75  # the exit code of what may succeed later

_EVERY = 5.0  # seconds between two words about progress


class Alone(Tree):
    """One file of a folder, under a name that may be another."""

    def __init__(self, root: str, name: str, alias: str = "") -> None:
        super().__init__(root)
        self._name, self._alias = name, alias or name

    def walk(self, below: str, left_out: List[LeftOut]) -> Iterator[Entry]:
        found = self.look(self._name)
        if found is not None:
            yield found._replace(path=self._alias)

    def open(self, path: str) -> int:
        return super().open(self._name if path == self._alias else path)


class Absent(CarryError):
    """There is no such path in the workspace."""

    def __init__(self, path: str) -> None:
        super().__init__(f"there is no {path!r} in the workspace")


def tree_of(root: str, below: str) -> Tree:
    """What lies below a folder: a folder, or one file. Raises Absent."""
    found = Tree(root).look(below)
    if found is None:
        raise Absent(below)
    if found.kind == "folder":
        return Tree(os.path.join(root, below) if below else root)
    above, _, name = below.rpartition("/")
    return Alone(os.path.join(root, above) if above else root, name)


class Carrier:
    """Carries out one order."""

    def __init__(
        self,
        order: Mapping[str, Any],
        root: str,
        store: Store,
        vault: Callable[[str], Vault],
        account: Account,
    ) -> None:
        self._order, self._root, self._store = order, root, store
        self._vault, self._account = vault, account
        self._kind = ""  # of what was pulled

    def run(self) -> Dict[str, Any]:
        """The report. Raises CarryError, StoreError, OSError."""
        verb = self._order["verb"]
        does: Dict[str, Callable[[], Result]] = {
            "list": self._list,
            "push": self._push,
            "pull": self._pull,
            "archive": self._archive,
            "restore": self._restore,
            "verify": self._verify,
            "remove": lambda: remove(Tree(self._root), self._order["paths"]),
        }
        return {**told(does[verb]()), "kind": self._kind}

    @property
    def _checksum(self) -> bool:
        return bool(self._order.get("checksum"))

    @property
    def _overwrite(self) -> bool:
        return bool(self._order.get("overwrite"))

    def _list(self) -> Result:
        path = self._order["path"]
        try:
            entries = listing(Tree(self._root), path, bool(self._order.get("deep")))
        except FileNotFoundError:
            raise Absent(path) from None
        self._store.put(LISTING, "".join(to_line(each) + "\n" for each in entries).encode())
        return Result()

    def _push(self) -> Result:
        """Bring what lies staged into the workspace."""
        done = Result()
        for each in self._order["staged"]:
            vault = self._vault(each["place"])
            book = read_book(vault)
            if not book.is_complete:
                raise CarryError(f"{each['place']} is not complete: push again")
            source = ArchiveSource(vault, held(book), self._root)
            found = receive(
                source, Tree(self._root), each["below"], self._account, "pushing", self._checksum
            )
            done = together(done, found)
        return done

    def _pull(self) -> Result:
        """Stage what lies in the workspace."""
        tree = tree_of(self._root, self._order["path"])
        self._kind = "file" if isinstance(tree, Alone) else "folder"
        vault = self._vault(self._order["place"])
        vault.proves = True  # who fetches it compares it
        return archive(tree, vault, self._account, self._checksum, overwrite=True)

    def _archive(self) -> Result:
        vault = self._vault(self._order["place"])
        tree, account = Tree(self._root), self._account
        if self._order.get("delete"):
            return archive_and_free(tree, vault, account, self._checksum, self._overwrite)
        sends = not self._order.get("linked")
        return archive(tree, vault, account, self._checksum, sends, self._overwrite)

    def _restore(self) -> Result:
        return restore(
            self._vault(self._order["place"]), Tree(self._root), self._account,
            partial=bool(self._order.get("partial")), checksum=self._checksum,
            overwrite=self._overwrite,
        )  # fmt: skip

    def _verify(self) -> Result:
        return verify(self._vault(self._order["place"]), self._account)


class Teller:
    """Writes down how far it is, now and then."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._next = 0.0

    def __call__(self, now: Progress) -> None:
        at = self._clock()
        if at < self._next:
            return
        self._next = at + _EVERY
        print(in_words(now), flush=True)
        try:
            self._store.put(UNDER_WAY, json.dumps(now._asdict()).encode())
        except StoreError:
            pass  # the next word will do


def main(environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> int:
    """The exit code: 0 done, though something may be missing, which the report says."""
    try:
        order = json.loads(environ[ORDER])
        root, store = environ["BATCHML_WORKSPACE"], open_store(environ["BATCHML_STORE"], environ)
    except KeyError as error:
        print(f"batchml: a carrier needs {error.args[0]}: it is for batchml workspace", flush=True)
        return 2
    report: Optional[Dict[str, Any]] = None
    code = 0
    try:
        account = Account(Teller(store, clock))
        made = Carrier(order, root, store, lambda url: open_posix(url, environ), account)
        report = made.run()
    except (CarryError, StoreError, OSError) as error:
        code = TEMPORARY if getattr(error, "temporary", False) else 1
        report = {"error": str(error), "absent": isinstance(error, Absent)}
        print(f"batchml: {error}", flush=True)
    store.put(DONE, json.dumps(report).encode())
    return code


def _stop(number: int, _: Any) -> None:
    """Nothing half is left: what was sent counts, and the next attempt goes on."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main(os.environ))
