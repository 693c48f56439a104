"""jobs/bert: pairs as MRPC has them, files that are fetched, a tiny model on two nodes."""

import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.e2e.test_translate import TWO_NODES, part_of
from tests.support.cli import Cli, read_rest, read_until
from tests.support.worlds import ROOT, kill_a_rank

JOB = ROOT / "jobs" / "bert"
LIMIT = 1200.0  # seconds: the first run downloads and installs a framework

pairs, download = part_of(JOB, "pairs"), part_of(JOB, "download")


def test_pairs_are_read_as_the_corpus_writes_them(tmp_path: Path) -> None:
    """A byte order mark, quotation marks that belong to the text, lines that end as on Windows."""
    path = tmp_path / "pairs.txt"
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    path.write_bytes(f'{header}1\t702876\t702977\tHe said "yes\t" Yes , " he said .\r\n'.encode())
    assert pairs.read(path) == [pairs.Pair(True, 'He said "yes', '" Yes , " he said .')]
    made = pairs.made_up(50, seed=3)
    pairs.write(made, path)
    assert pairs.read(path) == made != pairs.made_up(50, seed=4)


def test_everything_that_is_wrong_with_a_file_of_pairs_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    pairs.write([], path)
    with pytest.raises(pairs.BadPairs, match="the file has no pairs"):
        pairs.read(path)
    with path.open("a") as file:
        file.write("1\t1\t2\tone\n" + "yes\t1\t2\tone\ttwo\n" * 7)
    with pytest.raises(pairs.BadPairs) as wrong:
        pairs.read(path)
    assert "line 2 has 4 fields, not 5; line 3 begins with 'yes', not 0 or 1" in str(wrong.value)
    assert str(wrong.value).endswith("and 3 more lines")
    path.write_text("a\tb\n")
    with pytest.raises(pairs.BadPairs, match="the first line is not 'Quality #1 ID"):
        pairs.read(path)
    with pytest.raises(pairs.BadPairs, match="none: No such file"):
        pairs.read(tmp_path / "none")


class Server:
    """Has files by address, and counts how often it is asked."""

    def __init__(self, **files: bytes) -> None:
        self.files, self.asked = files, 0

    def __call__(self, url: str, timeout: float) -> Any:
        self.asked += 1
        if url not in self.files:
            raise URLError("no route to host")
        return io.BytesIO(self.files[url])


def wanted(content: bytes) -> Any:
    return download.File("vocab.txt", "there", hashlib.sha256(content).hexdigest(), len(content))


def test_what_is_fetched_is_kept_and_verified_each_time(tmp_path: Path) -> None:
    environ = {"BATCHML_DATA_DIR": str(tmp_path / "data"), "HOME": str(tmp_path)}
    server, said = Server(there=b"content"), list[str]()
    for _ in range(2):
        folder = download.fetch([wanted(b"content")], environ, server, said.append)
        assert (folder / "vocab.txt").read_bytes() == b"content"
    assert (server.asked, said) == (1, ["Fetching vocab.txt (0 kB)"])
    (folder / "vocab.txt").write_bytes(b"damaged")  # as long as it should be
    assert download.fetch([wanted(b"content")], environ, server, said.append) == folder
    assert (folder / "vocab.txt").read_bytes() == b"content"
    assert [path.name for path in folder.iterdir()] == ["vocab.txt"]


@pytest.mark.parametrize(
    "server, why",
    [
        (Server(), "no route to host"),
        (Server(there=b"changed"), "the content of there has changed"),
        (Server(there=b"content, and much more"), "the content of there has changed"),
    ],
)
def test_what_cannot_be_had_is_said_with_a_way_out(
    server: Server, why: str, tmp_path: Path
) -> None:
    environ = {"BATCHML_WORKSPACE": str(tmp_path), "HOME": "/nonexistent"}
    with pytest.raises(download.DownloadFailed) as error:
        download.fetch([wanted(b"content")], environ, server, print)
    words = str(error.value)
    assert why in words and "--model tiny" in words
    assert f"Put the files into {tmp_path}/bert" in words
    assert [*(tmp_path / "bert").iterdir()] == []


def test_weights_and_corpus_are_those_of_one_revision() -> None:
    files = [*download.corpus(), *download.weights({"HF_ENDPOINT": "https://mirror/"})]
    assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) and file.size for file in files)
    assert all(file.url.startswith("https://") for file in files)
    assert files[-1].url == (
        "https://mirror/google-bert/bert-base-uncased/resolve/"
        f"{download.REVISION}/model.safetensors"
    )


def test_the_two_jobs_share_what_they_say_of_ranks() -> None:
    """Each folder travels alone, so each has it."""
    ours, theirs = (ROOT / "jobs" / name / "ranks.py" for name in ("bert", "translate"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_tiny_model_learns_on_two_nodes_though_a_rank_is_killed(cli: Cli, tmp_path: Path) -> None:
    """From files as MRPC has them, with a vocabulary made of them; it goes on where it stood.

    What it leaves is a model that transformers opens, and how good it is.
    """
    pairs.write_made_up(tmp_path / "data" / "news")
    values = {"data": "news", "model": "tiny", "epochs": 3, "lr": 0.004, "save_every": 10}
    params = [word for name, value in values.items() for word in ("-p", f"{name}={value}")]
    cli.environ["BATCHML_DATA_DIR"] = str(tmp_path / "data")
    watching = cli.watch("submit", "--wait", "bert", *TWO_NODES, *params)
    seen = read_until(watching, "Submitted job")
    run_id = re.findall(r"bert - ([0-9a-f-]{36})", seen)[0]
    kill_a_rank(cli.home.runs / run_id / "checkpoints", 2)
    out, err = read_rest(watching, LIMIT)
    assert watching.returncode == 0, out + err
    resumed = re.findall(r"Resuming after step (\d+) of 93", out)
    assert len(resumed) == 1 and int(resumed[0]) >= 10
    assert float(re.findall(r" accuracy=([0-9.]+)", out)[-1]) > 0.9
    assert re.search(r"Metrics:.* f1\b", err + out)
    model = cli.home.runs / run_id / "output" / "model"
    scores = json.loads((model / "scores.json").read_text())
    assert scores["accuracy"] > 0.9 and scores["f1"] > 0.9
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*os.listdir(model)}
