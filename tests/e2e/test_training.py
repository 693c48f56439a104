"""The main job, as a user gets it: from a wheel, in an empty folder, on real digits."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from batchml.local.home import Home
from tests.e2e.conftest import Cli, Shown

ROOT = Path(__file__).parent.parent.parent
LIMIT = 1200.0  # seconds: the first run downloads and installs a framework


def real_mnist() -> dict[str, str]:
    """The variable that points jobs at MNIST, when it lies on this machine."""
    found = os.environ.get("BATCHML_DATA_DIR") or str(ROOT.parent / "shared" / "data")
    return {"BATCHML_DATA_DIR": found} if (Path(found) / "mnist").is_dir() else {}


def check_training(shown: Shown) -> None:
    """A log in MXNet's classic lines, an accuracy that says it learned, the end proved."""
    assert shown.code == 0, shown.out + shown.err
    speed = r"Epoch\[0\] Batch \[\d+\]\tSpeed: [0-9.]+ samples/sec\tTrain-accuracy=[0-9.]+\n"
    accuracy = re.search(r"Epoch\[0\] Validation-accuracy=([0-9.]+)\n", shown.out)
    assert accuracy, shown.out
    if "scikit-learn" in shown.out:  # no MNIST here, and none to be had: says so in one line
        assert float(accuracy[1]) > 0.5
    else:
        assert re.search(speed, shown.out)
        assert float(accuracy[1]) >= 0.97
    assert "Log complete:" in shown.err


@pytest.mark.slow
def test_the_readmes_two_commands_work_from_a_wheel_in_an_empty_folder(
    tmp_path: Path, home: Home
) -> None:
    """`pip install batchml` and `batchml submit --wait lenet`, outside of the repository."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), "."],
        cwd=ROOT, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("batchml-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    folder = tmp_path / "empty"
    folder.mkdir()
    installed = [str(tmp_path / "env" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*installed, str(wheel)], cwd=folder, check=True)

    class Installed(Cli):
        def command(self, *arguments: str) -> list[str]:
            return [str(tmp_path / "env" / "bin" / "batchml"), *arguments]

    cli = Installed(folder, home)
    shown = cli("submit", "--wait", "lenet", timeout=LIMIT, **real_mnist())
    check_training(shown)
    assert "Making the environment pytorch-" in shown.err
    run_id = re.findall(r"lenet - ([0-9a-f-]{36})", shown.out)[0]
    assert (home.runs / run_id / "output" / "lenet.pt").stat().st_size > 100_000


@pytest.mark.slow
def test_lenet_in_mxnet_trains_too(cli: Cli) -> None:
    shown = cli("submit", "--wait", "lenet-mxnet", timeout=LIMIT, **real_mnist())
    check_training(shown)
    run_id = re.findall(r"lenet-mxnet - ([0-9a-f-]{36})", shown.out)[0]
    outputs = sorted(path.name for path in (cli.home.runs / run_id / "output").iterdir())
    assert "mnist-0001.params" in outputs
    assert "mnist-symbol.json" in outputs
