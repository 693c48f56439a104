"""The corpus and the weights, fetched once and verified by SHA-256 each time.

They are looked for below the folder of data, the workspace and this user's cache, and kept in the
first of these that can be written. Nothing in them is unpickled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

FOLDER = "bert"  # below the folders that are looked in
SECONDS = 20.0  # that a server may be silent
_BLOCK = 1 << 20

# Of google-bert/bert-base-uncased, under the Apache License 2.0.
REVISION = "86b5e0934494bd15c9632b12f734a8a67f723594"


class NotHad(Exception):
    """A file that can neither be found nor fetched; why, and what to do."""


class File(NamedTuple):
    name: str
    url: str
    sha256: str
    size: int  # bytes


def corpus() -> list[File]:
    """MRPC as SentEval keeps it: 4,076 and 1,725 pairs."""
    base = "https://dl.fbaipublicfiles.com/senteval/senteval_data"
    train = "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89"
    test = "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784"
    return [
        File("msr_paraphrase_train.txt", f"{base}/msr_paraphrase_train.txt", train, 1_047_044),
        File("msr_paraphrase_test.txt", f"{base}/msr_paraphrase_test.txt", test, 441_275),
    ]


def weights(environ: Mapping[str, str] = os.environ) -> list[File]:
    """BERT-base, uncased. HF_ENDPOINT names a mirror."""
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    base = f"{endpoint}/google-bert/bert-base-uncased/resolve/{REVISION}"
    vocabulary = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    model = "68d45e234eb4a928074dfd868cead0219ab85354cc53d20e772753c6bb9169d3"
    return [
        File("vocab.txt", f"{base}/vocab.txt", vocabulary, 231_508),
        File("model.safetensors", f"{base}/model.safetensors", model, 440_449_768),
    ]


def bring(
    files: Iterable[File],
    environ: Mapping[str, str] = os.environ,
    opener: Callable[..., Any] = urlopen,
    say: Callable[[str], object] = print,
) -> Path:
    """A folder that has all the files. Raises NotHad.

    It is the same folder for all processes with the same variables, and two that fetch at once do
    not disturb each other.
    """
    wanted, folders = list(files), places(environ)
    for folder in folders:
        if all(_is_good(folder / file.name, file) for file in wanted):
            return folder
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in wanted:
                if not _is_good(folder / file.name, file):
                    say(f"Fetching {file.name} ({_in_words(file.size)})")
                    _fetch(file, folder / file.name, opener)
            return folder
        except PermissionError as error:
            reasons.append(f"{folder}: {error.strerror}")
        except (OSError, HTTPException) as error:
            reasons.append(f"{folder}: {getattr(error, 'reason', None) or error}")
            break  # the network or a full disk, and no matter of this folder
    names = " and ".join(file.name for file in wanted)
    raise NotHad(
        f"{names} cannot be had ({'; '.join(reasons)}). Put them into {folders[0]}, or train "
        f"without them: --data made-up --model tiny"
    )


def places(environ: Mapping[str, str]) -> Sequence[Path]:
    shared = (environ.get(name) for name in ("BATCHML_DATA_DIR", "BATCHML_WORKSPACE"))
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp", ".cache")
    return [*(Path(place, FOLDER) for place in shared if place), Path(home, "batchml", FOLDER)]


def _is_good(path: Path, file: File) -> bool:
    try:
        if path.stat().st_size != file.size:
            return False
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
    except OSError:
        return False


def _fetch(file: File, path: Path, opener: Callable[..., Any]) -> None:
    """Raises OSError, also for another content than it should be."""
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    digest, size = hashlib.sha256(), 0
    try:
        with opener(file.url, timeout=SECONDS) as answer, temporary.open("xb") as content:
            while block := answer.read(_BLOCK):
                digest.update(block)
                size += len(block)
                if size > file.size:
                    break
                content.write(block)
            content.flush()
            os.fsync(content.fileno())
        if size != file.size or digest.hexdigest() != file.sha256:
            raise OSError(f"{file.url} has another content than it had")
        temporary.chmod(0o644)  # a shared folder is read by other users too
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_words(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
