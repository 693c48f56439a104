"""Load handwritten digits for the example jobs: MNIST, or scikit-learn's without a network.

Several jobs in `jobs/` use it. It is part of the runtime, which every image has, because a job's
folder is sent alone: jobs cannot share a module beside their folders.

`load()` searches for the four MNIST files below `$BATCHML_DATA_DIR`, downloads the missing or
damaged ones, and keeps them there. Without a network it prints one line and uses the 1,797 digits
that ship with scikit-learn, so that an example job runs anywhere.

Contents are verified by SHA-256 *after* decompression, because MNIST is distributed in differently
compressed files.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import math
import os
import queue
import random
import struct
import sys
import tempfile
import threading
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

from batchml.runtime.storage.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SIDE = 28
"""Height and width of every image, in pixels."""

CLASSES = 10
"""Number of different labels; labels are 0..CLASSES-1."""

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
VALIDATION_IMAGES = "t10k-images-idx3-ubyte.gz"
VALIDATION_LABELS = "t10k-labels-idx1-ubyte.gz"

SHA256: Mapping[str, str] = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    VALIDATION_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    VALIDATION_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""File name -> SHA-256 of its decompressed content."""

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
"""Folders that hold the four files, in the order they are tried."""

CONNECT_SECONDS = 5.0
"""How long a mirror may take to answer, all of its addresses together."""

MAX_BYTES = 64 * 1024 * 1024
"""No MNIST file is larger, compressed or not. The rest of a larger one is not read."""


class IdxError(ValueError):
    """The bytes are not an IDX array of unsigned bytes, or images and labels do not match."""


class NoDigits(Exception):
    """Neither MNIST nor scikit-learn's digits are there. The message says what to do."""

    exit_code = 78


class _Damaged(Exception):
    """A file or a download is damaged. The message follows the file's name: "is truncated"."""


class _Unreachable(Exception):
    """No mirror had a good copy; the message has the reason for each."""


class Split(NamedTuple):
    """Images with their labels.

    `images` is count * 28 * 28 bytes, row-major, 0 (paper) to 255 (ink);
    `labels` is one byte for each image, 0 to 9.
    """

    images: bytes
    labels: bytes

    @property
    def size(self) -> int:
        """The number of images."""
        return len(self.labels)


class Digits(NamedTuple):
    """Digits to train and validate on, and their source: "mnist" or "digits"."""

    train: Split
    validation: Split
    source: str


# Opens a URL for reading: `urllib.request.urlopen(url, timeout=seconds)`. Raises OSError.
Opener = Callable[..., Any]
LogFunction = Callable[[str], object]  # prints one line to the job's output


def _say(line: str) -> None:
    print(line, flush=True)


# --- Contents of files ----------------------------------------------------------------------------


def parse_idx(content: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the data of an IDX array of unsigned bytes.

    The data is row-major and as long as the product of the shape.
    Raises IdxError if the header is wrong, or if the length differs from the header.
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise IdxError(f"starts with {content[:4]!r}, not with the magic number of an IDX file")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise IdxError(f"ends within its header, {len(content)} bytes for {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size, needed = len(content) - start, math.prod(shape)
    if size != needed:
        raise IdxError(f"holds {size} bytes of data where {shape} needs {needed}")
    return shape, content[start:]


def to_split(images: bytes, labels: bytes) -> Split:
    """Join images and labels, both decompressed IDX; raises IdxError if they do not match."""
    image_shape, pixels = parse_idx(images)
    label_shape, classes = parse_idx(labels)
    if image_shape[1:] != (SIDE, SIDE) or label_shape != image_shape[:1]:
        raise IdxError(f"images of shape {image_shape} do not fit labels of shape {label_shape}")
    if classes and max(classes) >= CLASSES:
        raise IdxError(f"holds the label {max(classes)}; labels are 0 to {CLASSES - 1}")
    return Split(pixels, classes)


def unpack(blob: bytes, sha256: str) -> bytes:
    """Decompress `blob` and verify its SHA-256.

    Raises _Damaged if it is not gzip, is cut short, is too long, or has another digest.
    """
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(blob)).read(MAX_BYTES + 1)
    except EOFError:
        raise _Damaged("is truncated") from None
    except (OSError, zlib.error) as error:
        raise _Damaged(f"is corrupt ({error})") from None
    if len(content) > MAX_BYTES:
        raise _Damaged(f"is larger than {MAX_BYTES} bytes")
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise _Damaged(f"has the wrong content (SHA-256 {found[:12]}..., not {sha256[:12]}...)")
    return content


def enlarge(pixels: Sequence[int]) -> bytes:
    """Return an 8x8 image with values 0..16 as 28x28 bytes 0..255, by bilinear interpolation."""
    rows = [pixels[8 * y : 8 * y + 8] for y in range(8)]
    wide = [[row[a] * (56 - part) + row[b] * part for a, b, part in _TAPS] for row in rows]
    full = 56 * 56 * 16
    return bytes(
        ((above * (56 - part) + below * part) * 255 + full // 2) // full
        for a, b, part in _TAPS
        for above, below in zip(wide[a], wide[b])  # noqa: B905 - strict= came with Python 3.10
    )


_POSITIONS = [min(max(16 * i - 20, 0), 7 * 56) for i in range(SIDE)]
_TAPS = [(each // 56, min(each // 56 + 1, 7), each % 56) for each in _POSITIONS]
"""For each of 28 pixels: its two neighbours among 8, and the weight of the second in 1/56."""


# --- scikit-learn's digits ------------------------------------------------------------------------


def scikit_learn_digits() -> Digits:
    """Return the digits that ship with scikit-learn, enlarged: 1,438 to train on, 359 to validate.

    The split is the same every time. Raises ImportError when scikit-learn is not installed.
    """
    bunch: Any = importlib.import_module("sklearn.datasets").load_digits()
    images = [enlarge([int(value) for value in row]) for row in bunch.data.tolist()]
    labels = [int(label) for label in bunch.target.tolist()]
    order = list(range(len(labels)))
    random.Random(0).shuffle(order)  # the file comes writer by writer
    cut = len(order) // 5

    def pick(indices: Iterable[int]) -> Split:
        chosen = list(indices)
        return Split(b"".join(images[i] for i in chosen), bytes(labels[i] for i in chosen))

    return Digits(train=pick(order[cut:]), validation=pick(order[:cut]), source="digits")


# --- Disk and network -----------------------------------------------------------------------------


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return this user's cache folder, which is used if the data folder cannot be written."""
    home = environ.get("HOME")
    cache = environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    if cache and os.access(Path(cache).parent, os.W_OK):
        return Path(cache) / "batchml"
    return Path(tempfile.gettempdir()) / f"batchml-{os.getuid()}"  # a container may have no home


def _find(name: str, sha256: str, folders: Sequence[Path]) -> tuple[bytes | None, list[str]]:
    """Return the content of the first good copy of `name`, and what is wrong with earlier ones."""
    problems: list[str] = []
    for folder in folders:
        path = folder / name
        try:
            return unpack(path.read_bytes(), sha256), problems
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror})")
        except _Damaged as error:
            problems.append(f"{path} {error}")
    return None, problems


def _open_within(seconds: float, opener: Opener, url: str) -> Any:
    """Open `url`, waiting `seconds` at most.

    A socket's timeout is for each address of a host, and does not limit the name server. Behind a
    firewall that drops packets the sum would be minutes, so a thread opens the URL.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(opener(url, timeout=seconds))
        except Exception as error:  # handed to the waiting thread, which raises it
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _download(
    name: str, sha256: str, mirrors: Sequence[str], opener: Opener
) -> tuple[bytes, bytes]:
    """Return a mirror's file `name`, and its verified content; raises _Unreachable."""
    reasons = []
    for mirror in mirrors:
        try:
            with _open_within(CONNECT_SECONDS, opener, mirror + name) as response:
                blob = response.read(MAX_BYTES + 1)
            return blob, unpack(blob, sha256)
        except (OSError, HTTPException) as error:
            reasons.append(f"{urlsplit(mirror).hostname}: {getattr(error, 'reason', error)}")
        except _Damaged as error:
            reasons.append(f"{urlsplit(mirror).hostname}: the file {error}")
    raise _Unreachable(f"cannot download {name} ({'; '.join(reasons)})")


def _keep(name: str, blob: bytes, folders: Iterable[Path], log: LogFunction) -> None:
    """Write `blob` to the first of `folders` that can be written; if none can, log it."""
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A shared folder is read by other users too.
            write_atomically(str(folder / name), blob, mode=0o644)
            return
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    log(f"mnist: {name} could not be kept ({'; '.join(reasons)}); it will be downloaded again")


# --- Loading --------------------------------------------------------------------------------------


def load(
    data_dir: str | None = None,
    *,
    opener: Opener = urlopen,
    log: LogFunction = _say,
    environ: Mapping[str, str] = os.environ,
    digests: Mapping[str, str] = SHA256,
    mirrors: Sequence[str] = MIRRORS,
    fallback: Callable[[], Digits] = scikit_learn_digits,
) -> Digits:
    """Return the digits to train on: MNIST (60,000 and 10,000), else scikit-learn's (`fallback`).

    The files are searched for in `data_dir`/mnist, in `data_dir`, and in the user's cache;
    `data_dir` is `$BATCHML_DATA_DIR` unless given. Missing or damaged files are downloaded, and
    kept in `data_dir`/mnist, else in the cache. `log` gets one line for each event.

    Raises NoDigits if there is neither MNIST nor scikit-learn, and IdxError if files with the right
    digests do not match (only possible with `digests` of the caller).
    """
    cache = user_cache(environ) / "mnist"
    base = data_dir or environ.get("BATCHML_DATA_DIR")
    homes = [Path(base) / "mnist", cache] if base else [cache]
    folders = [homes[0], Path(base), cache] if base else homes
    contents = {}
    try:
        for name in (TRAIN_IMAGES, TRAIN_LABELS, VALIDATION_IMAGES, VALIDATION_LABELS):
            content, problems = _find(name, digests[name], folders)
            remedy = "fetching it again" if content is None else "using another copy"
            for problem in problems:
                log(f"mnist: {problem}; {remedy}")
            if content is None:
                blob, content = _download(name, digests[name], mirrors, opener)
                _keep(name, blob, homes, log)
            contents[name] = content
    except _Unreachable as unreachable:
        return _stand_in(str(unreachable), homes[0], fallback, log)
    return Digits(
        train=to_split(contents[TRAIN_IMAGES], contents[TRAIN_LABELS]),
        validation=to_split(contents[VALIDATION_IMAGES], contents[VALIDATION_LABELS]),
        source="mnist",
    )


def _stand_in(reason: str, home: Path, fallback: Callable[[], Digits], log: LogFunction) -> Digits:
    """Return the fallback's digits, and log it; raises NoDigits if they are not installed."""
    try:
        digits = fallback()
    except ImportError as error:
        raise NoDigits(
            f"No handwritten digits to train on: {reason}, and scikit-learn's digits are not there "
            f"({error}, in {sys.executable}). Put the four MNIST files ({', '.join(SHA256)}) into "
            f"{home}, or install scikit-learn."
        ) from error
    log(f"mnist: {reason}; training on scikit-learn's {digits.train.size} digits instead")
    return digits
