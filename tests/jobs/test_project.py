"""The image of a job's own files: which file, what is made of it, and every mistake at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.errors import ConfigError
from batchml.jobs.find import (
    ImageSource,
    find_source,
    load_job,
    named_source,
    unused_files_notice,
)
from batchml.jobs.image_files import read_requirements
from batchml.jobs.own_image import file_kind, image_name
from batchml.local.images import find, publish_recipe
from batchml.model.image import OwnImage, Recipe, is_reference, parse_own_image

BASE = "ARG BASE=python:3.11-slim-bookworm\nFROM ${BASE}\n"


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Two images of one's own: `python`, and `deep` with a flavor for GPUs."""
    below = tmp_path / "images"
    put(below / "python", {"Dockerfile": BASE, "requirements.txt": "# none\n"})
    put(below / "deep", {
        "Dockerfile": f"{BASE}# deep\n", "requirements.txt": "torch==2\n",
        "requirements-cuda.txt": "torch-cuda==2\n",
        "image.toml": "[cuda]\nbase = 'nvidia/cuda:1'\n",
    })  # fmt: skip
    return [below]


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def made(images: list[Path], job: Path, image: str = ".", flavor: str = "cpu") -> Recipe:
    source = find_source(image, images, job)
    assert source is not None
    return source.recipe(flavor)


def text(recipe: Recipe, name: str) -> str:
    return dict(recipe.files)[name].decode()


def mistakes(images: list[Path], job: Path, image: str = ".") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        made(images, job, image)
    return caught.value.mistakes


# --- what `image` says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (".", OwnImage()),
        ("./", OwnImage()),
        ("./gpu.yml", OwnImage("gpu.yml")),
        ("deep + requirements.txt", OwnImage("requirements.txt", "deep")),
        ("deep+./env/more.txt", OwnImage("env/more.txt", "deep")),
        ("pytorch", None),
        ("docker.io/library/python:3.12", None),
        ("public.ecr.aws/x/y@sha256:0", None),
    ],
)
def test_an_image_says_a_file_a_name_or_a_reference(image: str, word: OwnImage | None) -> None:
    assert parse_own_image(image) == word
    assert is_reference(image) == ("/" in image and word is None)


def test_files_are_known_by_their_names() -> None:
    kinds = {
        "requirements.txt": "requirements.txt", "a/gpu.txt": "requirements.txt",
        "environment.yml": "environment.yml", "gpu.yaml": "environment.yml",
        "Dockerfile": "Dockerfile", "Dockerfile.gpu": "Dockerfile", "gpu.Dockerfile": "Dockerfile",
        "job.toml": "", "pyproject.toml": "",
    }  # fmt: skip
    assert {name: file_kind(name) for name in kinds} == kinds


def test_a_name_is_one_that_registries_take() -> None:
    names = ("lenet", "My Job_2", "übung--3", "x", "...")
    assert [image_name(each) for each in names] == ["lenet", "my-job-2", "bung-3", "job-x", "job"]


# --- which file ---------------------------------------------------------------------------------

REQUIREMENTS = {"requirements.txt": "six==1\n"}
CONDA = {"environment.yml": "dependencies:\n- python=3.12\n- pip:\n  - six==1\n"}
DOCKER = {"Dockerfile": "FROM debian:12\n"}


def test_a_job_without_image_is_made_of_its_folders_file(
    images: list[Path], tmp_path: Path
) -> None:
    job = put(tmp_path / "My Job", {"job.toml": 'command = ["true"]\n', **REQUIREMENTS})
    spec = load_job(job, images)
    assert spec.image == "."
    assert made(images, job, spec.image).name == "my-job"


def test_without_a_file_an_image_is_missing(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", {"job.toml": 'command = ["true"]\n'})
    with pytest.raises(ConfigError, match=r"image: missing.*requirements\.txt beside"):
        load_job(job, images)
    assert mistakes(images, job) == (
        "image: the folder has none of requirements.txt, environment.yml, environment.yaml, "
        "Dockerfile.",
    )


def test_of_two_one_must_be_chosen_unless_one_names_the_other(
    images: list[Path], tmp_path: Path
) -> None:
    job = put(tmp_path / "job", {**REQUIREMENTS, **CONDA})
    (told,) = mistakes(images, job)
    assert 'image = "./requirements.txt" or image = "./environment.yml"' in told
    assert "six" in text(made(images, job, "./requirements.txt"), "requirements.txt")
    assert "environment.yml" in dict(made(images, job, "./environment.yml").files)
    put(job, {"environment.yml": "dependencies:\n- pip:\n  - -r requirements.txt\n"})
    assert '"six==1"' in text(made(images, job), "environment.yml")
    put(job, {"Dockerfile": "FROM x:1\n# requirements.txt\nCOPY environment.yml /\n"})
    assert text(made(images, job), "Dockerfile").startswith("FROM x:1")


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("./requirments.txt", "has no requirments.txt. Did you mean 'requirements.txt'?"),
        ("./../other/requirements.txt", "is not in the job's folder"),
        ("./train.py", "train.py is none of requirements.txt"),
        ("deep + Dockerfile", "only a requirements.txt can be put on top"),
        ("docker.io/library/x:1 + requirements.txt", "not to a reference"),
    ],
)
def test_a_choice_that_cannot_be_made(
    images: list[Path], tmp_path: Path, image: str, says: str
) -> None:
    (told,) = mistakes(images, put(tmp_path / "job", {**REQUIREMENTS, **DOCKER}), image)
    assert says in told


def test_requirements_that_nobody_uses_are_said(tmp_path: Path) -> None:
    job = put(tmp_path / "job", REQUIREMENTS)
    told = unused_files_notice("deep", job)
    assert told.startswith("requirements.txt in the job's folder: not used, the image is deep.")
    assert 'image = "deep + requirements.txt"' in told
    assert unused_files_notice("docker.io/library/x:1", job) == "", "it may be built from them"
    assert unused_files_notice(".", job) == unused_files_notice("deep", tmp_path) == ""


# --- requirements.txt ---------------------------------------------------------------------------


def test_packages_are_put_on_an_image_in_each_flavor(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", REQUIREMENTS)
    plain = made(images, job, "deep + requirements.txt")
    assert (text(plain, "Dockerfile"), text(plain, "requirements.txt")) == (
        f"{BASE}# deep\n",
        "torch==2\nsix==1\n",
    )
    cuda = made(images, job, "deep + requirements.txt", "cuda")
    assert text(cuda, "requirements.txt") == "torch-cuda==2\nsix==1\n"
    assert dict(cuda.args) == {"BASE": "nvidia/cuda:1"}
    put(job, {"requirements-cuda.txt": "six-cuda==1\n"})
    cuda = made(images, job, "deep + requirements.txt", "cuda")
    assert text(cuda, "requirements.txt") == "torch-cuda==2\nsix-cuda==1\n"
    assert made(images, job).has_flavors, "on python too"


def test_what_decides_is_content_not_comments_nor_other_files(
    images: list[Path], tmp_path: Path
) -> None:
    job = put(tmp_path / "job", REQUIREMENTS)
    first = made(images, job).reference
    put(job, {"train.py": "print()\n", "requirements.txt": "# a word\nsix==1   # another\n\n"})
    assert made(images, job).reference == first
    put(job, {"requirements.txt": "six==2\n"})
    second = made(images, job).reference
    put(job, {".python-version": "3.12.4\n"})
    third = made(images, job)
    assert len({first, second, third.reference}) == 3
    assert text(third, "Dockerfile").startswith("ARG BASE=python:3.12-slim-bookworm\n")
    assert text(third, ".python-version") == "3.12\n"


def test_other_files_of_the_folder_are_read_into_it(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", {
        "requirements.txt": "-r env/more.txt\n--extra-index-url https://x.org/simple\nsix==1 \\\n"
        "  --hash=sha256:0\n",
        "env/more.txt": "--requirement=../base.txt\nnumpy>=2  # the newest\n",
        "base.txt": "six2 @ https://x.org/six2-1-py3-none-any.whl#sha256=0\n-e git+https://x.org/y\n",
    })  # fmt: skip
    assert text(made(images, job), "requirements.txt").splitlines() == [
        "# none",
        "six2 @ https://x.org/six2-1-py3-none-any.whl#sha256=0",
        "-e git+https://x.org/y",
        "numpy>=2",
        "--extra-index-url https://x.org/simple",
        "six==1 --hash=sha256:0",
    ]


def test_every_mistake_of_the_files_is_told_at_once(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", {
        "requirements.txt": "six\n-r none.txt\n-r ../out.txt\n-r requirements.txt\n-r /etc/x.txt\n",
        ".python-version": "pypy3\n",
    })  # fmt: skip
    told = mistakes(images, job)
    assert [each.split(": ")[0] for each in told[:-1]] == [
        "requirements.txt -> none.txt", "requirements.txt:3", "requirements.txt:4",
        "requirements.txt:5",
    ]  # fmt: skip
    assert told[-1].startswith(".python-version: found 'pypy3'")


@pytest.mark.parametrize(
    "line",
    [
        "-e .", "./wheels/x.whl", "-c pins.txt", "--find-links='my wheels'", "numpy @ file:///work",
        "mine @ git+https://${TOKEN}@x.org/mine", "-r https://x.org/more.txt",
        "six==1 --hash=sha256:0", "a[b, c] >=1, <2.* ; python_version > '3'", "a (>=1,<2)",
        "torch==2.1.0+cpu", "x-1.tar.gz", "a===odd~version",
    ],
)  # fmt: skip
def test_pip_judges_each_other_line(line: str) -> None:
    found = read_requirements("a.txt", {"a.txt": f"six\n{line}  # why\n"}.get)
    assert (found.lines, found.mistakes) == (("six", line), ())


@pytest.mark.parametrize(
    ("line", "better"),
    [
        ("pandas=2", "Did you mean 'pandas==2'?"),
        ("pandas => 2", "Did you mean 'pandas >= 2'?"),
        ("pandas[x] 2", "Did you mean 'pandas[x]==2'?"),
        ("pandas>=2 <3", "Did you mean 'pandas>=2,<3'?"),
        ("no requirement", "such as 'pandas==2.2'."),
        ("pandas==", "such as 'pandas==2.2'."),
    ],
)
def test_what_pip_cannot_read_is_refused_with_its_own_file_and_line(line: str, better: str) -> None:
    files = {"a.txt": "six\n\n-r b.txt\n", "b.txt": f"# why\n{line} # here\n"}
    (told,) = read_requirements("a.txt", files.get).mistakes
    assert told.startswith(f"b.txt:2: {line!r} is no requirement that pip can read")
    assert told.endswith(better)


def test_a_file_may_be_written_on_windows(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", REQUIREMENTS)
    plain = made(images, job).reference
    for encoding in ("utf-8-sig", "utf-16"):
        (job / "requirements.txt").write_bytes("# ö\r\nsix==1\r\n".encode(encoding))
        assert made(images, job).reference == plain
    (job / "requirements.txt").write_bytes(b"six # \xf6\n")
    assert mistakes(images, job) == ("requirements.txt: is not UTF-8.",)


def test_a_process_has_the_packages_beside_a_dockerfile(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", {
        **DOCKER, "requirements.txt": "-r more.txt\nsix==1 # one\n", "more.txt": "numpy\n",
    })  # fmt: skip
    assert text(made(images, job, "./Dockerfile"), "requirements.txt") == "numpy\nsix==1\n"
    put(job, {"requirements.txt": "-r none.txt\n"})
    assert "requirements.txt" not in dict(made(images, job, "./Dockerfile").files)
    put(job, {"Dockerfile": "FROM x:1\nCOPY requirements.txt /\n"})
    assert text(made(images, job), "requirements.txt") == "-r none.txt\n", "as it is copied"


def test_a_python_of_its_own_takes_no_version(images: list[Path], tmp_path: Path) -> None:
    put(images[0] / "cuda", {"Dockerfile": "FROM nvidia/cuda:1\n", "requirements.txt": ""})
    job = put(tmp_path / "job", {**REQUIREMENTS, ".python-version": "3.12\n"})
    (told,) = mistakes(images, job, "cuda + requirements.txt")
    assert told.startswith(".python-version: the image cuda does not start from an image of Python")


def test_a_file_may_be_named_by_two(tmp_path: Path) -> None:
    files = {"a.txt": "-r b.txt\n-r c.txt\n", "b.txt": "-r d.txt\n", "c.txt": "-r d.txt\n",
             "d.txt": "six\n"}  # fmt: skip
    assert read_requirements("a.txt", files.get).lines == ("six",)


# --- as a person names it -----------------------------------------------------------------------


def test_an_image_is_pushed_by_the_name_of_its_job_its_folder_or_its_word(
    images: list[Path], tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    mine = put(jobs / "mine", {"job.toml": 'command = ["true"]\n', **REQUIREMENTS})
    two = put(jobs / "two", {
        "job.toml": 'image = "./environment.yml"\ncommand = ["true"]\n', **REQUIREMENTS, **CONDA,
    })  # fmt: skip

    def named(name: str, here: Path = tmp_path) -> ImageSource | None:
        return named_source(name, images, [jobs], here)

    for name, here in (("mine", tmp_path), ("jobs/mine", tmp_path), (".", mine), (str(mine), jobs)):
        found = named(name, here)
        assert found is not None
        assert (found.folder.resolve(), found.file) == (mine, "requirements.txt")
    found = named("two")
    assert found is not None
    assert (found.file, found.push_argument(tmp_path), found.push_argument(two)) == (
        "environment.yml",
        "jobs/two",
        "./environment.yml",
    )
    found = named("deep + requirements.txt", mine)
    assert found is not None
    assert found.base == images[0] / "deep"
    assert named("deep") == ImageSource(images[0] / "deep")
    assert named("docker.io/library/x:1") is None


# --- kept for the embedded server ---------------------------------------------------------------


def test_the_server_gets_the_very_image_that_is_built(images: list[Path], tmp_path: Path) -> None:
    job = put(tmp_path / "job", {
        "Dockerfile": "FROM x:1\nCOPY run.sh bin/ /\n", "run.sh": "#!/bin/sh\n", "bin/a": "a\n",
        "b": "b\n",
    })  # fmt: skip
    (job / "run.sh").chmod(0o755)
    recipe = made(images, job)
    kept = find(tmp_path / "kept", publish_recipe(tmp_path / "kept", recipe))
    assert kept is not None
    assert {
        path.relative_to(kept.folder).as_posix(): path.read_bytes()
        for path in kept.folder.rglob("*") if path.is_file()
    } == dict(recipe.files)  # fmt: skip
    assert "b" not in dict(recipe.files)
    modes = [(kept.folder / name).stat().st_mode & 0o100 for name in ("run.sh", "bin/a")]
    assert modes == [0o100, 0]
    before = recipe.tag
    (job / "run.sh").chmod(0o644)
    assert made(images, job).tag != before


LINES = st.sampled_from(
    ["six==1", "-r a.txt", "-r b.txt", "-e .", "-c c.txt", "# word", "x @ file:///y", "numpy \\",
     "--hash=sha256:0", "", "-r ../up.txt", "./z.whl", "--requirement=b.txt"]
)  # fmt: skip


@given(st.lists(LINES, max_size=8), st.lists(LINES, max_size=8))
def test_any_two_files_are_read_to_an_end_and_include_no_other(
    one: list[str], two: list[str]
) -> None:
    files = {"a.txt": "\n".join(one), "b.txt": "\n".join(two)}
    found = read_requirements("a.txt", files.get)
    assert not any(line.startswith(("-r", "--requirement")) for line in found.lines)
    again = read_requirements("a.txt", {"a.txt": found.text}.get)
    assert again.lines == found.lines
    assert all("that pip can read" in each for each in again.mistakes)  # "numpy \\" joins lines
