"""Download the corpus and the weights once, and verify their SHA-256 each time.

The files are kept below the data folder, the workspace, or this user's cache: the first of these
that can be written. No file is unpickled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

FOLDER = "bert"  # below the data folder, the workspace or the cache
TIMEOUT = 20.0  # seconds without data from a server
_BLOCK = 1 << 20

# The revision of google-bert/bert-base-uncased, which has the Apache License 2.0.
REVISION = "86b5e0934494bd15c9632b12f734a8a67f723594"


class DownloadFailed(Exception):
    """A file is missing and cannot be downloaded. The text says why, and what to do."""


class File(NamedTuple):
    name: str
    url: str
    sha256: str
    size: int  # bytes


def corpus() -> list[File]:
    """The files of MRPC in the form of SentEval: 4,076 pairs to train on and 1,725 to test with."""
    base = "https://dl.fbaipublicfiles.com/senteval/senteval_data"
    train = "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89"
    test = "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784"
    return [
        File("msr_paraphrase_train.txt", f"{base}/msr_paraphrase_train.txt", train, 1_047_044),
        File("msr_paraphrase_test.txt", f"{base}/msr_paraphrase_test.txt", test, 441_275),
    ]


def weights(environ: Mapping[str, str] = os.environ) -> list[File]:
    """The files of BERT-base, uncased. The variable HF_ENDPOINT names a mirror."""
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    base = f"{endpoint}/google-bert/bert-base-uncased/resolve/{REVISION}"
    vocabulary = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    model = "68d45e234eb4a928074dfd868cead0219ab85354cc53d20e772753c6bb9169d3"
    return [
        File("vocab.txt", f"{base}/vocab.txt", vocabulary, 231_508),
        File("model.safetensors", f"{base}/model.safetensors", model, 440_449_768),
    ]


def fetch(
    files: Iterable[File],
    environ: Mapping[str, str] = os.environ,
    opener: Callable[..., Any] = urlopen,
    say: Callable[[str], object] = print,
) -> Path:
    """Return a folder that has all the files; download what is missing. Raises DownloadFailed.

    All processes with the same variables get the same folder. They may download at the same time.
    """
    wanted, folders = list(files), candidate_folders(environ)
    for folder in folders:
        if all(_is_good(folder / file.name, file) for file in wanted):
            return folder
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in wanted:
                if not _is_good(folder / file.name, file):
                    say(f"Fetching {file.name} ({_size_text(file.size)})")
                    _download(file, folder / file.name, opener)
            return folder
        except PermissionError as error:
            reasons.append(f"{folder}: {error.strerror}")
        except (OSError, HTTPException) as error:
            reasons.append(f"{folder}: {getattr(error, 'reason', None) or error}")
            break  # the network or the disk failed: the other folders would not help
    names = " and ".join(file.name for file in wanted)
    raise DownloadFailed(
        f"{names} cannot be downloaded ({'; '.join(reasons)}). Put the files into {folders[0]}, or "
        f"train without them: --data made-up --model tiny"
    )


def candidate_folders(environ: Mapping[str, str]) -> Sequence[Path]:
    shared = (environ.get(name) for name in ("BATCHML_DATA_DIR", "BATCHML_WORKSPACE"))
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp", ".cache")
    return [*(Path(folder, FOLDER) for folder in shared if folder), Path(home, "batchml", FOLDER)]


def _is_good(path: Path, file: File) -> bool:
    try:
        if path.stat().st_size != file.size:
            return False
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
    except OSError:
        return False


def _download(file: File, path: Path, opener: Callable[..., Any]) -> None:
    """Download one file. Raises OSError, also if the content has another digest."""
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    digest, size = hashlib.sha256(), 0
    try:
        with opener(file.url, timeout=TIMEOUT) as answer, temporary.open("xb") as content:
            while block := answer.read(_BLOCK):
                digest.update(block)
                size += len(block)
                if size > file.size:
                    break
                content.write(block)
            content.flush()
            os.fsync(content.fileno())
        if size != file.size or digest.hexdigest() != file.sha256:
            raise OSError(f"the content of {file.url} has changed")
        temporary.chmod(0o644)  # other users read a shared folder, too
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _size_text(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
