"""Commands that are shown can be typed into a shell."""

import subprocess
import sys

import pytest
from msgspec.structs import replace

from batchml.model.names import join_shell
from batchml.model.sweep import Trial
from batchml.sweeps.started import command_line
from tests.support.sweep_story import started

VALUES = (
    "plain", "", " ", "two words", "-x", "--lr=1", "it's", '"quoted"', "$HOME `id` $(id)", "a\\nb",
    "100 %d %%", "größer 漢字", "a\tb", "a\nb", "ends\n\n", "\n", "\r\x1b[2J\x07", "\u202eabc", "~",
    "*", "!x", "a;b&c|d>e", "#",
)  # fmt: skip
SHOW = "import os, sys; print(ascii((os.environ.get('BATCHML_SEED'), sys.argv[1:])))"


def run(line: str) -> str:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_shell_runs_the_words_that_were_joined() -> None:
    line = join_shell([sys.executable, "-c", SHOW, *VALUES])
    assert line.isprintable()
    assert run(line) == ascii((None, [*VALUES]))


@pytest.mark.parametrize("value", ["a b", "it's a\nnew line\n", "-1", "tab\there"])
def test_the_command_of_a_trial_runs_as_it_is_shown(value: str) -> None:
    job = {"name": "t", "command": [sys.executable, "-c", SHOW, "{x}"]}
    trial = Trial(number=1, params={"x": value}, seed=7)
    line = command_line(replace(started(), job=job), trial)
    assert line.isprintable()
    assert run(line) == ascii(("7", [value]))
