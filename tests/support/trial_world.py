"""A trial without a container: a store in a folder, a clock and a program that tests control."""

from collections.abc import Callable
from typing import Any

from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import INBOX, Cutoffs, MessageSender, TrialContract, TrialEntry
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError
from batchml.runtime.sweep.assignment import TrialAssignment
from batchml.runtime.sweep.watch import TrialWatch

AT = 1_000_000.0  # seconds since the epoch, when the trial begins


def a_contract(**changes: Any) -> TrialContract:
    contract = TrialContract(
        "k", (("acc", "max"),), ("train",), {}, {}, method="asha", rungs=(1, 3, 9), max=27,
        every=60.0, look=15.0, grace=30.0,
    )  # fmt: skip
    return contract._replace(**changes)


class UnreachableStore(FolderStore):
    """One that can be away."""

    is_away = False
    calls = 0

    def get(self, key: str) -> bytes | None:
        self._asked()
        return super().get(key)

    def keys(self, prefix: str, limit: int | None = None) -> list[str]:
        self._asked()
        return super().keys(prefix, limit)

    def put(self, key: str, data: bytes) -> None:
        self._asked()
        super().put(key, data)

    def _asked(self) -> None:
        self.calls += 1
        if self.is_away:
            raise StoreError("S3 did not do it", temporary=True)


class TrialWorld:
    """One attempt at trial 17. `stopped` is what the program was told, `asked` how often nicely."""

    def __init__(
        self, folder: str, contract: TrialContract, after: int = 0, wave: int = 2, **entry: Any
    ) -> None:
        self.store = UnreachableStore(folder)
        self.now = 0.0
        self.stopped: list[tuple[str, int]] = []
        self.asked = 0
        self.said: list[str] = []
        self.naps: list[float] = []
        work = TrialAssignment(
            contract,
            TrialEntry(17, {"lr": 0.5}, 4, **entry),
            MessageSender(wave, 17, 1, 5, "job:5", AT),
            True,
            after,
        )
        self.metrics = f"{folder}.metrics"
        self.watch = TrialWatch(
            work, self.store, self, self.metrics, self.said.append,
            clock=lambda: AT + self.now, monotonic=lambda: self.now,
        )  # fmt: skip

    # --- the program's side: `Program` of sweep/watch.py

    def stop(self, reason: str, code: int) -> None:
        self.stopped.append((reason, code))

    def request_stop(self) -> None:
        self.asked += 1

    def prints(self, *lines: str) -> None:
        for line in lines:
            self.watch.read_output([line.encode("utf-8", "surrogateescape")])

    def runs(self, seconds: float, *, step: float = 1.0) -> None:
        """Time passes, with a tick every second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.watch.tick(self.now)

    def ends(self, code: int = 0, was_asked: bool = False, why: str = "") -> int:
        ending = self.watch.ending(code, was_asked, why)
        return self.watch.send_end(ending, self.store, self._nap)

    # --- the controller's side

    def publish(self, cutoffs: Cutoffs) -> None:
        self.store.put("cutoffs.json", cutoffs.to_json())

    @property
    def messages(self) -> list[dict[str, Any]]:
        found = [
            messages.decode_message(self._read(key)) for key in FolderStore.keys(self.store, INBOX)
        ]
        assert None not in found
        return [each for each in found if each is not None]

    @property
    def end(self) -> dict[str, Any]:
        return self.messages[-1]

    @property
    def points(self) -> list[tuple[int, float]]:
        return [
            (step, values[0])
            for message in self.messages
            for step, values, _ in message.get("points", ())
        ]

    def _read(self, key: str) -> bytes:
        return FolderStore.get(self.store, key) or b""

    def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)


Make = Callable[..., TrialWorld]
