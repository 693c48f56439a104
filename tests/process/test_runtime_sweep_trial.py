"""Trials as their containers run them: a process, a store in a folder or in S3."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.processes import changes_of
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import (
    CONTRACT,
    CUTOFFS,
    INBOX,
    Cutoffs,
    TrialContract,
    TrialEntry,
    batch_key,
    deadline_key,
    encode,
    mark_key,
)
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store
from tests.support.local_server import wait_for
from tests.support.s3 import BUCKET, KEYS, moto_s3
from tests.support.trial_world import a_contract

ROOT = str(Path(__file__).parents[2])
ENTRIES = [TrialEntry(number, {"lr": number / 10}, 100 + number) for number in range(4)]
PRINTS = ["sh", "-c", "echo epoch=1 acc={lr} loss: 3"]


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


class Sweep:
    """A sweep whose trials are started by hand."""

    def __init__(self, folder: Path, url: str = "", **environ: str) -> None:
        self.folder = folder
        self.url = url or str(folder / "store")
        self.environ = environ
        self.store: Store = open_store(self.url, environ)
        self.width = 0
        (folder / "work").mkdir()

    def begins(
        self, command: Sequence[str], entries: Sequence[TrialEntry] = (), **contract: Any
    ) -> None:
        made: TrialContract = a_contract(
            command=tuple(command),
            **{"every": 0.2, "look": 0.1, "grace": 1.0, "max": 0, **contract},
        )
        self.store.put(CONTRACT, made.to_json())
        self.adds(1, entries or ENTRIES)

    def adds(self, wave: int, entries: Sequence[TrialEntry]) -> None:
        data, self.width = encode("k", wave, entries)
        self.store.put(batch_key(wave), data)

    def start(
        self, index: int = 0, wave: int = 1, job: str = "job", attempt: int = 1, **env: str
    ) -> "subprocess.Popen[str]":
        places = {
            "BATCHML_SWEEP": self.url, "BATCHML_WAVE": str(wave),
            "BATCHML_WAVE_WIDTH": str(self.width), "AWS_BATCH_JOB_ID": f"{job}:{index}",
            "AWS_BATCH_JOB_ARRAY_INDEX": str(index), "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        }  # fmt: skip
        own = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "TMPDIR": str(self.folder)}
        return subprocess.Popen(
            [sys.executable, "-m", "batchml.runtime.run", "whatever"],
            cwd=self.folder / "work", env={**own, **places, **self.environ, **env},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, index: int = 0, **options: Any) -> tuple[int, str]:
        process = self.start(index, **options)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    @property
    def messages(self) -> list[dict[str, Any]]:
        found = [
            messages.decode_message(self.store.get(key) or b"") for key in self.store.keys(INBOX)
        ]
        return [each for each in found if each is not None]

    @property
    def end(self) -> dict[str, Any]:
        return self.messages[-1]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text, "{params}"]


def test_a_trial_is_its_line_of_the_manifest(sweep: Sweep) -> None:
    names = "TRIAL SEED STEPS PARAMS PARAM_LR PARAM_EPOCHS"
    shown = " ".join(f"$BATCHML_{name}" for name in names.split())
    command = ["sh", "-c", f'echo "{shown} $0 $*"; echo epoch=1 acc={{lr}}', "{params}"]
    sweep.begins(command, params={"epochs": 2, "lr": 0.9}, max=27)
    code, output = sweep.run(2)
    assert code == 0
    assert output.splitlines()[0] == '2 102 27 {"epochs": 2, "lr": 0.2} 0.2 2 --epochs 2'
    assert (sweep.end["trial"], sweep.end["state"]) == (2, "DONE")
    at_the_rung, _ = sweep.messages
    assert at_the_rung["points"][0][:2] == [1, [0.2]]


def test_of_two_jobs_of_one_wave_only_the_first_runs_a_trial(sweep: Sweep) -> None:
    sweep.begins(PRINTS)
    assert sweep.run(1, job="first")[0] == 0
    code, output = sweep.run(1, job="second")
    assert code == 77
    assert "first:1 goes on" in output
    assert len({each["job"] for each in sweep.messages}) == 1
    assert sweep.run(1, job="first", attempt=2)[0] == 0
    assert sweep.end["attempt"] == 2


@pytest.mark.parametrize(
    ("key", "data", "words"),
    [
        (batch_key(1), None, "the manifest is missing"),
        (batch_key(1), b"x\n" * 500, "the manifest was changed"),
        (batch_key(1), b"", "ends before this line"),
        (CONTRACT, None, "course.json is missing"),
        (CONTRACT, b"{}", "course.json is not valid"),
    ],
)
def test_a_manifest_that_is_gone_or_changed_ends_it_before_any_work(
    sweep: Sweep, key: str, data: bytes | None, words: str
) -> None:
    sweep.begins(PRINTS)
    sweep.store.delete(key)
    if data is not None:
        sweep.store.put(key, data)
    code, output = sweep.run(3)
    assert code == 78
    assert words in output
    assert "acc=" not in output
    assert (sweep.end["trial"], sweep.end["index"], sweep.end["state"]) == (-4, 3, "FAILED")
    assert words in sweep.end["why"]


def test_one_that_was_stopped_before_it_began_does_nothing(sweep: Sweep) -> None:
    sweep.begins(PRINTS)
    sweep.store.put("stop/all", b"enough")
    code, output = sweep.run(0)
    assert (code, "acc=" in output) == (143, False)
    assert (sweep.end["state"], sweep.end["why"]) == ("KILLED", "enough")


def test_one_that_comes_after_the_deadline_does_nothing(sweep: Sweep) -> None:
    sweep.begins(PRINTS)
    sweep.store.put(deadline_key(1.0), b"")
    assert sweep.run(0)[0] == 143
    assert sweep.end["state"] == "KILLED"


def test_a_command_that_cannot_be_run_is_a_failure(sweep: Sweep) -> None:
    sweep.begins(["no-such-program", "{lr}"])
    assert sweep.run(0)[0] == 127
    assert sweep.end["state"] == "FAILED"
    assert "no such command in this image" in sweep.end["why"]


def test_a_program_that_ignores_the_signal_is_killed_and_pruned_all_the_same(sweep: Sweep) -> None:
    sweep.begins(["sh", "-c", 'trap "" TERM; echo epoch=1 acc=0.1; sleep 60 & wait; sleep 60'])
    sweep.store.put(CUTOFFS, Cutoffs(2, {0: (3, 0.5)}, {}).to_json())
    assert sweep.run(0)[0] == 0
    assert sweep.end["state"] == "PRUNED"


def test_a_program_that_reports_ends_at_the_very_step(sweep: Sweep) -> None:
    """And saves before it does, for the signal does not end it."""
    sweep.begins(
        python(
            "from batchml.runtime import report\n"
            "for epoch in range(1, 28):\n"
            "    if not report(epoch=epoch, acc=0.1): break\n"
            "print('saved after', epoch)"
        ),
        max=27,
    )
    sweep.store.put(CUTOFFS, Cutoffs(2, {0: (3, 0.05), 1: (3, 0.5)}, {}).to_json())
    code, output = sweep.run(0)
    assert code == 0
    assert "saved after 3" in output
    assert sweep.end["state"] == "PRUNED"


def test_a_program_that_does_not_look_at_what_report_says_ends_by_the_signal(sweep: Sweep) -> None:
    sweep.begins(
        python(
            "from batchml.runtime import report\n"
            "for epoch in range(1, 28):\n"
            "    report(epoch=epoch, acc=0.1)\n"
            "print('to the end')"
        ),
        max=27, grace=50.0,
    )  # fmt: skip
    sweep.store.put(CUTOFFS, Cutoffs(2, {0: (3, 0.5)}, {}).to_json())
    assert "to the end" not in sweep.run(0)[1]
    assert sweep.end["state"] == "PRUNED"


def test_a_signal_while_it_writes_loses_nothing_that_was_written(sweep: Sweep) -> None:
    text = (
        "import sys, time\n"
        "for epoch in range(1, 10000):\n"
        "    sys.stdout.write(f'epoch={epoch} ac'); sys.stdout.flush(); time.sleep(0.001)\n"
        "    sys.stdout.write(f'c=0.{epoch}\\n'); sys.stdout.flush()\n"
    )
    sweep.begins(python(text), rungs=(), method="none")
    process = sweep.start(0)
    wait_for(lambda: len(sweep.messages) > 0, "a message")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert sweep.end["state"] == "KILLED"
    whole = [line for line in output.splitlines() if line.startswith("epoch=") and "acc=" in line]
    assert sweep.end["points"][-1][0] == len(whole)


# --- trials in parts ----------------------------------------------------------------------------

SAVES = [
    "sh", "-c", 'cd "$BATCHML_CHECKPOINT_DIR"; echo "was: $(cat * 2>&-) resume=$BATCHML_RESUME"; '
    'for e in $(seq $BATCHML_STEPS); do echo "epoch=$e acc=0.{lr}"; done; echo {lr} > state',
]  # fmt: skip


def test_a_trial_goes_on_from_its_checkpoint(sweep: Sweep) -> None:
    sweep.begins(SAVES, [TrialEntry(0, {"lr": 5}, 1, target=1)], resume=True, max=27)
    assert "was:  resume=\n" in sweep.run(0)[1]
    assert sweep.end["state"] == "PAUSED"
    sweep.adds(2, [TrialEntry(0, {"lr": 5}, 1, target=27, resumes=True)])
    assert "was: 5 resume=1\n" in sweep.run(0, wave=2)[1]
    assert sweep.end["state"] == "DONE"
    sweep.adds(3, [TrialEntry(0, {"lr": 5}, 1, target=1)])
    assert "was:  resume=\n" in sweep.run(0, wave=3)[1]  # it begins anew


def test_report_is_false_where_a_part_of_a_trial_ends(sweep: Sweep) -> None:
    text = (
        "from batchml.runtime import report\n"
        "for epoch in range(9):\n"
        "    if not report(epoch=epoch, acc=0.1): break\n"
        "print('saved', epoch)"
    )
    sweep.begins(python(text), [TrialEntry(0, {}, 1, target=3)], resume=True, max=27, grace=50.0)
    assert "saved 2\n" in sweep.run(0)[1]
    assert sweep.end["state"] == "PAUSED"


def test_of_several_nodes_one_speaks(sweep: Sweep) -> None:
    sweep.begins(PRINTS)
    nodes = {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_NODE_INDEX": "1"}
    code, output = sweep.run(1, **nodes)
    assert (code, "acc=0.1" in output) == (0, True)
    assert sweep.messages == []


def test_a_change_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    changes = changes_of(path)
    try:
        assert select.select([changes], [], [], 0)[0] == []
        with open(path, "a") as file:
            file.write("x")
        assert select.select([changes], [], [], 10)[0] == [changes]
    finally:
        os.close(changes)
    with pytest.raises(OSError, match="none"):
        changes_of(str(tmp_path / "none" / "metrics"))


def test_another_attempt_goes_on_with_the_steps_of_the_one_before(sweep: Sweep) -> None:
    """Its program counts from 0, or prints no step at all."""
    text = (
        'cd "$BATCHML_CHECKPOINT_DIR"; begin=$(cat state 2>&-); '
        "for e in $(seq ${begin:-0} $((${begin:-0} + 2))); do echo PRINTS; done; "
        "echo $((e + 1)) > state; exit 143"
    )
    for prints in ("Epoch[$e] acc=0.5", "acc=0.5"):
        sweep.begins(["sh", "-c", text.replace("PRINTS", prints)], max=27)
        for attempt in (1, 2):
            sweep.run(0, job=prints, attempt=attempt)
        found = [point[0] for each in sweep.messages for point in each.get("points", ())]
        assert found == [1, 2, 3, 4, 5, 6]
        sweep.store.delete(*sweep.store.keys("inbox/"), *sweep.store.keys("claims/"))


def test_a_child_of_a_rung_takes_up_the_one_in_its_place(sweep: Sweep) -> None:
    sweep.begins(SAVES, [TrialEntry(n, {"lr": n}, 1, target=1) for n in range(4)],
                 method="halving", shape="rungs", max=27)  # fmt: skip
    for index in range(4):
        assert sweep.run(index)[0] == 0
    code, output = sweep.run(0, wave=2, BATCHML_RUNG="1")
    assert code == 0
    assert "was: 3 resume=1" in output  # the best of four
    assert (sweep.end["trial"], sweep.end["wave"], sweep.end["state"]) == (3, 2, "PAUSED")
    assert sweep.store.keys("rungs/1/") == [mark_key(1, -0.3, 3)]
    code, output = sweep.run(4, wave=2, BATCHML_RUNG="1")
    assert (code, "there is nothing to run" in output) == (0, True)


# --- S3 -----------------------------------------------------------------------------------------


def test_all_of_it_works_in_s3_with_checkpoints_on_the_store(moto: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/runs/{tmp_path.name}"
    sweep = Sweep(tmp_path, url, AWS_ENDPOINT_URL_S3=moto, **KEYS)
    sweep.begins(SAVES, [TrialEntry(0, {"lr": 5}, 1, target=1)], resume=True, max=27)
    assert sweep.run(0)[0] == 0
    assert sweep.end["state"] == "PAUSED"
    assert sweep.store.get("checkpoints/0/state") == b"5\n"
    sweep.adds(2, [TrialEntry(0, {"lr": 5}, 1, target=27, resumes=True)])
    assert "was: 5 resume=1\n" in sweep.run(0, wave=2)[1]
    sweep.adds(3, [TrialEntry(0, {"lr": 5}, 1, target=1)])
    assert "was:  resume=\n" in sweep.run(0, wave=3)[1]
    assert sweep.run(0, wave=3, job="other")[0] == 77


def test_a_store_that_is_not_there_ends_it_before_any_work(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.begins(PRINTS)
    code, output = sweep.run(0, BATCHML_SWEEP=str(tmp_path / "elsewhere"))
    assert (code, "course.json is missing" in output) == (78, True)
    assert isinstance(sweep.store, FolderStore)
