"""One process beside several: how the efficiency is computed, and where speeds are read."""

import pytest

from benchmarks.scaling import efficiency, programs, speed_of
from tests.support.worlds import ROOT


def test_an_efficiency_is_told_by_the_cores_that_the_processes_have() -> None:
    """Four processes on two cores can be twice as fast as one, and not more."""
    assert efficiency(160.0, 100.0, processes=2, cores=2) == 0.8
    assert efficiency(180.0, 100.0, processes=4, cores=2) == 0.9


def test_speeds_are_read_from_what_the_jobs_print() -> None:
    lines = {
        "ddp": "[r0] 2 processes: 812 samples/s, 1.2 ms a step",
        "llama": "Step 10/50 | Loss: 1 | Norm: 1 | LR: 1e-3 | 812 tokens/s",
        "bert": "Epoch[0] Step[20] loss=0.6 speed=812.4 pairs/s",
        "translate": "Epoch[0] Step[50] loss=6.1 speed=812 pieces/s",
    }
    for name, program in programs("made-up", "model").items():
        assert speed_of(lines[name], program.speed) == pytest.approx(812, abs=0.5)
        assert (ROOT / program.words[0]).is_file()
    warm = "\n".join(f"speed={speed} pairs/s" for speed in (1, 90, 100, 110))
    assert speed_of(warm, programs("made-up", "model")["bert"].speed) == 100
    with pytest.raises(RuntimeError, match="printed no speed: it failed"):
        speed_of("it failed", "speed=([0-9]+)")
