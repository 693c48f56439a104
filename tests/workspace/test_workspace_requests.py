"""The workspace of an environment in AWS: transfers in this process, a bucket that moto keeps."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from batchml.config.environments import read_environments
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import NotFound, TransferFailed, UsageError
from batchml.model.environment import (
    Environment,
    OnProgress,
    TransferStatus,
    WorkspaceEntry,
    ignore_progress,
)
from batchml.runtime.transfer import main, worker
from batchml.runtime.transfer.archives import ArchiveStore
from batchml.runtime.transfer.backends import open_archive, open_posix_archive
from batchml.workspace.remote import (
    RemoteStorage,
    RemoteWorkspace,
    listing_command,
    read_listing,
)
from batchml.workspace.transfer_runs import (
    TRANSFER_TAG,
    cheapest_queue,
    read_progress,
    transfer_request,
)
from tests.support.fakes import FakeClock
from tests.support.s3 import BUCKET, KEYS, client, moto_s3

CONFIG = """
[env.lab]
region = "eu-west-1"
[env.lab.compute.cpu]
instance_types = ["m6i"]
max_vcpus = 16
[env.lab.queues.default]
compute = ["cpu"]
"""


class InProcess:
    """Transfers without runs: the worker is called in this process.

    `interrupts` are how many of the next calls a Ctrl-C ends.
    """

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root, self.environ = root, environ
        self.key = self.interrupts = 0
        self.requests: list[dict[str, Any]] = []

    def execute(self, request: Mapping[str, Any], on_progress: OnProgress) -> dict[str, Any]:
        self.requests.append(dict(request))
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.key += 1
        on_progress(TransferStatus("waiting"))
        code = worker.main({
            **self.environ, worker.REQUEST_VARIABLE: json.dumps(request),
            "BATCHML_WORKSPACE": str(self.root), "BATCHML_STORE": self._store,
        })  # fmt: skip
        assert code in (0, 1)
        return dict(json.loads(self.read_file(worker.REPORT_KEY)))

    @property
    def _store(self) -> str:
        return f"s3://{BUCKET}/runs/{self.key}"

    def read_file(self, name: str) -> bytes:
        return open_archive(self._store, self.environ).get(name) or b""

    def describe_cost(self) -> str:
        return "It ran 20 s and cost $0.0003."


class Lab:
    """An environment with an EFS, and a machine beside it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.here, self.root = folder / "here", folder / "efs"
        self.at_work = 0
        self.here.mkdir()
        self.root.mkdir()
        (self.here / "batchml.toml").write_text(CONFIG)
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": address}
        settings = load_settings({"BATCHML_HOME": str(folder / "home")}, self.here, "lab")
        self.place = Context(settings, FakeClock(), self.here)
        self.transfers = InProcess(self.root, environ)
        self.s3 = client(address)
        self.storage = RemoteStorage(
            self.place, BUCKET, "fs-1", self.transfers, lambda url: open_archive(url, environ),
            lambda: self.at_work,
        )  # fmt: skip
        self.workspace = RemoteWorkspace(self.storage)
        self.archive: ArchiveStore = open_posix_archive(self.workspace.default_archive, environ)

    def keys(self, prefix: str = "") -> list[str]:
        found = self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        return [each["Key"] for each in found]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with moto_s3() as found:
        yield found


@pytest.fixture
def lab(tmp_path: Path, address: str) -> Iterator[Lab]:
    made = Lab(tmp_path, address)
    yield made
    for key in made.keys():  # noqa: SIM118  (no mapping)
        made.s3.delete_object(Bucket=BUCKET, Key=key)


def plant(top: Path) -> None:
    """A small tree of every kind."""
    (top / "sets" / "empty").mkdir(parents=True)
    (top / "sets" / "a.txt").write_text("one")
    (top / "sets" / "größe \n2.bin").write_bytes(os.urandom(1000))
    (top / "sets" / "run.sh").write_text("#!/bin/sh\n")
    (top / "sets" / "run.sh").chmod(0o755)
    (top / "sets" / "link").symlink_to("a.txt")
    os.utime(top / "sets" / "a.txt", ns=(1_600_000_000_000_000_000, 1_600_000_000_123_456_789))


def seen(top: Path) -> dict[str, Any]:
    """What a tree is: by path, kind, mode, time, content."""
    found: dict[str, Any] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = "folder"
        else:
            status = path.stat()
            found[name] = (path.read_bytes(), status.st_mode & 0o777, status.st_mtime_ns)
    return found


def test_what_is_pushed_is_there_and_nothing_stays_on_the_way(lab: Lab) -> None:
    plant(lab.here)
    told: list[TransferStatus] = []
    report = lab.workspace.push([Path("sets")], "data/sets", told.append)
    assert report.is_complete and report.files == 3
    assert report.notes == ("Transfer run: It ran 20 s and cost $0.0003.",)
    assert seen(lab.root / "data" / "sets") == seen(lab.here / "sets")
    assert lab.keys("runs/carry/") == []
    again = lab.workspace.push([Path("sets")], "data/sets", ignore_progress)
    assert (again.files, again.unchanged) == (0, 3)
    assert any(each.doing == "waiting" for each in told)


def test_a_push_that_was_interrupted_goes_on_with_what_is_on_its_way(lab: Lab) -> None:
    plant(lab.here)
    lab.transfers.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        lab.workspace.push([Path("sets")], "", ignore_progress)
    staged = lab.keys("runs/carry/")
    before = {key: lab.s3.head_object(Bucket=BUCKET, Key=key)["LastModified"] for key in staged}
    (lab.here / "sets" / "new.txt").write_text("new")
    told: list[TransferStatus] = []
    assert lab.workspace.push([Path("sets")], "", told.append).files == 4
    # Of what was there only the new file was sent.
    assert before and max(each.moved for each in told if each.doing == "sending") < 100
    assert seen(lab.root / "sets") == seen(lab.here / "sets")
    assert lab.keys("runs/carry/") == []


def test_one_file_becomes_what_it_is_told_to_be(lab: Lab) -> None:
    plant(lab.here)
    lab.workspace.push([Path("sets/a.txt")], "b.txt", ignore_progress)
    lab.workspace.push([Path("sets/a.txt"), Path("sets/run.sh")], "into/", ignore_progress)
    assert (lab.root / "b.txt").read_text() == "one"
    assert (lab.root / "into" / "run.sh").stat().st_mode & 0o777 == 0o755
    lab.workspace.pull("b.txt", Path("c.txt"), ignore_progress)
    lab.workspace.pull("/workspace/into/run.sh", None, ignore_progress)
    assert (lab.here / "c.txt").read_text() == "one" and (lab.here / "run.sh").exists()


def test_what_is_pulled_is_what_lies_there(lab: Lab) -> None:
    plant(lab.root)
    report = lab.workspace.pull("sets", None, ignore_progress)
    assert report.is_complete and seen(lab.here / "sets") == seen(lab.root / "sets")
    # A folder in which one file has its name is a folder all the same.
    (lab.root / "same").mkdir()
    (lab.root / "same" / "same").write_text("x")
    lab.workspace.pull("same", None, ignore_progress)
    assert (lab.here / "same" / "same").read_text() == "x"
    assert lab.keys("runs/carry/") == []


def test_the_workspace_is_listed(lab: Lab) -> None:
    plant(lab.root)
    names = [each.path for each in lab.workspace.ls("sets")]
    assert names == sorted(f"sets/{each}" for each in os.listdir(lab.root / "sets"))
    (one,) = lab.workspace.ls("sets/a.txt")
    assert (one.size, one.mtime_ns) == (3, 1_600_000_000_123_456_789)
    assert lab.workspace.ls("", deep=True)[0].path == "sets"
    with pytest.raises(NotFound, match="batchml workspace ls --env lab"):
        lab.workspace.ls("nowhere")


def test_a_run_that_is_there_lists_it_without_a_transfer_run(lab: Lab, capfd: Any) -> None:
    plant(lab.root)
    commands: list[tuple[str, ...]] = []

    def list_quickly(path: str) -> list[WorkspaceEntry] | None:
        """As in a container: what it prints comes back with a terminal's line ends."""
        command = listing_command(path)
        commands.append(command)
        words = [str(lab.root) if word == "/workspace" else word for word in command[3:]]
        main.main(words, os.environ, print)
        printed = str(capfd.readouterr().out).replace("\n", "\r\n")
        return read_listing(b"a motd\r\n" + printed.encode())

    lab.workspace = RemoteWorkspace(lab.storage, list_quickly)
    assert "sets/a.txt" in [each.path for each in lab.workspace.ls("sets")]
    assert commands[0][-1] == "--below=sets" and lab.transfers.requests == []
    # What it says of a path that is not there is for the transfer run to report.
    with pytest.raises(NotFound):
        lab.workspace.ls("nowhere")
    assert read_listing(b"no such program") is None


def test_an_archive_fills_another_file_system(lab: Lab, tmp_path: Path) -> None:
    """The file system was deleted after the archive; `setup` has made an empty one."""
    plant(lab.root)
    before = seen(lab.root)
    report = lab.workspace.archive("", ignore_progress)
    assert report.is_complete and report.location == f"s3://{BUCKET}/workspace"
    assert "workspace/sets/a.txt" in lab.keys("workspace/")
    lab.transfers.root = tmp_path / "new"
    lab.transfers.root.mkdir()
    assert lab.workspace.restore("", ignore_progress).is_complete
    assert seen(lab.transfers.root) == before


def test_what_is_archived_is_freed_only_when_nobody_works_with_it(lab: Lab) -> None:
    plant(lab.root)
    lab.at_work = 2
    with pytest.raises(UsageError, match="2 runs have not ended in lab"):
        lab.workspace.archive("", ignore_progress, delete=True)
    lab.at_work = 0
    report = lab.workspace.archive("", ignore_progress, delete=True)
    assert report.removed == 4 - 1 and not (lab.root / "sets" / "a.txt").exists()
    assert lab.workspace.restore("", ignore_progress).is_complete
    assert (lab.root / "sets" / "a.txt").read_text() == "one"


def test_what_is_removed_is_gone_and_what_is_newer_stays(lab: Lab) -> None:
    plant(lab.root)
    lab.workspace.archive("", ignore_progress)
    assert lab.workspace.remove(["sets/run.sh", "sets/link"], ignore_progress).removed == 2
    assert sorted(os.listdir(lab.root / "sets"))[0] == "a.txt"
    (lab.root / "sets" / "a.txt").write_text("newer")
    report = lab.workspace.restore("", ignore_progress)
    assert len(report.missing) == 1 and "it stays" in report.missing[0]
    assert (lab.root / "sets" / "a.txt").read_text() == "newer"
    assert lab.workspace.restore("", ignore_progress, overwrite=True).is_complete
    assert (lab.root / "sets" / "a.txt").read_text() == "one"


def test_an_archive_that_is_not_complete_is_not_restored(lab: Lab) -> None:
    plant(lab.root)
    lab.workspace.archive("", ignore_progress)
    lab.s3.delete_object(Bucket=BUCKET, Key="workspace/sets/a.txt")
    with pytest.raises(TransferFailed, match=r"sets/a\.txt"):
        lab.workspace.restore("", ignore_progress)


def test_a_place_that_no_run_reaches_is_refused(lab: Lab) -> None:
    with pytest.raises(UsageError, match="batchml workspace pull --env lab"):
        lab.workspace.archive("/backup", ignore_progress)
    assert lab.transfers.requests == []


def test_what_archives_hold_says_what_it_is_as_files(lab: Lab) -> None:
    """So that a file system of FSx that is linked to the bucket has owners, modes and times."""
    plant(lab.root)
    lab.workspace.archive("", ignore_progress)
    said = lab.s3.head_object(Bucket=BUCKET, Key="workspace/sets/run.sh")["Metadata"]
    assert said["file-permissions"] == "0100755"
    assert (said["file-owner"], said["file-group"]) == ("1000", "1000")
    said = lab.s3.head_object(Bucket=BUCKET, Key="workspace/sets/a.txt")["Metadata"]
    assert said["file-mtime"] == "1600000000123456789ns"


# --- the run that carries -------------------------------------------------------------------------


def described(**more: Any) -> Environment:
    table = {
        "region": "eu-west-1",
        "compute": {
            "gpu": {"instance_types": ["g5"], "max_vcpus": 8},
            "cpu": {"instance_types": ["m6i"], "max_vcpus": 8},
            "warm": {"instance_types": ["m6i"], "max_vcpus": 8, "min_vcpus": 2},
        },
        "queues": {
            "a": {"compute": ["gpu"]}, "b": {"compute": ["cpu", "gpu"]}, "c": {"compute": ["cpu"]},
        },
        **more,
    }  # fmt: skip
    return read_environments({"env": {"lab": table}}, "here")[1]["lab"]


@pytest.mark.parametrize(
    ("more", "queue"),
    [
        ({}, "c"),
        ({"controller_queue": "b"}, "b"),
        ({"queues": {"c": {"compute": ["cpu"]}, "z": {"compute": ["warm"]}}}, "z"),
        ({"queues": {"a": {"compute": ["gpu"]}}}, "a"),
    ],
)
def test_a_transfer_runs_where_it_costs_least(more: Any, queue: str) -> None:
    assert cheapest_queue(described(**more)) == queue


def test_a_transfer_run_is_an_ordinary_run_with_its_tag() -> None:
    order = transfer_request(described(), {"verb": "archive", "place": "s3://b/workspace"})
    assert order.own_tags == {TRANSFER_TAG: "archive"} and order.spec is not None
    assert order.spec.resources.vcpus == 1 and order.spec.retry.on == ("host-lost",)
    assert json.loads(str(order.spec.env[worker.REQUEST_VARIABLE]))["place"] == "s3://b/workspace"


@pytest.mark.parametrize("found", [None, b"", b"[1]", b"no", b'{"files": 3, "doing": "archiving"}'])
def test_what_a_transfer_run_says_of_its_progress_may_be_anything(found: bytes | None) -> None:
    told = read_progress(found)
    assert told is None or told == TransferStatus("archiving", files=3)


def test_a_worker_without_a_request_says_what_it_is_for(capsys: Any) -> None:
    assert worker.main({}) == 2
    assert "batchml workspace" in capsys.readouterr().out
