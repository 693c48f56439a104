"""Settings: what the user wants, and where each value came from.

A value is taken from, in this order: flag, environment variable, `batchml.toml`, default.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from batchml.errors import ConfigError, NotFound
from batchml.model.environment import LOCAL, Environment, read_environments

CONFIG_NAME = "batchml.toml"


class Setting(Struct, frozen=True):
    """A value and its source: `flag --env`, `BATCHML_ENV`, a file's path, or `default`."""

    value: str
    source: str


class Settings(Struct, frozen=True):
    env: Setting
    home: Setting
    data_dir: Setting | None
    environments: dict[str, Environment]
    default: str = LOCAL  # the environment's name that the file says
    config: str | None = None  # the path of the file they came from, if there is one

    @property
    def is_local(self) -> bool:
        return self.env.value == LOCAL

    @property
    def environment(self) -> Environment:
        return self.environments[self.env.value]


def load_settings(environ: Mapping[str, str], folder: Path, env_flag: str | None) -> Settings:
    """Read the settings as seen from `folder`.

    Raises ConfigError for a wrong file, NotFound for an environment that is not described.
    """
    path = _config_path(environ, folder)
    default, environments = LOCAL, {LOCAL: Environment()}
    source = "default"
    if path is not None:
        default, environments = read_environments(_parse(path), str(path))
        source = str(path)
    if env_flag:
        env = Setting(env_flag, "flag --env")
    elif environ.get("BATCHML_ENV"):
        env = Setting(environ["BATCHML_ENV"], "BATCHML_ENV")
    else:
        env = Setting(default, source)
    if env.value not in environments:
        hint = f"It came from {env.source}. Environments are described in {CONFIG_NAME}."
        raise NotFound("Environment", env.value, environments, hint)
    data_dir = environ.get("BATCHML_DATA_DIR")
    return Settings(
        env=env,
        home=_home(environ),
        data_dir=Setting(str((folder / data_dir).resolve()), "BATCHML_DATA_DIR")
        if data_dir
        else None,
        environments=environments,
        default=default,
        config=str(path) if path is not None else None,
    )


def _home(environ: Mapping[str, str]) -> Setting:
    if environ.get("BATCHML_HOME"):
        return Setting(str(Path(environ["BATCHML_HOME"]).absolute()), "BATCHML_HOME")
    from platformdirs import user_state_dir

    return Setting(user_state_dir("batchml", appauthor=False), "default")


def _config_path(environ: Mapping[str, str], folder: Path) -> Path | None:
    """`BATCHML_CONFIG`, else the nearest `batchml.toml` from `folder` upwards."""
    if environ.get("BATCHML_CONFIG"):
        path = Path(environ["BATCHML_CONFIG"])
        if not path.is_file():
            raise ConfigError("BATCHML_CONFIG", [f"{path}: there is no such file."])
        return path
    return next(
        (
            above / CONFIG_NAME
            for above in (folder, *folder.parents)
            if (above / CONFIG_NAME).is_file()
        ),
        None,
    )


def _parse(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"not TOML: {error}."]) from error
