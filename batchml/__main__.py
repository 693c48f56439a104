"""`batchml` and `python -m batchml`.

`--version` and `--help` are what people type first and completion scripts type often, so they are
answered here, before anything is imported: the help text is a file that a test compares with what
the commands themselves say (`tests/golden/`).
"""

import sys


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from batchml import __version__

        print(f"batchml {__version__}")
        return 0
    if arguments in ([], ["--help"]):
        with open(__file__.replace("__main__.py", "cli/help.txt"), encoding="utf-8") as text:
            sys.stdout.write(text.read())
        return 0
    # A short-lived process gains nothing from collecting garbage, and importing makes a lot.
    import gc

    gc.disable()
    from batchml.cli.app import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
