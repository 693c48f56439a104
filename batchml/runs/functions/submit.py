"""Prepare the run of a Python function: a command whose code has the function and its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import ConfigError, UsageError
from batchml.jobs.code import CodeArchive
from batchml.model.names import to_name
from batchml.model.run import FUNCTION_TAG
from batchml.runs.functions.packing import PackedFunction, check_items, pack_function
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runtime.protocol.function import MODULE

Function = Callable[..., Any]


def prepare_function(
    context: Context,
    function: Function,
    calls: Sequence[tuple[Any, ...]],
    options: SubmitOptions,
    *,
    is_map: bool = False,
    dry_run: bool = False,
) -> PreparedRun:
    """Make the requests of a run that calls a function once for each of `calls`, its arguments.

    Raises ConfigError with every part that cannot be sent, and what `prepare` raises.
    """
    if options.get("command"):
        raise UsageError("command: a function is what the run calls. Leave out one of both.")
    if is_map and options.get("array") is not None:
        raise UsageError("array: map makes an array with a child for each item. Leave it out.")
    check_items(function, len(calls))
    packed = pack_function(function, calls, context.folder)
    command = ["python3", "-m", MODULE, packed.call.name]
    given: SubmitOptions = {"name": packed.run_name, **options, "command": command}
    if len(calls) > 1:
        given["array"] = len(calls)
    request = replace(
        to_request(options=given),
        files=packed.files,
        own_tags={FUNCTION_TAG: to_name(packed.call.name)},
    )
    prepared = prepare(context, request, dry_run=dry_run)
    _check_modules(packed, prepared.archive)
    _check_version(packed, prepared)
    return prepared


def _check_modules(packed: PackedFunction, archive: CodeArchive | None) -> None:
    """Raise ConfigError for modules that ignore files keep out of the code."""
    ignored = archive.ignored if archive else ()
    mistakes = [
        f"{name}: an ignore file excludes it ({rule}), so that the run would not find it."
        for name in packed.modules
        for rule in ignored
        if name == rule or (rule.endswith("/") and name.startswith(rule))
    ]
    if mistakes:
        raise ConfigError(f"The function {packed.call.name}", mistakes)


def _check_version(packed: PackedFunction, prepared: PreparedRun) -> None:
    """Raise ConfigError for an image that is known to have a Python that cannot load the code."""
    if not packed.call.by_value or prepared.image_source is None:
        return
    files = dict(prepared.image_source.recipe().files)
    version = files.get(".python-version", b"").decode().strip()
    ours = packed.call.python
    if version and ".".join(version.split(".")[:2]) != ours:
        raise ConfigError(
            f"The function {packed.call.name}",
            [
                f"image: {prepared.spec.image} has Python {version}, and the code of a function "
                f"that is in no module runs with Python {ours} only. Move it to a module of the "
                "folder, or choose another image."
            ],
        )
