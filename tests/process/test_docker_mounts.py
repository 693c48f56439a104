"""What a container is given of this machine, while another container renames what it can."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchml.local.executors import mounts
from batchml.local.executors.choice import Permits
from batchml.local.executors.container_spec import container_name
from tests.support.executor_rig import Outcome, Rig, docker

VICTIMS = int(os.environ.get("BATCHML_VICTIMS", "16"))

# renameat2(2) with RENAME_EXCHANGE: the folder and the link are never absent. Each round ends with
# the folder in its place, for a moment in which a victim can start.
SWAP = """
import ctypes, os, time
os.makedirs('/shared/a/b', exist_ok=True)
os.symlink({outside!r}, '/shared/link')
swap = ctypes.CDLL(None).renameat2
print('swapping', flush=True)
while True:
    for _ in range(2000):
        swap(-100, b'/shared/a', -100, b'/shared/link', 2)
    time.sleep(0.002)
"""


def efs(root: str, at: str, **point: Any) -> dict[str, Any]:
    about = {"fileSystemId": "fs-9", "rootDirectory": root}
    return {
        "volumes": [{"name": "v", "efsVolumeConfiguration": about}],
        "mountPoints": [{"sourceVolume": "v", "containerPath": at, **point}],
    }


def folder(path: Path, at: str, **point: Any) -> dict[str, Any]:
    return {
        "volumes": [{"name": "v", "host": {"sourcePath": str(path)}}],
        "mountPoints": [{"sourceVolume": "v", "containerPath": at, **point}],
    }


@pytest.fixture(params=["efs", "allowed"])
def shared(rig: Rig, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What the attacker and its victims mount: a folder, and one deep in it."""
    if request.param == "efs":
        return {"all": efs("/", "/shared"), "deep": efs("/a/b", "/v")}
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    rig.permits = Permits(paths=(str(allowed),))
    return {"all": folder(allowed, "/shared"), "deep": folder(allowed / "a" / "b", "/v")}


def test_a_container_that_swaps_folders_gives_no_other_what_it_may_not_have(
    rig: Rig, tmp_path: Path, shared: dict[str, dict[str, Any]]
) -> None:
    private = tmp_path / "outside" / "b"
    private.mkdir(parents=True, mode=0o700)
    (private / "secret").write_text("of the host")
    script = SWAP.format(outside=str(private.parent))
    attacker = rig.start(["python3", "-c", script], **shared["all"])
    rig.until_line(attacker, b"swapping")
    victims: list[Outcome] = []
    got_in: list[Outcome] = []
    while len(victims) < VICTIMS or (not got_in and len(victims) < 20 * VICTIMS):
        tasks = [rig.start(["ls", "-a", "/v"], **shared["deep"]) for _ in range(8)]
        victims += [rig.outcome(task) for task in tasks]
        got_in = [done for done in victims if done.exit.code == 0 and b".." in done.lines]
    seen = [index for index, done in enumerate(victims) if b"secret" in done.lines]
    assert seen == [], "no victim sees the host's folder"
    assert private.stat().st_mode & 0o777 == 0o700
    assert os.listdir(private) == ["secret"]
    assert got_in
    assert mounts.pinned_tasks(rig.identity.id) == []


def test_what_is_mounted_deep_in_a_folder_is_the_folder_itself_and_nothing_stays_mounted(
    rig: Rig, tmp_path: Path, shared: dict[str, dict[str, Any]]
) -> None:
    assert rig.run(["sh", "-c", "echo one > /v/file"], **shared["deep"]).exit.code == 0
    assert rig.run(["cat", "/shared/a/b/file"], **shared["all"]).lines == [b"one"]
    assert str(rig.home.root) not in Path("/proc/mounts").read_text()
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert mounts.pinned_tasks(rig.identity.id) == []


def test_a_mount_that_a_killed_runner_left_is_ended_and_its_files_stay(
    rig: Rig, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    label = rig.identity.id
    source = {
        "path": str(kept / "deep"), "target": "/v", "roots": [str(kept)], "read_only": False,
        "make": True, "ours": False, "fixed": False, "before": (),
    }  # fmt: skip
    mounts.ContainerMounts([source], label, "killed").open()
    assert mounts.pinned_tasks(label) == ["killed"]
    command = [sys.executable, "-m", "batchml.local.executors.sweeper", label, "remove", "killed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert mounts.pinned_tasks(label) == []
    assert sorted(os.listdir(kept)) == ["deep", "file"]
    assert label not in Path("/proc/mounts").read_text()


def test_the_mounts_of_a_running_container_are_those_that_were_found(rig: Rig) -> None:
    task = rig.start(["sleep", "30"], **efs("/a b/é", "/v ü"))
    rig.until(lambda: rig.started(task))
    shown = docker(
        "inspect", "-f", "{{.State.Pid}} {{.Id}}", container_name(rig.identity.id, task)
    ).stdout.split()
    deep = (rig.home.volumes / "fs-9" / "a b" / "é").stat()
    assert (deep.st_dev, deep.st_ino) in mounts.mounted_files(int(shown[0]), shown[1])
    assert mounts.mounted_files(int(shown[0]), "another") == set()
