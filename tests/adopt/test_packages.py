"""The packages of a program, and the image that has them."""

import sys

import pytest

from batchml.adopt.packages import Package, ask_python, choose_image, find_packages

IMAGES = {
    "pytorch": "torch==2.13.0\nnumpy==2.4.6\n",
    "nlp": "torch==2.13.0\nnumpy==2.4.6\ntransformers==5.0\n",
    "notebook": "jupyterlab==4\ntorch==2.13.0\n",
    "python": "# nothing\n",
}


def test_packages_have_the_names_and_versions_of_the_users_python() -> None:
    found = find_packages(
        ["sklearn", "wandb", "my_model", "cv2"], frozenset(["wandb", "cv2"]),
        {"sklearn": Package("scikit-learn", "1.9.1"), "cv2": Package("opencv-python", "4.1+cpu")},
    )  # fmt: skip
    assert [each.requirement for each in found] == [
        "my-model", "opencv-python==4.1", "scikit-learn==1.9.1"
    ]  # fmt: skip


def test_a_python_says_which_packages_it_has() -> None:
    assert ask_python(sys.executable, ["pytest", "no_such_module"]).keys() == {"pytest"}
    assert ask_python("/no/python", ["pytest"]) == {}


@pytest.mark.parametrize(
    ("packages", "image", "requirements"),
    [
        ([], "python", ()),
        ([Package("torch", "2.13.0+cpu")], "pytorch", ()),
        ([Package("torch"), Package("transformers")], "nlp", ()),
        ([Package("torch"), Package("tqdm", "4.1")], "pytorch + requirements.txt", ("tqdm==4.1",)),
        ([Package("torch", "2.4.0")], ".", ("torch==2.4.0",)),  # the user's version counts
        ([Package("numpy", "2.4.6")], ".", ("numpy==2.4.6",)),  # torch would be for nothing
    ],
)
def test_the_image_that_is_chosen(
    packages: list[Package], image: str, requirements: tuple[str, ...]
) -> None:
    chosen = choose_image(packages, {}, IMAGES)
    assert (chosen.image, chosen.requirements) == (image, requirements)


def test_packages_without_a_version_are_named() -> None:
    chosen = choose_image([Package("numpy"), Package("tqdm", "4.1")], {}, IMAGES)
    assert chosen.describe_unpinned() == (
        "numpy has no version in requirements.txt, since your python does not have it: the newest "
        "is installed."
    )
    both = choose_image([Package("numpy"), Package("tqdm")], {}, IMAGES).describe_unpinned()
    assert both.startswith("numpy, tqdm have no versions") and "have them" in both
    assert choose_image([Package("numpy", "2.4.6")], {}, IMAGES).describe_unpinned() == ""


def test_files_of_the_folder_decide_and_what_they_lack_is_named() -> None:
    files = {"requirements.txt": "scikit_learn>=1\nnumpy\n"}
    chosen = choose_image([Package("scikit-learn"), Package("tqdm")], files, IMAGES)
    assert (chosen.image, chosen.requirements) == (".", ())
    assert chosen.why == "from requirements.txt, which does not name tqdm"
    both = choose_image([], {**files, "Dockerfile": "FROM x"}, IMAGES)
    assert both.image == "./requirements.txt"
