"""The digits of the example jobs: found, verified, fetched, replaced, or stood in for."""

from __future__ import annotations

import gzip
import hashlib
import io
import multiprocessing
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.error import URLError

import pytest

from batchml.runtime import mnist
from batchml.runtime.mnist import TRAIN_IMAGES, TRAIN_LABELS, VALIDATION_IMAGES, VALIDATION_LABELS

MIRRORS = ("https://one.example/mnist/", "https://two.example/mnist/")


# --- a small world: five images to train on, two to validate, and a pretended network ---


def idx(*shape: int, data: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def images(count: int, pixel: int) -> bytes:
    return idx(count, 28, 28, data=bytes([pixel]) * (count * 784))


CONTENTS = {
    TRAIN_IMAGES: images(5, 7),
    TRAIN_LABELS: idx(5, data=bytes([0, 1, 2, 3, 9])),
    VALIDATION_IMAGES: images(2, 8),
    VALIDATION_LABELS: idx(2, data=bytes([4, 5])),
}
FILES = {name: gzip.compress(content) for name, content in CONTENTS.items()}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
SMALL = mnist.Digits(
    train=mnist.Split(bytes([7]) * (5 * 784), bytes([0, 1, 2, 3, 9])),
    validation=mnist.Split(bytes([8]) * (2 * 784), bytes([4, 5])),
    source="mnist",
)
STAND_IN = mnist.Digits(mnist.Split(bytes(784), b"\1"), mnist.Split(bytes(784), b"\2"), "digits")


class Network:
    """Answers with the files it was given, keeps a list of what was asked, or is down."""

    def __init__(self, files: Mapping[str, bytes], down: tuple[str, ...] = ()) -> None:
        self.files, self.down, self.asked = files, down, list[str]()

    def __call__(self, url: str, *, timeout: float) -> io.BytesIO:
        self.asked.append(url)
        if url.startswith(self.down):
            raise URLError("Network is unreachable")
        return io.BytesIO(self.files[url.rpartition("/")[2]])


class Load:
    """`mnist.load` in a world of its own: the folder, the network and the lines it printed."""

    def __init__(self, tmp_path: Path) -> None:
        self.data, self.cache = tmp_path / "data", tmp_path / "home" / "batchml"
        self.data.mkdir()
        self.cache.parent.mkdir()
        self.network = Network(FILES)
        self.lines: list[str] = []

    def __call__(self, fallback: Callable[[], mnist.Digits] = lambda: STAND_IN) -> mnist.Digits:
        return mnist.load(
            opener=self.network,
            log=self.lines.append,
            environ={
                "BATCHML_DATA_DIR": str(self.data),
                "XDG_CACHE_HOME": str(self.cache.parent),
            },
            digests=DIGESTS,
            mirrors=MIRRORS,
            fallback=fallback,
        )

    def put(self, folder: Path, files: Mapping[str, bytes] = FILES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, blob in files.items():
            (folder / name).write_bytes(blob)

    @property
    def kept(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.data / "mnist").iterdir()}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(tmp_path)


def unplugged() -> Network:
    return Network({}, down=MIRRORS)


# --- files that are there ---


@pytest.mark.parametrize("folder", ["mnist", "."])
def test_good_files_are_read_in_silence_and_without_the_network(load: Load, folder: str) -> None:
    load.put(load.data / folder)
    assert load() == SMALL
    assert load.lines == []
    assert load.network.asked == []


def test_the_same_content_compressed_in_another_way_is_as_good(load: Load) -> None:
    load.put(load.data, {name: gzip.compress(data, 1, mtime=0) for name, data in CONTENTS.items()})
    assert load() == SMALL
    assert load.network.asked == []


def test_a_split_counts_its_images() -> None:
    assert (SMALL.train.size, SMALL.validation.size) == (5, 2)


# --- files that are missing or damaged ---


def test_missing_files_are_fetched_from_the_first_mirror_and_kept(load: Load) -> None:
    assert load() == SMALL
    assert load.network.asked == [MIRRORS[0] + name for name in FILES]
    assert load.kept == FILES
    assert load.lines == []


def test_what_was_kept_is_not_fetched_a_second_time(load: Load) -> None:
    load()
    load.network = unplugged()
    assert load() == SMALL


@pytest.mark.parametrize(
    ("blob", "complaint"),
    [
        (FILES[TRAIN_LABELS][:-9], "is truncated"),
        (b"", "has the wrong content"),
        (b"<html>not found</html>", "is corrupt"),
        (FILES[TRAIN_LABELS][:20] + b"\xff\xff" + FILES[TRAIN_LABELS][22:], "is corrupt"),
        (FILES[VALIDATION_LABELS], "has the wrong content"),
    ],
    ids=["truncated", "empty", "not gzip", "flipped bits", "another file"],
)
def test_a_damaged_file_is_named_on_one_line_and_fetched_again(
    load: Load, blob: bytes, complaint: str
) -> None:
    load.put(load.data / "mnist", {**FILES, TRAIN_LABELS: blob})
    assert load() == SMALL
    assert load.network.asked == [MIRRORS[0] + TRAIN_LABELS]
    assert load.kept == FILES
    (line,) = load.lines
    assert line.startswith(f"mnist: {load.data}/mnist/{TRAIN_LABELS} {complaint}")
    assert line.endswith("; fetching it again")


def test_a_damaged_file_stays_where_it_is_until_a_good_one_has_come(load: Load) -> None:
    load.put(load.data / "mnist", {**FILES, TRAIN_LABELS: b"damaged"})
    load.network = unplugged()
    assert load() == STAND_IN
    assert load.kept == {**FILES, TRAIN_LABELS: b"damaged"}


def test_a_good_copy_elsewhere_spares_the_download(load: Load) -> None:
    load.put(load.data / "mnist", {TRAIN_LABELS: b"damaged"})
    load.put(load.data)
    assert load() == SMALL
    assert load.network.asked == []
    assert load.lines[0].endswith("; using another copy")


# --- the network ---


def test_the_second_mirror_serves_when_the_first_is_down(load: Load) -> None:
    load.network = Network(FILES, down=MIRRORS[:1])
    assert load() == SMALL
    assert load.kept == FILES


def test_a_download_with_the_wrong_digest_is_refused_and_never_kept(load: Load) -> None:
    load.network = Network({**FILES, TRAIN_IMAGES: gzip.compress(images(5, 66))})
    assert load() == STAND_IN
    assert not (load.data / "mnist").exists()
    (line,) = load.lines
    assert "one.example: the file has the wrong content" in line


def test_without_a_network_one_line_says_why_and_what_is_trained_on(load: Load) -> None:
    load.network = unplugged()
    assert load() == STAND_IN
    assert load.lines == [
        f"mnist: cannot download {TRAIN_IMAGES} (one.example: Network is unreachable; "
        "two.example: Network is unreachable); training on scikit-learn's 1 digits instead"
    ]
    assert len(load.network.asked) == len(MIRRORS)


def test_a_mirror_that_never_answers_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        mnist._open_within(0.01, lambda url, timeout: never.wait(), "https://one.example/")
    never.set()


# --- folders that cannot be written ---


def test_a_data_folder_that_cannot_be_written_is_left_alone_and_the_cache_used(load: Load) -> None:
    load.put(load.data, {TRAIN_LABELS: b"damaged"})
    (load.data / "mnist").write_text("a file where the folder should be")  # root obeys it too
    assert load() == SMALL
    assert (load.data / TRAIN_LABELS).read_bytes() == b"damaged"
    assert {path.name for path in (load.cache / "mnist").iterdir()} == set(FILES)
    load.network = unplugged()
    assert load() == SMALL


def test_with_no_folder_to_keep_them_in_the_files_are_used_all_the_same(load: Load) -> None:
    load.cache.write_text("in the way")
    (load.data / "mnist").write_text("in the way")
    assert load() == SMALL
    assert len(load.lines) == len(FILES)
    assert "could not be kept" in load.lines[0]


def test_the_cache_of_a_user_without_a_home_is_a_temporary_folder() -> None:
    assert mnist.user_cache({}).name.startswith("batchml-")
    assert mnist.user_cache({"HOME": "/nowhere/at/all"}) == mnist.user_cache({})


def _load_with_barrier(tmp_path: Path, barrier: threading.Barrier) -> None:
    def opener(url: str, *, timeout: float) -> io.BytesIO:
        barrier.wait(timeout=30)  # both have found the file missing, and both write it
        return io.BytesIO(FILES[url.rpartition("/")[2]])

    environ = {"BATCHML_DATA_DIR": str(tmp_path)}
    assert mnist.load(opener=opener, environ=environ, digests=DIGESTS, mirrors=MIRRORS) == SMALL


def test_two_processes_that_fetch_at_once_both_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    pair = [context.Process(target=_load_with_barrier, args=(tmp_path, barrier)) for _ in "ab"]
    for process in pair:
        process.start()
    for process in pair:
        process.join(timeout=60)
    assert [process.exitcode for process in pair] == [0, 0]
    assert {path.name: path.read_bytes() for path in (tmp_path / "mnist").iterdir()} == FILES


# --- the stand-in ---


def test_without_scikit_learn_too_the_error_says_what_where_and_what_next(load: Load) -> None:
    def missing() -> mnist.Digits:
        raise ModuleNotFoundError("No module named 'sklearn'")

    load.network = unplugged()
    with pytest.raises(mnist.NoDigits) as caught:
        load(fallback=missing)
    message = str(caught.value)
    assert "\n" not in message
    assert "Network is unreachable" in message
    assert "No module named 'sklearn'" in message
    assert f"Put the four MNIST files ({', '.join(FILES)}) into {load.data / 'mnist'}" in message
    assert caught.value.exit_code == 78
    assert load.lines == []


@pytest.mark.parametrize("level", [0, 5, 16])
def test_enlarging_keeps_a_flat_image_flat_and_uses_the_full_range(level: int) -> None:
    assert mnist.enlarge([level] * 64) == bytes([round(level * 255 / 16)]) * 784


def test_enlarging_keeps_left_and_right_and_top_and_bottom() -> None:
    corner = mnist.enlarge([16] + [0] * 63)
    assert (corner[0], corner[27], corner[27 * 28], corner[-1]) == (255, 0, 0, 0)
    right = mnist.enlarge([0, 0, 0, 0, 0, 0, 0, 16] * 8)
    assert list(right[:28]) == sorted(right[:28])
    assert right[:28] * 28 == right


# --- the format ---


def test_an_idx_file_gives_its_shape_and_its_data() -> None:
    assert mnist.parse_idx(idx(2, 3, data=b"abcdef")) == ((2, 3), b"abcdef")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "magic number"),
        (b"\x1f\x8b\x08\x00", "magic number"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01abcd", "magic number"),
        (b"\x00\x00\x08\x00", "within its header"),
        (b"\x00\x00\x08\x03\x00\x00\x00\x01", "within its header"),
        (idx(2, 3, data=b"abcde"), r"holds 5 bytes of data where \(2, 3\) needs 6"),
        (idx(2, 3, data=b"abcdefg"), "holds 7 bytes"),
        (idx(2**32 - 1, 2**32 - 1, data=b""), "holds 0 bytes"),
    ],
)
def test_what_is_no_idx_file_is_refused_with_the_reason(content: bytes, complaint: str) -> None:
    with pytest.raises(mnist.IdxError, match=complaint):
        mnist.parse_idx(content)


@pytest.mark.parametrize(
    ("pictures", "labels", "complaint"),
    [
        (images(2, 0), idx(3, data=b"\0\0\0"), "do not fit"),
        (idx(2, 27, 28, data=bytes(2 * 27 * 28)), idx(2, data=b"\0\0"), "do not fit"),
        (idx(2, data=b"\0\0"), idx(2, data=b"\0\0"), "do not fit"),
        (images(1, 0), idx(1, data=b"\x0a"), "holds the label 10"),
    ],
    ids=["more labels than images", "wrong size", "labels twice", "no digit"],
)
def test_images_and_labels_that_do_not_belong_together_are_refused(
    pictures: bytes, labels: bytes, complaint: str
) -> None:
    with pytest.raises(mnist.IdxError, match=complaint):
        mnist.to_split(pictures, labels)


def test_something_that_unpacks_to_more_than_the_limit_is_refused_unread() -> None:
    bomb = gzip.compress(bytes(mnist.MAX_BYTES + 4096), 1)
    with pytest.raises(mnist._Damaged, match="larger than"):
        mnist.unpack(bomb, "0" * 64)
