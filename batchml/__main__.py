"""The entry point of `batchml` and `python -m batchml`.

It answers `--version`, `--help` and the requests of shell completion itself, without importing the
commands, so that they are fast. The help texts are stored in files: `make help-texts` writes them,
and a test compares them with the texts that the commands print.
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
    if arguments[:1] == ["__complete"]:  # sent by completion scripts at every Tab
        from batchml.cli.completion import main as complete

        return complete(arguments[1:])
    if len(arguments) == 2 and arguments[0] == "completion":  # run by every shell at its start
        from batchml.cli.completion import SCRIPTS

        if arguments[1] in SCRIPTS:
            sys.stdout.write(SCRIPTS[arguments[1]])
            return 0
    if not arguments or arguments[-1] in ("--help", "-h"):
        text = _stored_help(arguments[:-1])
        if text:
            sys.stdout.write(text)
            return 0
    # Imports make a lot of garbage, and a short-lived process gains nothing from collecting it.
    import gc

    gc.disable()
    try:
        from batchml.cli.app import run

        code = run(arguments)
        gc.freeze()  # else Python would search all objects once more, at its end
        return code
    except KeyboardInterrupt:  # also while importing, which is most of a short command's time
        from batchml.cli.terminal import end_interrupted

        return end_interrupted()


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed, as after `batchml >&-`.

    Otherwise Python sets such a stream to None, print() fails, and the next file or connection that
    is opened gets the descriptor of the stream.
    """
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_WRONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            # The lowest free descriptor is, in this order, the descriptor of the stream.
            descriptor = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace"))


def _stored_help(command: "list[str]") -> str:
    """Return the stored help of `batchml COMMAND`; "" for an unknown command."""
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
