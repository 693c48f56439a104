"""Which files of a folder travel with a run: `.gitignore`'s rules, and which look like secrets.

Source: git's documentation, gitignore(5), "PATTERN FORMAT"; the tests ask git itself.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from msgspec import Struct

OWN_FILE = ".batchmlignore"  # read last, so it has the last word

# Never code: caches, environments, what tools leave behind.
_NEVER = (
    ".git", ".hg/", ".svn/", ".venv/", "venv/", "__pycache__/", "node_modules/", ".mypy_cache/",
    ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", ".DS_Store", "*.pyc",
)  # fmt: skip

# Names that hold keys and passwords, as tools and people use them.
_SECRETS = (
    ".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", "!.env.dist",
    "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub",
    "*credentials", "*credentials.*", "!*credentials*.py", "!*credentials*.md",
    ".aws/", ".ssh/", ".gnupg/", ".kube/", ".docker/",
    ".netrc", "_netrc", ".pgpass", ".my.cnf", ".git-credentials", ".pypirc", ".npmrc", ".htpasswd",
    "service-account*.json", "service_account*.json", "client_secret*.json",
    "secrets.toml", "secrets.yaml", "secrets.yml", "secrets.json",
    "kaggle.json", ".boto", ".s3cfg", "rclone.conf", "**/.huggingface/token", "terraform.tfvars",
    "*.tfstate", "*.tfstate.backup",
)  # fmt: skip


class Rule(Struct, frozen=True):
    """One line of an ignore file, which lies in `base`. Paths are as `_raw` makes them."""

    regex: re.Pattern[str]
    ignores: bool
    folders_only: bool
    base: str

    def matches(self, path: str, is_folder: bool) -> bool:
        if self.folders_only and not is_folder:
            return False
        if self.base:
            if not path.startswith(f"{self.base}/"):
                return False
            path = path[len(self.base) + 1 :]
        return self.regex.fullmatch(path) is not None


class Rules(Struct, frozen=True):
    """Lines of ignore files in their order: of those that match a path, the last decides."""

    rules: tuple[Rule, ...] = ()

    def plus(self, lines: Iterable[str], base: str = "") -> "Rules":
        return Rules((*self.rules, *filter(None, (parse(line, base) for line in lines))))

    def verdict(self, path: str, is_folder: bool) -> bool | None:
        """True: ignored. False: a line with `!` takes it in. None: no line speaks of it."""
        path = _raw(path)
        for rule in reversed(self.rules):
            if rule.matches(path, is_folder):
                return rule.ignores
        return None


def parse(line: str, base: str = "") -> Rule | None:
    """The rule that a line says; None for an empty one, a comment, or a broken pattern."""
    line = _without_trailing_spaces(_raw(line).removesuffix("\n").removesuffix("\r"))
    if not line or line.startswith("#"):
        return None
    ignores = not line.startswith("!")
    line = line if ignores else line[1:]
    folders_only = line.endswith("/")
    line = line.removesuffix("/")
    if not line:
        return None
    anchored = "/" in line
    line = line.removeprefix("/")
    try:
        pattern = re.compile(_regex(line, anchored), re.DOTALL | re.ASCII)
    except (re.error, _Broken):
        return None
    return Rule(pattern, ignores, folders_only, _raw(base))


def read_rules(path: Path, rules: Rules, base: str = "") -> Rules:
    """`rules` with those of a file, if there is one. Raises OSError where it cannot be read."""
    if not path.is_file():  # a pipe would be waited for
        return rules
    text = path.read_text("utf-8", "surrogateescape")
    return rules.plus(text.removeprefix("\ufeff").split("\n"), base)


def never() -> Rules:
    """What travels only when a line of `.batchmlignore` takes it in."""
    return Rules().plus(_NEVER)


@cache
def _secret_rules() -> Rules:
    return Rules().plus(_SECRETS)


def looks_secret(path: str) -> bool:
    """True when a path, or a folder on its way, is named as keys and passwords are."""
    parts = path.lower().split("/")
    rules = _secret_rules()
    return any(
        rules.verdict("/".join(parts[: depth + 1]), depth + 1 < len(parts))
        for depth in range(len(parts))
    )


def _raw(text: str) -> str:
    """A character for each byte, which is what git compares: its `?` is half an `ä`."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


class _Broken(Exception):
    """A pattern that git takes for one that matches nothing."""


def _without_trailing_spaces(line: str) -> str:
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    return line


_STAR = "[^/]*"
_FOLDERS = "(?:.*/)?"
_CROSSING = ("/", _FOLDERS, ".+")  # the pieces that match a slash


def _regex(pattern: str, anchored: bool) -> str:
    """A pattern as a regular expression over the path below the file that it stands in."""
    pieces, at = [] if anchored else [_FOLDERS], 0
    while at < len(pattern):
        char = pattern[at]
        if char == "*":
            piece, at = _stars(pattern, at, anchored)
            if piece != _FOLDERS or pieces[-1:] != [_FOLDERS]:
                pieces.append(piece)
            continue
        at += 1
        if char == "?":
            pieces.append("[^/]")
        elif char == "[":
            piece, at = _bracket(pattern, at)
            pieces.append(piece)
        elif char == "\\":
            if at == len(pattern):
                raise _Broken
            pieces.append(re.escape(pattern[at]))
            at += 1
        else:
            pieces.append(re.escape(char))
    return "".join(_quick(pieces))


def _quick(pieces: list[str]) -> Iterator[str]:
    """The same, without trying every way to share a name among many stars.

    Of two stars in one name the first need never take more than it must: the second can have it.
    """
    is_open = False
    for at, piece in enumerate(pieces):
        if piece != _STAR:
            yield piece
            continue
        if is_open:
            yield ")"
        stops = (each for each in pieces[at + 1 :] if each == _STAR or each in _CROSSING)
        is_open = next(stops, "") == _STAR
        yield "(?>[^/]*?" if is_open else _STAR


def _stars(pattern: str, at: int, anchored: bool) -> tuple[str, int]:
    """One or more stars: two or more that fill a place between slashes stand for any folders."""
    end = at
    while pattern[end : end + 1] == "*":
        end += 1
    alone = pattern[at - 1 : at] in ("", "/") and pattern[end : end + 1] in ("", "/")
    if not (anchored and alone and end - at > 1):
        return _STAR, end
    return (".+", end) if end == len(pattern) else (_FOLDERS, end + 1)


_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\s", "xdigit": "0-9a-fA-F", "punct": r"!-/:-@\[-`{-~",
}  # fmt: skip


def _bracket(part: str, at: int) -> tuple[str, int]:
    """What follows a `[`, as a regular expression, and where it ends."""
    negated = part[at : at + 1] in ("!", "^")
    at += negated
    found = ""
    first = True
    while True:
        char = part[at : at + 1]
        if not char:
            raise _Broken  # never closed
        if char == "]" and not first:
            break
        first = False
        named = re.match(r"\[:(\w*):\]", part[at:])
        if named:
            if named[1] not in _CLASSES:
                raise _Broken
            found += _CLASSES[named[1]]
            at += named.end()
            continue
        low, at = _char(part, at)
        if part[at : at + 1] == "-" and part[at + 1 : at + 2] not in ("", "]"):
            high, at = _char(part, at + 1)
            if low <= high:
                found += f"{re.escape(low)}-{re.escape(high)}"
        else:
            found += re.escape(low)
    if not found:
        return ("[^/]" if negated else "(?!)"), at + 1
    # A slash is matched by no bracket.
    return f"(?!/)[{'^' if negated else ''}{found}]", at + 1


def _char(part: str, at: int) -> tuple[str, int]:
    if part[at] == "\\":
        at += 1
    if at == len(part):
        raise _Broken
    return part[at], at + 1
