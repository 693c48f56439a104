"""The gate: which host a run is let on, what is said, what is remembered, and when it gives up."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from batchml.model.group import HEALTH, health_variable
from batchml.model.job import Health
from batchml.runtime.health import checks
from batchml.runtime.health.checks import (
    MONITOR,
    NOT_CHECKED,
    OK,
    REPLACE,
    RETRY,
    HostCheck,
    NoFitHost,
    check_folder,
    classify_error,
    run_with_limit,
    worst,
)
from batchml.runtime.health.deep import check_by_computing, read_results
from batchml.runtime.health.gate import VARIABLE, HealthSettings, check_host
from batchml.runtime.health.host_records import host_id
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.folder import FolderStore


class Lab:
    """A run that may be tried on any host, with a fault file for each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        for name in ("scratch", "checkpoints"):
            (root / name).mkdir()
        self.environ = {
            "AWS_BATCH_JOB_ID": "j", "BATCHML_STORE": str(root / "store"),
            "TMPDIR": str(root / "scratch"), "BATCHML_CHECKPOINT_DIR": str(root / "checkpoints"),
            "BATCHML_FAULT_FILE": str(root / "fault-{host}"),
        }  # fmt: skip

    def break_down(self, host: str, text: str = "XID 79") -> None:
        (self.root / f"fault-{host}").write_text(text)

    def start(self, host: str, attempt: int = 1, /, **more: str) -> str | None:
        environ = {
            **self.environ, "BATCHML_HOST_ID": host, "AWS_BATCH_JOB_ATTEMPT": str(attempt), **more,
        }  # fmt: skip
        return check_host(RuntimeEnv.read(environ), environ, self.said.append)

    def store(self) -> FolderStore:
        return FolderStore(str(self.root / "store"))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


# --- the gate -------------------------------------------------------------------------------------


def test_a_fit_host_is_not_mentioned_and_nothing_is_left_on_it(lab: Lab) -> None:
    assert lab.start("i-1") is None
    assert lab.start("i-1", 2) is None
    assert lab.said == []
    assert sorted(path.name for path in lab.root.rglob("*")) == ["checkpoints", "scratch"]


def test_an_unfit_host_is_left_for_another_one(lab: Lab) -> None:
    lab.break_down("i-1")
    assert lab.start("i-1") == (
        "this host (i-1) is unfit: fault file: XID 79; another one is tried (1 of 3)"
    )
    assert lab.start("i-2", 2) is None
    record = json.loads(lab.store().get("hosts/bad/h-i-1") or b"")
    assert (record["host"], record["why"]) == ("i-1", "fault file: XID 79")
    assert ["fault file", "replace", "XID 79"] in record["checks"]
    assert lab.said == []


def test_a_host_that_was_unfit_is_left_at_once_even_if_it_looks_well(lab: Lab) -> None:
    lab.break_down("i-1")
    lab.start("i-1")
    (lab.root / "fault-i-1").unlink()
    assert lab.start("i-1", 2) == (
        "this host (i-1) is unfit: found unfit before: fault file: XID 79; another one is tried "
        "(2 of 3)"
    )


def test_what_may_have_been_put_right_is_asked_again(lab: Lab) -> None:
    lab.break_down("i-1", "retry: the disk is full")
    refused = lab.start("i-1")
    assert refused is not None and "fault file: the disk is full" in refused
    assert lab.start("i-1", 2) is not None
    (lab.root / "fault-i-1").unlink()
    assert lab.start("i-1", 3) is None


def test_after_so_many_hosts_it_is_not_the_hosts(lab: Lab) -> None:
    for number in (1, 2, 3, 4):
        lab.break_down(f"i-{number}", f"fault {number}")
    for number in (1, 2, 3):
        refused = lab.start(f"i-{number}", number)
        assert refused is not None and refused.endswith(f"({number} of 3)")
    with pytest.raises(NoFitHost) as refusal:
        lab.start("i-4", 4)
    told = str(refusal.value)
    assert told.startswith("4 hosts were unfit in 4 tries, more than `tries = 3` in [health]: ")
    for number in (1, 2, 3, 4):
        assert f"i-{number}: fault file: fault {number}" in told
    assert "A bad image or driver looks like bad hardware" in told


def test_where_there_is_one_host_its_tries_are_counted(lab: Lab) -> None:
    lab.break_down("vm")
    settings = {VARIABLE: json.dumps({"tries": 1})}
    assert lab.start("vm", **settings) is not None
    with pytest.raises(NoFitHost, match="one host was unfit in 2 tries"):
        lab.start("vm", 2, **settings)


def test_a_look_between_two_generations_is_the_same_try(lab: Lab) -> None:
    lab.break_down("i-1")
    for _ in range(5):
        refused = lab.start("i-1")
        assert refused is not None and refused.endswith("(1 of 3)")


def test_nodes_are_counted_each_and_children_of_an_array_apart(lab: Lab) -> None:
    lab.break_down("i-1")
    nodes = [lab.start("i-1", AWS_BATCH_JOB_NODE_INDEX=str(node)) for node in (0, 1)]
    assert [each and each[-8:] for each in nodes] == ["(1 of 3)", "(2 of 3)"]
    children = [lab.start("i-1", AWS_BATCH_JOB_ARRAY_INDEX=str(index)) for index in (1, 2, 3, 4, 5)]
    assert {each and each[-8:] for each in children} == {"(1 of 3)"}
    # What one child found, the others need not find again.
    (lab.root / "fault-i-1").unlink()
    assert lab.start("i-1", AWS_BATCH_JOB_ARRAY_INDEX="6") is not None


def test_what_is_to_be_watched_is_said_and_keeps_no_run_away(lab: Lab) -> None:
    lab.break_down("i-1", "monitor: it is warm")
    assert lab.start("i-1") is None
    assert lab.said == ["batchml notice: this host: fault file: it is warm"]


def test_what_could_not_be_checked_is_said_to_be_so(lab: Lab) -> None:
    assert lab.start("i-1", TMPDIR=str(lab.root / "none")) is None
    where = lab.root / "none"
    assert lab.said == [
        f"batchml notice: not checked on this host: scratch ({where}): No such file or directory"
    ]


def test_gpus_that_were_given_and_are_not_there_are_a_bad_host(lab: Lab) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has GPUs")
    refused = lab.start("i-1", NVIDIA_VISIBLE_DEVICES="GPU-1,GPU-2")
    assert refused is not None and "the run requested 2, and its container has no" in refused


def test_a_fault_of_setup_on_a_second_host_ends_the_run(lab: Lab) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has GPUs")
    for attempt in (1, 2):  # the same host says nothing of others
        refused = lab.start("i-1", attempt, BATCHML_GPUS="1")
        assert refused is not None and refused.endswith(f"({attempt} of 3)")
    assert lab.start("i-2", 3, BATCHML_FAULT_FILE="") is None
    with pytest.raises(NoFitHost) as refusal:
        lab.start("i-3", 4, BATCHML_GPUS="1")
    told = str(refusal.value)
    assert told.startswith("2 hosts (i-1, i-3) were unfit for the same reason")
    assert "the run requested 1, and its container has no NVIDIA device" in told


def test_off_is_off_and_a_person_is_not_checked(lab: Lab) -> None:
    lab.break_down("i-1")
    assert lab.start("i-1", **{VARIABLE: '{"checks": "off"}'}) is None
    environ = {k: v for k, v in lab.environ.items() if k != "AWS_BATCH_JOB_ID"}
    environ["BATCHML_HOST_ID"] = "i-1"
    assert check_host(RuntimeEnv.read(environ), environ, lab.said.append) is None


def test_a_store_that_is_away_changes_nothing_but_what_is_remembered(lab: Lab) -> None:
    (lab.root / "file").touch()
    lost = {"BATCHML_STORE": str(lab.root / "file" / "store")}
    assert lab.start("i-1", 2, **lost) is None
    lab.break_down("i-1")
    for store in (lost, {"BATCHML_STORE": ""}, {"BATCHML_STORE": "ftp://x"}):
        assert lab.start("i-1", 1, **store) == (
            "this host (i-1) is unfit: fault file: XID 79; another one is tried"
        )
    assert any("cannot record that this host is unfit" in line for line in lab.said)


def test_a_mistake_of_ours_keeps_no_run_from_a_host(lab: Lab) -> None:
    assert lab.start("i-1", TMPDIR="\0") is None
    assert len(lab.said) == 1 and "not checked on this host: scratch" in lab.said[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tries": "many"}', "7", "null"])
def test_settings_that_cannot_be_read_are_the_defaults(text: str) -> None:
    assert HealthSettings.read({VARIABLE: text}) == HealthSettings()


def test_the_client_and_the_runtime_mean_the_same() -> None:
    assert HEALTH == VARIABLE
    assert HealthSettings.read(health_variable(Health())) == HealthSettings("quick", 3, False)
    asked = Health(checks="deep", tries=5, quarantine=True)
    assert HealthSettings.read(health_variable(asked)) == HealthSettings("deep", 5, True)


# --- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "severity"),
    [
        (checks.check_memory("MemAvailable:   33554432 kB\n"), OK),
        (checks.check_memory("MemTotal: 1 kB\nMemAvailable:   1024 kB\n"), RETRY),
        (checks.check_memory(""), NOT_CHECKED),
        (checks.check_clock(checks.EARLIEST + 1), OK),
        (checks.check_clock(86_400.0), REPLACE),
        (checks.check_file_limit(-1), OK),
        (checks.check_file_limit(1024), OK),
        (checks.check_file_limit(256), MONITOR),
        (checks.check_shared_memory((1 << 30, 0)), OK),
        (checks.check_shared_memory((64 << 20, 64 << 20)), MONITOR),
        (checks.check_shared_memory(None), NOT_CHECKED),
        (classify_error("scratch", OSError(errno.EIO, "I/O error"), True), REPLACE),
        (classify_error("checkpoints", OSError(errno.ESTALE, "Stale file handle"), False), RETRY),
        (classify_error("scratch", OSError(errno.ENOSPC, "No space"), True), RETRY),
        # Every host sees the same full file system.
        (classify_error("checkpoints", OSError(errno.ENOSPC, "No space"), False), MONITOR),
        (classify_error("scratch", OSError(errno.EROFS, "Read-only"), True), NOT_CHECKED),
        (classify_error("checkpoints", OSError(errno.EACCES, "Denied"), False), NOT_CHECKED),
    ],
)
def test_how_bad_an_answer_is(found: HostCheck, severity: int) -> None:
    assert found.severity == severity
    assert bool(found.text) == (severity != OK)


def test_a_clock_that_differs_from_the_file_servers_is_found(tmp_path: Path) -> None:
    assert worst(check_folder("checkpoints", str(tmp_path), False)) == OK
    late = check_folder(
        "checkpoints", str(tmp_path), False, lambda: os.stat(tmp_path).st_mtime + 3600
    )
    assert [each.severity for each in late if each.name == "clock"] == [RETRY]
    assert list(tmp_path.iterdir()) == []


def test_what_hangs_in_the_kernel_is_left_behind() -> None:
    over = threading.Event()

    def hang() -> list[HostCheck]:
        over.wait(60)
        return []

    found = run_with_limit("checkpoints (/mnt)", 0.05, RETRY, hang)
    over.set()
    assert found == [HostCheck("checkpoints (/mnt)", RETRY, "no answer within 0.05 s")]


# --- in depth -------------------------------------------------------------------------------------


def stand_in(folder: Path, script: str) -> str:
    """Something to run instead of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("told", "severity", "words"),
    [
        ('[["cuda:0", "ok", "0.10 s"], ["cuda:1", "ok", "0.10 s"]]', OK, "cuda:1: 0.10 s"),
        ('[["cuda:0", "wrong", "7 of 9 products are wrong"]]', REPLACE, "7 of 9 products"),
        ('[["cuda:0", "failed", "CUDA error: device-side assert"]]', RETRY, "device-side"),
        ('[["cuda:0", "failed", "CUDA error: no kernel image is available"]]', RETRY, "no kernel"),
        ('[["torch", "unknown", "No module named torch"]]', NOT_CHECKED, "No module"),
        ("", RETRY, "ended with code 3"),
    ],
)
def test_what_the_probe_says_is_judged(
    tmp_path: Path, told: str, severity: int, words: str
) -> None:
    found = check_by_computing(os.environ, stand_in(tmp_path, f"echo '{told}'; exit 3"))
    assert worst(found) == severity
    assert words in found[-1].describe()


def test_a_probe_that_never_answers_or_dies(tmp_path: Path) -> None:
    hung = stand_in(tmp_path, "sleep 600 & sleep 600")
    found = check_by_computing(os.environ, hung, limit=0.2)
    assert [(each.severity, each.text) for each in found] == [(REPLACE, "no answer within 0.2 s")]
    assert [each.text for each in read_results(b"", -11)] == [
        "the program that computes it ended by signal 11"
    ]


def test_a_jobs_own_modules_are_not_the_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert worst(check_by_computing(os.environ)) < MONITOR


# --- which host this is ---------------------------------------------------------------------------


def test_a_hosts_name_is_the_instances_in_aws_and_the_machines_here() -> None:
    asked: list[tuple[str, str]] = []

    def imds(method: str, url: str, headers: dict[str, str], timeout: float) -> bytes:
        asked.append((method, url))
        return b"token" if method == "PUT" else b"i-0123456789abcdef0\n"

    def closed(method: str, url: str, headers: dict[str, str], timeout: float) -> bytes:
        raise OSError("timed out")

    ecs = {"ECS_CONTAINER_METADATA_URI_V4": "http://169.254.170.2/v4/x"}
    assert host_id(ecs, imds) == "i-0123456789abcdef0"
    assert asked == [
        ("PUT", "http://169.254.169.254/latest/api/token"),
        ("GET", "http://169.254.169.254/latest/meta-data/instance-id"),
    ]
    # Where IMDS is closed, all containers of a host still call it the same.
    assert host_id(ecs, closed).startswith("machine-")
    assert host_id(ecs, closed) == host_id(ecs, closed)
    assert host_id({}, closed)
    assert host_id({"BATCHML_NODE_ADDRESS": "127.3.0.2"}, closed) == "127.3.0.2"
    assert host_id({"BATCHML_NODE_ADDRESS": "a", "BATCHML_HOST_ID": "b"}, closed) == "b"
