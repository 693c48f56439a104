"""The main job, as a user gets it: from a wheel, in an empty folder, on real digits."""

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

from batchml.local.home import Home
from tests.support.cli import Cli, Shown

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


def readme_commands() -> tuple[str, str]:
    """The two commands of the README's first screen."""
    text = (ROOT / "README.md").read_text("utf-8")
    install, submit = text.split("```sh\n")[1].split("```")[0].splitlines()
    return install, submit


@pytest.mark.slow
def test_the_readmes_two_commands_work_as_they_are_written(tmp_path: Path, home: Home) -> None:
    """The first installs the wheel into an empty environment; the second runs in an empty folder,
    from which nothing of the repository can be reached, and makes the job's environment.
    """
    install, submit = readme_commands()
    venv.create(tmp_path / "env", with_pip=True)
    folder = tmp_path / "empty"
    folder.mkdir()
    binaries = tmp_path / "env" / "bin"
    path = os.pathsep.join((str(binaries), os.environ["PATH"]))
    subprocess.run(["sh", "-ec", install], cwd=ROOT, env={**os.environ, "PATH": path}, check=True)

    class Installed(Cli):
        is_installed = True

        def command(self, *arguments: str) -> list[str]:
            return ["sh", "-c", *arguments]

    cli = Installed(folder, home)
    cli.environ["PATH"] = path
    shown = cli(submit, timeout=LIMIT, **real_mnist())
    check_training(shown)
    assert "Making the environment pytorch-" in shown.err
    run_id = re.findall(r"lenet - ([0-9a-f-]{36})", shown.out)[0]
    assert (home.runs / run_id / "output" / "lenet.pt").stat().st_size > 100_000


@pytest.mark.slow
def test_lenet_in_mxnet_trains_too(cli: Cli) -> None:
    command = ("submit", "--wait", "--vcpus", "1", "lenet-mxnet")
    shown = cli(*command, timeout=LIMIT, **real_mnist())
    check_training(shown)
    run_id = re.findall(r"lenet-mxnet - ([0-9a-f-]{36})", shown.out)[0]
    outputs = sorted(path.name for path in (cli.home.runs / run_id / "output").iterdir())
    assert "mnist-0001.params" in outputs
    assert "mnist-symbol.json" in outputs
