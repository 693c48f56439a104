"""The parameters of `-p`: which names a job takes, and values of the types of defaults."""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from batchml.errors import SPELT_ALIKE, ConfigError, did_you_mean
from batchml.model.job import JobSpec, Scalar
from batchml.runtime.protocol.variables import (
    ALL,
    KEBAB,
    NUMBERS,
    parameter_variable,
    parse_number,
    takes_all,
)


def with_params(
    spec: JobSpec,
    given: Mapping[str, str],
    where: str,
    command: Sequence[str] = (),
    *,
    keep_whole: bool = False,
    of_program: Container[str] = (),
    is_rerun: bool = False,
) -> JobSpec:
    """Return `spec` with the parameters of `-p K=V`, each with the type of its default.

    For names that are not under [params], and the last three arguments, see `new_name_mistakes`.
    `keep_whole`: a whole number takes no fraction, because its author wrote 1, not 1.0; the values
    of an earlier run have no such meaning. Raises ConfigError for an unknown parameter or a wrong
    type.
    """
    new = [name for name in given if name not in spec.params]
    found = new_name_mistakes(new, spec, command, of_program=of_program, is_rerun=is_rerun)
    mistakes = list(found.values())
    if mistakes:
        raise ConfigError(where, mistakes)
    values = {
        name: _parse_like(spec.params[name], text) if name in spec.params else _parse_value(text)
        for name, text in given.items()
    }
    mistakes = [
        f"-p {name}={given[name]}: the default is {_as_toml(spec.params[name])}, so give "
        f"{'true or false' if isinstance(spec.params[name], bool) else 'a number'}."
        for name, value in values.items()
        if value is None
    ]
    mistakes += [
        f"-p {name}={given[name]}: the default is {spec.params[name]}, so give a whole number; or "
        f"write {name} = {spec.params[name]}.0 in job.toml."
        for name, value in values.items()
        if keep_whole and isinstance(value, float) and type(spec.params.get(name)) is int
    ]
    if mistakes:
        raise ConfigError(where, mistakes)
    params = {**spec.params, **{name: value for name, value in values.items() if value is not None}}
    return msgspec.structs.replace(spec, params=params)


def new_name_mistakes(
    names: Iterable[str],
    spec: JobSpec,
    command: Sequence[str] = (),
    *,
    of_program: Container[str] = (),
    is_rerun: bool = False,
) -> dict[str, str]:
    """The mistakes in names that are not under [params], by name, each as `-p NAME=...: ...`.

    A command with `{params}` takes any name, unless the name is spelt nearly like a parameter of
    the job and is not in `of_program`, the names that its program has as flags. `command` is the
    one that will run, if it is not the job's. `is_rerun`: the job.toml of now does not count.
    """
    takes_any = takes_all(command or spec.command, spec.params)
    # Of two equal flags in a command that the user has just typed, the last one is meant.
    flags = () if command else _flags(spec)
    found = {}
    for name in names:
        mistake = _new_name_mistake(name, spec, takes_any, flags)
        if not mistake and name not in of_program:
            mistake = _likeness_mistake(name, spec, is_rerun)
        if mistake:
            found[name] = mistake
    return found


def _flags(spec: JobSpec) -> Sequence[str]:
    """The flags that the job's command has itself, with their values: `--out {outputs}`."""
    words = " ".join(spec.template).split()
    if not {f"{{{ALL}}}", f"{{{ALL}:{KEBAB}}}"} & {*words}:
        return ()
    after = [*words[1:], "--"]
    return [
        word if "=" in word or value.startswith("--") else f"{word} {value}"
        for word, value in zip(words, after, strict=True)
        if word.startswith("--")
    ]


def _new_name_mistake(name: str, spec: JobSpec, takes_any: bool, flags: Sequence[str]) -> str:
    """The mistake in a parameter of `-p` that is not under [params]; "" if the job takes it."""
    known = sorted(spec.params)
    if not takes_any:
        return (
            f"-p {name}=...: the job has no such parameter."
            f"{did_you_mean(name, known)} Parameters: {', '.join(known) or 'none'}. For parameters "
            "of any name write {params} into its command."
        )
    if not re.fullmatch(_PARAM_NAME, name) or name == ALL:
        return f"-p {name}=...: a name has letters, digits, _, - and ., and is not {ALL}."
    same = parameter_variable(name)
    other = next((each for each in known if parameter_variable(each) == same), "")
    if other:
        return f"-p {name}=...: the job's parameter is {other}."
    own = f"--{name.replace('_', '-') if spec.flags == KEBAB else name}"
    there = next((flag for flag in flags if re.split("[ =]", flag)[0] == own), "")
    if there:
        return (
            f"-p {name}=...: the command has {there} already. Change it there; or, for -p, write "
            f"{{{name}}} as its value there and {name} = ... under [params] of job.toml."
        )
    return ""


def _likeness_mistake(name: str, spec: JobSpec, is_rerun: bool) -> str:
    """The mistake in a new name that is spelt nearly like a parameter of the job; "" if not."""
    meant = did_you_mean(name, sorted(spec.params), SPELT_ALIKE)
    add = f"add it to [params] of job.toml with a default{', and submit it anew' * is_rerun}"
    why = ": a rerun has the parameters of then" if is_rerun else ""
    return meant and (
        f"-p {name}=...: [params] has no such name.{meant} If {name} is a parameter of its own, "
        f"{add}{why}."
    )


def _as_toml(value: Scalar) -> str:
    return f"{value}".lower() if isinstance(value, bool) else repr(value)


_PARAM_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,99}"


def _parse_value(text: str) -> Scalar:
    """The value of a parameter without a default: a number or a boolean as in JSON, else text."""
    return text == "true" if text in ("true", "false") else parse_number(text)


def _with_example_numbers(text: str) -> str:
    """The text with a number in place of `{index}` and `{seed}`."""
    for name in NUMBERS:
        text = text.replace(f"{{{name}}}", "1")
    return text


def _parse_like(default: Scalar, text: str) -> Scalar | None:
    """Parse `text` as a value of the default's type: a text, a boolean or a number; else None.

    A default of 1 may be replaced by 0.5, but not by nan, which JSON does not have. A text with
    `{index}` or `{seed}` stays, if it becomes such a value in each run.
    """
    example = _with_example_numbers(text)
    if example != text:
        return None if _parse_like(default, example) is None else text
    if isinstance(default, str):
        return text if default == _with_example_numbers(default) else parse_number(text)
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower())
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def is_seed(name: str) -> bool:
    """Whether a parameter is a seed: `seed`, `random_seed`, `data-seed`."""
    return name.lower().replace("-", "_").rpartition("_")[2] == "seed"
