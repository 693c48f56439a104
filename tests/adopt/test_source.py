"""What a program's source tells: flags, packages, variables. Nothing of it is run."""

import sys
from pathlib import Path

import pytest

from batchml.adopt.packages import Package, ask_python, choose_image, find_packages
from batchml.adopt.source import Flag, ProgramSource, read_program
from batchml.errors import UsageError


def read(folder: Path, text: str, **modules: str) -> ProgramSource:
    (folder / "train.py").write_text(text)
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)
    return read_program(folder / "train.py", folder)


def flags_of(folder: Path, text: str) -> list[tuple[str, str, object]]:
    return [(flag.name, flag.kind, flag.default) for flag in read(folder, text).flags]


ARGPARSE = """
import argparse
RATE = 1e-2
p = argparse.ArgumentParser()
p.add_argument("data", help="folder")
p.add_argument("-b", "--batch-size", type=int, default=64)
p.add_argument("--lr", type=float, default=RATE)
p.add_argument("--decay", type=float, default=1)
p.add_argument("--steps", type=int, default=10 * 1000)
p.add_argument("--amp", action="store_true")
p.add_argument("--fast", type=bool, default=False)
p.add_argument("--layers", type=int, nargs="+", default=[1, 2])
p.add_argument("--name", required=True)
p.add_argument("-q", type=int, default=1)
"""


def test_flags_of_argparse(tmp_path: Path) -> None:
    assert flags_of(tmp_path, ARGPARSE) == [
        ("data", "positional", None),
        ("batch-size", "value", 64),
        ("lr", "value", 0.01),
        ("decay", "value", 1.0),
        ("steps", "value", 10_000),
        ("amp", "switch", None),
        ("fast", "switch", False),  # bool("false") is True
        ("layers", "several", None),
        ("name", "value", None),
        ("q", "several", 1),  # `{params}` writes only long names
    ]
    required = [flag.name for flag in read(tmp_path, ARGPARSE).flags if flag.is_required]
    assert required == ["data", "name"]
    assert read(tmp_path, ARGPARSE).flags[1] == Flag("batch-size", "value", 64, 6)


def test_flags_of_click(tmp_path: Path) -> None:
    text = (
        "import click\n@click.command()\n@click.option('--lr', '-l', default=0.1)\n"
        "@click.option('--amp/--no-amp', default=True)\n@click.argument('file')\n"
        "def main(lr, amp, file): ...\n"
    )
    assert flags_of(tmp_path, text) == [
        ("lr", "value", 0.1), ("amp", "switch", True), ("file", "positional", None)
    ]  # fmt: skip


def test_flags_of_typer(tmp_path: Path) -> None:
    text = (
        "import typer\ndef main(file: str, batch_size: int = 8, amp: bool = False,\n"
        "         lr: float = typer.Option(0.1, '--rate'), out: str = typer.Argument('x')): ...\n"
        "typer.run(main)\n"
    )
    assert flags_of(tmp_path, text) == [
        ("file", "positional", None), ("batch-size", "value", 8), ("amp", "switch", False),
        ("rate", "value", 0.1), ("out", "positional", "x"),
    ]  # fmt: skip


def test_flags_of_absl(tmp_path: Path) -> None:
    text = (
        "from absl import flags\nflags.DEFINE_float('lr', 0.1, 'rate')\n"
        "flags.DEFINE_bool('amp', False, 'x')\nflags.DEFINE_list('files', None, 'x')\n"
    )
    assert flags_of(tmp_path, text) == [
        ("lr", "value", 0.1), ("amp", "switch", False), ("files", "several", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "makes"),
    [
        ("import os\nos.makedirs('x', exist_ok=True)\n", True),
        ("from pathlib import Path\nPath('x').mkdir()\n", True),
        ("SummaryWriter('runs')\n", True),
        ("open('runs/x', 'w')\n", False),
    ],
)
def test_a_program_that_makes_the_folders_that_it_writes_to(
    tmp_path: Path, text: str, makes: bool
) -> None:
    assert read(tmp_path, text).makes_folders is makes


def test_imports_and_variables_of_the_program_and_of_its_modules(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "import os, helper\nfrom sklearn.svm import SVC\nos.environ['TOKEN']\n"
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n",
        helper="import numpy as np\nimport os\nos.getenv('DEBUG')\n"
        "def f():\n    from torch.utils.tensorboard import SummaryWriter\n",
    )
    assert found.imports == ("numpy", "sklearn", "tensorboard", "torch", "wandb")
    assert found.optional == {"wandb"}
    assert found.variables == ("DEBUG", "TOKEN")


@pytest.mark.parametrize(
    ("text", "words"),
    [("print 'old'\n", "line 1: not Python"), ("\0", "train.py"), ("def f(:\n", "line 1")],
)
def test_a_program_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, text)


# --- Packages -------------------------------------------------------------------------------------


IMAGES = {
    "pytorch": "torch==2.13.0\nnumpy==2.4.6\n",
    "nlp": "torch==2.13.0\nnumpy==2.4.6\ntransformers==5.0\n",
    "notebook": "jupyterlab==4\ntorch==2.13.0\n",
    "python": "# nothing\n",
}


def test_packages_have_the_names_and_versions_of_the_users_python() -> None:
    found = find_packages(
        ["sklearn", "wandb", "my_model", "cv2"], frozenset(["wandb", "cv2"]),
        {"sklearn": Package("scikit-learn", "1.9.1"), "cv2": Package("opencv-python", "4.1+cpu")},
    )  # fmt: skip
    assert [each.requirement for each in found] == [
        "my-model", "opencv-python==4.1", "scikit-learn==1.9.1"
    ]  # fmt: skip


def test_a_python_says_which_packages_it_has() -> None:
    assert ask_python(sys.executable, ["pytest", "no_such_module"]).keys() == {"pytest"}
    assert ask_python("/no/python", ["pytest"]) == {}


@pytest.mark.parametrize(
    ("packages", "image", "requirements"),
    [
        ([], "python", ()),
        ([Package("torch", "2.13.0+cpu")], "pytorch", ()),
        ([Package("torch"), Package("transformers")], "nlp", ()),
        ([Package("torch"), Package("tqdm", "4.1")], "pytorch + requirements.txt", ("tqdm==4.1",)),
        ([Package("torch", "2.4.0")], ".", ("torch==2.4.0",)),  # the user's version counts
        ([Package("numpy", "2.4.6")], ".", ("numpy==2.4.6",)),  # torch would be for nothing
    ],
)
def test_the_image_that_is_chosen(
    packages: list[Package], image: str, requirements: tuple[str, ...]
) -> None:
    chosen = choose_image(packages, {}, IMAGES)
    assert (chosen.image, chosen.requirements) == (image, requirements)


def test_packages_without_a_version_are_named() -> None:
    chosen = choose_image([Package("numpy"), Package("tqdm", "4.1")], {}, IMAGES)
    assert chosen.describe_unpinned() == (
        "numpy has no version in requirements.txt, since your python does not have it: the newest "
        "is installed."
    )
    both = choose_image([Package("numpy"), Package("tqdm")], {}, IMAGES).describe_unpinned()
    assert both.startswith("numpy, tqdm have no versions") and "have them" in both
    assert choose_image([Package("numpy", "2.4.6")], {}, IMAGES).describe_unpinned() == ""


def test_files_of_the_folder_decide_and_what_they_lack_is_named() -> None:
    files = {"requirements.txt": "scikit_learn>=1\nnumpy\n"}
    chosen = choose_image([Package("scikit-learn"), Package("tqdm")], files, IMAGES)
    assert (chosen.image, chosen.requirements) == (".", ())
    assert chosen.why == "from requirements.txt, which does not name tqdm"
    both = choose_image([], {**files, "Dockerfile": "FROM x"}, IMAGES)
    assert both.image == "./requirements.txt"
