"""Errors of plug-ins do not reach the run or each other; outputs are sent while the run goes on."""

import inspect
import os
import sys
from pathlib import Path

from batchml.runtime.entry.attempt import EVERY, AttemptPlugins
from batchml.runtime.entry.outputs import OutputSender, files_of, output_prefix
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError


class Member:
    def __init__(self, fails_at: int = 0, fails_to_finish: bool = False) -> None:
        self.ticks: list[float] = []
        self.finished = 0
        self._fails_at = fails_at
        self._fails_to_finish = fails_to_finish

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        if len(self.ticks) == self._fails_at:
            raise ValueError("broken\nhere")

    def finish(self) -> None:
        self.finished += 1
        if self._fails_to_finish:
            raise OSError("disk full")


def impossible() -> Member:
    raise RuntimeError("no such thing")


def test_a_plugin_that_fails_is_reported_once_and_switched_off() -> None:
    said: list[str] = []
    good, bad = Member(fails_to_finish=True), Member(fails_at=2)
    plugins = AttemptPlugins(said.append)
    plugins.add("an impossible one", impossible)
    plugins.add("bad", lambda: bad)
    plugins.add("good", lambda: good)
    for now in range(5):
        plugins.tick(float(now))
    plugins.finish()
    plugins.finish()
    assert (len(bad.ticks), bad.finished) == (2, 0)
    assert (len(good.ticks), good.finished) == (5, 1)
    assert [line.partition(": ")[2] for line in said] == [
        "an impossible one failed and is off, the run continues: no such thing",
        "bad failed and is off, the run continues: broken here",
        "good failed and is off, the run continues: disk full",
    ]


def test_plugins_are_called_about_once_a_second() -> None:
    member = Member()
    plugins = AttemptPlugins(print, 10.0)
    plugins.add("m", lambda: member)
    assert plugins.until_tick(9.5) == 0.5
    for now in (9.9, 10.0, 10.2, 10.9, 11.0, 11.5, 12.4):
        plugins.tick(now)
    assert member.ticks == [10.0, 11.0, 12.4]
    assert plugins.until_tick(12.9) == EVERY - 0.5
    assert plugins.until_tick(20.0) == 0


class Shop(FolderStore):
    """A store that notes what is sent, and may be away."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.sent: list[str] = []
        self.away = False

    def put_file(self, key: str, path: str) -> None:
        if self.away:
            raise StoreError("away", temporary=True)
        self.sent.append(key)
        super().put_file(key, path)


def test_a_file_is_sent_once_it_rests_and_again_when_it_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    shop = Shop(str(tmp_path / "store"))
    outputs = OutputSender(str(folder), shop, "output/")
    (folder / "model").write_text("1")
    outputs.poll()
    assert shop.sent == [], "it may still be written"
    outputs.poll()
    assert shop.sent == ["output/model"]
    outputs.poll()
    (folder / "model").write_text("22")
    outputs.poll()
    (folder / "late").write_text("3")
    assert outputs.finish() == []
    assert shop.sent == ["output/model", "output/late", "output/model"]
    assert shop.get("output/model") == b"22"


def test_what_cannot_be_sent_is_named_and_a_store_that_is_away_is_not_asked_for_each(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).touch()
    shop = Shop(str(tmp_path / "store"))
    shop.away = True
    assert OutputSender(str(folder), shop, "output/").finish() == [
        "a: away", "b: not tried any more", "c: not tried any more",
    ]  # fmt: skip


def test_many_files_go_several_at_once_and_each_of_them_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for number in range(50):
        (folder / str(number)).write_text(str(number))
    shop = Shop(str(tmp_path / "store"))
    outputs = OutputSender(str(folder), shop, "output/")
    assert outputs.finish() == []
    assert sorted(shop.sent) == sorted(f"output/{number}" for number in range(50))
    assert outputs.finish() == []
    assert len(shop.sent) == 50
    assert all(shop.get(f"output/{number}") == str(number).encode() for number in range(50))


def test_links_to_files_are_sent_as_these_and_pipes_never(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "last").symlink_to("model")
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "model").write_text("m")
    shop = Shop(str(tmp_path / "store"))
    assert OutputSender(str(folder), shop, "output/").finish() == []
    assert shop.sent == ["output/last", "output/model"]


def test_children_and_nodes_have_places_of_their_own() -> None:
    assert output_prefix({}) == "output/"
    assert output_prefix({"AWS_BATCH_JOB_ARRAY_INDEX": "0"}) == "output/0/"
    nodes = {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1", "AWS_BATCH_JOB_NODE_INDEX": "1"}
    assert output_prefix(nodes) == "output/"
    assert output_prefix({**nodes, "AWS_BATCH_JOB_NODE_INDEX": "0"}) == "output/node-0/"


def test_outputs_may_lie_deeper_than_pythons_stack(tmp_path: Path) -> None:
    deep = tmp_path / ("a/" * 300)
    deep.mkdir(parents=True)
    (deep / "model").write_text("m")
    most = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        found = files_of(str(tmp_path))
    finally:
        sys.setrecursionlimit(most)
    assert list(found) == ["a/" * 300 + "model"]
