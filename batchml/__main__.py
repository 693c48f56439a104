"""`batchml` and `python -m batchml`.

`--version` and `--help` are what people type first and completion scripts type often, so they are
answered here, before anything is imported: the help texts are files, and a test compares them with
what the commands themselves say (`-h` asks those). `make help-texts` writes them.
"""

import sys


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from batchml import __version__

        print(f"batchml {__version__}")
        return 0
    if not arguments or arguments[-1] == "--help":
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
        return 130


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
