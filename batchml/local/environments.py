"""Virtual environments for process jobs: one for each different `requirements.txt` (or
environment.yml).

The first run that needs an environment makes it. A lock protects it against a second maker. pip
holds the lock, too, so nobody builds beside an orphaned pip; the kernel releases it when the last
holder dies. An environment whose maker was killed has no `.complete` mark, and is deleted and made
again. Scripts of an environment contain its path, and so does the mark: a moved or copied
environment is made again at its new path.

Runs as a program of its own, which the runner starts and stops; it prints its progress. Standard
library only, no import of batchml: `python -I environments.py REQUIREMENTS TARGET PYTHON`, or with
an environment.yml and a conda program instead.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys

COMPLETE = ".complete"
# bytes; with fewer free, a failed build is reported as a full disk (a large file may fail to be
# written although a little space is left)
_FULL = 4 * 1024**2


def make(wanted: str, target: str, maker: str) -> None:
    """Make the environment `target` unless it exists. Raises RuntimeError with one line.

    `wanted` is a requirements.txt and `maker` a Python, or an environment.yml and a conda program.
    """
    target = os.path.realpath(target)
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    with open(f"{target}.lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if is_whole(target):
                return
            print_progress("waiting for another run that is making the same environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_whole(target):
            return
        shutil.rmtree(target, ignore_errors=True)
        print_progress("creating it (once for these requirements)")
        build = _by_conda if wanted.endswith(".yml") else _by_pip
        try:
            build(wanted, target, maker, lock.fileno())
        except (RuntimeError, OSError) as error:
            free = shutil.disk_usage(os.path.dirname(target)).free
            shutil.rmtree(target, ignore_errors=True)  # it may be gigabytes, and is useless
            if free < _FULL:  # ensurepip does not report this itself
                raise RuntimeError(
                    f"No space left on the disk of {os.path.dirname(target)}: {error}"
                ) from error
            raise
        with open(os.path.join(target, COMPLETE), "w", encoding="utf-8") as mark:
            mark.write(f"{target}\n")
            mark.flush()
            os.fsync(mark.fileno())


def _by_pip(requirements: str, target: str, python: str, lock: int) -> None:
    with open(requirements, encoding="utf-8") as file:
        wanted = [line for line in file if line.strip() and not line.lstrip().startswith("#")]
    _run([python, "-m", "venv", *([] if wanted else ["--without-pip"]), target], lock)
    if wanted:
        pip = [os.path.join(target, "bin", "python"), "-m", "pip", "--no-input"]
        # Compiling all modules takes as long as unpacking them, and a program imports a tenth.
        _run([*pip, "install", "--disable-pip-version-check", "--progress-bar", "off",
              "--no-compile", "-r", requirements], lock)  # fmt: skip


def _by_conda(wanted: str, target: str, tool: str, lock: int) -> None:
    # Answer yes to every question, as nobody is there to answer. Variables, not options, because
    # all versions of all three programs know these.
    os.environ.update(dict.fromkeys(("CONDA_ALWAYS_YES", "MAMBA_ALWAYS_YES"), "true"))
    create = ["create"] if os.path.basename(tool) == "micromamba" else ["env", "create"]
    _run([tool, *create, "--prefix", target, "--file", wanted], lock)
    if not has_python(target):
        raise RuntimeError(f"{os.path.basename(tool)} made an environment without a python")


def is_whole(target: str) -> bool:
    """True when it was completed at this path, and its Python still exists."""
    try:
        with open(os.path.join(target, COMPLETE), encoding="utf-8") as mark:
            return mark.read() == f"{os.path.realpath(target)}\n" and has_python(target)
    except (OSError, UnicodeDecodeError):
        return False


def has_python(target: str) -> bool:
    return os.access(os.path.join(target, "bin", "python"), os.X_OK)


def print_progress(text: str) -> None:
    print(text, flush=True)


def _run(command: list[str], lock: int) -> None:
    """Run one step; print those lines of its output that show progress."""
    errors: list[str] = []
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
                errors = [*errors[-20:], text]
    if process.returncode != 0:
        raise RuntimeError(_cause(errors))


def _progress(line: str) -> str:
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
    if any("ensurepip is not" in line for line in lines):
        return "Python's venv module is incomplete here: apt-get install python3-venv"
    for line in lines:
        if line.startswith("ERROR:") or "No space left" in line:
            return line.removeprefix("ERROR:").strip()
    return lines[-1] if lines else "it ended without a message"


if __name__ == "__main__":
    try:
        make(*sys.argv[1:4])
    except (RuntimeError, OSError) as error:
        print_progress(str(error))
        sys.exit(1)
