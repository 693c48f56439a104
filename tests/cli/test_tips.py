"""Command lines that cannot be read: what they were meant to say, and what programs are told."""

import json
import os
import pty
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.cli import app, output
from batchml.cli.app import SYNONYMS
from batchml.runs.commands import hints


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output, "_documents", 0)
    monkeypatch.setattr(app.RootGroup, "usage_error", "")
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("submit python train.py", "batchml submit -- python train.py"),
        ("submit --name x python train.py", "batchml submit -- python train.py"),
        ("submit python train.py --epochs 3", "batchml submit -- python train.py --epochs 3"),
        ("submit train.py --lr=3", "batchml submit train.py -- --lr=3"),
        ("submit train.sh a 3", "batchml submit train.sh -- a 3"),
        ("submit train.sh --lr=3", "batchml submit train.sh -- --lr=3"),
        ("submit --gres=gpu:1 train.sh", "--gres: here --gpus 1"),
        ("submit --cpus-per-task 4 train.sh", "--cpus-per-task: here --vcpus 4"),
        ("submit -c 4 train.sh", "-c: here --vcpus 4"),
        ("submit -N 2 train.sh", "-N: here --nodes 2"),
        ("submit --partition gpu train.sh", "--partition: here --queue gpu"),
        ("submit --array 0-3 train.sh", "--array 0-3: here --array 4, for 0 to 3"),
        ("submit --array=3,5 train.sh", "#SBATCH --array=3,5"),
        ("submit --time 1h train.sh", "--time: here --timeout 1h"),
        ("submit --time 1:00:00 train.sh", "--time: here --timeout 3600s"),
        ("submit --output x train.sh", "--output is an option of sbatch: all output is kept"),
        ("submit train.sh --gres=gpu:1", "batchml submit train.sh -- --gres=gpu:1"),
        ("sbatch train.sh", "Did you mean 'batchml submit'?"),
        ("salloc", "Did you mean 'batchml alloc'?"),
        ("submit train --lr 0.3", "A parameter of the job: -p lr=0.3"),
        ("submit train --lr=0.3", "A parameter of the job: -p lr=0.3"),
        ("submit train -x 1", "No such option: -x"),
        ("submit train --lr", "A parameter of the job: -p lr=VALUE"),
        ("submit train lr=0.3 n=1", "Parameters of the job: -p lr=0.3 -p n=1"),
        ("submit train --nmae x", "--name"),
        ("submit --image", "Option '--image' requires an argument."),
        ("status", "Did you mean 'batchml ls'?"),
        ("ps", "Did you mean 'batchml ls'?"),
        ("help", "Did you mean 'batchml --help'?"),
        ("run train", "Did you mean 'batchml submit'?"),
        ("stop x", "Did you mean 'batchml cancel'?"),
        ("sumbit", "Did you mean 'submit'?"),
        ("stauts", "Did you mean 'batchml ls'?"),
        ("metrics @last", "Did you mean 'batchml show'?"),
        ("foo", "No such command 'foo'."),
    ],
)
def test_a_wrong_line_is_told_what_it_was_meant_to_be(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert hint in err.splitlines()[-1]
    assert "foo" not in line or "Did you mean" not in err
    assert hint.startswith("--") or "Possible" not in err


def test_every_synonym_is_no_command_and_names_one() -> None:
    for word, command in SYNONYMS.items():
        assert word not in app.ORDER
        assert command.split()[0] in (*app.ORDER, "--help", "--version")


@given(st.lists(st.text(max_size=6), max_size=5))
def test_no_line_is_too_strange_for_a_hint(words: list[str]) -> None:
    for start in range(len(words)):
        assert "\x1b" not in hints.words_hint(words, words[start:])
        assert "\x1b" not in hints.option_hint(words, words[start].partition("=")[0])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("ls --json --limit x", 2, "--limit"),
        ("status --json", 2, "batchml ls"),
        ("show --json", 2, "RUN"),
        ("cost --json r --since 7d", 2, "cannot be combined"),
    ],
)
def test_with_json_an_error_is_one_document_too(
    line: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(line.split()) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document.keys() == {"error", "exitCode"}
    assert document["exitCode"] == code
    assert words in document["error"]
    assert document["error"] in err


@pytest.mark.parametrize(
    "line",
    [
        *(f"submit {flag} ''" for flag in ("--queue", "--share", "--fallback", "--tag", "--after")),
        "submit --name=", "submit train.sh --queue ' '", "ls --env ''", "ls --project=",
        "sweep sweep.toml --name ''", "sweeps best @last --get ''", "queue list --env ''",
        "get @last --json --env=", "alloc --name ''",
    ],
)  # fmt: skip
def test_an_empty_value_of_an_option_is_refused_by_every_command(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    option = [word.partition("=")[0] for word in words if word.startswith("--")][-1]
    assert app.run(words) == 2
    assert f"{option} is empty. Is a variable of the shell not set?" in capsys.readouterr().err


def test_empty_words_of_the_command_of_a_run_are_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["submit", "--dry-run", "--", "echo", "--queue", ""]) == 2
    assert "The command has an empty word" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("submit --vcpus 0 -- true", "resources.vcpus: found 0. Expected a whole number >= 1."),
        ("submit --nodes 0 -- true", "nodes: found 0."),
        ("submit --attempts 0 -- true", "retry.attempts: found 0."),
        ("submit --", "Nothing follows the --"),
        ("submit . --", "Nothing follows the --"),
        ("alloc --", "Nothing follows the --"),
    ],
)
def test_zero_and_a_command_without_words_are_refused(
    line: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "job.toml").write_text('command = ["true"]\nimage = "python"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHML_HOME", str(tmp_path / "home"))
    command, *rest = line.split()
    assert app.run([command, "--dry-run", *rest]) != 0
    out, err = capsys.readouterr()
    assert (out, words in err) == ("", True), err


def test_what_stands_after_the_dashes_asks_for_no_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["submit", "--nope", "--", "prog", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_there_is_never_a_second_document(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json([1])
    output.print_error("no", 1)
    assert json.loads(capsys.readouterr().out) == [1]


INTERRUPTED = """
import os, sys
from batchml.cli import app
@app.app.command()
def press(how: str) -> None:
    from batchml.cli.app import Detached
    raise KeyboardInterrupt if how == "key" else Detached(130) if how == "told" else SystemExit(130)
sys.exit(app.run(["press", sys.argv[1]]))
"""


@pytest.mark.parametrize("how", ["key", "told", "exit"])
def test_at_a_terminal_ctrl_c_ends_the_command_as_a_shell_expects(how: str) -> None:
    """Bash goes on with a loop after exit code 130, which a run can have by itself."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", INTERRUPTED, how])
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # it has ended
        pass
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT
    assert died == (how != "exit")
    assert died or os.waitstatus_to_exitcode(status) == 130
