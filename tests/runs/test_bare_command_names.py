"""What a run of a bare command is called."""

import pytest

from batchml.runs.options import name_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train"),
        ("/usr/bin/python3.11 -u -X dev src/bad_mod.py", "bad_mod"),
        ("python -c print(1) x.py", "python"),
        ("python -m pkg.train data.py", "train"),
        ("python -m", "python"),
        ("python", "python"),
        ("bash -c ./x.sh", "bash"),
        ("sh run.sh", "run"),
        ("./run.sh 1", "run"),
        ("torchrun --nproc_per_node 4 train.py", "train"),
        ("uv run train.py", "train"),
        ("env A=1 python train.py", "train"),
        ("./.sh", "job"),
        ("make train.py", "make"),
        ("/opt/my.tool x", "my-tool"),
    ],
)
def test_a_command_is_called_after_its_script(command: str, name: str) -> None:
    assert name_of(command.split()) == name
