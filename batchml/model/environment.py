"""Environment: a named place that runs jobs, as `batchml.toml` says it."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchml.errors import ConfigError, did_you_mean
from batchml.model.reading import read_struct

LOCAL = "local"


class Environment(Struct, frozen=True, forbid_unknown_fields=True):
    """A place in AWS. `local` is built in and needs no entry."""

    region: str = ""
    profile: str = ""
    # For `batchml setup`, which makes what they describe; submitting needs none of them.
    ami: str = "build"
    gpu_access: str = "driver-mount"
    storage: dict[str, Any] = {}
    compute: dict[str, Any] = {}
    queues: dict[str, Any] = {}


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `batchml.toml`."""

    default: str = LOCAL
    env: dict[str, dict[str, Any]] = {}


def read_environments(table: Mapping[str, Any], where: str) -> tuple[str, dict[str, Environment]]:
    """The default environment's name, and every environment by name.

    Raises ConfigError with every mistake of the file at once.
    """
    config, mistakes = read_struct(table, Config)
    environments = {LOCAL: Environment()}
    for name, inner in config.env.items():
        if name == LOCAL:
            mistakes.append("env.local: is built in and cannot be described here.")
            continue
        environments[name], found = read_struct(inner, Environment)
        mistakes += [f"env.{name}.{mistake}" for mistake in found]
        if not environments[name].region:
            mistakes.append(f'env.{name}.region: missing. For example region = "us-east-1".')
    if config.default not in environments:
        meant = did_you_mean(config.default, environments)
        mistakes.append(f"default: no environment {config.default!r} is described.{meant}")
    if mistakes:
        raise ConfigError(where, mistakes)
    return config.default, environments
