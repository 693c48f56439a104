"""The flags of commands that submit runs, made from the table `SubmitOptions`."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Annotated, Any, TypeVar, cast

import typer

from batchml.cli.options import read_pairs
from batchml.errors import UsageError
from batchml.runs.options import OptionRow, SubmitOptions, option_rows

Command = TypeVar("Command", bound=Callable[..., None])


def takes_options(
    names: Sequence[str] | None = None,
    *,
    texts: Mapping[str, str] = {},
    defaults: Mapping[str, Any] = {},
) -> Callable[[Command], Command]:
    """Add the flags of these options, or of all options, to a command.

    The flags replace the command's parameter `options`, which gets their values as SubmitOptions.
    `texts` replace help texts, `defaults` are values of flags that the user does not set.
    """
    rows = [row for name, row in option_rows().items() if names is None or name in names]

    def decorate(function: Command) -> Command:
        def command(**given: Any) -> None:
            values = {row.name: _read(row, given.pop(row.name)) for row in rows}
            # Not `in (None, False)`, since 0 == False: --gpus 0 counts, and --vcpus 0 is a mistake.
            options = {
                name: value
                for name, value in values.items()
                if value is not None and value is not False
            }
            function(**given, options=cast(SubmitOptions, options))

        parameters: list[Parameter] = []
        for each in signature(function).parameters.values():
            if each.name == "options":
                parameters += [_parameter(row, texts, defaults) for row in rows]
            else:
                parameters.append(each.replace(kind=Parameter.KEYWORD_ONLY))
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__module__ = function.__module__
        command.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return cast(Command, command)

    return decorate


def _parameter(row: OptionRow, texts: Mapping[str, str], defaults: Mapping[str, Any]) -> Parameter:
    flags = [row.flag, *filter(None, [row.option.short])]
    shown = typer.Option(
        *flags, metavar=row.option.metavar, help=texts.get(row.name, row.option.help)
    )
    kind: Any = list[str] if row.type in (dict, list) else str if row.option.words else row.type
    default = defaults.get(row.name, False if row.type is bool else None)
    hint = kind if default is not None else kind | None
    annotation = Annotated[hint, shown]  # type: ignore[valid-type]
    return Parameter(row.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(row: OptionRow, value: Any) -> Any:
    """The value of a flag; None for a list or table without entries. Raises UsageError."""
    if row.option.words and value is not None:
        number = row.read_number(value)
        if number is None:
            raise UsageError(f"{row.flag}: found {value!r}. Give {row.expected}.")
        return number
    if row.type is dict:
        return read_pairs(value, row.option.short or row.flag) or None
    return value or None if row.type is list else value
