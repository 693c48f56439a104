"""The layout of the package in figures, from its syntax trees (tests/test_architecture.py).

`python -m tests.support.house` prints the figures.
"""

import ast
import fnmatch
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.other_system import LINUX_ONLY

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "batchml"
FOLDER_SIZE = 20  # files
PREFIX_SIZE = 4  # files of a folder with one prefix are a folder of their own


class Import(NamedTuple):
    """One name that a module imports. `name` is dotted, `module` the module of ours that it is in,
    empty for a third party's.
    """

    path: Path
    line: int
    name: str
    module: str
    in_function: bool


def paths(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def place(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def modules() -> dict[str, Path]:
    """The modules of the package by their dotted names."""
    return {dotted(path): path for path in paths()}


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """All imports of a module, wherever they stand: in functions and for types, too."""
    return tuple(_imports(path, tree_of(path), in_function=False))


def _imports(path: Path, node: ast.AST, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: relative import"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.expr):  # no import is in it
            continue
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(path, child, in_function or is_function)
            continue
        for name in names:
            yield Import(path, child.lineno, name, module_of(name), in_function)


def module_of(name: str) -> str:
    """The module of ours that a dotted name is, or lies in."""
    if name.split(".")[0] != PACKAGE.name:
        return ""
    return name if name in modules() else name.rpartition(".")[0]


# The rooms from low to high: a module imports from its own room and from lower ones. `aws` and
# `local` stand side by side: what one writes and the other reads is judged by botocore's model.
ORDER = (
    ("errors", "clock", "resources", "rich_html"),
    ("runtime",), ("model",), ("config",), ("aws", "local"),
    ("history_index",), ("history",), ("context",), ("cli",), ("jobs",), ("cost",), ("runs",),
    ("cluster",), ("explain",), ("sessions",), ("workspace",), ("setup",), ("adopt",), ("sweeps",),
    ("handles",), ("client",), ("prove", "dashboard"),
)  # fmt: skip
_LEVELS = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


# --- what the rules refuse: each function names all offenders ---------------------------------


def imports_upwards() -> list[str]:
    """Imports from a room that is not lower. `__init__` and `__main__` stand above all rooms."""
    return sorted({
        f"{place(path)}:{found.line} imports {found.name}"
        for path in paths()
        if room(path) in _LEVELS
        for found in imports(path)
        if "." in found.module and not _is_lower(found.module.split(".")[1], room(path))
    })  # fmt: skip


def _is_lower(target: str, own: str) -> bool:
    return target == own or _LEVELS[target] < _LEVELS[own]


def files_in_cycles() -> list[str]:
    """Files that import each other, counting every import. Tarjan's algorithm."""
    graph = {
        name: sorted({found.module for found in imports(path)} & {*modules()} - {name})
        for name, path in modules().items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.extend(f"{each}: in a cycle of {len(group)} files" for each in group)

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def imports_in_functions() -> list[str]:
    """Imports of ours inside functions, a statement counted once."""
    return sorted({
        f"{place(path)}:{found.line}"
        for path in paths()
        for found in imports(path)
        if found.module and found.in_function
    })  # fmt: skip


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]


def class_names_used_twice() -> list[str]:
    where: dict[str, list[str]] = defaultdict(list)
    for path in paths():
        for made in _classes(path):
            if not made.name.startswith("_"):
                where[made.name].append(place(path))
    return sorted(f"{name}: {', '.join(found)}" for name, found in where.items() if found[1:])


def large_folders() -> list[str]:
    counts = Counter(path.parent for path in paths())
    return sorted(
        f"{folder.relative_to(ROOT)}: {count} files"
        for folder, count in counts.items()
        if count > FOLDER_SIZE
    )


def shared_prefixes() -> list[str]:
    """Prefixes that ask for a folder. The names of commands in help texts are no modules."""
    groups: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for path in paths():
        prefix = path.stem.split("_")[0]
        if prefix:
            groups[path.parent, prefix].append(path.name)
    return sorted(
        f"{folder.relative_to(ROOT)}: {', '.join(sorted(names))}"
        for (folder, _), names in groups.items()
        if len(names) >= PREFIX_SIZE
    )


def errors_elsewhere() -> list[str]:
    """Kinds of BatchmlError, by the names of their bases, that are not in errors.py."""
    bases: dict[str, set[str]] = defaultdict(set)
    where: list[tuple[str, str]] = []
    for path in paths():
        for made in _classes(path):
            bases[made.name] |= {ast.unparse(base).rpartition(".")[2] for base in made.bases}
            where.append((made.name, place(path)))
    kinds = {"BatchmlError"}
    while True:
        more = {name for name, above in bases.items() if above & kinds} - kinds
        if not more:
            break
        kinds |= more
    offenders = [(file, name) for name, file in where if name in kinds and file != "errors.py"]
    return sorted(f"{file}: {name}" for file, name in offenders)


_ROW = re.compile(r"^\| (?P<old>[^|]+) \| (?P<new>[^|]+) \|$", re.MULTILINE)
_WORD = re.compile(r"`([^`]+)`")


def replaced_words() -> list[str]:
    """The words of the left column of docs/glossary.md. `word_*` stands for all that begin so."""
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    return [word for row in _ROW.finditer(text) for word in _WORD.findall(row["old"])]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All that is below a node, without expressions, which are most of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


def old_words() -> list[str]:
    """Modules, and classes or functions of modules, whose name is a replaced word."""
    words = replaced_words()
    files = [word for word in words if word == word.lower()]
    names = {word for word in words if word != word.lower()}
    calls = {word.removesuffix("()") for word in words if word.endswith("()")}
    found = []
    for path in paths():
        if any(fnmatch.fnmatchcase(path.stem, word) for word in files if not word.endswith("()")):
            found.append(f"{place(path)}: the module")
        for node in _statements(tree_of(path)):
            match node:
                case ast.ClassDef(name=name) if name in names:
                    found.append(f"{place(path)}:{getattr(node, 'lineno', 0)}: {name}")
                case ast.FunctionDef(name=name) if name in calls:
                    found.append(f"{place(path)}:{node.lineno}: {name}()")
    return sorted(found)


_PATH = re.compile(r"\b(?:batchml|tests|benchmarks|images|cfn)/[\w/.-]*\w\.(?:py|toml|yaml|sh)\b")
_MODULE = re.compile(r"\bbatchml(?:\.[a-z_]\w*)+")
_IN_PACKAGE = re.compile(r"`(\w+(?:/\w+)+)(?:\.py|/)?`")


def documents() -> list[Path]:
    """What is kept in step with the code. Decisions tell of the day on which they were taken."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def dead_references() -> list[str]:
    """Files and modules that a document names and that are not there."""
    found = []
    for document in documents():
        text = document.read_text("utf-8")
        dead = {name for name in _PATH.findall(text) if not (ROOT / name).exists()}
        dead |= {name for name in _MODULE.findall(text) if not _is_known(name)}
        dead |= {name for name in _IN_PACKAGE.findall(text) if not _is_in_package(name)}
        found += [f"{document.relative_to(ROOT)}: {name}" for name in sorted(dead)]
    return found


def _is_known(name: str) -> bool:
    """Whether a dotted name is a module, or a name of one, or a public name; or names a file."""
    import batchml

    first = name.split(".")[1]
    if first in batchml.__all__ or first in ("toml", "fish"):
        return True
    return name in modules() or name.rpartition(".")[0] in {*modules()} - {PACKAGE.name}


def _is_in_package(name: str) -> bool:
    """Whether `aws/logs`, say, is a module; names that begin with no folder of ours are others'.

    `jobs/x` and `runs/x` are folders of a project, and of a state folder, too.
    """
    if name.split("/")[0] in ("jobs", "runs"):
        return True
    path = PACKAGE / name
    is_ours = (PACKAGE / name.split("/")[0]).is_dir()
    return not is_ours or path.is_dir() or path.with_suffix(".py").exists()


# Modules that only run on Linux, and modules that do without the names where they are missing.
_ON_LINUX = (
    "local/", "runtime/", "prove/probe/", "sessions/exec/container.py", "sessions/forward/local.py",
    "sessions/forward/listener.py", "sessions/tensorboard/token_server.py",
    "sweeps/control/lease.py",
)  # fmt: skip


def linux_only() -> list[str]:
    """Names that Python has on Linux only, and files of /proc and /sys, in commands against AWS."""
    names = {f"{module}.{name}" for module, text in LINUX_ONLY.items() for name in text.split()}
    found = []
    for path in paths():
        if place(path).startswith(_ON_LINUX):
            continue
        for node in ast.walk(tree_of(path)):
            name = ""
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
            elif isinstance(node, ast.ImportFrom):
                name = next((f"{node.module}.{each.name}" for each in node.names
                             if f"{node.module}.{each.name}" in names), "")  # fmt: skip
            elif isinstance(node, ast.Attribute) and node.attr == "prctl":
                name = "prctl"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value if node.value.startswith(("/proc/", "/sys/")) else ""
            if name in names or name == "prctl" or name.startswith(("/proc/", "/sys/")):
                found.append(f"{place(path)}:{getattr(node, 'lineno', 0)}: {name}")
    return found


def lines_of_code() -> int:
    """Lines without comments, docstrings and blanks."""
    count = 0
    for path in paths():
        docstrings = {
            line
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        code = set()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type not in _NO_CODE:
                code |= {*range(token.start[0], token.end[0] + 1)}
        count += len(code - docstrings)
    return count


_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

RULES: dict[str, Callable[[], list[str]]] = {
    "imports from higher rooms": imports_upwards,
    "files in cycles": files_in_cycles,
    "imports of ours in functions": imports_in_functions,
    "public class names used twice": class_names_used_twice,
    "folders of more than 20 files": large_folders,
    "prefixes that four files of a folder share": shared_prefixes,
    "errors outside errors.py": errors_elsewhere,
    "names of Linux in commands against AWS": linux_only,
    "words that the glossary replaces": old_words,
    "references of documents to what is not there": dead_references,
}


def figures() -> dict[str, int]:
    return {
        "files": len(paths()),
        "lines of code": lines_of_code(),
        **{name: len(rule()) for name, rule in RULES.items()},
    }


if __name__ == "__main__":
    for name, count in figures().items():
        print(f"{count:7,}  {name}")
