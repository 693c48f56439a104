"""Read the files of a job's own image: requirements.txt, environment.yml, Dockerfile.

They are read for three purposes: to find the files that decide the image and its digest, to scan
those for secrets, and to add the runtime. A requirement that pip could not read is refused; pip,
conda and the Docker engine check the rest when they make the image.

Sources: pip's documentation, "Requirements File Format"; PEP 508, "Grammar"; conda's documentation,
"Managing environments" and "Package match specifications"; Docker's documentation, "Dockerfile
reference".
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from msgspec import Struct

ReadText = Callable[[str], str | None]  # reads a file of the folder; None if it is missing

# --- requirements.txt -----------------------------------------------------------------------------


_INCLUDE = r"(?:-r|--requirement)(?:\s*=\s*|\s+|(?<=^-r))(\"[^\"]*\"|'[^']*'|\S+).*"
_URL = r"\w+://"
_COMMENT = r"(?:^|\s+)#.*$"

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_CLAUSE = r"(?:(?:==|!=|<=|>=|<|>|~=)\s*[\w.*+!-]+|===\s*[^\s,;)]+)"
_CLAUSES = rf"{_CLAUSE}(?:\s*,\s*{_CLAUSE})*\s*,?"
_EXTRAS = rf"(?:\[\s*(?:{_NAME}\s*(?:,\s*{_NAME}\s*)*)?\]\s*)?"
_REQUIREMENT = rf"{_NAME}\s*{_EXTRAS}(?:{_CLAUSES}|\(\s*{_CLAUSES}\s*\))?"
# Paths, URLs, variables and options, which are no names of packages.
_OTHER = r"[/\\@$]|^[.-]|^\["
_CORRECTIONS = (
    (r"=([<>])", r"\1="),  # `=>2`
    (r"(?<![=<>!~])=(?!=)", "=="),  # `=2`
    (rf"^({_NAME}(?:\[.*\])?)\s+(?=\d)", r"\1=="),  # `pandas 2`
    (r"([<>=]\s*\d[\w.*]*)\s*(?=[<>!~=])", r"\1,"),  # `>=2<3`
)


class Requirements(Struct, frozen=True):
    """The lines of a requirements.txt and of files that it includes, without comments."""

    lines: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def read_requirements(file: str, read: ReadText) -> Requirements:
    """Read a file and the files that it includes with -r, and collect every mistake."""
    lines: list[str] = []
    mistakes: list[str] = []
    _read(file, read, lines, mistakes, ())
    return Requirements(tuple(dict.fromkeys(lines)), tuple(mistakes))


def _read(
    file: str, read: ReadText, lines: list[str], mistakes: list[str], trail: tuple[str, ...]
) -> None:
    text = read(file)
    if text is None:
        mistakes.append(f"{' -> '.join((*trail, file))}: is not in the folder.")
        return
    for number, line in _logical_lines(text):
        include = re.fullmatch(_INCLUDE, line)
        if include is None or re.match(_URL, include[1]):
            lines.append(line)
            mistake = requirement_mistake(line)
            mistakes += [f"{file}:{number}: {mistake}"] if mistake else []
            continue
        named = include[1].strip("\"'")
        inner = _resolve_include(file, named)
        if inner is None:
            mistakes.append(f"{file}:{number}: {named} is outside the folder.")
        elif inner == file or inner in trail:
            mistakes.append(f"{file}:{number}: {inner} includes itself.")
        else:
            _read(inner, read, lines, mistakes, (*trail, file))


def requirement_mistake(line: str) -> str:
    """Why pip cannot read a line, with the probable correction; "" if it can, or may."""
    requirement = re.split(r"\s-|;", line)[0].strip()  # without options and the marker
    if re.search(_OTHER, requirement) or re.fullmatch(_REQUIREMENT, requirement):
        return ""
    for wrong, right in _CORRECTIONS:
        better = re.sub(wrong, right, requirement)
        if re.fullmatch(_REQUIREMENT, better):
            return f"{requirement!r} is no requirement that pip can read. Did you mean {better!r}?"
    return f"{requirement!r} is no requirement that pip can read, such as 'pandas==2.2'."


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers, without comments; continued lines are joined."""
    parts, start = list[str](), 0
    for number, raw in enumerate(text.splitlines(), 1):
        start = start if parts else number
        line = re.sub(_COMMENT, "", raw).strip()
        if line.endswith("\\"):
            parts.append(line[:-1].strip())
            continue
        whole = " ".join(filter(None, (*parts, line)))
        parts = []
        if whole:
            yield start, whole
    if any(parts):
        yield start, " ".join(filter(None, parts))


def _resolve_include(file: str, other: str) -> str | None:
    """Resolve the name `other` in `file` to a path below the folder; None if it is outside."""
    if other.startswith("/"):
        return None
    parts = file.split("/")[:-1]
    for part in other.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


# --- environment.yml ------------------------------------------------------------------------------


PYTHON = "3.11"  # for files without a version of Python; images/*/Dockerfile have the same
CHANNEL = "conda-forge"
CUDA = "12.6"  # conda chooses packages for this version, which the driver of GPU hosts supports

_NOT_OF_IMAGES = ("name", "prefix", "platforms")  # keys on which an image does not depend
_SPEC = r"(?s)(?:[\w./:-]+::)?([A-Za-z0-9_][A-Za-z0-9_.-]*)\s*(.*)"
_PIN = r"={1,2}\s*(\d+(?:\.\d+)*)(\.\*)?"


class CondaFile(Struct, frozen=True):
    """The content of an environment.yml that decides the image."""

    table: dict[str, Any]  # without `pip:`
    pip: tuple[str, ...] = ()  # the lines that pip installs after conda's packages

    @property
    def specs(self) -> list[Any]:
        """The packages of conda, and entries that only conda understands."""
        return list(self.table["dependencies"])

    def render(self) -> str:
        """Write the file for conda, as JSON, which is YAML. Equal content gives equal bytes."""
        specs, names = self.specs, [_package(spec) for spec in self.specs]
        specs += [] if "python" in names else [f"python={PYTHON}"]
        if self.pip:
            tools = ["pip", *(["git"] if any("git+" in line for line in self.pip) else [])]
            specs += [each for each in tools if each not in names]
            specs.append({"pip": [*self.pip]})
        return json.dumps({**self.table, "dependencies": specs}, indent=1) + "\n"

    def pip_equivalent(self) -> tuple[str, str] | None:
        """Return requirements for pip and the version of Python, if pip can install all packages.

        Else None: packages of conda may have another name on PyPI.
        """
        version = PYTHON
        for spec in self.specs:
            match = re.fullmatch(_SPEC, spec) if isinstance(spec, str) else None
            name, pinned = (match[1].lower(), match[2].strip()) if match else ("", "")
            pin = re.fullmatch(_PIN, pinned)
            if name == "python" and (pin or not pinned):
                version = ".".join(pin[1].split(".")[:2]) if pin else version
            elif name != "pip" and (pinned or name not in ("setuptools", "wheel")):
                return None
        requirements = "".join(f"{line}\n" for line in self.pip)
        return (requirements, version) if "." in version else None


def _package(spec: Any) -> str:
    match = re.fullmatch(_SPEC, spec) if isinstance(spec, str) else None
    return match[1].lower() if match else ""


def read_conda(file: str, read: ReadText) -> tuple[CondaFile, list[str]]:
    """Read an environment.yml and the files that its `pip:` includes; return also every mistake."""
    table, mistake = _read_yaml(read(file) or "")
    entries = table.get("dependencies") if isinstance(table, dict) else None
    if not mistake and not isinstance(entries, list):
        mistake = "expected dependencies: with a list of packages, such as `- python=3.11`"
    elif not mistake and "variables" in table:
        mistake = "variables: write them under [env] of job.toml"
    if mistake or not isinstance(entries, list):
        return CondaFile({"dependencies": []}), [f"{file}: {mistake}."]
    specs, lines = list[Any](), list[str]()
    for entry in entries:
        if isinstance(entry, dict) and [*entry] == ["pip"] and isinstance(entry["pip"], list):
            lines += map(str, entry["pip"])
        elif entry not in specs:
            specs.append(entry)
    listed = "\n".join(lines)
    found = read_requirements("pip", lambda name: listed if name == "pip" else read(name))
    others = {key: value for key, value in table.items() if key not in _NOT_OF_IMAGES}
    channels = others.pop("channels", None) or [CHANNEL]
    ordered = {"channels": channels, **others, "dependencies": specs}
    return CondaFile(ordered, found.lines), [f"{file}: {each}" for each in found.mistakes]


def _read_yaml(text: str) -> tuple[Any, str]:
    """Return the file's content with every value as text (3.10 is no number), or a mistake."""
    import yaml  # takes a tenth of a command's time, and few jobs have such a file

    try:
        return yaml.load(text, yaml.BaseLoader), ""
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return None, f"line {mark.line + 1}: {error.problem or error.context}"
    except (yaml.YAMLError, RecursionError) as error:
        return None, f"not YAML: {str(error).splitlines()[0]}"


# The Dockerfile for an environment.yml. The tools of conda stay in the first stage. Of the
# variables that `conda activate` sets, programs get PATH and CONDA_PREFIX.
CONDA_DOCKERFILE = """\
# Made by batchml from an environment.yml. The build context has this and batchml/ (its runtime).
ARG BASE=debian:bookworm-slim

FROM mambaorg/micromamba:2.0.5-debian12-slim AS environment
# The CUDA version for which packages are chosen; empty: packages without CUDA.
ARG CONDA_OVERRIDE_CUDA=""
# hadolint ignore=DL3002
USER 0
COPY environment.yml /build/
RUN if [ -z "${CONDA_OVERRIDE_CUDA}" ]; then unset CONDA_OVERRIDE_CUDA; fi; \\
    micromamba create --yes --prefix /opt/venv --file /build/environment.yml && \\
    micromamba clean --all --yes

# hadolint ignore=DL3006
FROM ${BASE}
RUN useradd --uid 1000 --user-group --create-home --home-dir /job batchml && \\
    [ "$(id -u batchml):$(id -g batchml)" = 1000:1000 ]
COPY --from=environment /opt/venv /opt/venv
COPY batchml /opt/batchml/batchml
ENV PATH=/opt/venv/bin:/usr/local/nvidia/bin:${PATH} \\
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}} \\
    CONDA_PREFIX=/opt/venv \\
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \\
    NVIDIA_VISIBLE_DEVICES=void \\
    PYTHONPATH=/opt/batchml \\
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /job
ENTRYPOINT ["python", "-m", "batchml.runtime.run"]
"""

# The image.toml for an environment.yml: the build arguments of the flavor cuda.
CONDA_SETTINGS = f'[cuda]\nbuild_args = {{ CONDA_OVERRIDE_CUDA = "{CUDA}" }}\n'

# --- Dockerfile -----------------------------------------------------------------------------------


_DIRECTIVE = r"#\s*(\w+)\s*=\s*(.*)"
# A here-document is a separate word: `<<<` is a string of the shell, `1 << n` is arithmetic.
_HEREDOC = r"(?:^|\s)\d*<<-?([\"']?)([\w.-]+)\1(?=$|[\s>|;&])"
_MAY_HAVE_HEREDOC = ("RUN", "COPY", "ADD")
_REMOTE_SOURCE = r"(?:https?|git|ssh)://|git@"
_RUNTIME = "batchml.runtime.run"


class Instruction(Struct, frozen=True):
    number: int  # of its first line
    word: str  # FROM, COPY, ...
    rest: str  # the text after the word


class CopySource(Struct, frozen=True):
    """A source of COPY or ADD below the job's folder. It may have wildcards."""

    number: int
    path: str


def instructions(text: str) -> list[Instruction]:
    """Parse the instructions, without comments and here-documents; continued lines are joined."""
    escape, found = _escape(text), list[Instruction]()
    parts, start = list[str](), 0
    lines = enumerate(text.splitlines(), 1)
    for number, raw in lines:
        line = raw.strip()
        if not line or line.startswith("#"):  # also between the lines of an instruction
            continue
        start = start if parts else number
        parts.append(line.removesuffix(escape).strip())
        if line.endswith(escape):
            continue
        found.append(_instruction(start, parts))
        parts = []
        if found[-1].word in _MAY_HAVE_HEREDOC:
            for _, mark in re.findall(_HEREDOC, found[-1].rest):
                next((inner for _, inner in lines if inner.strip() == mark), None)
    return [*found, _instruction(start, parts)] if any(parts) else found


def _instruction(number: int, parts: list[str]) -> Instruction:
    word, _, rest = " ".join(parts).replace("\t", " ").partition(" ")
    return Instruction(number, word.upper(), rest.strip())


def _escape(text: str) -> str:
    """Return the character that continues a line: the directive `escape`, or a backslash."""
    for line in text.splitlines():
        directive = re.fullmatch(_DIRECTIVE, line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            return directive[2].strip()
    return "\\"


def copy_sources(text: str) -> tuple[list[CopySource], list[str]]:
    """Return the files that a Dockerfile copies from the job's folder, and every mistake."""
    found: list[CopySource] = []
    mistakes: list[str] = []
    for each in instructions(text):
        if each.word not in ("COPY", "ADD") or re.search(_HEREDOC, each.rest):
            continue
        words = _words(each.rest)
        flags = list(takewhile(lambda word: word.startswith("--"), each.rest.split()))
        if any(flag.startswith("--from=") for flag in flags):
            continue
        for path in words[len(flags) : -1]:
            if re.match(_REMOTE_SOURCE, path):
                continue
            if "$" in path:
                mistakes.append(
                    f"line {each.number}: {each.word} {path}: has a variable. Write the file's "
                    "name: batchml reads the file to name the image by its content."
                )
                continue
            parts = [part for part in path.split("/") if part not in ("", ".")]
            if ".." in parts:
                mistakes.append(f"line {each.number}: {each.word} {path}: leaves the folder.")
                continue
            found.append(CopySource(each.number, "/".join(parts)))
    return found, mistakes


def _words(rest: str) -> list[str]:
    start = rest.find("[")
    if start >= 0 and all(word.startswith("--") for word in rest[:start].split()):
        listed = _json_list(rest[start:])
        if listed is not None:
            return [*rest[:start].split(), *listed]
    try:
        return shlex.split(rest, posix=True)
    except ValueError:
        return rest.split()


def runtime_mistakes(text: str) -> Iterator[str]:
    """Yield the reasons why the runtime cannot be added (see `add_runtime`)."""
    found = instructions(text)
    if found and len(instructions(f"{text}\nRUN true\n")) == len(found):
        yield "its last line is continued, and no line follows."
    entry = _last(found, "ENTRYPOINT")
    if entry is not None and _json_list(entry.rest) is None:
        yield (
            f"line {entry.number}: ENTRYPOINT as a shell command ignores the job's command. "
            f'Write it as a list: ENTRYPOINT ["{(entry.rest.split() or ["sh"])[0]}", ...].'
        )


def add_runtime(text: str) -> str:
    """Add the runtime, which fetches a run's code and starts its program.

    Like images of batchml, the image runs as user 1000:1000 with the home /job, in the Dockerfile's
    last WORKDIR or in /job. The runtime starts the Dockerfile's own entry point.
    """
    last = _last_stage(instructions(text))
    if any(each.word == "ENTRYPOINT" and _RUNTIME in each.rest for each in last):
        return text
    entry = _last(last, "ENTRYPOINT")
    original = (_json_list(entry.rest) or []) if entry else []
    folder = "" if any(each.word == "WORKDIR" for each in last) else "WORKDIR /job\n"
    start = json.dumps(["python3", "-m", _RUNTIME, *original])
    added = _ADDED.replace("\\\n", f"{_escape(text)}\n")
    return f"{text.rstrip()}\n{added}{folder}ENTRYPOINT {start}\n"


_ADDED = """
# --- Added by batchml: the runtime, which fetches the code of a run and starts its program ---
USER 0
RUN python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || \\
    { echo "batchml needs python3, version 3.8 or later. Install it in the Dockerfile."; \\
    exit 1; }
RUN mkdir -p /job && chown 1000:1000 /job
COPY batchml /opt/batchml/batchml
ENV PYTHONPATH=/opt/batchml${PYTHONPATH:+:${PYTHONPATH}} \\
    PYTHONUNBUFFERED=1 \\
    HOME=/job
USER 1000:1000
"""


def _last_stage(found: list[Instruction]) -> list[Instruction]:
    starts = [at for at, each in enumerate(found) if each.word == "FROM"]
    return found[starts[-1] :] if starts else found


def _last(found: list[Instruction], word: str) -> Instruction | None:
    return next((each for each in reversed(_last_stage(found)) if each.word == word), None)


def _json_list(text: str) -> list[str] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return [str(each) for each in found] if isinstance(found, list) else None
