"""`make help-texts`: store what each command says for `-h`."""

from tests.test_surface import COMMANDS, HELP, run


def main() -> None:
    for old in HELP.glob("*.txt"):
        old.unlink()
    for command in COMMANDS:
        path = HELP / f"{'-'.join(['batchml', *command])}.txt"
        path.write_text(run(*command, "-h").stdout, "utf-8")


if __name__ == "__main__":
    main()
