"""Trees of files for tests: described, made, and read back."""

import os
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

DAY = 86_400 * 10**9  # ns


class Node(NamedTuple):
    """What a test says of one thing in a tree."""

    kind: str
    content: bytes = b""  # of a file; where a link leads
    mode: int = 0o644
    mtime_ns: int = 1_700_000_000 * 10**9


Seen = dict[bytes, Node]  # by path below the top


def file(content: bytes | str = b"x", **more: int) -> Node:
    return Node("file", content.encode() if isinstance(content, str) else content, **more)


def make(top: Path, tree: Seen) -> Path:
    """Write a tree; folders that are not named are made."""
    root = os.fsencode(top)
    os.makedirs(root, exist_ok=True)
    for path, node in sorted(tree.items()):
        where = os.path.join(root, path)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        if node.kind == "folder":
            os.makedirs(where, exist_ok=True)
        elif node.kind == "link":
            os.symlink(node.content, where)
        else:
            Path(os.fsdecode(where)).write_bytes(node.content)
    for path, node in sorted(tree.items(), reverse=True):
        where = os.path.join(root, path)
        if node.kind != "link":
            os.chmod(where, node.mode)
        os.utime(where, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)
    return top


def seen(top: Path) -> Seen:
    """A tree as it is. A folder's time is that of its last change: it is not told."""
    root, found = os.fsencode(top), Seen()
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            state = os.lstat(path)
            below = os.path.relpath(path, root)
            if os.path.islink(path):
                found[below] = Node("link", os.readlink(path), 0, 0)
            elif os.path.isdir(path):
                found[below] = Node("folder", b"", state.st_mode & 0o7777, state.st_mtime_ns)
            else:
                content = Path(os.fsdecode(path)).read_bytes()
                found[below] = Node("file", content, state.st_mode & 0o7777, state.st_mtime_ns)
    return found


_names = st.one_of(
    st.text("ab .\n\u00e4\u4e16", min_size=1, max_size=4),
    st.sampled_from(["-rf", "a" * 255, "\u202e", "CON", "~", "*", "\x7f", "x.tmp"]),
).map(os.fsencode) | st.binary(min_size=1, max_size=4)
_good = _names.filter(lambda name: name not in (b".", b"..") and not set(name) & {0, 47})
_times = st.integers(0, 20_000 * DAY)
_files = st.builds(
    Node, st.just("file"), st.binary(max_size=60),
    st.sampled_from([0o644, 0o600, 0o755, 0o444]), _times,
)  # fmt: skip
_folders = st.builds(
    Node, st.just("folder"), st.just(b""), st.sampled_from([0o755, 0o700, 0o555]), _times
)
_links = st.builds(Node, st.just("link"), _good, st.just(0), _times)


@st.composite
def trees(draw: st.DrawFn) -> Seen:
    """A tree of some files, folders and links that stay in it."""
    found: Seen = {}
    folders = [b""]
    for _ in range(draw(st.integers(0, 8))):
        path = os.path.join(draw(st.sampled_from(folders)), draw(_good))
        if path not in found:
            found[path] = draw(_files | _folders | _links)
            folders += [path] if found[path].kind == "folder" else []
    return found
