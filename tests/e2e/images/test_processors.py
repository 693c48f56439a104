"""Images of several processors, in the engine and in ECR."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchml.errors import ImageError
from batchml.jobs.images import pinned_recipe
from tests.support.executor_rig import PROCESSOR, docker
from tests.support.image_rig import OTHER, Rig, processor_in_engine, recipe_of
from tests.support.registry_rig import Answer


def test_each_processor_has_an_image_and_a_tag_of_its_own(rig: Rig) -> None:
    rows = [rig.push(processor) for processor in (PROCESSOR, OTHER)]
    assert [row.tag.rpartition("-")[2] for row in rows] == [PROCESSOR, OTHER]
    assert [row.pushed for row in rows] == [True, True]
    assert rows[0].digest != rows[1].digest
    for row, processor in zip(rows, (PROCESSOR, OTHER), strict=True):
        assert processor_in_engine(f"{rig.repository}:{row.tag}") == processor
        assert rig.registry.configuration(rig.repository, row.tag)["architecture"] == processor
        assert not rig.push(processor).pushed, "it is there"
    session = rig.registry.session()
    pinned = [
        pinned_recipe(session, recipe_of(rig.folder, each), "x") for each in (PROCESSOR, OTHER)
    ]
    assert pinned == [row.reference for row in rows]


def test_an_image_of_another_processor_in_the_engine_is_built_again(rig: Rig) -> None:
    wrong = rig.build(OTHER)
    wanted = recipe_of(rig.folder).reference
    docker("image", "tag", wrong.reference, wanted)
    assert processor_in_engine(wanted) == OTHER
    assert rig.build().built
    assert processor_in_engine(wanted) == PROCESSOR


@pytest.mark.parametrize("form", ["image", "index"])
def test_an_image_of_another_processor_in_ecr_is_refused(rig: Rig, form: str) -> None:
    other = rig.push(OTHER)
    tag = recipe_of(rig.folder).tag
    rig.registry.put_copy(rig.repository, other.tag, tag, [OTHER] if form == "index" else [])
    rig.registry.requests.clear()
    with pytest.raises(ImageError) as refused:
        rig.push()
    text = str(refused.value)
    assert f"{rig.repository}:{tag} in ECR is an image for {OTHER}, not for {PROCESSOR}" in text
    assert (
        f"batch-delete-image --repository-name {rig.repository} --image-ids imageTag={tag}" in text
    )
    assert rig.registry.writes() == []


def test_an_image_index_with_the_processor_is_there(rig: Rig) -> None:
    other = rig.push(OTHER)
    tag = recipe_of(rig.folder).tag
    rig.registry.put_copy(rig.repository, other.tag, tag, [OTHER, PROCESSOR])
    assert not rig.push().pushed


def test_someone_elses_image_of_another_processor_is_refused(rig: Rig) -> None:
    """Another client was faster, and its image has the tag but not the processor."""
    other = rig.push(OTHER)
    tag = recipe_of(rig.folder).tag
    words = "The image tag already exists: the repository is immutable."

    def fault(method: str, path: str) -> Answer | None:
        if method != "PUT" or not path.endswith(tag):
            return None
        rig.registry.put_copy(rig.repository, other.tag, tag)
        return Answer(400, "TAG_INVALID", words)

    rig.registry.fault = fault
    with pytest.raises(ImageError, match=f"is an image for {OTHER}"):
        rig.push()


@contextmanager
def base_of_other_processor(rig: Rig, folder: Path) -> Iterator[str]:
    """A base image in the engine, with a shell that this machine cannot run."""
    name = f"batchml-test/{rig.folder.name}:1"
    made = folder / "base"
    made.mkdir()
    header = bytes.fromhex("7f454c460201010000000000000000000200")
    machine = {"amd64": b"\x3e\x00", "arm64": b"\xb7\x00"}[OTHER]
    (made / "sh").write_bytes(header + machine + bytes(44))
    (made / "sh").chmod(0o755)
    (made / "Dockerfile").write_text("FROM scratch\nCOPY sh /bin/sh\n")
    built = docker("build", "--no-cache", "--platform", f"linux/{OTHER}", "-t", name, str(made))
    assert built.returncode == 0, built.stdout + built.stderr
    try:
        assert processor_in_engine(name) == OTHER
        yield name
    finally:
        docker("image", "rm", "-f", name)


def test_a_base_image_of_another_processor_gives_no_image(rig: Rig, tmp_path: Path) -> None:
    with base_of_other_processor(rig, tmp_path) as base:
        (rig.folder / "Dockerfile").write_text(f"FROM {base}\nCOPY requirements.txt /one\n")
        with pytest.raises(ImageError) as failed:
            rig.push()
    # Newer engines look for the base image of this processor in the registry.
    is_old = f"was built for {OTHER}, not for {PROCESSOR}" in str(failed.value)
    assert is_old or base in str(failed.value)
    assert not is_old or f"docker pull --platform linux/{PROCESSOR} {base}" in str(failed.value)
    assert rig.engine.find(recipe_of(rig.folder).reference) is None
    assert rig.there() is None


def test_an_engine_without_emulation_says_how_to_get_it(rig: Rig, tmp_path: Path) -> None:
    with base_of_other_processor(rig, tmp_path) as base:
        (rig.folder / "Dockerfile").write_text(f"FROM {base}\nRUN true\n")
        with pytest.raises(ImageError) as failed:
            rig.build(OTHER)
    assert str(failed.value).count("\n") == 0
    assert "at 'Step 2/2 : RUN true'" in str(failed.value)
    assert f"docker run --privileged --rm tonistiigi/binfmt --install {OTHER}" in str(failed.value)
    assert "Docker Desktop" in str(failed.value)
