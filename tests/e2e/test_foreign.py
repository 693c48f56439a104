"""Training programs that know nothing of batchml, in the style of public ones: `tests/foreign/`.

Each is run, killed once after it has saved, tried again, and its model is fetched. It saves where
it saves by default, in its working folder. Half of them are killed alone, the others together with
batchml's runtime, as a lost host does.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from batchml.local.home import Home
from tests.support.cli import Cli
from tests.support.local_server import wait_for
from tests.support.worlds import ROOT

LIMIT = 240.0  # seconds for all programs together


class Program(NamedTuple):
    """A foreign program, and what a user does with it."""

    script: str
    words: tuple[str, ...]  # its arguments, or a whole command that begins with `sh`
    saves: str  # the file whose appearance says that it has saved: a glob pattern
    model: str  # the file that the user wants: a glob pattern
    resumed: str = ""  # what it prints when it goes on; "": it cannot, and begins anew
    with_host: bool = False  # killed together with batchml's runtime


PLAIN = [
    Program(
        "fairseq_style",
        (),
        "checkpoints/checkpoint_last.pt",
        "checkpoints/checkpoint_last.pt",
        "Loaded checkpoint checkpoints/checkpoint_last.pt",
    ),
    Program(
        "hf_trainer_style",
        (
            "--resume_from_checkpoint",
            "--save_steps",
            "300",
        ),
        "out/checkpoint-*/trainer_state.json",
        "out/model.safetensors",
        "Continuing training from checkpoint",
        True,
    ),
    Program(
        "lightning_style",
        ("--ckpt_path", "last"),
        "lightning_logs/version_0/checkpoints/*",
        "lightning_logs/version_1/checkpoints/epoch=49-step=500.ckpt",
        "Restored all states",
    ),
    Program(
        "yolo_style",
        ("resume=True",),
        "runs/train/exp/weights/best.pt",
        "runs/train/exp/weights/best.pt",
        "Resuming training",
        True,
    ),
    Program(
        "detectron_style",
        ("--resume", "SOLVER.MAX_ITER", "900"),
        "output/last_checkpoint",
        "output/model_final.pth",
        "[Checkpointer] Loading from output/model_",
    ),
    Program(
        "keras_style",
        (),
        "backup/training_metadata.json",
        "model.keras",
        "Restored from backup/: epoch",
        True,
    ),
    Program(
        "mxnet_style",
        (),
        "mnist/mlp-0001.params",
        "mnist/mlp-0050.params",
        "Loaded model mnist/mlp_00",
    ),
    Program(
        "xgboost_style", (), "models/model_*.json", "xgb.model.json", "continues from models/", True
    ),
    Program("sklearn_style", (), "cv_results.csv", "model.joblib"),
    Program("optuna_style", (), "2.pickle", "example-study.db", "Using an existing study", True),
    Program(
        "sb3_style", (), "logs/rl_model_*_steps.zip", "ppo_bandit.zip", "Loading logs/rl_model"
    ),
    Program("hydra_style", ("trainer.epochs=40",), "outputs/*/*/model.pkl", "outputs/*/*/done.txt"),
    Program(
        "tensorflow_style",
        (),
        "train_logs/checkpoint",
        "train_logs/model.ckpt-100.index",
        "Restoring parameters from train_logs/model.ckpt-",
        True,
    ),
    Program("gensim_style", (), "corpus.txt", "vectors.txt"),
    Program(
        "orbax_style",
        (),
        "ckpts/30/params/array.json",
        "ckpts/240/params/array.json",
        "Restoring checkpoint from ckpts/",
        True,
    ),
]
RESUME_IF_SAVED = (
    "[ -e out/ckpt.pt ] && more=--init_from=resume; exec python nanogpt_torch.py $more"
)
TORCH = [
    Program("mnist_torch", ("--save-model",), "train_loss.txt", "mnist_cnn.pt"),
    Program(
        "imagenet_torch",
        ("--resume", "checkpoint.pth.tar"),
        "model_best.pth.tar",
        "model_best.pth.tar",
        "=> loaded checkpoint 'checkpoint.pth.tar'",
        True,
    ),
    Program(
        "nanogpt_torch",
        ("sh", "-c", RESUME_IF_SAVED),
        "out/ckpt.pt",
        "out/ckpt.pt",
        "Resuming training from out",
    ),
    Program("word_language_model_torch", (), "model.pt", "model.pt"),
    Program(
        "ddp_torch",
        ("200", "10"),
        "snapshot.pt",
        "snapshot.pt",
        "Resuming training from snapshot",
        True,
    ),
]


class Outcome(NamedTuple):
    """The end of a program's run: its JSON, its log, and the folder with its fetched files."""

    status: str
    attempts: int
    log: str
    folder: Path


class Judge:
    """Runs programs, kills each once after it has saved, and fetches the files of each."""

    def __init__(self, cli: Cli) -> None:
        self._cli = cli

    def run(self, programs: Sequence[Program], *flags: str) -> dict[str, Outcome]:
        ids: dict[str, str] = {}
        for each in programs:  # the attempts after the kills run side by side
            ids[each.script] = self._submit(each, flags)
            kill = partial(self._kill, each, ids[each.script])
            wait_for(kill, f"{each.script} saves", LIMIT)
        self._cli("wait", *ids.values(), timeout=LIMIT)
        return {name: self._fetch(name, job_id) for name, job_id in ids.items()}

    def _submit(self, program: Program, flags: Sequence[str]) -> str:
        folder = self._cli.folder / program.script
        folder.mkdir()
        source = ROOT / "tests" / "foreign" / f"{program.script}.py"
        (folder / source.name).write_text(source.read_text())
        is_line = program.words[:1] == ("sh",)
        command = program.words if is_line else ("python", source.name, *program.words)
        if program.script == "ddp_torch":
            command = ("torchrun", "--nproc-per-node=2", *command[1:])
            flags = (*flags, "--launch", "torchrun")
        here = Cli(folder, self._cli.home)
        sent = here(
            "submit", "--json", "--attempts", "3", "--retry-on", "app-error", "--retry-on",
            "host-lost", "--set-env", "BATCHML_KEEP_EVERY=0.1", *flags, "--", *command,
        )  # fmt: skip
        assert sent.code == 0, sent.err
        return str(sent.json["jobId"])

    def _kill(self, program: Program, job_id: str) -> bool:
        """Kill a program that has saved; with its host, once the file is kept, too."""
        script = f"{program.script}.py".encode()
        own = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _is_of(pid, job_id)]
        own = sorted(pid for pid in own if script in _read(pid, "cmdline"))
        if not own or not (runtime := parent_of(own[0])):
            return False
        # The runtime stays in the working folder; a program may change to another one.
        folder = Path(f"/proc/{runtime}/cwd")
        if not any(folder.glob(program.saves)):
            return False
        # Nobody can go on from half a file, so a program is killed between two writes.
        _send(own, signal.SIGSTOP)
        wait_for(lambda: all(_state(pid) in "TZ" for pid in own), "the program stands still", 60)
        if any(_is_writing(pid, folder.resolve()) for pid in own):
            _send(own, signal.SIGCONT)
            return False
        victims = own[:1]
        if program.with_host:
            kept = self._cli.home.runs / job_id / "output" / "work"
            for pattern in (program.saves, program.model):
                if any(folder.glob(pattern)):  # the model of most programs comes at their end
                    wait_for(partial(_has_some, kept, pattern), f"{pattern} is kept", 60)
            victims = [runtime, *own]
        _send(victims, signal.SIGKILL)
        return True

    def _fetch(self, name: str, job_id: str) -> Outcome:
        shown = self._cli("show", job_id, "--json").json
        folder = self._cli.folder / f"{name}-files"
        assert self._cli("get", job_id, str(folder)).code == 0
        log = "".join(
            self._cli("logs", job_id, "--attempt", str(number + 1)).out
            for number in range(int(shown["attempts"]))
        )
        return Outcome(shown["status"], int(shown["attempts"]), log, folder / "work")


def _read(pid: int | str, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _is_of(pid: str, job_id: str) -> bool:
    return f"BATCHML_RUN={job_id}\0".encode() in _read(pid, "environ")


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the end of another one has ended it
            os.kill(pid, number)


def _has_some(folder: Path, pattern: str) -> bool:
    """Whether a file of this pattern is in the folder, with something in it."""
    return any(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def _state(pid: int) -> str:
    """The state of a process: `T` if it is stopped, `Z` if it has ended."""
    return (_read(pid, "stat").rpartition(b") ")[2][:1] or b"Z").decode()


def _is_writing(pid: int, folder: Path) -> bool:
    """Whether a process has a file of the folder open, other than those that it always has open."""
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            file = Path(os.readlink(descriptor))
            if file.is_relative_to(folder) and file.suffix not in (".csv", ".log", ".db"):
                return True
    return False


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    return int((_read(pid, "stat").rpartition(b") ")[2].split() or [b"", b"0"])[1])


def _check(program: Program, ended: Outcome) -> None:
    assert ended.status == "SUCCEEDED", ended.log[-2000:]
    assert ended.attempts == 2 or program.script == "ddp_torch", ended.log
    assert any(ended.folder.glob(program.model)), sorted(ended.folder.rglob("*"))
    assert program.resumed in ended.log
    assert "of the working folder" in ended.log and "kept: batchml get" in ended.log


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory, environments: Path
) -> Iterator[dict[str, Outcome]]:
    yield from _judge(tmp_path_factory.mktemp("foreign"), environments, PLAIN)


@pytest.fixture(scope="module")
def torch(
    tmp_path_factory: pytest.TempPathFactory, environments: Path, pytorch: Path
) -> Iterator[dict[str, Outcome]]:
    """With the environment that `pytorch` has made."""
    yield from _judge(tmp_path_factory.mktemp("torch"), environments, TORCH, "--image", "pytorch")


def _judge(
    folder: Path, environments: Path, programs: Sequence[Program], *flags: str
) -> Iterator[dict[str, Outcome]]:
    home, work = Home(folder / "home"), folder / "work"
    home.prepare()
    home.envs.symlink_to(environments)
    work.mkdir()
    try:
        yield Judge(Cli(work, home)).run(programs, *flags)
    finally:
        pid = home.holder()
        if pid is not None and home.is_held():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("program", PLAIN, ids=lambda program: str(program.script))
def test_a_program_is_killed_goes_on_and_leaves_its_model(
    program: Program, plain: dict[str, Outcome]
) -> None:
    _check(program, plain[program.script])


@pytest.mark.slow
@pytest.mark.parametrize("program", TORCH, ids=lambda program: str(program.script))
def test_a_program_with_torch_is_killed_goes_on_and_leaves_its_model(
    program: Program, torch: dict[str, Outcome]
) -> None:
    _check(program, torch[program.script])
