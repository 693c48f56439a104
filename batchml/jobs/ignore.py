"""Match paths with the rules of ignore files such as `.gitignore`, and with names of secrets.

Source: git's documentation, gitignore(5), "PATTERN FORMAT"; the tests compare with git itself.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from msgspec import Struct

IGNORE_FILE = ".batchmlignore"  # its rules come after those of .gitignore

# Files that are ignored by default: caches, environments, files of tools.
_DEFAULTS = (
    ".git", ".hg/", ".svn/", ".venv/", "venv/", "__pycache__/", "node_modules/", ".mypy_cache/",
    ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", ".DS_Store", "*.pyc",
)  # fmt: skip

# Names of files with keys and passwords.
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


class IgnoreRule(Struct, frozen=True):
    """A line of the ignore file in the folder `base`. Paths are encoded by `_raw`."""

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


class IgnoreRules(Struct, frozen=True):
    """The rules of ignore files, in order. The last rule that matches a path decides."""

    rules: tuple[IgnoreRule, ...] = ()

    def plus(self, lines: Iterable[str], base: str = "") -> "IgnoreRules":
        return IgnoreRules((*self.rules, *filter(None, (parse_rule(line, base) for line in lines))))

    def match(self, path: str, is_folder: bool) -> bool | None:
        """Return True: ignored; False: included by a line with `!`; None: no line matches."""
        if not self.rules:
            return None
        path = _raw(path)
        for rule in reversed(self.rules):
            if rule.matches(path, is_folder):
                return rule.ignores
        return None


def parse_rule(line: str, base: str = "") -> IgnoreRule | None:
    """The rule of a line; None for an empty line, a comment or a broken pattern."""
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
    except (re.error, _BrokenPattern):
        return None
    return IgnoreRule(pattern, ignores, folders_only, _raw(base))


def read_rules(path: Path, rules: IgnoreRules, base: str = "") -> IgnoreRules:
    """Add the rules of a file, if it exists. Raises OSError if it cannot be read."""
    if not path.is_file():  # reading a pipe would block
        return rules
    text = path.read_text("utf-8", "surrogateescape")
    return rules.plus(text.removeprefix("\ufeff").split("\n"), base)


@cache
def default_rules() -> IgnoreRules:
    """The rules for files that are ignored unless `.batchmlignore` includes them."""
    return IgnoreRules().plus(_DEFAULTS)


@cache
def _secret_rules() -> IgnoreRules:
    return IgnoreRules().plus(_SECRETS)


def looks_secret(path: str) -> bool:
    """Say whether a path, or a folder above it, is named like files with keys and passwords."""
    parts = path.lower().split("/")
    rules = _secret_rules()
    return any(
        rules.match("/".join(parts[: depth + 1]), depth + 1 < len(parts))
        for depth in range(len(parts))
    )


def _raw(text: str) -> str:
    """Make one character of each byte: git compares bytes, so its `?` matches half an `ä`."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


class _BrokenPattern(Exception):
    """A pattern that matches nothing in git."""


def _without_trailing_spaces(line: str) -> str:
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    return line


_STAR = "[^/]*"
_FOLDERS = "(?:.*/)?"
_WITH_SLASH = ("/", _FOLDERS, ".+")  # the pieces that can match a slash


def _regex(pattern: str, anchored: bool) -> str:
    """Translate a pattern to a regular expression for paths below the ignore file's folder."""
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
                raise _BrokenPattern
            pieces.append(re.escape(pattern[at]))
            at += 1
        else:
            pieces.append(re.escape(char))
    return "".join(_limit_backtracking(pieces))


def _limit_backtracking(pieces: list[str]) -> Iterator[str]:
    """Make stars match in linear time, not try all ways to divide a name between them.

    Of two stars in one name, the first need not match more than necessary: the second can.
    """
    is_open = False
    for at, piece in enumerate(pieces):
        if piece != _STAR:
            yield piece
            continue
        if is_open:
            yield ")"
        stops = (each for each in pieces[at + 1 :] if each == _STAR or each in _WITH_SLASH)
        is_open = next(stops, "") == _STAR
        yield "(?>[^/]*?" if is_open else _STAR


def _stars(pattern: str, at: int, anchored: bool) -> tuple[str, int]:
    """Translate one or more stars. Two, alone between slashes, match any number of folders."""
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


def _bracket(pattern: str, at: int) -> tuple[str, int]:
    """Translate a bracket, given the position after its `[`; return also the position after it."""
    negated = pattern[at : at + 1] in ("!", "^")
    at += negated
    found = ""
    first = True
    while True:
        char = pattern[at : at + 1]
        if not char:
            raise _BrokenPattern  # not closed
        if char == "]" and not first:
            break
        first = False
        named = re.match(r"\[:(\w*):\]", pattern[at:])
        if named:
            if named[1] not in _CLASSES:
                raise _BrokenPattern
            found += _CLASSES[named[1]]
            at += named.end()
            continue
        low, at = _char(pattern, at)
        if pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            high, at = _char(pattern, at + 1)
            if low <= high:
                found += f"{re.escape(low)}-{re.escape(high)}"
        else:
            found += re.escape(low)
    if not found:
        return ("[^/]" if negated else "(?!)"), at + 1
    # No bracket matches a slash.
    return f"(?!/)[{'^' if negated else ''}{found}]", at + 1


def _char(pattern: str, at: int) -> tuple[str, int]:
    if pattern[at] == "\\":
        at += 1
    if at == len(pattern):
        raise _BrokenPattern
    return pattern[at], at + 1
