"""A job.toml as text, from a JobSpec: for a job with the parameters that a sweep found."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from batchml.model.job import JobSpec
from batchml.model.sweep import Params


def job_file(job: JobSpec, params: Params) -> str:
    """The job with these parameters in the place of its own; what is as by default is left out."""
    table = msgspec.to_builtins(replace(job, params={**job.params, **params}))
    return to_toml(_without_defaults(table, msgspec.to_builtins(JobSpec())))


def _without_defaults(table: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if value is None or value == usual.get(name):
            continue
        if isinstance(value, dict) and isinstance(usual.get(name), dict):
            value = _without_defaults(value, usual[name])
        found[name] = value
    return found


def to_toml(table: Mapping[str, Any]) -> str:
    """Values first, then a `[section]` for each table and `[[section]]` for each of a list."""
    values = [f"{_key(name)} = {_value(each)}" for name, each in table.items() if _is_value(each)]
    parts = ["\n".join(values)] if values else []
    for name, each in table.items():
        if isinstance(each, dict):
            parts.append(_section(f"[{_key(name)}]", each))
        elif not _is_value(each):
            parts += [_section(f"[[{_key(name)}]]", one) for one in each]
    return "\n\n".join(parts)


def _section(head: str, table: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{_key(name)} = {_value(each)}" for name, each in table.items())])


def _is_value(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    return not (isinstance(value, list | tuple) and value and isinstance(value[0], dict))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings have JSON's escapes, and take no bare DEL (TOML 1.0, String).
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return (
            f"{{ {', '.join(f'{_key(name)} = {_value(each)}' for name, each in value.items())} }}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _key(name: str) -> str:
    bare = name and all(char.isascii() and (char.isalnum() or char in "-_") for char in name)
    return name if bare else _value(name)
