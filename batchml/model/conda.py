"""A project's environment.yml: what it asks for, the image of it, and whether pip is enough.

Source: conda's documentation, "Managing environments", and "Package match specifications".
"""

import json
import re
from typing import Any

from msgspec import Struct

from batchml.errors import did_you_mean
from batchml.model.requirements import Read, read_requirements

PYTHON = "3.11"  # for a file that names none, as in images/*/Dockerfile
CHANNEL = "conda-forge"
CUDA = "12.6"  # what an image for GPUs is solved for: the driver of our hosts runs it

# `platforms` is conda-lock's. Of name, prefix and platforms nothing is asked: they decide nothing.
_KEYS = ("name", "channels", "dependencies", "platforms", "prefix")
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_SPEC = re.compile(rf"(?:[\w./:-]+::)?({_NAME})\s*([^\s\[#]*(?:\s+[^\s\[#]+)*)\s*(\[.*\])?")
_PIN = re.compile(r"={1,2}\s*(\d+(?:\.\d+)*)(\.\*)?")


class Conda(Struct, frozen=True):
    """`dependencies` are conda's; `pip` the lines that pip installs after them."""

    channels: tuple[str, ...] = (CHANNEL,)
    dependencies: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()

    def render(self) -> str:
        """The file as the tools get it: JSON is YAML. The same wishes are the same bytes."""
        names = [name_of(spec) for spec in self.dependencies]
        wanted: list[Any] = [*self.dependencies]
        wanted += [] if "python" in names else [f"python={PYTHON}"]
        if self.pip:
            tools = ["pip", *(["git"] if any("git+" in line for line in self.pip) else [])]
            wanted += [each for each in tools if each not in names]
            wanted.append({"pip": [*self.pip]})
        table = {"channels": [*self.channels], "dependencies": wanted}
        return json.dumps(table, indent=1) + "\n"

    def by_pip(self) -> tuple[str, str] | None:
        """Its requirements and the version of its Python, where pip alone can have it; else None.

        What conda calls a package, PyPI may call otherwise: of those only python and pip count.
        """
        version = PYTHON
        for spec in self.dependencies:
            name, wish = name_of(spec), (_SPEC.fullmatch(spec) or [""] * 4)[2]
            pin = _PIN.fullmatch(wish.strip())
            if name == "python" and (pin or not wish):
                version = ".".join(pin[1].split(".")[:2]) if pin else version
            elif name != "pip" and (wish or name not in ("setuptools", "wheel")):
                return None
        return ("".join(f"{line}\n" for line in self.pip), version) if "." in version else None


def name_of(spec: str) -> str:
    """The package that a conda spec asks for; empty where it is none."""
    match = _SPEC.fullmatch(spec)
    return match[1].lower() if match else ""


def read_conda(file: str, read: Read) -> tuple[Conda, list[str]]:
    """What an environment.yml asks for, and every mistake, each with the file's name."""
    try:
        table = _read_yaml(read(file) or "")
    except _BadYaml as error:
        return Conda(), [f"{file}: {error}."]
    if not isinstance(table, dict):
        return Conda(), [f"{file}: expected keys such as dependencies:, each on a line."]
    mistakes = [_unknown(key) for key in table if key not in _KEYS]
    channels = _texts(table, "channels", mistakes) or [CHANNEL]
    pip: list[str] = []
    wanted: list[str] = []
    entries = table.get("dependencies")
    if not isinstance(entries, list) or not entries:
        mistakes.append("dependencies: expected a list of packages, such as `- python=3.11`.")
        entries = []
    for place, entry in enumerate(entries):
        if isinstance(entry, dict):
            _pip(entry, place, read, pip, mistakes)
        elif not isinstance(entry, str) or not name_of(entry):
            found = repr(entry) if isinstance(entry, str) else "a list"
            mistakes.append(f"dependencies[{place}]: found {found}. Expected numpy or numpy=2.")
        else:
            wanted.append(entry)
    asked = Conda(tuple(channels), tuple(dict.fromkeys(wanted)), tuple(dict.fromkeys(pip)))
    return asked, [f"{file}: {mistake}" for mistake in mistakes]


class _BadYaml(Exception):
    """The text is not YAML; the message has the line."""


def _read_yaml(text: str) -> Any:
    """What is written, every value as text: a version such as 3.10 is no number."""
    import yaml  # a tenth of a command's time, for a file that few have

    try:
        loader = yaml.BaseLoader(text)
        node = loader.get_single_node()
        _refuse_twice(node)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _BadYaml(f"line {mark.line + 1}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        raise _BadYaml(f"not YAML: it has the character #x{error.character:04x}") from error
    except RecursionError as error:
        raise _BadYaml("not read: too many lists within lists") from error


def _refuse_twice(node: Any) -> None:
    """Of a key of the file that is there twice YAML would take the last, without a word."""
    seen = set[str]()
    for key, _ in node.value if node is not None and node.id == "mapping" else ():
        if str(key.value) in seen:
            raise _BadYaml(f"line {key.start_mark.line + 1}: {key.value!r} is there twice")
        seen.add(str(key.value))


def _unknown(key: str) -> str:
    if key == "variables":
        return "variables: write them under [env] of job.toml, which every place sets."
    return f"{key}: is no key of such a file.{did_you_mean(key, _KEYS)}"


def _texts(table: dict[str, Any], key: str, mistakes: list[str]) -> list[str]:
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        mistakes.append(f"{key}: expected a list of texts.")
        return []
    return value


def _pip(
    entry: dict[str, Any], place: int, read: Read, pip: list[str], mistakes: list[str]
) -> None:
    where = f"dependencies[{place}]"
    if list(entry) != ["pip"]:
        mistakes.append(f"{where}: found {', '.join(entry)}:. Expected a package, or pip:.")
        return
    lines = _texts(entry, "pip", mistakes)
    listed = "\n".join(lines)
    found = read_requirements("pip", lambda name: listed if name == "pip" else read(name))
    pip += found.lines
    mistakes += [f"{where}: {mistake}" for mistake in found.mistakes]


# Solved and installed in a stage of its own: conda's tools stay behind in it. PATH is all of an
# activation that programs get.
DOCKERFILE = """\
# Made by batchml from an environment.yml. The build context holds that and batchml/ (its runtime).
ARG BASE=debian:bookworm-slim

FROM mambaorg/micromamba:2.0.5-debian12-slim AS environment
# What GPUs packages are chosen for; empty: none.
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

# An image.toml: what the flavor cuda is built with.
SETTINGS = f'[cuda]\nbuild_args = {{ CONDA_OVERRIDE_CUDA = "{CUDA}" }}\n'
