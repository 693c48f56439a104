"""Make the virtual environments of jobs that are processes: one for each different
`requirements.txt` or environment.yml.

The first run that needs an environment makes it, under a lock. pip and conda hold the lock, too, so
nobody builds beside an orphan of theirs; the kernel releases it when the last holder dies. An
environment whose maker was killed has no `.complete` mark, and is deleted and made again. Scripts
of an environment contain its path, and so does the mark: a moved or copied environment is made
again at its new path.

Runs as a separate program, which the runner starts and stops, and prints its progress. Standard
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


def make(file: str, target: str, maker: str) -> None:
    """Make the environment `target` unless it exists. Raises RuntimeError with a message of one
    line.

    `file` is a requirements.txt and `maker` a Python, or an environment.yml and a conda program.
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
        build = _build_with_conda if file.endswith(".yml") else _build_with_pip
        try:
            build(file, target, maker, lock.fileno())
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


def _build_with_pip(requirements: str, target: str, python: str, lock: int) -> None:
    with open(requirements, encoding="utf-8") as file:
        needs_pip = any(line.strip() and not line.lstrip().startswith("#") for line in file)
    _run([python, "-m", "venv", *([] if needs_pip else ["--without-pip"]), target], lock)
    if needs_pip:
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


def has_python(target: str) -> bool:
    return os.access(os.path.join(target, "bin", "python"), os.X_OK)


def print_progress(text: str) -> None:
    print(text, flush=True)


def _run(command: list[str], lock: int) -> None:
    """Run one step; print those lines of its output that show progress."""
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
    if process.returncode != 0:
        raise RuntimeError(_cause(last_lines))


def _progress(line: str) -> str:
    """The progress that a line of pip shows; empty for other lines."""
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
            return line.removeprefix("ERROR:").strip()
    return lines[-1] if lines else "it ended without a message"


if __name__ == "__main__":
    try:
        make(*sys.argv[1:4])
    except (RuntimeError, OSError) as error:
        print_progress(str(error))
        sys.exit(1)
