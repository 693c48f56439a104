"""Which log streams there are: the journal's index of them, read by a connection of its own."""

from pathlib import Path

import msgspec

from batchml.local.messages import LogEnd
from batchml.local.store import Stream, open_reader

_FIELDS = "SELECT log_group, stream, task_id, created_at FROM streams WHERE log_group = ?"
_LAST = "\U0010ffff"
_LOG_END = msgspec.json.Decoder(LogEnd)


class Streams:
    """For one thread, which is not the one that commits. Streams come by name."""

    def __init__(self, journal: Path) -> None:
        self._db = open_reader(journal)

    def close(self) -> None:
        self._db.close()

    def one(self, group: str, name: str) -> Stream | None:
        row = self._db.execute(f"{_FIELDS} AND stream = ?", (group, name)).fetchone()
        return None if row is None else Stream(*row)

    def log_end(self, task_id: str) -> LogEnd | None:
        """What was committed with the end of an attempt; None while it goes on."""
        row = self._db.execute("SELECT body FROM log_ends WHERE task_id = ?", (task_id,)).fetchone()
        return None if row is None else _LOG_END.decode(row[0])

    def all(self, group: str, prefix: str = "") -> list[Stream]:
        """Those whose name starts with `prefix`."""
        rows = self._db.execute(
            f"{_FIELDS} AND stream BETWEEN ? AND ? ORDER BY stream",
            (group, prefix, prefix + _LAST),
        )
        return [Stream(*row) for row in rows]

    def page(
        self, group: str, prefix: str, after: str | None, limit: int, *, descending: bool = False
    ) -> list[Stream]:
        """The next `limit` after the stream `after`, in either direction."""
        low, high = prefix, prefix + _LAST
        beyond = f"AND stream {'<' if descending else '>'} ?" if after is not None else ""
        rows = self._db.execute(
            f"{_FIELDS} AND stream BETWEEN ? AND ? {beyond}"
            f" ORDER BY stream {'DESC' if descending else ''} LIMIT ?",
            (group, low, high, *([after] if after is not None else []), limit),
        )
        return [Stream(*row) for row in rows]

    def groups(self) -> dict[str, int]:
        """Each log group with the time of its first stream, in ms."""
        rows = self._db.execute("SELECT log_group, min(created_at) FROM streams GROUP BY log_group")
        return dict(rows.fetchall())
