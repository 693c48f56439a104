"""GPUs by NVML, against a library that was built for this: what is asked, and what it means."""

import threading
from collections.abc import Callable, Mapping
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
    UNAVAILABLE_EVENT,
    XID_EVENT,
    GpuMonitor,
    Nvml,
    NvmlError,
    gpu_handles,
    gpu_totals,
    gpu_use_of,
    has_gpus,
    with_own_gpus,
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
        ("sram", 1, REPLACE,
         "GPU-bbbb: its on-chip memory (SRAM) had more ECC errors than NVIDIA allows"),
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
        "GPU-aaaa: recovery: the driver does not report it",
        "GPU-bbbb: recovery: the driver does not report it",
    }


def test_a_card_that_retires_pages_needs_a_reboot_for_it(driver: FakeDriver) -> None:
    driver.set("old", 1)
    driver.set("pages", 1)
    assert [each.describe() for each in asked(driver) if each.severity == REPLACE] == [
        "GPU-aaaa: bad pages of its memory wait for a reboot to be retired"
    ]


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
    driver.set("init", 15)
    found = asked(driver)
    assert [(each.severity, each.text) for each in found] == [(REPLACE, "nvmlInit: GPU is lost")]
    for code, words in ((9, "driver is not loaded"), (18, "another version than the host's")):
        driver.set("init", code)
        (other,) = asked(driver)
        assert (other.severity, other.is_setup) == (RETRY, True) and words in other.text

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    found = check_gpus(BOTH, lambda: Nvml(missing), HERE)
    assert [each.severity for each in found] == [NOT_CHECKED]
    with pytest.raises(NvmlError):
        Nvml(missing)


def test_gpus_that_were_given_and_are_not_there(tmp_path: Path, driver: FakeDriver) -> None:
    found = check_gpus(BOTH, driver.open, str(tmp_path / "nvidiactl"))
    assert [(each.severity, each.is_setup) for each in found] == [(RETRY, True)]
    assert "the run requested 2, and its container has no NVIDIA device" in found[0].text


def test_gpus_that_were_requested_are_counted_even_if_nothing_names_them(
    tmp_path: Path, driver: FakeDriver
) -> None:
    """As in a privileged container, of an image of ours: only the request tells."""
    requested = {"BATCHML_GPUS": "2", "NVIDIA_VISIBLE_DEVICES": "void"}
    none = str(tmp_path / "nvidiactl")
    assert has_gpus(requested, none) and not has_gpus({"NVIDIA_VISIBLE_DEVICES": "void"}, HERE)
    assert has_gpus({}, HERE) and not has_gpus({}, none)
    assert check_gpus(requested, driver.open, none)[0].is_setup
    assert asked(driver, **requested) == []
    driver.set("count", 1)
    assert [each.describe() for each in asked(driver, **requested)] == [
        "GPUs: 1 of the run's 2 answer"
    ]
    driver.set("count", 2)
    (more,) = asked(driver, BATCHML_GPUS="1")
    assert more.severity == MONITOR and "the container sees 2, and the run requested 1" in more.text


def test_a_run_without_gpus_is_not_concerned_with_those_of_its_machine(driver: FakeDriver) -> None:
    driver.set("lost", 15)
    assert GpuMonitor({"NVIDIA_VISIBLE_DEVICES": "void"}, driver.open, HERE).read() == []


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a"}, "GPU-a"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, None),  # all that are seen are its own
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
        ({}, None),
    ],
)
def test_a_privileged_container_that_sees_all_gpus_uses_those_that_it_was_given(
    given: dict[str, str], own: str | None
) -> None:
    devices = ["null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
    assert with_own_gpus(given, devices).get("CUDA_VISIBLE_DEVICES") == own


def test_use_is_read_from_the_cards_of_the_run(driver: FakeDriver) -> None:
    nvml = driver.open()
    used = [
        nvml.usage(handle)
        for _, _, handle in gpu_handles(nvml, {"NVIDIA_VISIBLE_DEVICES": "GPU-bbbb"})
    ]
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
    assert gpu_totals(gpus.read()) == {"gpu": 60.0, "gpu_memory": 4096.0}  # with the driver's own
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
        self.code: int | None = None
        self.lines: list[str] = []
        self.stopped: list[tuple[str, int]] = []

    def pids(self) -> list[int]:
        return []

    def last_lines(self) -> list[str]:
        return self.lines

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
    watch.finish()
    assert driver.users == 0


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("lost", 15, "it does not answer: GPU is lost"),
        ("lost", 28, "it does not answer"),
        ("action", 2, "the driver asks for: reboot"),
    ],
)
def test_a_card_that_vanishes_without_an_event_is_noticed(
    driver: FakeDriver, tmp_path: Path, what: str, value: int, words: str
) -> None:
    attempt = Attempt(tmp_path)
    watch = GpuWatcher(attempt, driver.open, HERE)
    watch.tick(1.0)
    driver.set(what, value, gpu=1)
    watch.tick(5.0)
    assert attempt.stopped == []
    watch.tick(11.5)
    watch.tick(30.0)
    ((why, code),) = attempt.stopped
    assert code == 75 and f"GPU-bbbb: {words}" in why
    watch.finish()
    assert driver.users == 0


def test_an_event_that_a_card_cannot_be_used_and_a_driver_that_wants_an_action(
    driver: FakeDriver, tmp_path: Path
) -> None:
    for kind, data, action in ((UNAVAILABLE_EVENT, 0, 0), (XID_EVENT, 154, 1)):
        attempt = Attempt(tmp_path)
        watch = GpuWatcher(attempt, driver.open, HERE)
        driver.set("action", action)
        driver.happen(kind, data)
        watch.tick(1.0)
        assert [code for _, code in attempt.stopped] == [75]
        watch.finish()


def test_what_may_pass_is_reported_once_and_keeps_the_run_where_it_is(
    driver: FakeDriver, tmp_path: Path
) -> None:
    attempt = Attempt(tmp_path)
    watch = GpuWatcher(attempt, driver.open, HERE)
    watch.tick(0.0)
    driver.set("lost", 999)  # NVML's "unknown error"
    for errors in (1, 5):
        driver.set("errors", errors, gpu=1)
        driver.set("slow", 0x40, gpu=1)
        watch.tick(100.0 * errors)
    assert attempt.stopped == []
    assert attempt.said == [
        "batchml notice: GPU-bbbb: 1 uncorrected ECC errors during the run",
        "batchml notice: GPU-bbbb: its clocks are lowered: heat",
    ]
    watch.finish()


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (lambda driver, attempt: driver.happen(XID_EVENT, 79), "XID 79: it has fallen off"),
        (lambda driver, attempt: driver.set("lost", 15), "it does not answer: GPU is lost"),
        (lambda driver, attempt: driver.set("errors", 2), "2 uncorrected ECC errors during"),
        (lambda driver, attempt: driver.set("pending", 1), "wait for a reset"),
        (lambda driver, attempt: driver.happen(XID_EVENT, 94), "XID 94: an ECC error"),
        (lambda driver, attempt: attempt.lines.append(
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
         "uncorrectable ECC error"),
    ],
)  # fmt: skip
def test_a_program_that_ends_by_its_broken_card_goes_on_elsewhere(
    driver: FakeDriver,
    tmp_path: Path,
    happens: Callable[[FakeDriver, Attempt], object],
    words: str,
) -> None:
    """The program mostly ends before the next question to the driver."""
    for code, stops in ((0, 0), (1, 1)):
        driver.reset()
        attempt = Attempt(tmp_path, "GPU-aaaa")
        watch = GpuWatcher(attempt, driver.open, HERE)
        watch.tick(1.0)
        happens(driver, attempt)
        attempt.code = code
        watch.finish()
        assert len(attempt.stopped) == stops and driver.users == 0
    ((why, given),) = attempt.stopped
    assert given == 75 and words in why
    assert why.endswith("; the run goes on elsewhere")


def test_the_main_node_does_not_blame_its_own_host_for_the_card_of_another_node(
    driver: FakeDriver, tmp_path: Path
) -> None:
    """AWS Batch sees the main node's exit code, so the run goes on elsewhere by that."""
    attempt = Attempt(tmp_path)
    watch = GpuWatcher(attempt, driver.open, HERE)
    attempt.lines = [
        "[r0] step 1", "batchml: its last lines were:",
        "  RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "batchml: Rank 9 on node 1 (10.0.0.2) ended with 1.",
    ]  # fmt: skip
    attempt.code = 1
    watch.finish()
    assert attempt.stopped == [(
        "a GPU of another node is broken: uncorrectable ECC error encountered; the run goes on "
        "elsewhere", 75,
    )]  # fmt: skip
    assert not (tmp_path / "store" / "hosts").exists()


def test_a_driver_that_never_answers_after_a_failure_is_left(
    driver: FakeDriver, tmp_path: Path
) -> None:
    over = threading.Event()

    class Hanging(Nvml):
        def test(self, handle: Any) -> int:
            over.wait(60)
            return 0

    attempt = Attempt(tmp_path)
    watch = GpuWatcher(attempt, lambda: Hanging(driver.load), HERE, limit=0.05)
    watch.tick(1.0)
    attempt.code = 1
    watch.finish()
    over.set()
    ((why, code),) = attempt.stopped
    assert code == 75 and "GPUs: no answer within 0.05 s" in why


def test_a_program_that_fails_by_itself_keeps_its_exit_code(
    driver: FakeDriver, tmp_path: Path
) -> None:
    driver.set("errors", 3)  # before the run
    attempt = Attempt(tmp_path)
    watch = GpuWatcher(attempt, driver.open, HERE)
    watch.tick(1.0)
    driver.happen(XID_EVENT, 31)
    attempt.lines.append("RuntimeError: CUDA error: an illegal memory access was encountered")
    attempt.code = 1
    watch.finish()
    assert attempt.stopped == []


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
