"""What a program's source tells: flags, packages, variables. Nothing of it is run."""

from pathlib import Path

import pytest

from batchml.errors import UsageError
from batchml.jobs.source import Flag, ProgramSource, read_flags, read_program


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
        ("amp", "switch", False),
        ("fast", "several", False),  # bool("false") is True
        ("layers", "several", None),
        ("name", "value", None),
        ("q", "several", 1),  # `{params}` writes only long names
    ]
    required = [flag.name for flag in read(tmp_path, ARGPARSE).flags if flag.is_required]
    assert required == ["data", "name"]
    assert read(tmp_path, ARGPARSE).flags[1] == Flag("batch-size", "value", 64, 6, aliases=("-b",))


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


NO_AMP = "p.add_argument('--no-amp', dest='amp', action='store_false'"


@pytest.mark.parametrize(
    ("text", "default", "off"),
    [
        ("p.add_argument('--amp', action='store_true')", False, ""),
        ("p.add_argument('--amp', action='store_false')", False, ""),
        ("p.add_argument('--amp', action=argparse.BooleanOptionalAction)", None, "--no-amp"),
        (
            "p.add_argument('--amp', action=argparse.BooleanOptionalAction, default=True)",
            True, "--no-amp",
        ),
        ("p.add_argument('--amp', action='count')", None, ""),
        (f"p.add_argument('--amp', action='store_true'); {NO_AMP})", False, "--no-amp"),
        (f"{NO_AMP}); p.add_argument('--amp', action='store_true')", True, "--no-amp"),
        (
            f"p.add_argument('--amp', action='store_true'); {NO_AMP}); p.set_defaults(amp=True)",
            True, "--no-amp",
        ),
        (
            f"p.add_argument('--amp', action='store_true', default=None); {NO_AMP}, default=None)",
            None, "--no-amp",
        ),
        ("@click.option('--amp', is_flag=True)\ndef f(): ...", False, ""),
        ("@click.option('--amp/--without', default=True)\ndef f(): ...", True, "--without"),
        ("@click.option('--amp', is_flag=True, default=True)\ndef f(): ...", None, ""),
        ("flags.DEFINE_bool('amp', True, 'x')", True, "--noamp"),
        ("import typer\ndef f(amp: bool = True): ...\ntyper.run(f)", True, "--no-amp"),
        ("import typer\ndef f(amp: bool = typer.Option(False, '--amp')): ...\ntyper.run(f)",
         False, ""),
    ],
)  # fmt: skip
def test_a_switch_has_a_default_if_a_parameter_can_stand_for_it(
    tmp_path: Path, text: str, default: bool | None, off: str
) -> None:
    (flag,) = read(tmp_path, text).flags
    assert (flag.kind, flag.default, flag.off) == ("switch", default, off)


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


FLAGS = """
p.add_argument("-b", "--batch-size", type=int, default=64)
p.add_argument("--learning-rate", "--lr", "-l", type=float, default=0.1)
p.add_argument("--amp", action="store_true")
p.add_argument("--compile", action=argparse.BooleanOptionalAction)
p.add_argument("--max_steps", type=int)
"""


@pytest.mark.parametrize(
    ("command", "name", "known", "words"),
    [
        ("python train.py {params:kebab}", "lr", ["learning_rate"],
         "train.py has it as --learning-rate: the parameter is learning_rate."),
        ("python train.py {params}", "learning-rate", ["lr"], "the parameter is lr."),
        ("python train.py {params}", "b", [], "has no flag --b: the parameter is batch-size."),
        ("python train.py --lr 1 {params}", "learning-rate", [], "the command has --lr already"),
        ("python train.py {params:kebab}", "amp", [], '--amp of train.py takes no value. Write "'),
        ("python train.py {params}", "no-compile", [],
         '--no-compile of train.py takes no value. Write "{--compile/--no-compile}" into'),
        ("python train.py {--compile/--no-compile} {params}", "no-compile", ["compile"],
         "the parameter is compile: -p compile=false"),
        ("python train.py {params:kebab}", "no_compile", [], "--no-compile of train.py takes no"),
        ("python train.py {params}", "batch_size", [], "the parameter is batch-size."),
        ("python train.py {params:kebab}", "max_steps", [], "Write --max_steps into the command."),
        ("python train.py {params}", "lr", ["batch-size"], ""),
        ("python train.py {params}", "unknown", [], ""),
        ("python train.py {params:json}", "amp", [], ""),
        ("python missing.py {params}", "amp", [], ""),
        ("sh -c true", "amp", [], ""),
    ],
)  # fmt: skip
def test_parameters_that_the_program_has_by_another_name(
    tmp_path: Path, command: str, name: str, known: list[str], words: str
) -> None:
    (tmp_path / "train.py").write_text(FLAGS)
    found = read_flags(command.split(), tmp_path).mistakes([name], [*known, name])
    assert words in "".join(found) and bool(found) == bool(words)
    (tmp_path / "train.py").write_text("not python(")
    assert read_flags(command.split(), tmp_path).mistakes([name], known) == []
