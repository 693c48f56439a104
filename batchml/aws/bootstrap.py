"""The bootstrap script of hosts: its checks, its start on a host, and the report of its failure.

The user data has the script compressed. systemd runs it once, as root, after Docker has started and
the workspace is mounted, and before the ECS agent (`ExecStartPre`), so a host whose script fails
never joins the cluster. It then writes the script's last lines to its console, which EC2 keeps for
about an hour after the host's end, and powers off; Auto Scaling replaces it.

Source: EC2 User Guide, "Instance console output"; EC2 API reference, GetConsoleOutput.
"""

import base64
import gzip
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

MAX_SCRIPT = 256 * 1024  # bytes
MAX_PACKED = 8 * 1024  # bytes in the user data, of which EC2 allows 16 KiB
MINUTES = 15  # that a script may take
MOST_MS = (MINUTES + 5) * 60_000  # the longest time from a host's launch to its script's end
SHOWN_LINES = 20  # of a failed script's output

_STATE = "/var/lib/batchml"
_PROGRAM = "/usr/local/sbin/batchml-bootstrap"
_MARK = "batchml-bootstrap"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


# --- The file -------------------------------------------------------------------------------------


def read_script(folder: Path, name: str) -> tuple[str, list[str]]:
    """The text of a script and its mistakes. `name` is relative to the folder of batchml.toml."""
    path = folder / name
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        return "", [f"{path} {what}. Expected a script, relative to batchml.toml."]
    try:
        if path.stat().st_size > MAX_SCRIPT:
            return "", [f"{name} has {path.stat().st_size} bytes; at most {MAX_SCRIPT}."]
        content = path.read_bytes()
    except OSError as error:
        return "", [f"{path} cannot be read: {error.strerror}."]
    mistakes = list(script_mistakes(name, content)) or list(_syntax_mistakes(name, content))
    return ("" if mistakes else content.decode()), mistakes


def script_mistakes(name: str, content: bytes) -> Iterator[str]:
    """Why a host could not run a script with this content."""
    if not content.strip():
        yield f"{name} is empty."
        return
    try:
        content.decode()
    except UnicodeDecodeError:
        yield f"{name} is not a text file. Expected a script that begins with #!/bin/bash."
        return
    if b"\0" in content:
        yield f"{name} is not a text file. Expected a script that begins with #!/bin/bash."
        return
    if b"\r\n" in content:
        yield (
            f"{name} has Windows line endings, so Linux finds no interpreter. To convert it: "
            f"sed -i 's/\\r$//' {name}"
        )
    if content.startswith(_BYTE_ORDER_MARK):
        yield f"{name} begins with a byte order mark: save it as UTF-8 without one."
    elif not content.startswith(b"#!"):
        yield f"{name} does not name its interpreter: its first line must be like #!/bin/bash."
    size = len(pack_script(content.decode()))
    if size > MAX_PACKED:
        yield (
            f"{name} has {size} bytes when it is compressed; at most {MAX_PACKED}, because EC2 "
            "limits user data. Let the script download the rest, for example from S3."
        )


_SHELL = rb"#!.*?(?:/|\s)(?:ba)?sh\s*(?:-\w+\s*)*\n"
_SYNTAX_SECONDS = 10.0


def _syntax_mistakes(name: str, content: bytes) -> Iterator[str]:
    """What bash says of a script of the shell that it cannot read; nothing without bash here."""
    bash = shutil.which("bash")
    if bash is None or not re.match(_SHELL, content):
        return
    try:
        done = subprocess.run(
            [bash, "-n"], input=content, capture_output=True, timeout=_SYNTAX_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()
        first = next((line.partition(": ")[2] for line in said if ": line " in line), "")
        yield f"{name}: bash cannot read it: {first or 'a mistake of syntax'}."


def pack_script(script: str) -> str:
    """The script compressed, as lines of base64. The bytes depend on the version of zlib."""
    return base64.encodebytes(gzip.compress(script.encode(), mtime=0)).decode()


def script_hash(script: str) -> str:
    """A hash that stands for a packed script where two machines must get the same text."""
    return hashlib.sha256(script.encode()).hexdigest()


# --- On the host ----------------------------------------------------------------------------------


def make_bootstrap(packed: str) -> str:
    """The part of the user data that installs a packed script. It may be repeated at a boot."""
    return f"""\
#!/bin/bash
(
    umask 077
    base64 -d << 'END' | gunzip > {_PROGRAM}-script
{packed.strip()}
END
)
chmod 0700 {_PROGRAM}-script
cat > {_PROGRAM} << 'END'
#!/bin/bash
# Run the script once. If it fails, keep this host out of the cluster, and end it.
state={_STATE}
mkdir -p "$state"
[ -e "$state/bootstrap.done" ] && exit 0
if [ ! -e "$state/bootstrap.failed" ]; then
    HOME=/root timeout --kill-after=30 {MINUTES * 60} {_PROGRAM}-script \\
        > "$state/bootstrap.log" 2>&1 < /dev/null
    code=$?
    if [ "$code" -eq 0 ]; then
        touch "$state/bootstrap.done"
        exit 0
    fi
    why="exit code $code after $SECONDS s"
    [ "$SECONDS" -lt {MINUTES * 60} ] || why="no end after {MINUTES} minutes"
    echo "$why" > "$state/bootstrap.failed"
fi
{{
    echo "{_MARK}: $(cat "$state/bootstrap.failed")"
    tail -n {SHOWN_LINES} "$state/bootstrap.log" | tr -cd '\\11\\12\\40-\\176' | cut -c 1-200 |
        sed 's/^/{_MARK}| /'
}} | tee /dev/console >&2
systemctl poweroff --no-block
exit 1
END
chmod 0755 {_PROGRAM}
mkdir -p /etc/systemd/system/ecs.service.d
cat > /etc/systemd/system/ecs.service.d/bootstrap.conf << 'END'
[Service]
ExecStartPre={_PROGRAM}
TimeoutStartSec={MINUTES * 60 + 900}
END
systemctl daemon-reload
"""


# --- Its failure ----------------------------------------------------------------------------------


class BootstrapFailure(Struct, frozen=True):
    """A host whose script failed. `at`: when it was launched, in ms.

    `lines`: the last lines of the script's output. `ended`, `starting`: how many hosts of the
    compute environment have ended within about an hour, and how many start now.
    """

    compute: str
    host: str
    why: str
    lines: tuple[str, ...] = ()
    ended: int = 1
    starting: int = 0
    at: int = 0


def parse_console(text: str) -> tuple[str, tuple[str, ...]] | None:
    """The reason and the last lines of a failed script in a console's text; None without one."""
    why, lines = "", list[str]()
    for line in text.splitlines():
        if found := re.search(rf"{_MARK}: (.+)", line):
            why, lines = found[1].strip(), []
        elif found := re.search(rf"{_MARK}\| (.*)", line):
            lines.append(found[1].rstrip())
    return (why, tuple(lines[-SHOWN_LINES:])) if why else None
