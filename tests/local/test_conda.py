"""An environment.yml: how it is read, how its environment is made, and its mistakes."""

import json
from pathlib import Path

import pytest

from batchml.jobs.find import find_source
from batchml.jobs.image_files import CondaFile, read_conda
from batchml.local.executors.spec import ExecutorHost, RunnerSpecError, _plan_environment, _target
from batchml.local.home import Home
from batchml.local.images import LocalImage, find, publish_recipe
from batchml.resources import shipped_folder


def conda(text: str, **files: str) -> tuple[CondaFile, list[str]]:
    return read_conda("environment.yml", {"environment.yml": text, **files}.get)


def test_it_is_given_to_the_tools_with_a_python_and_without_what_is_this_machines() -> None:
    found, mistakes = conda(
        "name: vision\nchannels: [pytorch, conda-forge]\ndependencies:\n- numpy=2\n- pip:\n"
        "  - six\nprefix: /home/me/envs/vision\n"
    )
    assert mistakes == []
    assert json.loads(found.render()) == {
        "channels": ["pytorch", "conda-forge"],
        "dependencies": ["numpy=2", "python=3.11", "pip", {"pip": ["six"]}],
    }


# As `conda env export` writes it, and people change it.
EXPORTED = """\
name: vision
channels:
  - pytorch
  - defaults
dependencies:
  - _libgcc_mutex=0.1=main
  - conda-forge::libgcc-ng=13.2.0=h807b86f_5
  - python=3.10   # the cluster's
  - "numpy>=1.26,<3"
  - pytorch[version='>=2.1']
  - pip:
      - --extra-index-url https://download.pytorch.org/whl/cu118
      - torch==2.0.1+cu118
      - "a[b,c]>=1; python_version < '3.12'"
      - git+https://github.com/x/y@main#egg=y
platforms: [linux-64]
prefix: /home/me/miniconda3/envs/vision
"""


def test_an_exported_file_is_given_on_and_brings_what_its_pip_needs() -> None:
    found, mistakes = conda(EXPORTED)
    assert mistakes == []
    assert json.loads(found.render())["dependencies"] == [
        "_libgcc_mutex=0.1=main", "conda-forge::libgcc-ng=13.2.0=h807b86f_5", "python=3.10",
        "numpy>=1.26,<3", "pytorch[version='>=2.1']", "pip", "git",
        {"pip": [
            "--extra-index-url https://download.pytorch.org/whl/cu118", "torch==2.0.1+cu118",
            "a[b,c]>=1; python_version < '3.12'", "git+https://github.com/x/y@main#egg=y",
        ]},
    ]  # fmt: skip
    assert conda(EXPORTED.replace("\n", "\r\n"))[0] == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: b\n  c: d\n", "line 2: mapping values are not allowed here."),
        ("dependencies:\n\t- numpy\n", "line 2: found character"),
        ("dependencies: [numpy\n", "line 2: expected ',' or ']', but got '<stream end>'."),
        ("dependencies: &all [*all]\n", "line 1: found unconstructable recursive node."),
        ("dependencies: [a]\n---\nname: b\n", "line 2: but found another document."),
        ("name: \0", "unacceptable character #x0000"),
        ("[" * 600, "not YAML: maximum recursion depth exceeded"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_reported_with_its_line(text: str, says: str) -> None:
    (told,) = conda(text)[1]
    assert told.startswith("environment.yml: ")
    assert says in told


def test_no_value_is_more_than_a_text() -> None:
    found, _ = conda("dependencies: !!python/object/apply:os.system [python=3.10, 'yes', 1.10]\n")
    assert found.specs == ["python=3.10", "yes", "1.10"]


def test_the_same_wishes_are_the_same_bytes() -> None:
    one, _ = conda("dependencies:\n  - python=3.12  # ours\n  - numpy\n")
    two, _ = conda("name: other\ndependencies:\n- python=3.12\n- numpy\n- numpy\n")
    assert one.render() == two.render()


@pytest.mark.parametrize(
    "spec",
    [
        "python", "python=3.10", "Python >=3.10,<4", "conda-forge::python=3.10.4=h807b86f_5",
        "python[version='>=3.10',build=*cpython*]",
    ],
)  # fmt: skip
def test_a_python_of_its_own_is_not_asked_for_again(spec: str) -> None:
    found, _ = conda(f'dependencies: ["{spec}"]\n')
    assert json.loads(found.render())["dependencies"] == [spec]


@pytest.mark.parametrize("spec", ["=1", "", "python-dateutil", "{npm: [left-pad]}", "[numpy]"])
def test_conda_judges_each_other_entry(spec: str) -> None:
    found, mistakes = conda(f"nmae: x\nchannels: conda-forge\ndependencies: [{spec or repr('')}]\n")
    assert mistakes == []
    table = json.loads(found.render())
    assert (table["nmae"], table["channels"]) == ("x", "conda-forge")
    assert len(table["dependencies"]) == 2 and table["dependencies"][1] == "python=3.11"
    assert found.pip_equivalent() is None


@pytest.mark.parametrize(
    ("dependencies", "by_pip"),
    [
        ("[python=3.12, pip]", ("", "3.12")),
        ("[python==3.10.4]", ("", "3.10")),
        ("[python]", ("", "3.11")),
        ("['python>=3.10']", None),
        ("[numpy]", None),
        ("[python=3]", None),
        ("[python=3.12, setuptools, pip=23.3]", ("", "3.12")),
        ("[python=3.12, setuptools=58]", None),
    ],
)
def test_pip_is_enough_where_conda_has_only_the_python(
    dependencies: str, by_pip: tuple[str, str] | None
) -> None:
    assert conda(f"dependencies: {dependencies}\n")[0].pip_equivalent() == by_pip


def test_all_mistakes_of_pip_lines_are_reported_at_once() -> None:
    _, mistakes = conda("dependencies:\n- pip:\n  - -r none.txt\n  - six\n  - -r ../up.txt\n")
    assert mistakes == [
        "environment.yml: pip -> none.txt: is not in the folder.",
        "environment.yml: pip:3: ../up.txt is outside the folder.",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "- numpy\n", "numpy\n", "dependencies:\n", "a: |\n  b\n",
     "variables:\n  A: b\ndependencies: [numpy]\n"],
)  # fmt: skip
def test_a_file_that_is_none_is_one_mistake(text: str) -> None:
    _, (mistake,) = conda(text)
    assert mistake.startswith("environment.yml: ")
    assert ("[env] of job.toml" in mistake) == ("variables" in text)


# --- a process's environment --------------------------------------------------------------------


def image_of(tmp_path: Path, files: dict[str, str]) -> LocalImage:
    job = tmp_path / "vision"
    job.mkdir()
    for name, text in files.items():
        (job / name).write_text(text)
    source = find_source(".", [shipped_folder("images")], job)
    assert source is not None
    kept = find(tmp_path / "images", publish_recipe(tmp_path / "images", source.recipe()))
    assert kept is not None
    return kept


def tool(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_the_tool_of_conda_that_is_there_makes_it(tmp_path: Path) -> None:
    image = image_of(tmp_path, {"environment.yml": "dependencies: [python=3.12, numpy]\n"})
    tools = tmp_path / "bin"
    tool(tools, "conda")
    assert _plan_environment(image, {"PATH": str(tools)}).maker == str(tools / "conda")
    tool(tools, "micromamba")
    way = _plan_environment(image, {"PATH": str(tools)})
    assert (way.maker, way.file.name, way.variable) == (
        str(tools / "micromamba"),
        "environment.yml",
        "CONDA_PREFIX",
    )
    assert way.label.startswith("vision-")


def test_without_one_pip_makes_what_pip_can_have(tmp_path: Path) -> None:
    image = image_of(tmp_path, {"environment.yml": "dependencies: [python=3.11, pip]\n"})
    way = _plan_environment(image, {"PATH": ""})
    assert (way.file.name, way.variable) == ("requirements.txt", "VIRTUAL_ENV")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"environment.yml": "dependencies: [numpy]\n"}, "no micromamba, mamba or conda is on"),
        ({"Dockerfile": "FROM debian:12\n"}, "is made by a Dockerfile"),
        ({"requirements.txt": "", ".python-version": "3.99\n"}, "no python3.99 is on the PATH"),
    ],
)
def test_what_a_process_cannot_have_says_what_to_do(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    with pytest.raises(RunnerSpecError, match=says) as caught:
        _plan_environment(image_of(tmp_path, files), {"PATH": ""})
    assert "Docker" in str(caught.value)
    assert len(str(caught.value)) <= 255, "AWS Batch keeps no longer reason"


def test_an_environment_serves_all_images_that_are_made_of_the_same(tmp_path: Path) -> None:
    assert _target(tmp_path, "b-0123") == tmp_path / "b-0123"
    for label in ("a-0123", "c-4567"):
        tool(tmp_path / label / "bin", "python")
        assert _target(tmp_path, "b-0123") == tmp_path / "b-0123", "it is being made"
    (tmp_path / "a-0123" / ".complete").write_text(f"{tmp_path.resolve() / 'a-0123'}\n")
    assert _target(tmp_path, "b-0123") == tmp_path / "a-0123"
    assert _target(tmp_path, "b-4567") == tmp_path / "b-4567"


def test_the_host_needs_no_tool_for_an_image_without_conda(home: Home, tmp_path: Path) -> None:
    image = image_of(tmp_path, {"requirements.txt": "six\n"})
    host = ExecutorHost(home, tmp_path, {"PATH": "/usr/bin"})
    assert _plan_environment(image, host.environ).label == image.label
