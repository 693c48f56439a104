"""A registry and one image's folder for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.executor_rig import docker, need_engine
from tests.support.image_rig import Rig, image_folder
from tests.support.registry_rig import Registry, need_registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    need_registry()
    folder = tmp_path / "registry"
    folder.mkdir()
    made = Registry(folder)
    yield made
    made.close()
    assert made.wrong == []


@pytest.fixture
def rig(tmp_path: Path, registry: Registry) -> Iterator[Rig]:
    need_engine()
    made = Rig(image_folder(tmp_path), registry)
    yield made
    names = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert [name for name in names if name.startswith(registry.host)] == [], "no name is left"
    for name in names:
        if name.startswith(f"{made.repository}:"):
            docker("image", "rm", "-f", name)
