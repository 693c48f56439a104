"""Make docs/lenet.svg and docs/sweep.svg: the README's commands, as a real terminal shows them.

Runs a command in tmux, takes the screen when it is under way, and draws it. `make picture`, or
`picture.py sweep` for one of them.
"""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 112, 20
LIMIT = 600  # seconds

# The command, and what the screen shows when it is taken.
PICTURES = {
    "lenet": ("batchml submit --wait lenet", "Batch [800]"),
    "sweep": ("batchml sweep lenet", "3 done"),
}


def tmux(*arguments: str) -> str:
    command = ["tmux", "-L", "batchml-picture", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def screen(command: str, until: str) -> str:
    """The screen, with its colours, once it shows `until`."""
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
    tmux("new-session", "-d", *size, "env", f"PATH={search}", "PS1=$ ", "bash", "--norc")
    try:
        tmux("send-keys", "clear", "Enter", command, "Enter")
        for _ in range(LIMIT * 5):
            shown = tmux("capture-pane", "-e", "-p")
            if until in shown:
                time.sleep(1)  # until all of it is drawn
                return tmux("capture-pane", "-e", "-p")
            time.sleep(0.2)
        raise SystemExit(f"not within {LIMIT} s: {until}\n{shown}")
    finally:
        tmux("kill-session")


def draw(shown: str, title: str, path: Path) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()))
    # Without the fonts that it would fetch from elsewhere: any monospaced one will do.
    plain = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title=title, code_format=plain, unique_id=path.stem)
    path.write_text(svg.replace("Fira Code,", ""), "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        command, until = PICTURES[name]
        draw(screen(command, until), command, Path(__file__).parent / f"{name}.svg")
