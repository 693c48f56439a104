"""What names an image: its content, all of it, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.errors import ConfigError
from batchml.jobs.find import ImageSource, own_image_files
from batchml.jobs.images import ImageVariant, read_recipes, variants_of
from batchml.jobs.own_image import OWN_IMAGE_FILES
from batchml.local.home import Home
from batchml.local.images import find, publish
from batchml.model.environment import Compute, Environment
from batchml.model.image import (
    DOCKERFILE,
    PROCESSORS,
    REQUIREMENTS,
    flavor_for,
    has_cuda,
    is_pinned,
    make_recipe,
    parse_reference,
)
from batchml.resources import shipped_folder
from batchml.runtime.package import sources
from tests.support.ami import data, template

FOLDER = {
    "Dockerfile": b"FROM scratch\n",
    "requirements.txt": b"torch==1\n",
    "requirements-cuda.txt": b"torch-cuda==1\n",
    ".python-version": b"3.11\n",
    "image.toml": b'[cuda]\nbase = "nvidia/cuda:1"\nbuild_args = { A = "b" }\n',
}
RUNTIME = {"batchml/__init__.py": b"", "batchml/runtime/run.py": b"go()\n"}
BOTH = [ImageVariant("cpu"), ImageVariant("cuda")]
PLAIN = {name: FOLDER[name] for name in ("Dockerfile", "requirements.txt")}


def tag(folder: dict[str, bytes] = FOLDER, flavor: str = "cpu", **more: object) -> str:
    return make_recipe("x", folder, RUNTIME, flavor, **more).tag  # type: ignore[arg-type]


def test_whatever_decides_the_image_decides_its_tag() -> None:
    changed = [
        *(tag({**FOLDER, name: b"# other\n"}) for name in
          ("Dockerfile", "requirements.txt", ".python-version")),
        *(make_recipe("x", FOLDER, {**RUNTIME, name: b"1"}).tag for name in RUNTIME),
        make_recipe("x", FOLDER, {**RUNTIME, "batchml/runtime/new.py": b""}).tag,
        tag(base="debian:12"),
        tag(base="debian:13"),
        tag(build_args={"A": "b"}),
        tag(build_args={"A": "c"}),
        tag(build_args={"B": "b"}),
        tag(flavor="cuda"),
        tag({**FOLDER, "requirements-cuda.txt": b"torch-cuda==2\n"}, "cuda"),
        tag({**FOLDER, "image.toml": b'[cuda]\nbase = "nvidia/cuda:2"\n'}, "cuda"),
    ]  # fmt: skip
    assert len({tag(), *changed}) == len(changed) + 1


def test_what_does_not_decide_it_does_not_change_it() -> None:
    assert tag({**FOLDER, "README.md": b"x"}) == tag()
    assert tag({**FOLDER, "requirements-cuda.txt": b"x"}) == tag(), "another flavor's"
    assert tag(dict(reversed(FOLDER.items()))) == tag()
    assert tag(build_args={"A": "1", "B": "2"}) == tag(build_args={"B": "2", "A": "1"})


def test_an_image_without_anything_for_cuda_is_the_same_in_both_flavors() -> None:
    assert not has_cuda(PLAIN)
    assert make_recipe("x", PLAIN, RUNTIME, "cuda") == make_recipe("x", PLAIN, RUNTIME, "cpu")


def test_the_flavor_cuda_has_its_own_requirements_base_and_arguments() -> None:
    made = make_recipe("x", FOLDER, RUNTIME, "cuda")
    files = dict(made.files)
    assert files["requirements.txt"] == b"torch-cuda==1\n"
    assert set(files) == {"Dockerfile", "requirements.txt", ".python-version", *RUNTIME}
    assert dict(made.args) == {"BASE": "nvidia/cuda:1", "A": "b"}
    given_base = make_recipe(
        "x", FOLDER, RUNTIME, "cuda", base="ubuntu:24.04", build_args={"A": "c"}
    )
    assert dict(given_base.args) == {"BASE": "ubuntu:24.04", "A": "c"}
    assert make_recipe("x", FOLDER, RUNTIME).args == ()


Files = st.dictionaries(st.sampled_from(sorted(PLAIN)), st.binary(max_size=20))
Args = st.dictionaries(st.text("AB=", min_size=1, max_size=3), st.text("ab=,'", max_size=3))


@given(Files, Args, Files, Args)
def test_two_recipes_share_a_tag_only_if_they_are_one(
    files: dict[str, bytes], args: dict[str, str], others: dict[str, bytes], more: dict[str, str]
) -> None:
    one = make_recipe("x", files, RUNTIME, build_args=args)
    other = make_recipe("x", others, RUNTIME, build_args=more)
    assert (one.tag == other.tag) == ((files, args) == (others, more))
    assert parse_reference(one.reference) == ("x", one.tag, "")


@pytest.mark.parametrize(
    ("reference_", "pinned"),
    [
        ("debian", False), ("debian:latest", False), ("host:5000/debian", False),
        ("a/b:latest", False), ("debian:", False), ("debian@sha256:12", False),
        ("debian:bookworm-slim", True), ("host:5000/a/b:1", True), ("d@sha256:" + "0" * 64, True),
        ("d:latest@sha256:" + "0" * 64, True),
    ],
)  # fmt: skip
def test_a_base_is_named_so_that_it_stays(reference_: str, pinned: bool) -> None:
    assert is_pinned(reference_) is pinned


def test_every_mistake_is_told_at_once() -> None:
    folder = {**FOLDER, "image.toml": b'[cuda]\nbase = "nvidia/cuda"\n[cpu]\n'}
    with pytest.raises(ConfigError) as failed:
        make_recipe("Not_A__Name", folder, RUNTIME, "cuda", base="debian", build_args={"BASE": "x"})
    found = "\n".join(failed.value.mistakes)
    for part in ("cpu: unknown key", "cuda.base", "'Not_A__Name'", "--base: found 'debian'",
                 "--build-arg BASE and --base", "--build-arg BASE: found 'x'"):  # fmt: skip
        assert part in found, part
    with pytest.raises(ConfigError, match="not TOML"):
        make_recipe("x", {**PLAIN, "image.toml": b"= ="}, RUNTIME)


def test_the_embedded_server_and_the_command_have_one_notion(tmp_path: Path, home: Home) -> None:
    for folder in shipped_folder("images").iterdir():
        wanted = ImageSource(folder).recipe()
        assert wanted.reference == publish(home.images, folder)
        kept = find(home.images, wanted.reference)
        assert kept is not None
        there = {str(p.relative_to(kept.folder)): p for p in kept.folder.rglob("*") if p.is_file()}
        assert {name: path.read_bytes() for name, path in there.items()} == dict(wanted.files)
        assert sources().items() <= dict(wanted.files).items()


def test_a_virtual_environment_outlives_what_only_a_container_has(
    tmp_path: Path, home: Home
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "requirements.txt").write_text("# none\n")
    first = find(home.images, publish(home.images, folder))
    (folder / "Dockerfile").write_text("FROM scratch\n")
    second = find(home.images, publish(home.images, folder))
    (folder / "requirements.txt").write_text("# other\n")
    third = find(home.images, publish(home.images, folder))
    assert first and second and third
    assert first.tag != second.tag
    assert first.label == second.label != third.label


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_processor_is_the_end_of_the_tag(processor: str) -> None:
    one = make_recipe("x", FOLDER, RUNTIME)
    built = one.built_for(processor)
    assert built.tag == f"{one.tag}-{processor}"
    assert built.content == one.content == one.tag
    found = parse_reference(built.reference)
    assert found is not None
    assert (found.name, found.content, found.processor) == ("x", one.tag, processor)
    assert found.tag == built.tag
    assert parse_reference(f"{one.reference}-riscv64") is None


def test_an_environment_gets_the_variants_that_its_jobs_may_need() -> None:
    cpus, gpus, arm = (
        Compute(instance_types=(kind,)) for kind in ("c6i.large", "g5.xlarge", "m7g.large")
    )
    pairs = {name: [(each.flavor, each.processor) for each in found] for name, found in {
        "gpus": variants_of(Environment(compute={"a": cpus, "b": gpus}), "dev"),
        "all": variants_of(Environment(compute={"a": arm, "b": gpus}), "dev"),
        "cuda": variants_of(Environment(compute={"a": arm, "b": gpus}), "dev", "cuda"),
        "cuda without GPUs": variants_of(Environment(compute={"a": arm}), "dev", "cuda"),
        "Arm": variants_of(Environment(compute={"a": arm}), "dev"),
        "none": variants_of(Environment(), "dev"),
        "local": variants_of(Environment(compute={"a": arm, "b": gpus}), "local"),
        "cuda on local": variants_of(Environment(), "local", "cuda"),
    }.items()}  # fmt: skip
    assert pairs == {
        "gpus": [("cpu", "amd64"), ("cuda", "amd64")],
        "all": [("cpu", "amd64"), ("cpu", "arm64"), ("cuda", "amd64")],
        "cuda": [("cuda", "amd64")],
        "cuda without GPUs": [("cuda", "arm64")],
        "Arm": [("cpu", "arm64")],
        "none": [("cpu", "amd64")],
        "local": [("cpu", "")],
        "cuda on local": [("cuda", "")],
    }
    assert (flavor_for(0), flavor_for(2)) == ("cpu", "cuda")


def test_the_shipped_images_come_in_these_flavors() -> None:
    folders = sorted(shipped_folder("images").iterdir())
    found = [(one.name, one.flavor) for one in read_recipes(map(ImageSource, folders), BOTH)]
    assert found == [
        ("controller", "cpu"), ("mxnet", "cpu"), ("mxnet", "cuda"), ("nlp", "cpu"),
        ("nlp", "cuda"), ("notebook", "cpu"), ("python", "cpu"), ("pytorch", "cpu"),
        ("pytorch", "cuda"), ("ray", "cpu"), ("tensorboard", "cpu"),
    ]  # fmt: skip
    (mxnet,) = (
        one
        for one in read_recipes(map(ImageSource, folders), [ImageVariant("cuda")])
        if one.name == "mxnet"
    )
    assert dict(mxnet.args)["BASE"].startswith("nvidia/cuda:11.2")
    assert b"mxnet-cu112==" in dict(mxnet.files)["requirements.txt"]


def test_images_for_gpus_have_the_libraries_of_the_version_of_the_hosts_driver() -> None:
    folders = [shipped_folder("images") / name for name in ("nlp", "pytorch")]
    found = read_recipes(map(ImageSource, folders), BOTH)
    args = {(one.name, one.flavor): dict(one.args) for one in found}
    assert args["nlp", "cpu"] == args["pytorch", "cpu"] == {}
    assert args["nlp", "cuda"] == args["pytorch", "cuda"]
    host = template()["Parameters"]
    assert args["pytorch", "cuda"]["EFA_INSTALLER"] == host["EfaVersion"]["Default"]
    assert args["pytorch", "cuda"]["EFA_LIBRARIES"].startswith("/opt/amazon/ofi-nccl/lib")
    build = dict(found[0].files)["Dockerfile"].decode()
    (key,) = set(re.findall(r"\bkey=(\w+)", build))
    assert f"key={key}" in data()["EfaComponent"]
    assert f"EFA_SOURCE={host['EfaSource']['Default']}" in build


def test_the_shipped_dockerfiles_are_as_a_linter_wants_them() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    files = sorted(map(str, shipped_folder("images").glob("*/Dockerfile")))
    found = subprocess.run([hadolint, "--no-color", *files], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_shipped_images_run_as_a_numbered_user_on_bases_that_stay() -> None:
    for one in read_recipes(map(ImageSource, sorted(shipped_folder("images").iterdir())), BOTH):
        lines = dict(one.files)["Dockerfile"].decode().splitlines()
        assert [line for line in lines if line.startswith("USER ")][-1] == "USER 1000:1000"
        bases = [line.partition("=")[2] for line in lines if line.startswith("ARG BASE=")]
        assert all(map(is_pinned, [*bases, *filter(None, [dict(one.args).get("BASE")])]))
        assert len(bases) == 1


def test_the_image_of_controllers_has_all_of_batchml_and_what_that_imports() -> None:
    """What a controller does in AWS is `batchml sweeps attend`; nothing there serves or builds."""
    wanted = ImageSource(shipped_folder("images") / "controller").recipe()
    files = dict(wanted.files)
    assert {"batchml/__main__.py", "batchml/cli/app.py", "batchml/aws/session.py"} <= files.keys()
    assert not any("share/" in name or "__pycache__" in name for name in files)
    named = {line.split("==")[0] for line in files["requirements.txt"].decode().splitlines()
             if not line.startswith("#")}  # fmt: skip
    assert named == {"boto3", "msgspec", "platformdirs", "rich", "typer"}


def test_an_image_without_a_dockerfile_is_for_processes_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "requirements.txt").touch()
    with pytest.raises(ConfigError, match="Dockerfile: missing"):
        read_recipes([ImageSource(tmp_path / "mine")], [ImageVariant("cpu")])


def test_a_file_of_an_image_that_changes_or_appears_makes_another_image(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    source, references = ImageSource(folder), list[str]()
    for name, text in (
        (REQUIREMENTS, "numpy\n"),
        (REQUIREMENTS, "scipy\n"),
        (DOCKERFILE, "FROM python:3.12\n"),
    ):
        (folder / name).write_text(text)
        references.append(source.recipe().reference)
    (folder / DOCKERFILE).unlink()
    references.append(source.recipe().reference)
    assert len(set(references[:3])) == 3
    assert references[3] == references[1]


@pytest.mark.parametrize("name", OWN_IMAGE_FILES)
def test_only_regular_files_are_files_of_an_image(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to(name)
    assert own_image_files(tmp_path) == ()
    path.unlink()
    os.mkfifo(path)
    assert own_image_files(tmp_path) == ()
    path.unlink()
    path.write_text("")
    assert own_image_files(tmp_path) == (name,)
