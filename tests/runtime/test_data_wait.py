"""How long an attempt waited for data: at its start, and at disks."""

from pathlib import Path

import pytest

from batchml.runtime.telemetry.data_wait import DataWait, any_waits


def pressure(seconds: float) -> str:
    total = round(seconds * 1e6)
    return (
        f"some avg10=0.00 avg60=1.02 avg300=2.15 total={total}\n"
        f"full avg10=0.00 avg60=0.06 avg300=0.50 total=9\n"
    )


def test_the_kernels_count_is_the_time_since_the_start() -> None:
    texts = [pressure(7), pressure(8.5), pressure(10)]
    wait = DataWait(12.0, 100.0, lambda: texts.pop(0), lambda: pytest.fail("no sample is needed"))
    wait.sample(150.0)
    assert wait.measure(115.0) == {
        "staging": 12.0, "io_wait": pytest.approx(1.5), "data_wait": pytest.approx(50.0),
    }  # fmt: skip
    assert wait.measure(188.0)["data_wait"] == pytest.approx(15.0)


def test_without_it_states_are_sampled() -> None:
    states = [True, False, False, True]
    wait = DataWait(0.0, 0.0, lambda: "", lambda: states.pop(0))
    for now in (1, 2, 3, 4, 6, 7, 8):
        wait.sample(now)
    assert wait.measure(10.0) == {"io_wait": 5.0, "data_wait": 50.0}


def test_a_run_that_waits_for_nothing_says_nothing() -> None:
    assert DataWait(0.0, 0.0, lambda: "", lambda: False).measure(10.0) == {}
    assert DataWait(0.0, 0.0, lambda: pressure(3), lambda: False).measure(10.0) == {}
    assert DataWait(5.0, 0.0, lambda: "", lambda: False).measure(0.0)["data_wait"] == 100.0


def test_more_waiting_than_time_is_all_of_it() -> None:
    texts = [pressure(0), pressure(20)]
    wait = DataWait(0.0, 0.0, lambda: texts.pop(0), lambda: False)
    assert wait.measure(10.0) == {"io_wait": 10.0, "data_wait": 100.0}


def test_any_thread_that_waits_for_a_disk_counts(tmp_path: Path) -> None:
    def thread(pid: int, number: int, state: str) -> None:
        folder = tmp_path / str(pid) / "task" / str(number)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{number} (py) D x) {state} 1 2 3\n")

    thread(7, 7, "S")
    thread(7, 8, "R")
    assert not any_waits([7, 99], str(tmp_path))
    thread(8, 8, "S")
    thread(8, 9, "D")
    assert any_waits([7, 99, 8], str(tmp_path))
