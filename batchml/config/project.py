"""Find the project of a folder: the runs that commands list and name belong to a project.

A project is the name in batchml.toml, or else a folder: the root of the git repository, or the
current folder. Its identity is the name, or the folder's path; two folders of one name are two
projects (docs/decisions/043-projects.md). Completion imports this module at every press of Tab, so
it imports little.
"""

import os
import zlib
from collections.abc import Callable, Iterable

from batchml.errors import UsageError

PROJECT_VARIABLE = "BATCHML_PROJECT"
MAX_PROJECT_NAME = 64

_HASH_DIGITS = 8


def is_project_name(text: str) -> bool:
    """Whether batchml.toml may name a project so.

    1 to 64 letters, digits, `-` and `_`; the first is a letter or digit. `--` separates a project
    from the name of its queue on `local`, so a name neither has it nor ends with a hyphen.
    """
    characters = text.replace("-", "").replace("_", "")
    return (
        len(text) <= MAX_PROJECT_NAME
        and text.isascii()
        and characters.isalnum()
        and text[0] not in "-_"
        and not text.endswith("-")
        and "--" not in text
    )


def is_project_id(text: str) -> bool:
    """Whether a text is the identity of a project: its name, or `NAME.1a2b3c4d` of a folder."""
    name, dot, digits = text.partition(".")
    is_hash = len(digits) == _HASH_DIGITS and not digits.strip("0123456789abcdef")
    return is_project_name(name) and (is_hash or not dot)


def project_name(project: str) -> str:
    """The name that people read: that of batchml.toml, or the folder's."""
    return project.partition(".")[0]


def short_project(project: str, known: Iterable[str]) -> str:
    """The shortest word that means a project: its name, unless another project has that name."""
    name = project_name(project)
    others = (each for each in known if each != project)
    return project if any(project_name(each) == name for each in others) else name


def folder_project(folder: str) -> str:
    """The project of a folder without a name in batchml.toml: `vision.1a2b3c4d`.

    The digits are the CRC-32 of the path of its root. They tell folders of one name apart and hide
    nothing; a cryptographic hash takes 30 times longer to import.
    """
    root = os.path.realpath(project_root(folder))
    kept = "".join(
        char if char.isascii() and (char.isalnum() or char == "_") else "-"
        for char in os.path.basename(root)
    )
    name = "-".join(filter(None, kept[:MAX_PROJECT_NAME].strip("-_").split("-"))) or "root"
    return f"{name}.{zlib.crc32(os.fsencode(root)):0{_HASH_DIGITS}x}"


def project_root(folder: str) -> str:
    """The root of the folder's git repository or worktree; the folder itself without one."""
    folder = os.path.abspath(folder)
    return repository_root(folder) or folder


def repository_root(folder: str) -> str:
    """The root of the git repository or worktree of an absolute folder; "" without one."""
    above = folder
    while not os.path.exists(os.path.join(above, ".git")):
        below, above = above, os.path.dirname(above)
        if above == below:
            return ""
    return above


def folder_above(folder: str, known: Iterable[str]) -> str:
    """The nearest folder above `folder` that is one of these projects; "" if none is."""
    projects, above = set(known), os.path.dirname(os.path.abspath(folder))
    while above != os.path.dirname(above):
        if folder_project(above) in projects:
            return above
        above = os.path.dirname(above)
    return ""


def find_project_folder(project: str, folders: Iterable[str]) -> str:
    """The path of a project: of these folders of its runs, or above them; "" if it is not found."""
    for folder in dict.fromkeys(folders):
        is_own = folder_project(folder) == project
        found = folder if is_own else folder_above(folder, [project])
        if found:
            return project_root(found)
    return ""


def choose_project(
    given: str,
    known: Iterable[str],
    source: str,
    own: str = "",
    find_folder: Callable[[str], str] = lambda project: "",
) -> str:
    """The project that a word of the user names: an identity, or the name of one known folder.

    Of several folders of that name, the user's own is meant, if it is one of them. An unknown name
    is returned as it is: other machines may have runs of a project of that name. `source` is the
    flag or variable. `find_folder` returns the path of a project, or "". Raises UsageError for the
    name of several folders, and for a word that names no project.
    """
    if not is_project_id(given):
        raise UsageError(
            f"{source} {given!r}: a project's name has 1 to {MAX_PROJECT_NAME} letters, digits, - "
            "and _; it begins with a letter or digit, and has no two hyphens together."
        )
    projects = dict.fromkeys(known)
    folders = sorted(each for each in projects if project_name(each) == given)
    if given in projects or not folders:
        return given
    if own in folders:
        return own
    if len(folders) > 1:
        paths = {each: find_folder(each) for each in folders}
        listed = (f"{each} ({path})" if path else each for each, path in paths.items())
        raise UsageError(
            f"{source} {given}: several folders have this name. Give one of these: "
            f"{', '.join(listed)}."
        )
    return folders[0]
