"""Sharded training: jobs/llama."""

import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli import Cli, read_rest, read_until
from tests.support.worlds import ROOT, Worlds, kill_a_rank

STEPS = 12
MISTAKES = (
    "train.py: --tensor-parallel 2 does not divide 1 processes.",
    "step-0000000012 is of another model: Size mismatch",
    "train.py: --batch 3 is not a multiple of 2 processes.",
    "and a gradient of nan: choose a lower --lr.",
)
LOSS = re.compile(r"Step (\d+)/\d+ \| Loss: ([0-9.]+)")


@pytest.fixture
def trainer(cli: Cli) -> Cli:
    """A client whose runs find PyTorch."""
    return cli


@given(st.integers(1, 3000), st.integers(0, 1 << 40))
def test_an_epoch_has_every_window_once_in_an_order_of_its_own(count: int, key: int) -> None:
    shuffled = runpy.run_path(str(ROOT / "jobs" / "llama" / "order.py"))["shuffled"]
    order = [shuffled(place, count, key) for place in range(count)]
    assert sorted(order) == [*range(count)]
    if count > 20:
        assert order != [*range(count)]
        assert order != [shuffled(place, count, key + 1) for place in range(count)]


def write_text(folder: Path) -> None:
    """Two files; windows go over from one to the other."""
    folder.mkdir()
    for name in ("one", "two"):
        lines = [f"line {i} of {name} in all\n" for i in range(999)]
        (folder / f"{name}.txt").write_text("".join(lines))


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(printed)}


@pytest.mark.slow
def test_a_checkpoint_is_restored_on_another_number_of_processes(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Two, then one, then two split each layer: the losses are those of two throughout. (D1)"""
    write_text(tmp_path / "text")
    words = f"--data text --steps {STEPS} --warmup 2 --batch 8 --log-every 1 --save-every 100"
    common = words.split()
    kept = (*common, "--checkpoints", "$BATCHML_WORKSPACE/kept")

    def llama(world: int, *arguments: object) -> tuple[list[int], str]:
        return worlds.run(ROOT / "jobs" / "llama" / "train.py", tmp_path, world, *arguments)

    unbroken = llama(2, *common)
    parts = [
        llama(2, *kept, "--until", 4),
        llama(1, *kept, "--until", 8, "--recompute", "--micro-batch", 3),
        llama(2, *kept, "--tensor-parallel", 2),
    ]
    refused = [
        llama(1, *common, "--tensor-parallel", 2),
        llama(1, *kept, "--size", "60m", "--sequence", 16),
        llama(2, *common, "--batch", 3),
        llama(1, *common, "--checkpoints", "new", "--lr", 1e30),
    ]
    for codes, printed in (unbroken, *parts):
        assert {*codes} == {0}, printed
    expected = losses(unbroken[1])
    assert [*expected] == [*range(1, STEPS + 1)]
    assert expected[STEPS] < expected[1] - 1
    steps = [losses(printed) for _, printed in parts]
    assert [[*part] for part in steps] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    for part in steps:
        for step, loss in part.items():
            assert loss == pytest.approx(expected[step], abs=1e-3)
    assert unbroken[1].count("device: CPU, 1 thread, fp32, 2 processes (gloo)\n") == 1
    for (codes, printed), code, words in zip(refused, (2, 2, 2, 1), MISTAKES, strict=True):
        assert {*codes} == {code}
        assert printed.count(words) == 1, printed
        assert "Traceback" not in printed


@pytest.mark.slow
def test_a_lost_rank_costs_the_steps_since_the_last_checkpoint(trainer: Cli) -> None:
    """Two nodes train; one of their processes is killed; the run ends well."""
    params = ("-p", "steps=30", "-p", "batch=8", "-p", "save_every=10")
    watching = trainer.watch("submit", "--wait", "llama", *params)
    run_id = re.findall(r"llama - ([0-9a-f-]{36})", read_until(watching, "Submitted job"))[0]
    folder = trainer.home.runs / run_id / "checkpoints"
    kill_a_rank(folder, 2)
    out, err = read_rest(watching)
    assert watching.returncode == 0, out + err
    resumed = re.search(r"Resuming after step (\d+)", out)
    assert resumed and int(resumed[1]) in (10, 20)
    assert losses(out)[30] < losses(out)[10]
    assert re.search(r"\| \d+ tokens/s", out)
    assert sorted(path.name for path in folder.glob("step-*"))[-1] == "step-0000000030"
