"""The packages that a program needs, by the names that it imports, and an image that has them."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

# Import name -> package, where they differ. The Python of the user knows those that are installed.
PACKAGES = {
    "absl": "absl-py", "attr": "attrs", "bs4": "beautifulsoup4", "Bio": "biopython",
    "cairosvg": "CairoSVG", "clip": "openai-clip", "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil", "dotenv": "python-dotenv", "faiss": "faiss-cpu",
    "fitz": "pymupdf", "git": "GitPython", "hydra": "hydra-core", "jwt": "PyJWT",
    "lightning_fabric": "lightning", "MySQLdb": "mysqlclient", "open_clip": "open-clip-torch",
    "OpenSSL": "pyOpenSSL", "PIL": "pillow", "pkg_resources": "setuptools",
    "psycopg2": "psycopg2-binary", "serial": "pyserial", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "skopt": "scikit-optimize", "umap": "umap-learn", "usb": "pyusb",
    "yaml": "pyyaml", "zmq": "pyzmq",
}  # fmt: skip

_OWN_IMAGES = ("controller", "notebook", "python", "tensorboard")  # batchml's own use

_ASK = """
import json, sys
from importlib.metadata import packages_distributions, version
known, found = packages_distributions(), {}
for name in json.loads(sys.argv[1]):
    for package in known.get(name, ())[:1]:
        found[name] = [package, version(package)]
print(json.dumps(found))
"""


class Package(NamedTuple):
    """A package of PyPI; `version` is "" if it is not installed."""

    name: str
    version: str = ""

    @property
    def requirement(self) -> str:
        """`torch==2.4.0`. A local version such as `+cu121` is not on PyPI."""
        return f"{self.name}=={self.version.partition('+')[0]}" if self.version else self.name


class ImageChoice(Struct, frozen=True):
    """The `image` of a job.toml, and the lines of a new requirements.txt; () without one."""

    image: str
    why: str
    requirements: tuple[str, ...] = ()

    def describe_unpinned(self) -> str:
        """Which of the requirements have no version, and why; "" if all have one."""
        names = [line for line in self.requirements if "==" not in line]
        if not names:
            return ""
        lack = "has no version" if len(names) == 1 else "have no versions"
        return (
            f"{', '.join(names)} {lack} in requirements.txt, since your python does not have "
            f"{'it' if len(names) == 1 else 'them'}: the newest is installed."
        )


def ask_python(python: str, imports: Sequence[str]) -> dict[str, Package]:
    """Ask a Python which packages have these modules; {} if it cannot say. Starts a process."""
    if not imports:
        return {}
    command = [python, "-I", "-c", _ASK, json.dumps(list(imports))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        return {name: Package(*each) for name, each in json.loads(done.stdout).items()}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}


def find_packages(
    imports: Iterable[str], optional: frozenset[str], installed: Mapping[str, Package]
) -> list[Package]:
    """The packages of imported names, by name. An optional import counts if it is installed."""
    found = {
        installed.get(name) or Package(PACKAGES.get(name, name.replace("_", "-")))
        for name in imports
        if name in installed or name not in optional
    }
    return sorted(found, key=lambda package: package.name.lower())


def choose_image(
    packages: Sequence[Package], own_files: Mapping[str, str], images: Mapping[str, str]
) -> ImageChoice:
    """Choose the image of a program.

    `own_files` are files of the folder that describe an image, name -> text; `images` are the
    requirements.txt of the folders below images/. An image of batchml is chosen if it has the
    program's main package, and no other version of a package than the user has.
    """
    if own_files:
        file, text = next(iter(own_files.items()))
        names = {_normal(name) for name in re.findall(r"[A-Za-z0-9._-]+", text)}
        missing = [each for each in packages if _normal(each.name) not in names]
        lacks = f", which does not name {_listed(missing)}" if missing else ""
        return ImageChoice("." if len(own_files) == 1 else f"./{file}", f"from {file}{lacks}")
    if not packages:
        return ImageChoice("python", "it imports only the standard library")
    needed = {_normal(package.name): package for package in packages}
    best: tuple[int, int, str] | None = None
    for name, text in images.items():
        has = _read_pins(text)
        common = needed.keys() & has.keys()
        fits = all(needed[each].version.partition("+")[0] in ("", has[each]) for each in common)
        is_for_it = next(iter(has), "") in needed and name not in _OWN_IMAGES
        if is_for_it and fits:
            best = max(best or (0, 0, ""), (len(common), -len(has), name))
    if best is None:
        lines = tuple(package.requirement for package in packages)
        return ImageChoice(".", "from requirements.txt", lines)
    name = best[2]
    rest = [each for key, each in needed.items() if key not in _read_pins(images[name])]
    if not rest:
        return ImageChoice(name, f"has {_listed(packages)}")
    lines = tuple(package.requirement for package in rest)
    return ImageChoice(f"{name} + requirements.txt", f"and {_listed(rest)}", lines)


def _listed(packages: Sequence[Package]) -> str:
    return ", ".join(package.name for package in packages)


def _read_pins(text: str) -> dict[str, str]:
    """Package -> version of the lines `NAME==VERSION`, in order."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s#;]+)", text, re.MULTILINE)
    return {_normal(name): version for name, version in found}


def _normal(name: str) -> str:
    """The name as PyPI compares it. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
