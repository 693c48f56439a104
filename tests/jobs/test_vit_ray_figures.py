"""The report of jobs/vit-ray."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

JOB = Path(__file__).parent.parent.parent / "jobs" / "vit-ray"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vit_figures", JOB / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and tuples with names look there
    spec.loader.exec_module(module)
    return module


def told(figures: ModuleType, seconds: float, workers: int) -> Any:
    steps = figures.Steps(
        count=100, seconds=seconds, waited=seconds / 2, began=0.0, images=1600, rows={1: 1600}
    )
    nodes = [figures.Node("head 10.0.0.1", "head", 4.0, 1600, 0.9, 46.0)]
    nodes += [figures.Node(f"worker {i}", "worker", 16.0, 0, None, None) for i in range(workers)]
    return figures.report(steps, nodes, {"head": 1.408, "worker": 0.816})


def test_a_price_is_of_all_hosts_for_the_time_of_the_steps(figures: ModuleType) -> None:
    alone, both = told(figures, 360.0, 0), told(figures, 180.0, 1)
    assert alone["step_seconds"] == 3.6
    assert alone["data_wait"] == 50
    assert alone["images_per_second"] == 4.44
    assert alone["dollars_per_1000_steps"] == pytest.approx(1.408)
    assert both["dollars_per_1000_steps"] == pytest.approx(2.224 / 2)
    assert figures.lines(alone)[1] == (
        "Report: head 10.0.0.1: 1600 images blurred, CPU 90 % of 4 vCPUs, GPU 46 %"
    )
    assert "CPU ? of 16" in figures.lines(both)[2]


def test_the_metrics_of_the_run_are_the_averages_of_the_report(figures: ModuleType) -> None:
    steps = figures.Steps(100, 360.0, 230.4, 0.0, 1600, {})
    averages = figures.averages(steps)
    assert averages == {"step_seconds": 3.6, "data_wait": 64.0, "images_per_second": 4.44}
    assert averages.items() <= figures.report(steps, [], {}).items()
    assert figures.averages(figures.Steps(0, 0.0, 0.0, 0.0, 0, {}))["data_wait"] == 0


def test_prices_are_read_and_mistakes_named(figures: ModuleType) -> None:
    assert figures.read_prices("head=1.4, worker=0.8") == {"head": 1.4, "worker": 0.8}
    assert figures.read_prices("") == {}
    for text in ("gpu=1", "head", "head=much"):
        with pytest.raises(ValueError):
            figures.read_prices(text)


def test_use_is_what_changed_between_two_times(figures: ModuleType) -> None:
    samples = [(float(at), at * 0.5, 40.0 if at % 2 else None) for at in range(20)]
    assert figures.used(samples, 5.0, 15.0) == pytest.approx(0.5)
    assert figures.used(samples, 100.0, 110.0) == 0.0
    assert figures.mean_gpu(samples) == 40.0
    assert figures.mean_gpu([(0.0, 0.0, None)]) is None
