"""`make help-texts`: store what each command prints for `-h`."""

from tests.test_surface import HELP, typed_helps


def main() -> None:
    for old in HELP.glob("*.txt"):
        old.unlink()
    for command, text in typed_helps().items():
        path = HELP / f"{'-'.join(['batchml', *command.split()])}.txt"
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
