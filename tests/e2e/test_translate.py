"""jobs/translate: its parts, one process and four, a rank that is killed, a conversation."""

import importlib.util
import os
import pty
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.jobs.find import find_source
from batchml.local.home import Home
from tests.support.cli import Cli, read_rest, read_until
from tests.support.worlds import ROOT, Worlds, kill_a_rank, make_python, open_worlds

JOB = ROOT / "jobs" / "translate"
PER_NODE = 2 if os.environ.get("BATCHML_TORTURE") else 1
# Two nodes share the cores of this machine.
TWO_NODES = ("--nodes", "2", "--vcpus", "1")
LEARN = (
    "--digits", "3", "--batch-size", "32", "--width", "64", "--dropout", "0", "--lr", "0.004",
    "--warmup", "30",
)  # fmt: skip


def part_of(job: Path, name: str) -> Any:
    """A module of a job."""
    spec = importlib.util.spec_from_file_location(f"{job.name}_{name}", job / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and NamedTuples look for their module
    spec.loader.exec_module(module)
    return module


corpus, vocabulary, bleu = (part_of(JOB, name) for name in ("corpus", "vocabulary", "bleu"))
sys.modules["corpus"] = corpus  # for catalogues.py
catalogues = part_of(JOB, "catalogues")
LINES = [line for pair in corpus.numbers(3).train for line in pair]
PIECES = vocabulary.build(LINES, "bpe:100")


@pytest.fixture(scope="module")
def python(environments: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the packages of the job's own image."""
    home = Home(tmp_path_factory.mktemp("home"))
    home.prepare()
    home.envs.symlink_to(environments)
    image = tomllib.loads((JOB / "job.toml").read_text())["image"]
    source = find_source(image, [ROOT / "images"], JOB)
    assert source is not None
    return make_python(home, source)


@pytest.fixture(scope="module")
def job_worlds(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with open_worlds(python, tmp_path_factory.mktemp("worlds")) as opened:
        yield opened


def test_numbers_are_said_as_people_say_them() -> None:
    said = {
        0: "zero", 13: "thirteen", 20: "twenty", 305: "three hundred five",
        3472: "three thousand four hundred seventy two", 100_000: "one hundred thousand",
    }  # fmt: skip
    assert {number: corpus.in_words(number) for number in said} == said
    made = corpus.numbers(3, "words-digits")
    assert len(made.train) + len(made.valid) == len({*made.train, *made.valid}) == 1000
    assert ("three hundred five", "3 0 5") in {*made.train, *made.valid}
    assert 50 < len(made.valid) < 150


def test_a_corpus_of_ones_own_is_two_files_of_lines(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "en-de"
    folder.mkdir(parents=True)
    source = "\ufeffa  house\r\n\nthe dog\u2028barks\n"
    (folder / "train.src").write_bytes(source.encode())
    (folder / "train.tgt").write_text("ein Haus\nnichts\nder Hund bellt")
    (folder / "valid.src").write_text("a\n")
    (folder / "valid.tgt").write_text("ein\n")
    environ = {"BATCHML_DATA_DIR": str(tmp_path / "data")}
    found = corpus.read(corpus.find("en-de", environ))
    assert found.train == [("a house", "ein Haus"), ("the dog barks", "der Hund bellt")]
    assert found.valid == [("a", "ein")]
    corpus.write(corpus.numbers(2), tmp_path / "made")
    assert corpus.read(tmp_path / "made") == corpus.numbers(2)


def test_everything_that_is_wrong_with_a_corpus_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.src").write_bytes(b"one\n\xff\n")
    (tmp_path / "valid.src").write_text("one\ntwo\n")
    (tmp_path / "valid.tgt").write_text("eins\n")
    with pytest.raises(corpus.BadCorpus) as wrong:
        corpus.read(tmp_path)
    for words in ("train.src: is not UTF-8 (byte 4)", "train.tgt: No such file",
                  "valid.src has 2 lines and valid.tgt 1"):  # fmt: skip
        assert words in str(wrong.value)
    with pytest.raises(corpus.BadCorpus, match="no folder with a corpus at nowhere, /d/nowhere"):
        corpus.find("nowhere", {"BATCHML_DATA_DIR": "/d"})


def write_catalogue(path: Path, messages: dict[str, str]) -> tuple[str, Path]:
    """A file as msgfmt writes it: gettext's manual, "The Format of GNU MO Files"."""
    rows = sorted((a.encode(), b.encode()) for a, b in messages.items())
    tables, texts, at = [b"", b""], b"", 28 + 16 * len(rows)
    for side in (0, 1):
        for row in rows:
            tables[side] += struct.pack("<2I", len(row[side]), at + len(texts))
            texts += row[side] + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    path.write_bytes(head + b"".join(tables) + texts)
    return "xx", path


def test_messages_of_packages_are_a_corpus(tmp_path: Path) -> None:
    messages = {f"Message {number}": f"Nachricht {number}" for number in range(40)}
    messages |= {
        "menu\x04Open the file": "Die Datei\n\n öffnen",  # with a context
        "%d file\0%d files": "%d Datei\0%d Dateien",  # a plural
        "File": "Datei",  # no sentence
        "the same": "the same",
        "": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n!=1;\n",
    }
    found = catalogues.read("xx", [write_catalogue(tmp_path / "a.mo", messages)])
    pairs = {*found.train, *found.valid}
    assert len(pairs) == 42 and found.valid
    assert {("Open the file", "Die Datei öffnen"), ("%d file", "%d Datei")} < pairs
    with pytest.raises(corpus.BadCorpus, match="into 'yy': most catalogues are for xx"):
        catalogues.read("yy", [("xx", tmp_path / "a.mo")])
    (tmp_path / "b.mo").write_bytes(b"no catalogue")
    with pytest.raises(corpus.BadCorpus, match=r"b\.mo: is not a catalogue of gettext"):
        catalogues.read("xx", [("xx", tmp_path / "b.mo")])


@given(st.lists(st.sampled_from("0123456789 efghinorstuvwxyz"), max_size=40).map("".join))
def test_pieces_of_words_are_put_together_again(text: str) -> None:
    """Any text in letters that were seen, also words that were not."""
    again = vocabulary.Vocabulary.from_text(PIECES.to_text())
    numbers = PIECES.encode(text)
    assert PIECES.decode(numbers) == " ".join(text.split())
    assert again.encode(text) == numbers


def test_a_vocabulary_has_what_was_seen_and_a_piece_for_the_rest() -> None:
    words = vocabulary.build(LINES, "words")
    assert words.decode(words.encode("three hundred dogs")) == "three hundred <unk>"
    assert len(PIECES) <= 100
    assert {"\u2581hundred", "ty"} <= {*PIECES.pieces}
    assert len(PIECES.encode("one hundred")) < len("one hundred")
    assert len(vocabulary.build(["a b", "b"], "words")) == vocabulary.SPECIAL + 2
    assert {"a", "b"} <= {*vocabulary.build(["a b", "b"], "bpe:1").pieces}


def test_bleu_counts_what_is_right_and_punishes_what_is_short() -> None:
    """The examples of the paper: a candidate that repeats a word, and one that is short."""
    wanted = "the cat is on the mat"
    assert bleu.bleu(bleu.counts(wanted, wanted)) == pytest.approx(100)
    assert bleu.counts("the the the the the the the", wanted)[:5] == [2, 0, 0, 0, 7]
    short = bleu.bleu(bleu.counts("the cat is on", wanted))
    assert short == pytest.approx(100 * 2.718281828 ** (1 - 6 / 4))
    assert bleu.bleu(bleu.counts("", wanted)) == bleu.bleu(bleu.counts("dog", wanted)) == 0
    both = [a + b for a, b in zip(bleu.counts(wanted, wanted), bleu.counts("a", "b"), strict=True)]
    assert bleu.exact(both) == 0.5


# --- trained ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_processes_learn_what_one_learns(job_worlds: Worlds, tmp_path: Path) -> None:
    """They share each batch, so the losses are the same but for the order of sums."""
    losses = []
    for world in (1, 4):
        place = {"BATCHML_CHECKPOINT_DIR": str(tmp_path / f"checkpoints of {world}")}
        words = (*LEARN, "--layers", "1", "--epochs", "2")
        codes, printed = job_worlds.run(JOB / "train.py", tmp_path, world, *words, **place)
        assert {*codes} == {0}, printed
        together = f", {world} processes (gloo)" if world > 1 else ""
        assert printed.count(f"device: CPU, 1 thread, fp32{together}\n") == 1, printed
        losses.append([float(loss) for loss in re.findall(r" loss=([0-9.]+)", printed)])
    assert len(losses[0]) == 2 and losses[0][1] < 0.8 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@contextmanager
def conversation(command: list[str]) -> Iterator[int]:
    """A program that believes to be spoken to by a person; the person's side."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield ours
        os.write(ours, b"\x04")  # Ctrl-D
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def heard(side: int, text: str) -> str:
    """What the program says, up to `text`."""
    said = ""
    while text not in said:
        said += os.read(side, 4096).decode()
    return said


@pytest.mark.slow
def test_what_a_broken_run_has_learnt_the_next_one_translates(cli: Cli, python: Path) -> None:
    """Two nodes train, a rank is killed, they go on from the checkpoint and say what they learnt.

    Then a run that only translates finds the model in the workspace, and so does a conversation.
    """
    command = ("torchrun", "--nproc-per-node", str(PER_NODE), "train.py", *LEARN, "--epochs", "8")
    watching = cli.watch("submit", "--wait", "translate", *TWO_NODES, "--", *command)
    seen = read_until(watching, "Submitted job")
    run_id = re.findall(r"translate - ([0-9a-f-]{36})", seen)[0]
    kill_a_rank(cli.home.runs / run_id / "checkpoints", 2 * PER_NODE)
    out, err = read_rest(watching)
    assert watching.returncode == 0, out + err
    resumed = re.findall(r"Resuming after step (\d+) of 216", out)
    assert len(resumed) == 1 and int(resumed[0]) >= 27, out
    assert float(re.findall(r" exact=([0-9.]+)", out)[-1]) > 0.7

    told = dict(corpus.numbers(3).train[50::100])
    asked = [word for line in told for word in ("--text", line)]
    shown = cli("submit", "--wait", "translate", "--", "python", "translate.py", *asked)
    assert shown.code == 0, shown.out + shown.err
    right = [line for line, said in told.items() if f"Z] {said}\n" in shown.out]
    assert len(right) >= len(told) - 2, shown.out

    model = cli.home.runs / run_id / "output" / "translate.pt"
    words = [str(python), str(JOB / "translate.py"), "--checkpoint", str(model)]
    with conversation(words) as side:
        heard(side, "> ")
        os.write(side, f"{right[0]}\n".encode())
        heard(side, f"\n{told[right[0]]}\r\n> ")
