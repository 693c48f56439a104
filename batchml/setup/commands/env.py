"""batchml env list, show and use."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from batchml.aws.batch.resources import ComputeApi
from batchml.cli.app import command_group
from batchml.cli.options import Env, Json, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import table
from batchml.config.environments import with_default
from batchml.context import Context
from batchml.errors import BatchmlError, NotFound, UsageError
from batchml.model.environment import Compute, Environment, Queue
from batchml.setup.images import host_images, newer_image_lines, own_details

env_app = command_group(
    "env",
    "Show the environments of batchml.toml, and choose the default.",
    "batchml env list",
)


@env_app.command("list", epilog="Example: batchml env list")
def list_(json_: Json = False) -> None:
    """List the environments; * marks the one that commands use."""
    settings = open_context(None).settings
    found: list[dict[str, Any]] = [
        {
            "env": name,
            "isDefault": name == settings.env.value,
            "region": environment.region or None,
            "profile": environment.profile or None,
            "compute": sorted(environment.compute),
            "queues": sorted(environment.queues),
        }
        for name, environment in settings.environments.items()
    ]
    if json_:
        return print_json(found)
    rows = [["", "NAME", "REGION", "PROFILE", "COMPUTE", "QUEUES"]]
    rows += [
        [
            "*" if each["isDefault"] else "",
            each["env"],
            each["region"] or "this machine",
            each["profile"] or "",
            ", ".join(each["compute"]),
            ", ".join(each["queues"]),
        ]
        for each in found
    ]
    print_line(table(rows))


@env_app.command(epilog="Example: batchml env show dev")
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Environment; default: the one in use.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show the values of an environment, and the source of each.

    For an environment in AWS, also show whether the AMIs of its hosts are the newest.
    """
    context = open_context(name or env)
    settings = context.settings
    found: list[dict[str, Any]] = [
        {"key": "env", "value": settings.env.value, "source": settings.env.source},
        {"key": "home", "value": settings.home.value, "source": settings.home.source},
        {"key": "project", "value": settings.project.value, "source": settings.project.source},
    ]
    if settings.data_dir is not None:
        setting = settings.data_dir
        found.append({"key": "data_dir", "value": setting.value, "source": setting.source})
    environment = settings.environment
    defaults = {
        **_flat(msgspec.to_builtins(Environment())),
        **_defaults("compute", environment.compute, Compute()),
        **_defaults("queues", environment.queues, Queue()),
    }
    for key, value in _flat(msgspec.to_builtins(environment)).items():
        is_default = key in defaults and defaults[key] == value
        source = "default" if is_default or settings.config is None else settings.config
        found.append({"key": key, "value": value, "source": source})
    details = _compute_in_aws(context)
    found += [
        {"key": f"compute.{name}.image", "value": f"{image.type}: {image.describe()}",
         "source": "AWS"}
        for name, detail in details.items() for image in host_images(detail)
    ]  # fmt: skip
    if json_:
        return print_json(found)
    rows = [["KEY", "VALUE", "FROM"]]
    rows += [[each["key"], _text(each["value"]), each["source"]] for each in found]
    print_line(table(rows))
    for line in newer_image_lines(details, context.env):
        say(line)


def _compute_in_aws(context: Context) -> dict[str, Mapping[str, Any]]:
    """The environment's compute environments in AWS by short name; none if AWS cannot be asked."""
    if context.settings.is_local or not context.settings.environment.compute:
        return {}
    try:
        return own_details(ComputeApi(context.connect()).environments(), context.env)
    except BatchmlError as error:
        say(f"The AMIs of its hosts are unknown: {str(error).splitlines()[0]}")
        return {}


@env_app.command(epilog="Example: batchml env use dev")
def use(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Environment of batchml.toml, or local.")
    ],
    json_: Json = False,
) -> None:
    """Make an environment the default, in batchml.toml."""
    settings = open_context(None).settings
    if name not in settings.environments:
        hint = "Environments are described in batchml.toml."
        raise NotFound("Environment", name, settings.environments, hint)
    if settings.config is None:
        raise UsageError("There is no batchml.toml here to change. To write one: batchml init")
    path = Path(settings.config)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(with_default(path.read_text("utf-8"), name), "utf-8")
    temporary.replace(path)
    if json_:
        print_json({"env": name, "config": str(path)})
    else:
        print_line(f"{name} is the default now ({path}).")


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value. An empty table counts as a value."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{path}.{key}" if path else key)
    return found


def _defaults(section: str, names: Iterable[str], default: Any) -> dict[str, Any]:
    """The defaults of each table of a section."""
    plain = msgspec.to_builtins(default)
    return {k: v for name in names for k, v in _flat(plain, f"{section}.{name}").items()}


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in (None, {}) else str(value)
