"""Read the settings of a command, each with its source.

A value comes from the flag, else from the environment variable, else from `batchml.toml`, else it
is the default.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from batchml.config.project import PROJECT_VARIABLE, folder_project
from batchml.errors import ConfigError, NotFound
from batchml.model.environment import LOCAL, ConfigContent, Environment

CONFIG_NAME = "batchml.toml"


class Setting(Struct, frozen=True):
    """A value and its source: `flag --env`, `BATCHML_ENV`, a file's path, or `default`."""

    value: str
    source: str


class Settings(Struct, frozen=True):
    """All settings. `content` is the content of batchml.toml.

    `project` is the word of a flag or variable, or the identity of the project; `own_project` is
    the identity of the folder's project.
    """

    env: Setting
    home: Setting
    data_dir: Setting | None
    content: ConfigContent
    config: str | None = None  # the path of batchml.toml, if there is one
    project: Setting = Setting("", "")  # "": the program belongs to no project
    own_project: str = ""

    def check(self, name: str) -> None:
        """Raise ConfigError if an environment has mistakes."""
        check_config(self.content, self.config or CONFIG_NAME, name)

    @property
    def environments(self) -> dict[str, Environment]:
        return self.content.environments

    @property
    def default(self) -> str:
        """The default environment of the file."""
        return self.content.default

    @property
    def is_local(self) -> bool:
        return self.env.value == LOCAL

    @property
    def environment(self) -> Environment:
        return self.environments[self.env.value]


def check_config(content: ConfigContent, where: str, *names: str) -> None:
    """Raise ConfigError if these environments, or keys outside all environments, have mistakes."""
    mistakes = content.mistakes_of(*names)
    if mistakes:
        raise ConfigError(where, mistakes)


def load_settings(
    environ: Mapping[str, str], folder: Path, env_flag: str | None, project_flag: str | None = None
) -> Settings:
    """Read the settings for a command in `folder`.

    Raises ConfigError for a wrong file, NotFound for an unknown environment.
    """
    path = _config_path(environ, folder)
    content = ConfigContent(LOCAL, {LOCAL: Environment()}, {})
    source = "default"
    if path is not None:
        from batchml.config.environments import read_config  # late: there may be no file

        content = read_config(_parse(path))
        source = str(path)
    check_config(content, source)
    if env_flag:
        env = Setting(env_flag, "flag --env")
    elif environ.get("BATCHML_ENV"):
        env = Setting(environ["BATCHML_ENV"], "BATCHML_ENV")
    else:
        env = Setting(content.default, source)
    if env.value not in content.environments:
        where = f"are in {CONFIG_NAME}" if path else f"need a {CONFIG_NAME}: batchml init"
        hint = f"The name came from {env.source}. Environments {where}."
        raise NotFound("Environment", env.value, content.environments, hint)
    # Mistakes in other environments are ignored: runs in this one can be listed and stopped.
    check_config(content, source, env.value)
    data_dir = environ.get("BATCHML_DATA_DIR")
    own = _own_project(folder, content, source)
    return Settings(
        env=env,
        home=_home(environ),
        data_dir=Setting(str((folder / data_dir).resolve()), "BATCHML_DATA_DIR")
        if data_dir
        else None,
        content=content,
        config=str(path) if path is not None else None,
        project=_named_project(environ, project_flag) or own,
        own_project=own.value,
    )


def _named_project(environ: Mapping[str, str], flag: str | None) -> Setting | None:
    if flag is not None:
        return Setting(flag, "--project")
    named = environ.get(PROJECT_VARIABLE)
    return Setting(named, PROJECT_VARIABLE) if named else None


def _own_project(folder: Path, content: ConfigContent, source: str) -> Setting:
    if content.project:
        return Setting(content.project, source)
    return Setting(folder_project(str(folder)), "the folder")


def _home(environ: Mapping[str, str]) -> Setting:
    if environ.get("BATCHML_HOME"):
        return Setting(str(Path(environ["BATCHML_HOME"]).absolute()), "BATCHML_HOME")
    from platformdirs import user_state_dir

    return Setting(user_state_dir("batchml", appauthor=False), "default")


def _config_path(environ: Mapping[str, str], folder: Path) -> Path | None:
    """The file of `BATCHML_CONFIG`, or the nearest `batchml.toml` from `folder` upwards."""
    if environ.get("BATCHML_CONFIG"):
        path = Path(environ["BATCHML_CONFIG"])
        if not path.is_file():
            raise ConfigError("BATCHML_CONFIG", [f"{path}: there is no such file."])
        return path
    paths = (above / CONFIG_NAME for above in (folder, *folder.parents))
    return next(filter(Path.is_file, paths), None)


def _parse(path: Path) -> dict[str, object]:
    import tomllib  # late: there may be no file

    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"not TOML: {error}."]) from error
