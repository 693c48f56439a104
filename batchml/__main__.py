"""`batchml` and `python -m batchml`.

`--version` and `--help` are what people type first and completion scripts type often, so they are
answered here, before anything is imported: the help texts are files, and a test compares them with
what the commands themselves print. `make help-texts` writes them.
"""

import os
import sys


def main() -> int:
    _open_closed_streams()
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from batchml import __version__

        print(f"batchml {__version__}")
        return 0
    if arguments[:1] == ["__complete"]:  # by the scripts of `batchml completion`, for every Tab
        from batchml.cli.completion import main as complete

        return complete(arguments[1:])
    if len(arguments) == 2 and arguments[0] == "completion":  # by every shell that starts
        from batchml.cli.completion import SCRIPTS

        if arguments[1] in SCRIPTS:
            sys.stdout.write(SCRIPTS[arguments[1]])
            return 0
    if not arguments or arguments[-1] in ("--help", "-h"):
        text = _stored_help(arguments[:-1])
        if text:
            sys.stdout.write(text)
            return 0
    # A short-lived process gains nothing from collecting garbage, and importing makes a lot.
    import gc

    gc.disable()
    try:
        from batchml.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # also while importing, which is most of a short command's time
        from batchml.cli.exit import end_interrupted

        return end_interrupted()


def _open_closed_streams() -> None:
    """What was started with `>&-` writes to nowhere.

    Without this Python has no such stream: print() fails, or takes stdout for stderr, and the next
    file or connection that is opened gets the stream's number.
    """
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_WRONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free: in this order its own
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="replace"))


def _stored_help(command: "list[str]") -> str:
    """The help of `batchml COMMAND`, or nothing for what is no command of ours."""
    if not all(word.isalpha() for word in command):
        return ""
    name = "-".join(["batchml", *command])
    try:
        with open(f"{__file__.removesuffix('__main__.py')}cli/help/{name}.txt") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
