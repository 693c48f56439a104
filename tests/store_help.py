"""`make help-texts`: store what each command prints for `-h`."""

from tests.test_surface import COMMANDS, HELP, run_app


def main() -> None:
    for old in HELP.glob("*.txt"):
        old.unlink()
    for command in COMMANDS:
        path = HELP / f"{'-'.join(['batchml', *command])}.txt"
        path.write_text(run_app(*command, "-h").stdout, "utf-8")


if __name__ == "__main__":
    main()
