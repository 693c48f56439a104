"""Move and merge modules, and change every reference to them: imports, dotted names, paths.

`python tools/move_modules.py PLAN SECTION [SECTION ...]` reads lines of PLAN such as
``- `store/journal.py` (505) <- local/store, local/writelog`` below a heading `### local/: ...`,
writes the new files below batchml/, deletes the old ones, and prints what a person has to look at.
Run `ruff check --fix` and `ruff format` after it. It goes away when all modules have moved
(docs/decisions/037-moving.md).
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "batchml"
_HEADING = re.compile(r"^### (?P<room>\S+?)/?:")
_LINE = re.compile(r"^- `(?P<new>[^`]+)\.py`[^<]*<- (?P<old>.+)$")
_DONE = "\0"
_TEXTS = ("*.py", "*.md", "*.toml", "*.sh", "*.txt", "*.yaml", "Dockerfile", "Makefile", "run")


class Move(NamedTuple):
    """Modules by their dotted names; several old ones become one."""

    new: str
    path: Path
    old: tuple[str, ...]


def read_plan(text: str, sections: Iterable[str]) -> list[Move]:
    room, wanted, found = "", {*sections}, []
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading:
            room = heading["room"]
        entry = _LINE.match(line)
        if entry is None or room not in wanted:
            continue
        place = entry["new"] if room == "(top)" else f"{room}/{entry['new']}"
        olds = [name.strip().removesuffix("/__init__") for name in entry["old"].split(",")]
        dotted = ".".join((PACKAGE, *place.split("/"))).removesuffix(".__init__")
        path = ROOT / PACKAGE / f"{place}.py"
        found.append(Move(dotted, path, tuple(".".join((PACKAGE, *o.split("/"))) for o in olds)))
    return found


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# --- one module of several ------------------------------------------------------------------------


class Piece:
    """A module as it goes into a merged one: its imports and its body."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.stem = module.rpartition(".")[2]
        self.source = path_of(module).read_text("utf-8")
        self.reports: list[str] = []

    def without(self, merged: set[str]) -> None:
        """Leave out imports of the other pieces, whose names are this module's own now."""
        edits: list[tuple[int, int, str]] = []
        tree = ast.parse(self.source)
        offsets = line_offsets(self.source)
        aliases: set[str] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            own = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if self.module in own:  # a program that imports itself by its name
                self.reports.append(f"{self.module}:{node.lineno}: imports itself")
                continue
            start, end = span(offsets, node)
            if node.module in merged:
                renamed = [a for a in node.names if a.asname]
                for each in renamed:
                    self.reports.append(
                        f"{self.module}:{node.lineno}: {each.name} as {each.asname}"
                    )
                edits.append((start, end, "pass" if self._is_alone(tree, node) else ""))
                continue
            inner = [a for a in node.names if f"{node.module}.{a.name}" in merged]
            if inner:
                aliases |= {a.asname or a.name for a in inner}
                rest = [a for a in node.names if a not in inner]
                edits.append(
                    (start, end, f"from {node.module} import {spelled(rest)}" if rest else "")
                )
        for node in ast.walk(tree):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_attribute and node.value.id in aliases:  # type: ignore[attr-defined]
                start, end = span(offsets, node)  # type: ignore[arg-type]
                edits.append((start, end, node.attr))  # type: ignore[attr-defined]
        self.source = edited(self.source, edits)

    @staticmethod
    def _is_alone(tree: ast.AST, node: ast.stmt) -> bool:
        return any(getattr(parent, "body", None) == [node] for parent in ast.walk(tree))

    def rename(self, old: str, new: str) -> None:
        tree = ast.parse(self.source)
        offsets = line_offsets(self.source)
        edits = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == old:
                edits.append((*span(offsets, node), new))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == old:
                start = offsets[node.lineno - 1]
                at = self.source.encode().index(old.encode(), start)
                edits.append((at, at + len(old), new))
            elif isinstance(node, ast.Global) and old in node.names:
                start, end = span(offsets, node)
                names = [new if each == old else each for each in node.names]
                edits.append((start, end, f"global {', '.join(names)}"))
        self.source = edited(self.source, edits)
        self.source = re.sub(rf'"{old}"', f'"{new}"', self.source)

    def parts(self) -> tuple[str, list[str], list[str], str]:
        """Docstring, imports, imports for types, and the rest."""
        tree = ast.parse(self.source)
        lines = self.source.splitlines(keepends=True)
        docstring, imports, types, last = "", [], [], 0
        for index, node in enumerate(tree.body):
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstring = str(node.value.value)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(text)
            elif is_type_checking(node):
                if isinstance(node, ast.If):
                    types += [
                        "".join(lines[each.lineno - 1 : each.end_lineno]) for each in node.body
                    ]
            else:
                break
            last = node.end_lineno or last
        comments = [line for line in lines[:last] if line.lstrip().startswith("#")]
        self.reports += [f"{self.module}: a comment among imports: {c.strip()}" for c in comments]
        return docstring, imports, types, "".join(lines[last:]).strip("\n")

    def names(self) -> dict[str, str]:
        """What the body defines at the top level, with its source."""
        tree = ast.parse(self.source)
        found = {}
        for node in tree.body:
            text = ast.unparse(node)
            for name in defined(node):
                found[name] = text
        return found

    def needs(self, merged: set[str]) -> set[str]:
        """Pieces that it needs while it is being imported."""
        tree = ast.parse(path_of(self.module).read_text("utf-8"))
        found = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module} & merged
                found |= {f"{node.module}.{alias.name}" for alias in node.names} & merged
        return found


def is_type_checking(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return [ast.unparse(t) for t in node.targets] == ["TYPE_CHECKING"]
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        names = [each for target in node.targets for each in ast.walk(target)]
        return [each.id for each in names if isinstance(each, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def merge(move: Move) -> tuple[str, dict[tuple[str, str], str], list[str]]:
    """The source of the new module, names that changed by (old module, name), and reports."""
    merged = {*move.old}
    pieces = in_order([Piece(name) for name in move.old], merged)
    renamed: dict[tuple[str, str], str] = {}
    seen: dict[str, str] = {}
    for piece in pieces:
        piece.without(merged)
        for name, text in piece.names().items():
            if name in seen and name != "TYPE_CHECKING" and seen[name] != text:
                if not name.startswith("_"):
                    piece.reports.append(f"{move.new}: two public {name}: {piece.module}")
                new = f"_{piece.stem.upper()}{name}" if name.isupper() else f"_{piece.stem}{name}"
                renamed[piece.module, name] = new
                piece.rename(name, new)
        seen |= piece.names()
    header, imports, types, bodies, reports = "", [], [], [], []
    kept: set[str] = set()
    for piece in pieces:
        docstring, more, for_types, body = piece.parts()
        if piece.module == move.old[0]:
            header = docstring
        imports += more
        types += for_types
        body = without_repeated(body, kept)
        if piece.module != move.old[0]:  # whose docstring is that of the whole
            body = f"{separator(piece.stem)}\n{commented(docstring)}\n\n\n{body}"
        elif piece is not pieces[0]:
            body = f"{separator(piece.stem)}\n\n\n{body}"
        bodies.append(body)
        reports += piece.reports
    mains = [body for body in bodies if "\nif __name__ ==" in body]
    if mains[1:]:
        reports.append(f"{move.new}: {len(mains)} programs")
    tails = []
    for index, body in enumerate(bodies):
        at = body.find("\nif __name__ ==")
        if at >= 0:
            tails.append(body[at:].strip("\n"))
            bodies[index] = body[:at].rstrip("\n")
    text = f'"""{header}"""\n\n' + "".join(dict.fromkeys(imports)) + "\n"
    if types:
        has_typing = any("TYPE_CHECKING" in each for each in imports)
        text += "" if has_typing else "TYPE_CHECKING = False\n"
        own = "".join(
            each if each.startswith(" ") else "    " + each for each in dict.fromkeys(types)
        )
        text += f"if TYPE_CHECKING:\n{own}\n"
    return text + "\n\n\n".join([*bodies, *tails]) + "\n", renamed, reports


def separator(stem: str) -> str:
    return f"# --- {stem.replace('_', ' ')} ".ljust(100, "-")


def commented(docstring: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in docstring.strip().splitlines())


def without_repeated(body: str, kept: set[str]) -> str:
    """Leave out definitions that an earlier piece has word by word; `kept` grows by the others."""
    tree = ast.parse(body)
    lines = body.splitlines(keepends=True)
    gone: set[int] = set()
    for node in tree.body:
        text = ast.unparse(node)
        if defined(node) and text in kept:
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            gone |= {*range(start - 1, node.end_lineno or start)}
        kept.add(text)
    return "".join(line for index, line in enumerate(lines) if index not in gone).strip("\n")


def in_order(pieces: list[Piece], merged: set[str]) -> list[Piece]:
    done: list[Piece] = []
    left = list(pieces)
    while left:
        names = {piece.module for piece in left}
        ready = [piece for piece in left if not piece.needs(merged) & (names - {piece.module})]
        piece = (ready or left)[0]
        done.append(piece)
        left.remove(piece)
    return done


# --- references -----------------------------------------------------------------------------------


def line_offsets(source: str) -> list[int]:
    """Where lines begin, in bytes, as the columns of syntax trees count."""
    offsets, at = [], 0
    for line in source.encode().splitlines(keepends=True):
        offsets.append(at)
        at += len(line)
    return offsets


def span(offsets: list[int], node: ast.stmt | ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = offsets[node.lineno - 1] + node.col_offset
    return start, offsets[node.end_lineno - 1] + node.end_col_offset


def edited(source: str, edits: Iterable[tuple[int, int, str]]) -> str:
    data = source.encode()
    for start, end, text in sorted({*edits}, reverse=True):
        is_line = data[end : end + 1] == b"\n" and not data[:start].rpartition(b"\n")[2].strip()
        if not text and is_line:
            start = data.rfind(b"\n", 0, start) + 1
            end += 1
        data = data[:start] + text.encode() + data[end:]
    return data.decode()


def spelled(names: list[ast.alias]) -> str:
    parts = [f"{a.name} as {a.asname}" if a.asname else a.name for a in names]
    return f"({', '.join(parts)})" if len(parts) > 1 else parts[0]


def marked(module: str) -> str:
    """A new name that is not to be taken for an old one."""
    return module.replace(".", f".{_DONE}", 1)


class Renames(NamedTuple):
    modules: dict[str, str]  # old -> new
    names: dict[tuple[str, str], str]  # (old module, name) -> new name

    def in_imports(self, source: str) -> str:
        """The imports of one file."""
        offsets, edits = line_offsets(source), []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                text = self._of(node)
                if text is not None:
                    start, end = span(offsets, node)
                    indent = " " * node.col_offset
                    edits.append((start, end, f"\n{indent}".join(text)))
        return edited(source, edits)

    def _of(self, node: ast.ImportFrom) -> list[str] | None:
        module = node.module or ""
        if module in self.modules:
            for alias in node.names:
                new = self.names.get((module, alias.name))
                if new:
                    alias.asname, alias.name = alias.asname or alias.name, new
            return [f"from {marked(self.modules[module])} import {spelled(node.names)}"]
        moved = [a for a in node.names if f"{module}.{a.name}" in self.modules]
        if not moved:
            return None
        rest = [a for a in node.names if a not in moved]
        lines = [f"from {module} import {spelled(rest)}"] if rest else []
        for alias in moved:
            package, _, name = self.modules[f"{module}.{alias.name}"].rpartition(".")
            known = alias.asname or alias.name
            renamed = f" as {known}" if known != name else ""
            lines.append(f"from {marked(package)} import {name}{renamed}")
        return lines

    def in_text(self, text: str) -> str:
        """Dotted names and paths, in one pass: a new name may be an old one of another."""
        moved = {old: new for old, new in self.modules.items() if old != new}
        below = {old.partition(".")[2].replace(".", "/"): new for old, new in moved.items()}
        longest = sorted(moved, key=len, reverse=True)
        names = "|".join(map(re.escape, longest))
        paths = "|".join(old.partition(".")[2].replace(".", "/") for old in longest)

        def path(match: re.Match[str]) -> str:
            return below[match[0]].partition(".")[2].replace(".", "/")

        text = re.sub(rf"(?<![\w.])(?:{names})\b(?!\.py\b)", lambda m: moved[m[0]], text)
        return re.sub(rf"(?:(?<=\b{PACKAGE}/)|(?<![\w/-]))(?:{paths})(?=\.py\b|`)", path, text)


def texts() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *_TEXTS, "*/Dockerfile*"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in sorted({*listed.stdout.splitlines()}):
        path = ROOT / name
        skip = (
            name.startswith(("docs/decisions/", "tools/", "tests/recorded/"))
            or name == "CHANGELOG.md"
        )
        if path.is_file() and not skip:
            yield path


def main(arguments: list[str]) -> None:
    moves = read_plan(Path(arguments[0]).read_text("utf-8"), arguments[1:])
    written: dict[Path, str] = {}
    modules: dict[str, str] = {}
    names: dict[tuple[str, str], str] = {}
    for move in moves:
        text, renamed, reports = merge(move)
        written[move.path] = text
        modules |= dict.fromkeys(move.old, move.new)
        names |= renamed
        print(*reports, sep="\n", end="\n" if reports else "")
        for (module, name), new in renamed.items():
            print(f"{move.new}: {name} of {module} is {new}")
    for module in modules:
        path_of(module).unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        first = path.parent / "__init__.py"
        if not first.exists():
            first.write_text(f'"""{path.parent.name}."""\n', "utf-8")
    renames = Renames(modules, names)
    for path in texts():
        old = path.read_text("utf-8")
        new = renames.in_imports(old) if path.suffix == ".py" else old
        new = renames.in_text(new).replace(_DONE, "")
        if new != old:
            path.write_text(new, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
