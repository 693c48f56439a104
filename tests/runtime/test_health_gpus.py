"""GPUs by NVML, against a library that was built for this: what is asked, and what it means."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, OK, REPLACE, RETRY, HostCheck, worst
from batchml.runtime.health.gpus import check_gpus
from batchml.runtime.health.host_records import HostRecords
from batchml.runtime.health.xid import BROKEN, PROGRAMS, SILENT, GpuWatcher, classify_xid
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store
from batchml.runtime.telemetry.gpus import (
    RECOVERY_EVENT,
    XID_EVENT,
    GpuMonitor,
    Nvml,
    NvmlError,
    gpu_handles,
    gpu_totals,
    gpu_use_of,
)
from tests.support.nvml_fake import FakeDriver, build

BOTH = {"NVIDIA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}
HERE = "/dev/null"  # something that is there, as /dev/nvidiactl would be


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path) -> FakeDriver:
    return FakeDriver(library)


def asked(driver: FakeDriver, **environ: str) -> list[HostCheck]:
    found = check_gpus(environ or BOTH, driver.open, HERE)
    assert driver.users == 0
    return [each for each in found if each.severity != OK]


def test_gpus_that_are_well_have_nothing_to_say(driver: FakeDriver) -> None:
    found = check_gpus(BOTH, driver.open, HERE)
    assert {each.name for each in found} == {"GPU-aaaa", "GPU-bbbb"}
    assert worst(found) == OK


@pytest.mark.parametrize(
    ("what", "value", "severity", "words"),
    [
        ("action", 1, REPLACE, "GPU-bbbb: the driver asks for: reset"),
        ("action", 2, REPLACE, "GPU-bbbb: the driver asks for: reboot"),
        ("action", 4, REPLACE, "GPU-bbbb: the driver asks for: drain and reset"),
        ("action", 99, REPLACE, "GPU-bbbb: the driver asks for: action 99"),
        ("errors", 3, MONITOR, "GPU-bbbb: 3 uncorrected ECC errors since the driver was loaded"),
        ("failed", 1, REPLACE, "GPU-bbbb: a bad row of its memory could not be remapped"),
        ("pending", 1, REPLACE,
         "GPU-bbbb: bad rows of its memory wait for a reset to be remapped"),
        ("uncorrected", 2, MONITOR, "GPU-bbbb: 2 bad rows of its memory were remapped"),
        ("slow", 0x48, MONITOR, "GPU-bbbb: its clocks are lowered: hardware slowdown, heat"),
        ("slow", 0x4, OK, ""),  # the cap on its power that every card has
    ],
)  # fmt: skip
def test_what_a_driver_tells_of_a_card_is_judged(
    driver: FakeDriver, what: str, value: int, severity: int, words: str
) -> None:
    driver.set(what, value, gpu=1)
    found = asked(driver)
    assert [(each.severity, each.describe()) for each in found] == (
        [(severity, words)] if words else []
    )


def test_without_the_drivers_word_any_ecc_error_is_one_too_many(driver: FakeDriver) -> None:
    driver.set("old", 1)
    driver.set("errors", 1)
    found = asked(driver)
    assert (RETRY, "GPU-aaaa") in [(each.severity, each.name) for each in found]
    unknown = {each.describe() for each in found if each.severity == NOT_CHECKED}
    assert unknown == {
        "GPU-aaaa: recovery, remapped rows: the driver does not report it",
        "GPU-bbbb: recovery, remapped rows: the driver does not report it",
    }


def test_a_card_that_does_not_answer_is_missing(driver: FakeDriver) -> None:
    driver.set("lost", 15, gpu=1)
    assert [each.describe() for each in asked(driver)] == [
        "GPU-bbbb: it does not answer: GPU is lost",
        "GPUs: 1 of the run's 2 answer",
    ]
    driver.set("lost", 0, gpu=1)
    driver.set("count", 1)
    assert worst(asked(driver)) == REPLACE
    driver.set("lost", 3)  # cards that share the machine's memory do not tell how much they have
    assert asked(driver, NVIDIA_VISIBLE_DEVICES="GPU-aaaa") == []


def test_without_names_every_card_that_is_seen_is_asked(driver: FakeDriver) -> None:
    driver.set("failed", 1, gpu=1)
    assert [each.name for each in asked(driver, NVIDIA_VISIBLE_DEVICES="all")] == ["GPU 1"]
    driver.set("count", 0)
    assert [each.severity for each in asked(driver, A="")] == [NOT_CHECKED]


def test_a_driver_that_is_broken_is_the_hosts_and_a_missing_library_is_not(
    driver: FakeDriver,
) -> None:
    driver.set("init", 9)
    found = asked(driver)
    assert [(each.severity, each.text) for each in found] == [
        (REPLACE, "nvmlInit: Driver Not Loaded")
    ]

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    found = check_gpus(BOTH, lambda: Nvml(missing), HERE)
    assert [each.severity for each in found] == [NOT_CHECKED]
    with pytest.raises(NvmlError):
        Nvml(missing)


def test_gpus_that_were_given_and_are_not_there(tmp_path: Path, driver: FakeDriver) -> None:
    found = check_gpus(BOTH, driver.open, str(tmp_path / "nvidiactl"))
    assert [each.describe() for each in found] == [
        "GPUs: the run was given 2, and the host has none"
    ]


def test_use_is_read_from_the_cards_of_the_run(driver: FakeDriver) -> None:
    nvml = driver.open()
    used = [nvml.usage(handle) for _, _, handle in gpu_handles(nvml, "GPU-bbbb")]
    assert used == [{"busy": 80.0, "held": float(1 << 30)}]
    nvml.close()


def test_use_of_a_rank_is_that_of_the_cards_which_it_has_for_itself(driver: FakeDriver) -> None:
    gpus = GpuMonitor(BOTH, driver.open, HERE)
    seen = gpus.read()
    assert gpu_totals(seen) == {"gpu": 60.0, "gpu_memory": 2048.0}
    assert gpu_use_of(seen, {4, 5}) == {"gpu": 60.0, "gpu_memory": 600.0}
    assert gpu_use_of(seen, {4}) == {"gpu_memory": 600.0}  # 5 is on the second card as well
    assert gpu_use_of(seen, {5}) == {"gpu_memory": 0.0}  # whose driver does not tell how much
    assert gpu_use_of(seen, {6}) == {}
    driver.set("old", 1)
    assert gpu_use_of(gpus.read(), {4}) == {}
    gpus.close()
    assert gpus.read() == []
    assert driver.users == 0
    assert GpuMonitor({}, driver.open, "/no/such/device").read() == []


class Attempt:
    """What a companion is given."""

    last_output, notice = 0.0, ""

    def __init__(self, folder: Path, visible: str = "GPU-aaaa,GPU-bbbb") -> None:
        self.environ: Mapping[str, str] = {
            "AWS_BATCH_JOB_ID": "j", "BATCHML_STORE": str(folder / "store"),
            "BATCHML_HOST_ID": "i-1", "NVIDIA_VISIBLE_DEVICES": visible,
        }  # fmt: skip
        self.env = RuntimeEnv.read(self.environ)
        self.store: Store | None = FolderStore(self.env.store)
        self.said: list[str] = []
        self.stopped: list[tuple[str, int]] = []

    def pids(self) -> list[int]:
        return []

    def mark(self, text: str) -> None:
        raise AssertionError(text)

    def say(self, text: str) -> None:
        self.said.append(text)

    def stop(self, reason: str, code: int, within: float = 0.0) -> None:
        self.stopped.append((reason, code))


@pytest.mark.parametrize("is_old", [0, 1])
def test_a_card_that_breaks_sends_the_run_elsewhere(
    driver: FakeDriver, tmp_path: Path, is_old: int
) -> None:
    driver.set("old", is_old)
    attempt = Attempt(tmp_path)
    watch = GpuWatcher(attempt, driver.open, HERE)
    watch.tick(1.0)
    assert attempt.stopped == []
    driver.happen(XID_EVENT, 79, gpu=1)
    watch.tick(2.0)
    watch.tick(3.0)
    assert attempt.stopped == [
        ("this host (i-1) is unfit: GPU-bbbb: XID 79: it has fallen off the bus; "
         "the run saves and goes on elsewhere", 75)
    ]  # fmt: skip
    store = attempt.store
    assert store is not None
    found = HostRecords(store, attempt.env).find("i-1")
    assert found is not None and found.is_for_good
    # A run that got far on the host has not tried it in vain.
    assert store.keys("hosts/tried/") == []
    assert driver.users == 0


def test_what_the_program_did_is_told_once_and_the_rest_is_not(
    driver: FakeDriver, tmp_path: Path
) -> None:
    attempt = Attempt(tmp_path, "GPU-aaaa")
    watch = GpuWatcher(attempt, driver.open, HERE)
    driver.happen(XID_EVENT, 79, gpu=1)  # another run's card
    for xid in (13, 13, 43, 63, 777):
        driver.happen(XID_EVENT, xid)
    driver.happen(RECOVERY_EVENT, 0)  # it is well again
    watch.tick(1.0)
    assert attempt.said == [
        "batchml notice: GPU-aaaa: XID 13: an error of the program's kernel",
        "batchml notice: GPU-aaaa: XID 777: see NVIDIA's list of XIDs",
    ]
    driver.set("action", 1)
    driver.happen(RECOVERY_EVENT, 1)
    assert attempt.stopped == []
    watch.tick(2.0)
    assert [code for _, code in attempt.stopped] == [75]
    watch.finish()
    assert driver.users == 0


def test_without_gpus_or_a_driver_there_is_nothing_to_hear(
    driver: FakeDriver, tmp_path: Path
) -> None:
    attempt = Attempt(tmp_path)
    driver.set("init", 9)
    for watch in (
        GpuWatcher(attempt, driver.open, str(tmp_path / "none")),
        GpuWatcher(attempt, driver.open, HERE),
    ):
        watch.tick(1.0)
        watch.finish()
    assert (attempt.said, attempt.stopped) == ([], [])


def test_each_xid_has_one_meaning() -> None:
    assert not set(BROKEN) & set(PROGRAMS) and not (set(BROKEN) | set(PROGRAMS)) & set(SILENT)
    assert {classify_xid(xid).severity for xid in BROKEN} == {REPLACE}
    assert {classify_xid(xid).severity for xid in PROGRAMS} == {MONITOR}
    assert {classify_xid(xid).severity for xid in SILENT} == {OK}
