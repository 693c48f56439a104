"""Control groups: found in either version's words, limits written once, emptied and removed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from batchml.local.executors import cgroup
from batchml.local.executors.cgroup import SlotV2, make_slot
from batchml.runtime.processes import start_time
from tests.process.test_processes import is_alive
from tests.support.local_server import wait_for


def test_a_process_that_is_not_seen_from_here_is_nobody(tmp_path: Path) -> None:
    """The kernel lists it as 0; a signal to 0 would end whoever sends it."""
    (tmp_path / "cgroup.procs").write_text("0\n999999999\n")
    assert cgroup.members([str(tmp_path)]) == [999999999]


def test_two_state_folders_have_groups_of_their_own(tmp_path: Path, groups: cgroup.Groups) -> None:
    other = cgroup.find(f"{tmp_path.name}-other")
    assert not set(other.values()) & set(groups.values())
    assert cgroup.find(tmp_path.name) == groups
    assert cgroup.remove(list(other.values()))


def test_what_is_in_a_group_dies_with_it_also_below_it(groups: cgroup.Groups) -> None:
    slot = make_slot(groups, "1-1")
    folders = list(slot.folders.values())
    for folder in folders:
        os.mkdir(f"{folder}/below")
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.01; done"])
    for folder in folders:
        (Path(folder) / "below" / "cgroup.procs").write_text(str(child.pid))
    wait_for(lambda: child.pid in cgroup.members(folders), "it is in there")
    cgroup.kill(folders)
    assert child.wait(10) == -signal.SIGKILL
    wait_for(lambda: not cgroup.kill(folders), "nothing is left")
    assert cgroup.remove(folders, 10)
    assert not any(map(os.path.exists, folders))
    assert cgroup.remove(folders), "what is gone is no hindrance"


def test_a_sweep_spares_the_slots_of_those_who_live(groups: cgroup.Groups) -> None:
    own = make_slot(groups, cgroup.slot_name(os.getpid(), start_time(os.getpid())))
    reused = make_slot(groups, cgroup.slot_name(os.getpid(), 1))
    gone = make_slot(groups, "999999999-1")
    child = subprocess.Popen(["sleep", "300"])
    for folder in reused.folders.values():
        (Path(folder) / "cgroup.procs").write_text(str(child.pid))
    assert cgroup.remove_dead_slots(groups) == [child.pid]
    child.wait(10)
    cgroup.remove_dead_slots(groups)
    assert all(map(os.path.isdir, own.folders.values()))
    assert not any(map(os.path.exists, [*reused.folders.values(), *gone.folders.values()]))
    own.remove()
    assert not any(map(os.path.exists, own.folders.values()))


def test_limits_go_up_and_down_and_are_written_once(groups: cgroup.Groups) -> None:
    if "memory" not in groups:
        pytest.skip("version 1 only")
    slot = make_slot(groups, "1-1")
    memory = Path(slot.folders["memory"]) / "memory.limit_in_bytes"
    for size in (64, 2000, 32, None, 128):
        slot.limit(size, 2, 100)
        given = int(memory.read_text())
        assert given == size << 20 if size else given > 1 << 50
    assert (Path(slot.folders["pids"]) / "pids.max").read_text() == "100\n"
    assert (Path(slot.folders["cpu"]) / "cpu.shares").read_text() == "2048\n"
    memory.write_text(str(100 << 20))
    slot.limit(128, 2, 100)
    assert int(memory.read_text()) == 100 << 20
    slot.remove()


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/unified", os.W_OK), reason="no second version")
def test_the_second_version_holds_and_kills_too(tmp_path: Path) -> None:
    """Here without controllers, which the first version has: only that nothing escapes."""
    folder = f"/sys/fs/cgroup/unified/batchml-test-{os.getpid()}"
    os.mkdir(folder)
    try:
        child = subprocess.Popen(["sh", "-c", "setsid sleep 300 & wait"])
        (Path(folder) / "cgroup.procs").write_text(str(child.pid))
        wait_for(lambda: cgroup.members([folder]), "it is in there")
        cgroup.kill([folder])
        assert child.wait(10) == -signal.SIGKILL
        wait_for(lambda: not cgroup.kill([folder]), "nothing is left")
        assert not is_alive(child.pid)
    finally:
        assert cgroup.remove([folder], 10)


def test_the_kernels_lists_are_read_in_both_versions() -> None:
    both = "12:cpu,cpuacct:/a\n3:memory:/\n0::/user.slice\n"
    assert cgroup.own_groups(both) == {
        "cpu": "/a", "cpuacct": "/a", "memory": "", "all": "/user.slice",
    }  # fmt: skip
    mounts = (
        "30 23 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
        "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "32 23 0:28 /docker/1 /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
        "33 23 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "34 23 0:30 / / rw - ext4 /dev/vda rw\n"
    )
    assert cgroup.mounts_in(mounts) == {
        "memory": "/sys/fs/cgroup/memory",
        "cpu": "/sys/fs/cgroup/cpu,cpuacct",
        "all": "/sys/fs/cgroup/unified",
    }


def test_an_attempt_may_have_many_processes_but_not_all() -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert 1024 <= cgroup.max_pids() <= max(most // 8, 1024)


# --- version 2, as files: its controllers are seldom free where these tests run -----------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A mount of version 2: a service that may limit its children, and us in one of them."""
    service = tmp_path / "service"
    for folder, given in (
        (tmp_path, ""), (service, "cpu memory pids"), (service / "us", ""),
        (service / "jobs", "cpu memory pids"),
    ):  # fmt: skip
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.subtree_control").write_text(f"{given}\n")
        (folder / "cgroup.procs").touch()
    return tmp_path


@pytest.fixture
def slot(tree: Path) -> SlotV2:
    folder = tree / "service" / "jobs" / "1-1"
    folder.mkdir()
    for name in ("cgroup.procs", "memory.max", "memory.swap.max", "pids.max", "cpu.weight"):
        (folder / name).touch()
    (folder / "memory.events").write_text("low 0\nmax 3\noom 1\noom_kill 0\noom_group_kill 0\n")
    made = SlotV2({"all": str(folder.parent)}, "1-1", {"all": str(tree / "service" / "us")})
    return made


def read(slot: SlotV2, name: str) -> str:
    """What was written last; a file keeps the end of what was longer."""
    path = Path(slot.folders["all"]) / name
    text = path.read_text()
    path.write_text("")
    return text


def test_version_2_gives_limits_below_the_nearest_group_that_may(tree: Path) -> None:
    found = cgroup.find_v2(str(tree), "/service/us", "jobs")
    assert found == {"all": str(tree / "service" / "jobs")}
    (tree / "service" / "cgroup.subtree_control").write_text("cpu\n")
    assert cgroup.find_v2(str(tree), "/service/us", "jobs") == {}


def test_version_2_hands_on_what_it_may_limit(tree: Path) -> None:
    control = tree / "service" / "jobs" / "cgroup.subtree_control"
    control.write_text("")
    assert cgroup.find_v2(str(tree), "/service/us", "jobs") == {}, "a file is not the kernel"
    assert control.read_text().startswith("+")


def test_version_2_writes_limits_in_its_own_words(slot: SlotV2) -> None:
    slot.limit(96, 3, 2048)
    written = [read(slot, name) for name in ("memory.max", "memory.swap.max", "pids.max")]
    assert written == [str(96 << 20), "0", "2048"]
    assert read(slot, "cpu.weight") == "300"
    slot.limit(96, 3, 2048)
    assert read(slot, "pids.max") == "", "what is as it was is not written again"
    slot.limit(None, 200, 2048)
    assert (read(slot, "memory.max"), read(slot, "cpu.weight")) == ("max", "10000")


def test_version_2_has_no_limit_of_memory_while_the_runner_is_inside(slot: SlotV2) -> None:
    """It is larger than what it starts, so it would be the one that is killed."""
    slot.limit(4, 1, 2048)
    assert read(slot, "memory.max") == str(4 << 20)
    slot.enter()
    assert read(slot, "memory.max") == "max"
    assert read(slot, "cgroup.procs").endswith("0")
    slot.leave()
    assert read(slot, "memory.max") == str(4 << 20)
    slot.limit(None, 1, 2048)
    assert read(slot, "memory.max") == "max"
    slot.enter()
    slot.leave()
    assert read(slot, "memory.max") == ""


def test_version_2_counts_kills_for_memory_since_the_last_look(slot: SlotV2) -> None:
    events = Path(slot.folders["all"]) / "memory.events"
    assert slot.oom_kills() == 0
    events.write_text("low 0\noom 4\noom_kill 2\noom_group_kill 0\n")
    assert (slot.oom_kills(), slot.oom_kills()) == (2, 0)


def test_version_2_kills_all_at_once(slot: SlotV2) -> None:
    kill = Path(slot.folders["all"]) / "cgroup.kill"
    kill.touch()
    slot.limit(96, 1, 2048)
    slot.kill()
    assert kill.read_text() == "1"
    read(slot, "pids.max")
    slot.limit(96, 1, 2048)
    assert read(slot, "pids.max") == "2048", "limits are set anew after that"


def test_a_runner_that_may_not_move_in_version_2_has_no_slot(slot: SlotV2, tree: Path) -> None:
    with pytest.raises(OSError):
        SlotV2({"all": str(tree / "service" / "jobs")}, "1-1", {"all": str(tree / "nowhere")})


def test_groups_that_vanish_under_a_sweep_are_no_failure(tmp_path: Path) -> None:
    """The last runner of an earlier server removes them while the next server starts."""
    assert cgroup.remove_dead_slots({"memory": str(tmp_path / "gone")}) == []


def test_a_folder_that_is_removed_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    mkdir, wanted = os.mkdir, tmp_path / "batchml"

    def made_and_removed_once(path: str) -> None:
        mkdir(path)
        if not removed:
            removed.append(path)
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", made_and_removed_once)
    assert cgroup._make(str(wanted)) == str(wanted)
    assert wanted.is_dir()
