"""Install the packages of a requirements.txt into a virtual environment with uv, as pip would.

uv unpacks packages into a cache and links them from there, so that environments share what they
have in common. It does not read pip's settings, so that they are translated. On a machine without a
GPU, PyTorch's build for CPUs is preferred, unless the user says where packages come from.

A separate program with the arguments UV REQUIREMENTS TARGET CACHE, which `environments.py` runs: it
prints progress, and an error as its last line. Standard library and batchml.runtime only. Exit code
0, 1 for an error that pip would have, too, or NEEDS_PIP with the reason as its last line.
"""

from __future__ import annotations

import configparser
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping

from batchml.local.environments import NEEDS_PIP, print_progress
from batchml.runtime.entry.folders import size_text


def install(
    uv: str,
    requirements: str,
    target: str,
    cache: str,
    *,
    environ: Mapping[str, str],
    gpu: bool,
) -> str:
    """Install the requirements. Returns why pip has to do it instead, or "".

    `environ`: the variables with the user's settings. `gpu`: whether this machine has a GPU. Raises
    RuntimeError with a message of one line for an error that pip would have, too.
    """
    with open(requirements, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    settings = uv_settings(read_pip_settings(environ), lines)
    if settings.needs_pip:
        return settings.needs_pip
    return _Uv(uv, settings, target, cache, environ).install(requirements, prefers_cpu=not gpu)


def has_gpu() -> bool:
    """Whether this machine seems to have a GPU of NVIDIA or AMD."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))) or bool(
        shutil.which("nvidia-smi")
    )


# --- settings of pip, for uv --------------------------------------------------------------------
# https://pip.pypa.io/en/stable/topics/configuration/ and
# https://docs.astral.sh/uv/reference/environment/


def read_pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The options that pip would take from its configuration files and variables, by their long
    names without dashes in front.
    """
    found: dict[str, str] = {}
    for path in _pip_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip reports it
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update({k.replace("_", "-"): v for k, v in parser.items(section)})
    for name, value in environ.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE" and value:
            found[name[4:].lower().replace("_", "-")] = value
    return found


def _pip_files(environ: Mapping[str, str]) -> list[str]:
    """pip's configuration files, the least important first."""
    own = environ.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    home = environ.get("HOME", "")
    system = [*(environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)]
    paths = [*(os.path.join(folder, "pip", "pip.conf") for folder in system), "/etc/pip.conf"]
    if own and os.path.exists(own):
        return [*paths, own]
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return [*paths, os.path.join(home, ".pip", "pip.conf"), os.path.join(config, "pip", "pip.conf")]


class UvSettings:
    """How to call uv so that it does what pip would do.

    `needs_pip`: why uv cannot; empty if it can. `has_own_index`: the user says where packages come
    from.
    """

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.flags: list[str] = []
        self.needs_pip = ""
        self.has_own_index = False


# pip's options that name variables of uv, and the separator of their values.
_VARIABLES: dict[str, tuple[str, str]] = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
    "retries": ("UV_HTTP_RETRIES", ""),
    "keyring-provider": ("UV_KEYRING_PROVIDER", ""),
}
_INDEXES = ("index-url", "extra-index-url", "find-links", "no-index")
_SWITCHES = {
    "no-index": "--no-index",
    "pre": "--prerelease=allow",
    "require-hashes": "--require-hashes",
    "no-deps": "--no-deps",
}
_LISTS = ("no-binary", "only-binary")
# What changes nothing about the packages, or what `make` decides itself.
_WITHOUT_EFFECT = {
    "cache-dir", "no-cache-dir", "disable-pip-version-check", "no-input", "no-color", "no-compile",
    "compile", "progress-bar", "quiet", "verbose", "log", "root-user-action", "format", "upgrade",
    "no-warn-script-location", "require-virtualenv", "no-warn-conflicts", "prefer-binary",
    "no-python-version-warning", "use-feature", "use-deprecated", "break-system-packages",
    "exists-action", "upgrade-strategy", "user", "resume-retries", "src", "version",
}  # fmt: skip
# Lines of a requirements.txt that uv understands as pip does.
_LINES = {
    "-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-i", "--index-url",
    "--extra-index-url", "-f", "--find-links", "--no-index", "--no-binary", "--only-binary",
    "--require-hashes", "--prefer-binary", "--use-feature",
}  # fmt: skip
_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f")


def uv_settings(pip: Mapping[str, str], requirements: Iterable[str]) -> UvSettings:
    """The settings of uv for pip's settings and the lines of a requirements.txt."""
    found = UvSettings()
    given = dict(pip)
    for line in requirements:
        if " --hash" in line:  # pip then wants one for every package
            given["require-hashes"] = "1"
        option, _, value = line.replace("=", " ", 1).partition(" ")
        if not option.startswith("-"):
            continue
        found.has_own_index |= option in ("-i", "-f") or option[2:] in _INDEXES
        if option == "--pre":
            given["pre"] = "1"
        elif option == "--trusted-host":
            given["trusted-host"] = f"{given.get('trusted-host', '')} {value}".strip()
        elif option not in _LINES:
            found.needs_pip = f"uv does not know {option} in requirements.txt"
    for name, value in given.items():
        if value.lower() in _FALSE or name in _WITHOUT_EFFECT:
            continue
        found.has_own_index |= name in _INDEXES
        words = value.replace(",", " ").split() if name in _LISTS else value.split()
        if name in _VARIABLES:
            variable, separator = _VARIABLES[name]
            found.variables[variable] = separator.join(words) if separator else value.strip()
        elif name in _SWITCHES and value.lower() in _TRUE:
            found.flags.append(_SWITCHES[name])
        elif name in _LISTS:
            found.flags += [f"--{name}={word}" for word in words]
        else:
            found.needs_pip = f"uv has no counterpart of pip's setting {name}"
    return found


# --- uv -----------------------------------------------------------------------------------------

_TORCH_HOST = "download.pytorch.org"
# uv's own settings of where packages come from.
_OWN_INDEX = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
              "UV_NO_INDEX", "UV_OFFLINE", "UV_CONFIG_FILE")  # fmt: skip


class _Uv:
    """uv, which installs into one environment."""

    def __init__(
        self, uv: str, settings: UvSettings, target: str, cache: str, environ: Mapping[str, str]
    ) -> None:
        self._target, self._cache = target, cache
        self._call = [uv, "pip", "install", "--python", os.path.join(target, "bin", "python")]
        self._flags = settings.flags
        # pip takes the best version of all indexes; the user's own variables of uv win.
        self._basic = {**environ, "UV_CACHE_DIR": self._cache, "NO_COLOR": "1"}
        own = {name: value for name, value in environ.items() if name.startswith("UV_")}
        self._environ = {
            "UV_INDEX_STRATEGY": "unsafe-best-match", **self._basic, **settings.variables, **own,
            "UV_CACHE_DIR": self._cache,
        }  # fmt: skip
        self._has_own_index = settings.has_own_index or any(name in own for name in _OWN_INDEX)
        self._has_own_index |= any(map(os.path.exists, _uv_files(environ)))

    def install(self, requirements: str, *, prefers_cpu: bool) -> str:
        """Install the requirements, and pip. Returns why pip has to do it instead, or "".

        `prefers_cpu`: take PyTorch's build for CPUs, if the user has not chosen another.
        Raises RuntimeError for an error that pip would have, too.
        """
        command = [*self._call, *self._flags, "-r", requirements]
        chosen = self._has_own_index or "UV_TORCH_BACKEND" in self._environ
        if prefers_cpu and not chosen:
            self._prefer_cpu_build(command)
        code, lines = self._run(command, self._environ)
        if code and _is_damaged(lines):  # a power cut may do this
            print_progress("the cache of packages is damaged and is emptied")
            shutil.rmtree(self._cache, ignore_errors=True)
            code, lines = self._run(command, self._environ)
        if code:
            reason = why_pip(code, lines)
            if not reason:
                raise RuntimeError(uv_error(lines))
            return reason
        self._add_pip()
        return ""

    def _prefer_cpu_build(self, command: list[str]) -> None:
        """Choose PyTorch's build for CPUs, a tenth of the one for CUDA, if its index answers."""
        environ = {**self._environ, "UV_TORCH_BACKEND": "cpu"}
        code, lines = self._run([*command, "--dry-run"], {**environ, "UV_HTTP_RETRIES": "0"})
        text = " ".join(lines)
        if code == 0 or "torch" not in text.lower():
            self._environ = environ
        elif _TORCH_HOST in text:
            print_progress(
                f"{_TORCH_HOST} cannot be reached: the default index usually has PyTorch's build "
                "for CUDA, several GiB"
            )

    def _add_pip(self) -> None:
        """Install the pip that comes with Python, so that a job may use it."""
        if os.path.exists(os.path.join(self._target, "bin", "pip")):
            return
        wheels = _bundled_wheels()
        if wheels:
            flags = ["--no-config", "--no-index", "--no-deps", "--find-links", wheels]
            environ = {k: v for k, v in self._basic.items() if k not in (*_OWN_INDEX, *_LIMITS)}
            code, lines = self._run([*self._call, *flags, "pip"], environ, quiet=True)
            if code:
                raise RuntimeError(uv_error(lines))

    def _run(
        self, command: list[str], environ: Mapping[str, str], *, quiet: bool = False
    ) -> tuple[int, list[str]]:
        """Run uv, and print its progress: its exit code, and its lines that are no progress.

        uv shows the progress of downloads only on a terminal. It also holds the environment's lock,
        which this process has from its parent.
        """
        reader, writer = _open_terminal()
        progress = UvProgress(time.monotonic)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environ,
                cwd=os.sep, close_fds=False,
            )  # fmt: skip
        finally:
            os.close(writer)
        with process, open(reader, "rb", buffering=0) as output:
            while data := _read(output.fileno()):
                for text in progress.feed(data.decode("utf-8", "replace")):
                    if not quiet:
                        print_progress(text)
        return process.returncode, progress.finish()


_LIMITS = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE_NEWER", "UV_BUILD_CONSTRAINT")


def _uv_files(environ: Mapping[str, str]) -> list[str]:
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    return [os.path.join(home, "uv", "uv.toml"), "/etc/uv/uv.toml"]


def _bundled_wheels() -> str:
    """The folder with the wheel of pip that Python's `ensurepip` installs, or ""."""
    bundled = os.path.join(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    for folder in (sysconfig.get_config_var("WHEEL_PKG_DIR") or "", bundled):
        names = os.listdir(folder) if folder and os.path.isdir(folder) else []
        if any(name.startswith("pip-") for name in names):
            return folder
    return ""


def _open_terminal() -> tuple[int, int]:
    """A pseudoterminal's two ends, wide enough for uv's messages; a pipe where there is none."""
    try:
        reader, writer = os.openpty()
    except OSError:
        return os.pipe()
    import struct
    import termios

    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 100, 500, 0, 0))
    return reader, writer


def _read(descriptor: int) -> bytes:
    """The next bytes of a pipe or a pseudoterminal; empty at its end."""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: the last writer has closed the pseudoterminal
        return b""


_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_ERASE = re.compile(r"\x1b\[[0-9]*[ABJK]")  # or moves to another line
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPINNER = "\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f"
# `torch  ----------------  12.00 MiB/180.50 MiB`; several of them in one line, padded with spaces.
_BAR = re.compile(
    r"(\S+) (?:[-\u2500-\u257f]+ )+([0-9.]+) (B|KiB|MiB|GiB)/([0-9.]+) (B|KiB|MiB|GiB)\b"
)
_PAUSE = 0.5  # seconds between two lines of progress
_SPAN = 5.0  # seconds of which the rate is the mean


class UvProgress:
    """Reads what uv draws on a terminal. `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rest = ""
        self._lines: list[str] = []
        self._done: dict[str, tuple[float, float]] = {}  # package -> (bytes that arrived, all)
        self._samples: list[tuple[float, float]] = []  # (time, bytes)
        self._next = 0.0  # time from which another line may be printed
        self._last = ""

    def feed(self, text: str) -> list[str]:
        """Add output; return the lines of progress to print."""
        text = _ESCAPES.sub("", _ERASE.sub("\n", text))
        # uv pads each of its drawings to the width of the terminal, twenty times a second.
        text = re.sub(" {4,}", "   ", self._rest + text)
        *parts, self._rest = re.split(rf"[\r\n]|(?=[{_SPINNER}])| {{3}}(?=error: )", text)
        found = ""
        for part in parts:
            found = self._take(part.rstrip()) or found
        return self._limit(found)

    def finish(self) -> list[str]:
        """The lines that are no progress, at the end of the output."""
        self._take(self._rest.rstrip())
        return self._lines

    def _take(self, line: str) -> str:
        text = re.sub(" +", " ", line.strip(f"{_SPINNER} "))
        bars = {
            name: (float(done) * _UNITS[unit], float(all_) * _UNITS[unit_of_all])
            for name, done, unit, all_, unit_of_all in _BAR.findall(text)
        }
        is_whole = text.startswith("Preparing packages")  # has a bar for each package on its way
        if is_whole or bars:
            if is_whole:
                for name in self._done.keys() - bars.keys():
                    self._done[name] = (self._done[name][1],) * 2
            self._done.update(bars)
            return self._describe_download()
        if text.startswith("Building "):
            return f"building {text.split()[1].partition('==')[0]}"
        if re.match(r"(Built|Updating|Updated|Resolving) ", text):
            return ""
        if line[:1] in _SPINNER and line and "==" in text:
            return f"finding {text.partition('==')[0]}"
        if text and line[:1] not in f"{_SPINNER}\u2588\u2591":
            self._lines = [*self._lines[-200:], text]
        return ""

    def _describe_download(self) -> str:
        """`fetching torch, scipy: 120 of 226 MiB, 14 MiB/s, 8 s left`"""
        going = {name: all_ for name, (done, all_) in self._done.items() if done < all_}
        if not going:
            return ""
        now, done = self._clock(), sum(done for done, _ in self._done.values())
        self._samples = [each for each in self._samples if each[0] > now - _SPAN] + [(now, done)]
        all_ = sum(all_ for _, all_ in self._done.values())
        names = sorted(going, key=lambda name: -going[name])
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        text = f"fetching {', '.join(names[:2])}{more}: {size_text(done)} of {size_text(all_)}"
        began, before = self._samples[0]
        if now - began < 1 or done <= before:
            return text
        rate = (done - before) / (now - began)
        return f"{text}, {size_text(rate)}/s, {(all_ - done) / rate:.0f} s left"

    def _limit(self, text: str) -> list[str]:
        now = self._clock()
        if not text or text == self._last or now < self._next:
            return []
        self._next, self._last = now + _PAUSE, text
        return [text]


_SHARED = re.compile(
    "No solution found|Failed to fetch|Request failed|Failed to download|Failed to build|"
    "build backend returned an error|"
    "Distribution not found|No space left|Git operation failed|does not appear to be a Python "
    "project|Hash mismatch|--require-hashes",
)


def why_pip(code: int, lines: Iterable[str]) -> str:
    """Why pip may succeed where uv has failed; empty if it would fail, too."""
    text = "\n".join(lines)
    if code < 0 or code > 2:
        return f"uv ended with code {code}"
    if "pre-release" in text:
        return "uv does not take pre-releases by itself"
    return "" if _SHARED.search(text) else f"uv says: {uv_error(text.splitlines())}"


def _is_damaged(lines: Iterable[str]) -> bool:
    """Whether a package in uv's cache cannot be read."""
    text = "\n".join(lines)
    return "archive-v" in text and "No such file" in text


def uv_error(lines: Iterable[str]) -> str:
    """The error in uv's last lines, as one line."""
    parts: list[str] = []  # the error and its causes
    output: list[str] = []  # of a build that failed
    for line in lines:
        text = re.sub(r"^[\u00d7\u2570\u2500\u25b6\u2502\s]+", "", line)
        if re.match(r"(warning|hint):|Using Python|Resolved |Prepared ", text):
            continue
        if re.match(r"(error|cause): ", text) or "\u2570" in line or not parts:
            parts.append(re.sub(r"^(error|cause): ", "", text))
        elif text.startswith(("[std", "--- std")) or output:
            output.append(text)
        else:
            parts[-1] += f" {text}"
    because = next((part for part in parts if part.startswith("Because ")), "")
    if because:
        sentence, _, rest = because.partition(", we can conclude that your requirements ")
        return because if rest != "are unsatisfiable." else f"{sentence}."
    if output:
        return f"{parts[0]}: {output[-1]}"
    return ": ".join(dict.fromkeys((*parts[:2], *parts[-1:]))) or "uv ended without a message"


def main() -> None:
    try:
        reason = install(*sys.argv[1:5], environ=os.environ, gpu=has_gpu())
    except (RuntimeError, OSError) as error:
        print_progress(str(error))
        sys.exit(1)
    if reason:
        print_progress(reason)
        sys.exit(NEEDS_PIP)
