"""What no run needs is found and removed, unless it is in use, being made, or young. Files count
once.
"""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchml.local.disk import CachedPackage, find_waste, free, measure
from batchml.local.environments import ARCHIVE, CACHE, COMPLETE, note_use
from batchml.local.home import Home
from batchml.runtime.data.cache import DataCache, StagedFile, key_of
from batchml.runtime.data.sources import SourceFile

NOW = 1_000_000_000.0  # long ago: what is used now is used later
BLOCK = 4096  # bytes that a small file takes
NO_UV = ""


def made(folder: Path, age: float, *packages: Path) -> Path:
    """An environment with a Python of its own, and links to the files of packages."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("x" * 100)
    (folder / COMPLETE).write_text("y")
    for package in packages:
        for file in package.glob("*.py"):
            os.link(file, folder / file.name)
    os.utime(folder / COMPLETE, (NOW - age, NOW - age))
    os.utime(folder, (NOW - age, NOW - age))
    return folder


def package(home: Home, name: str, blocks: int = 1) -> Path:
    """A package of the cache, and the link that leads to it."""
    folder = home.envs / CACHE / ARCHIVE / f"id-{name}"
    (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{name}.py").write_bytes(b"z" * blocks * BLOCK)
    links = home.envs / CACHE / "wheels-v8" / "index"
    links.mkdir(parents=True, exist_ok=True)
    (links / name).symlink_to(folder)
    return folder


def names(home: Home, before: float = NOW - 100) -> list[str]:
    return [old.path.name for old in find_waste(home, before).environments]


def removed(home: Home, before: float = NOW - 100) -> list[str]:
    freed = free(home, find_waste(home, before), NO_UV)
    return [each.path.name for each in freed.environments]


def test_what_was_not_used_for_long_goes(home: Home) -> None:
    old = made(home.envs / "old-1", 200)
    made(home.envs / "new-2", 50)
    made(home.images / "image-3", 200)  # a run that waits, or that is rerun, is made of it
    (first,) = find_waste(home, NOW - 100).environments
    assert (first.size, first.used) == (2 * BLOCK, NOW - 200)
    assert removed(home) == ["old-1"]
    assert not old.exists()
    assert [path.name for path in home.envs.iterdir() if path.is_dir()] == ["new-2"]


def test_what_was_used_since_stays_and_what_was_never_completed_goes(home: Home) -> None:
    note_use(str(made(home.envs / "used-1", 200)))
    (made(home.envs / "half-2", 0) / COMPLETE).unlink()
    assert names(home) == ["half-2"]


def test_what_a_process_runs_in_stays(home: Home) -> None:
    by_variable, by_command = made(home.envs / "a-1", 200), made(home.envs / "b-2", 200)
    made(home.envs / "c-3", 200)
    found = find_waste(home, NOW - 100)
    command = [sys.executable, "-c", "print(flush=True); input()", f"{by_command}/bin/x"]
    with subprocess.Popen(
        command, env={"PATH": f"{by_variable}/bin:/bin"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # /proc tells nothing of one that is just being started
        assert names(home) == ["c-3"]
        assert [each.path.name for each in free(home, found, NO_UV).environments] == ["c-3"]
        process.communicate(b"\n")
    assert names(home) == ["a-1", "b-2"]


def test_what_is_being_made_stays_and_so_do_all_packages(home: Home) -> None:
    path = made(home.envs / "a-1", 200)
    package(home, "torch")
    found = find_waste(home, NOW - 100)
    with open(f"{path}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_waste(home, NOW - 100).size == 0
        assert free(home, found, sys.executable).size == 0
    assert removed(home) == ["a-1"]


def test_a_package_goes_with_the_last_environment_that_shares_it(home: Home) -> None:
    torch, numpy = package(home, "torch", 5), package(home, "numpy", 2)
    made(home.envs / "old-1", 200, torch, numpy)
    made(home.envs / "new-2", 50, numpy)
    waste = find_waste(home, NOW - 100)
    assert waste.packages == (CachedPackage(torch, "torch", 5 * BLOCK),)
    assert waste.size == (5 + 2) * BLOCK
    freed = free(home, waste, NO_UV)
    assert freed.packages == () and freed.size == 2 * BLOCK, "without uv no package goes"


def test_a_file_with_several_links_counts_once(home: Home) -> None:
    torch = package(home, "torch", 5)
    assert measure(home).environments == 5 * BLOCK
    for name in ("a-1", "b-2"):
        made(home.envs / name, 200, torch)
    assert measure(home).environments == (5 + 2 * 2) * BLOCK
    assert measure(home).environments == (5 + 2 * 2) * BLOCK, "as remembered"
    (home.envs / "a-1" / "module.pyc").write_bytes(b"p" * BLOCK)
    assert measure(home).environments == (5 + 2 * 2) * BLOCK, "it changes only when it is used"
    note_use(str(home.envs / "a-1"))
    assert measure(home).environments == (5 + 2 * 2 + 1) * BLOCK


def test_the_parts_of_a_state_folder_are_measured(tmp_path: Path) -> None:
    home = Home(tmp_path / "none")
    use = measure(home)
    assert (use.environments, use.runs, use.jobs, use.code) == (0, 0, 0, 0)
    assert use.free > 0, "a folder that does not exist yet"
    home.prepare()
    for folder, blocks in ((home.runs / "j" / "output", 3), (home.local, 2), (home.code, 1)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x").write_bytes(b"x" * blocks * BLOCK)
    use = measure(home)
    assert (use.runs, use.jobs, use.code) == (3 * BLOCK, 2 * BLOCK, BLOCK)
    assert use.describe() == "environments 0 B, runs 12 KiB, jobs and logs 8.0 KiB, code 4.0 KiB"


def cached(home: Home, name: str, age: float) -> tuple[DataCache, str]:
    """A copy of a data set with one file, and its key."""
    cache = DataCache(str(home.cache), "this boot")
    cache.prepare()
    files = [SourceFile("train.bin", BLOCK, "v1", 0)]
    key, source = key_of(f"s3://data/{name}", files), f"s3://data/{name}"
    Path(cache.staging_path(key)).mkdir()
    Path(cache.staging_path(key), "train.bin").write_bytes(b"d" * BLOCK)
    cache.complete(key, source, [StagedFile.of(files[0], ("digest",))])
    cache.lock(key).close()
    os.utime(home.cache / "locks" / key, (NOW - age, NOW - age))
    return cache, key


def test_an_old_copy_of_a_data_set_goes_unless_a_run_uses_it(home: Home) -> None:
    for name, age in (("old", 200.0), ("used", 300.0), ("young", 50.0)):
        cache, key = cached(home, name, age)
        if name == "used":
            lock = cache.lock(key)
            assert lock.share()
    (found,) = find_waste(home, NOW - 100).copies
    assert (found.source, found.used, found.size) == ("s3://data/old", NOW - 200, BLOCK)
    before = measure(home).copies
    assert free(home, find_waste(home, NOW - 100), NO_UV).copies == (found,)
    assert before - measure(home).copies == 2 * BLOCK, "with its manifest"
    lock.close()
    assert [each.source for each in find_waste(home, NOW - 100).copies] == ["s3://data/used"]
    assert "copies of data sets" in measure(home).describe()


def test_a_copy_that_was_used_since_it_was_found_stays(home: Home) -> None:
    cache, key = cached(home, "old", 200)
    found = find_waste(home, NOW - 100)
    lock = cache.lock(key)
    assert lock.share()
    lock.mark_use()
    lock.close()  # the run has ended already
    assert free(home, found, NO_UV).copies == ()
    assert cache.header(key) is not None


def test_a_copy_whose_lock_cannot_be_opened_stays_and_others_go(home: Home) -> None:
    for name in ("odd", "old"):
        cache, key = cached(home, name, 200)
        if name == "odd":
            odd = key
    lock = home.cache / "locks" / odd
    lock.unlink()
    lock.mkdir()  # opening it to write fails, for root, too
    os.utime(lock, (NOW - 200, NOW - 200))
    found = find_waste(home, NOW - 100)
    assert [each.source for each in found.copies] == ["s3://data/old"]
    lock.rmdir()
    both = find_waste(home, time.time() + 60)
    assert {each.source for each in both.copies} == {"s3://data/old", "s3://data/odd"}
    lock.unlink()
    lock.mkdir()  # after the question
    assert [each.source for each in free(home, both, NO_UV).copies] == ["s3://data/old"]
    assert cache.header(odd) is not None


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"a-1": 7}'])
def test_remembered_sizes_that_cannot_be_read_are_measured_again(home: Home, text: str) -> None:
    made(home.envs / "a-1", 200)
    (home.envs / ".sizes.json").write_text(text)
    assert measure(home).environments == 2 * BLOCK
