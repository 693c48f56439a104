"""Make the virtual environments of jobs that are processes: one for each different
`requirements.txt` or environment.yml.

The first run that needs an environment makes it, under a lock. uv, pip and conda hold the lock,
too, so nobody builds beside an orphan of theirs; the kernel releases it when the last holder dies.
An environment whose maker was killed has no `.complete` mark, and is deleted and made again.
Scripts of an environment contain its path, and so does the mark: a moved or copied environment is
made again at its new path. The mark's time is that of the last use.

uv installs packages from a cache beside the environments, by hard links, so that two environments
share what they have in common. pip stands in where uv is missing, or cannot do what pip may do.

Runs as a separate program (`maker_command`), which the runner starts and stops, and prints its
progress. The Python may be another one than batchml's: standard library and batchml.runtime only.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping

from batchml.runtime.entry.folders import size_text
from batchml.runtime.package import module_command

COMPLETE = ".complete"
NEEDS_PIP = 3  # the exit code of uv_install.py if pip has to install the packages
CACHE = ".cache"  # uv's cache, beside the environments: hard links need one file system
ARCHIVE = "archive-v0"  # the folder of unpacked packages in it
MADE = "made in "  # begins the last line of progress
# bytes; with fewer free, a failed build is reported as a full disk (a large file may fail to be
# written although a little space is left)
_FULL = 4 * 1024**2


def maker_command(python: str) -> list[str]:
    """The words that run `make` in a program of its own; the arguments of `make` follow."""
    return module_command(python, "batchml.local.environments")


def make(file: str, target: str, maker: str, uv: str = "") -> None:
    """Make the environment `target` unless it exists. Raises RuntimeError with a message of one
    line.

    `file` is a requirements.txt and `maker` a Python, or an environment.yml and a conda program.
    `uv`: the path of this program; empty for none.
    """
    target = os.path.realpath(target)
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    with open(f"{target}.lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if is_complete(target):
                return
            print_progress("waiting for another run that is making the same environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(target):
            return
        shutil.rmtree(target, ignore_errors=True)
        print_progress("creating it (once for these requirements)")
        began, stored = time.monotonic(), _stored_packages(cache_folder(target, os.environ))
        try:
            if file.endswith(".yml"):
                _build_with_conda(file, target, maker, lock.fileno())
            else:
                _build_from_requirements(file, target, maker, uv, lock.fileno())
        except (RuntimeError, OSError) as error:
            free = shutil.disk_usage(os.path.dirname(target)).free
            shutil.rmtree(target, ignore_errors=True)  # it may be gigabytes, and is useless
            if free < _FULL:  # ensurepip does not report this itself
                raise RuntimeError(
                    f"No space left on the disk of {os.path.dirname(target)}: {error}"
                ) from error
            raise
        print_progress(_describe_result(target, time.monotonic() - began, stored))
        with open(os.path.join(target, COMPLETE), "w", encoding="utf-8") as mark:
            mark.write(f"{target}\n")
            mark.flush()
            os.fsync(mark.fileno())


def _build_from_requirements(
    requirements: str, target: str, python: str, uv: str, lock: int
) -> None:
    with open(requirements, encoding="utf-8") as file:
        is_empty = all(line.strip()[:1] in ("", "#") for line in file)
    _run([python, "-m", "venv", "--without-pip", target], lock)
    if is_empty:
        return
    if uv:
        program = module_command(sys.executable, "batchml.local.uv_install")
        paths = [uv, os.path.abspath(requirements), target, cache_folder(target, os.environ)]
        code, lines = _try([*program, *paths], lock)
        if code == 0:
            return
        reason = lines[-1] if lines else f"uv's program ended with code {code}"
        if code != NEEDS_PIP:
            raise RuntimeError(reason)
        print_progress(f"pip makes it, because {reason}")
    _run([python, "-m", "venv", "--clear", target], lock)
    pip = [os.path.join(target, "bin", "python"), "-m", "pip", "--no-input"]
    # Compiling all modules takes as long as unpacking them, and a program imports a tenth.
    _run([*pip, "install", "--disable-pip-version-check", "--progress-bar", "off",
          "--no-compile", "-r", requirements], lock)  # fmt: skip


def _build_with_conda(file: str, target: str, tool: str, lock: int) -> None:
    # Answer yes to every question, because nobody else answers. These are variables, not options,
    # because all versions of all three programs have them.
    os.environ.update(dict.fromkeys(("CONDA_ALWAYS_YES", "MAMBA_ALWAYS_YES"), "true"))
    create = ["create"] if os.path.basename(tool) == "micromamba" else ["env", "create"]
    _run([tool, *create, "--prefix", target, "--file", file], lock)
    if not has_python(target):
        raise RuntimeError(f"{os.path.basename(tool)} made an environment without a python")


def is_complete(target: str) -> bool:
    """True when an environment was completed at this path, and its Python still exists."""
    try:
        with open(os.path.join(target, COMPLETE), encoding="utf-8") as mark:
            return mark.read() == f"{os.path.realpath(target)}\n" and has_python(target)
    except (OSError, UnicodeDecodeError):
        return False


def note_use(target: str) -> None:
    """Note that a run uses a complete environment now: unused ones are removed after a while."""
    try:
        os.utime(os.path.join(target, COMPLETE))
    except OSError:
        pass  # it only keeps the environment from being made again


def has_python(target: str) -> bool:
    return os.access(os.path.join(target, "bin", "python"), os.X_OK)


def cache_folder(target: str, environ: Mapping[str, str]) -> str:
    """The folder of uv's cache: the user's, or the one that the environments of a state folder
    share.
    """
    return environ.get("UV_CACHE_DIR") or os.path.join(os.path.dirname(target), CACHE)


def print_progress(text: str) -> None:
    print(text, flush=True)


# --- what was made ------------------------------------------------------------------------------


def _stored_packages(cache: str) -> set[str]:
    """The folders of unpacked packages in uv's cache."""
    try:
        with os.scandir(os.path.join(cache, ARCHIVE)) as entries:
            return {entry.path for entry in entries if entry.is_dir(follow_symlinks=False)}
    except OSError:
        return set()


def _describe_result(target: str, seconds: float, stored: set[str]) -> str:
    """`made in 14 s: 1.2 GiB, of which 10 MiB are new on the disk; torch 2.13.0+cpu is for CPUs`.

    `stored`: the packages that the cache had before.
    """
    seen: dict[tuple[int, int], int] = {}
    size, own = add_up(target, seen)
    new = own + sum(
        add_up(path, {})[0] for path in _stored_packages(cache_folder(target, os.environ)) - stored
    )
    shared = f", of which {size_text(min(new, size))} are new on the disk" if new < size else ""
    took = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{MADE}{took}: {size_text(size)}{shared}{_describe_torch(target)}"


def add_up(folder: str, seen: dict[tuple[int, int], int]) -> tuple[int, int]:
    """The space that a folder's files take, in bytes, and that of files without a second link.

    `seen` has the files with several links that were counted before; they are not counted again.
    """
    size = own = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    status = entry.stat(follow_symlinks=False)
                    used = status.st_blocks * 512
                    if status.st_nlink == 1:
                        own += used
                    elif (status.st_dev, status.st_ino) in seen:
                        continue
                    else:
                        seen[status.st_dev, status.st_ino] = used
                    size += used
        except OSError:
            continue  # removed meanwhile
    return size, own


def _describe_torch(target: str) -> str:
    """For which processor PyTorch was built, if it was installed."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = os.path.join(target, "lib", python, "site-packages", "torch", "version.py")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return ""
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*= '([^']+)'", text, re.M)
    name = f"torch {version[1]}" if version else "torch"
    if not cuda:
        return f"; {name} is a build for CPUs" if "+cpu" in name else f"; {name}"
    return f"; {name} is a build for CUDA {cuda[1]}"


# --- programs that install ----------------------------------------------------------------------


def _run(command: list[str], lock: int) -> None:
    """Run one step. Raises RuntimeError with the error if it fails."""
    code, lines = _try(command, lock)
    if code != 0:
        raise RuntimeError(_cause(lines))


def _try(command: list[str], lock: int) -> tuple[int, list[str]]:
    """Run one step; print those lines of its output that show progress. Its exit code and its last
    lines.
    """
    last_lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", pass_fds=[lock],
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            text = line.strip()
            progress = _progress(text)
            if progress:
                print_progress(progress)
            if text and not text.startswith("WARNING"):
                last_lines = [*last_lines[-20:], text]
    return process.returncode, last_lines


def _progress(line: str) -> str:
    """The progress that a line of pip or of uv_install.py shows; empty for other lines."""
    if re.match(r"(finding|fetching|building) |download\.pytorch\.org|the cache of ", line):
        return line  # of uv_install.py
    if line.startswith("Collecting "):
        return f"finding {line.split()[1]}"
    found = re.match(r"(?:Downloading|Using cached|Processing) (\S+)(?: \((\d[^)]*)\))?", line)
    if found:
        name = found[1].rpartition("/")[2].split("-")[0]
        return f"fetching {name}" + (f" ({found[2]})" if found[2] else "")
    if line.startswith("Installing collected packages:"):
        count = line.count(",") + 1
        return f"installing {count} package{'s' if count > 1 else ''}"
    return ""


def _cause(lines: list[str]) -> str:
    """The error in the last lines of a program that has failed."""
    if any("ensurepip is not" in line for line in lines):
        return "Python's venv module is incomplete here: apt-get install python3-venv"
    for line in lines:
        if line.startswith("ERROR:") or "No space left" in line:
            return re.sub("^ERROR:", "", line).strip()
    return lines[-1] if lines else "it ended without a message"


def main() -> None:
    try:
        make(*sys.argv[1:5])
    except (RuntimeError, OSError) as error:
        print_progress(str(error))
        sys.exit(1)
