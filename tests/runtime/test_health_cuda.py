"""Whether CUDA starts, with a libcuda.so.1 that was built for this; and what its errors mean."""

import sys
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.health.checks import MONITOR, OK, REPLACE, RETRY
from batchml.runtime.health.cuda import check_cuda, judge_cuda
from batchml.runtime.health.deep import read_results
from tests.support.nvml_fake import build

DRIVER_570 = {"init": 0, "driver": 12080}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda")).parent


def described(folder: Path | None, **environ: str) -> tuple[int, bool, str]:
    # The site is left out, so that the torch of these tests is not the image's.
    isolated = {"PYTHONPATH": "", "LD_LIBRARY_PATH": str(folder or ""), **environ}
    (found,) = check_cuda(isolated, sys.executable)
    return found.severity, found.is_setup, found.describe()


def test_a_driver_that_starts_is_well_even_if_the_job_hides_its_gpus(folder: Path) -> None:
    assert described(folder, CUDA_VISIBLE_DEVICES="") == (OK, False, "CUDA")


def test_a_container_without_the_drivers_library_is_refused(tmp_path: Path) -> None:
    severity, is_setup, text = described(tmp_path)
    assert (severity, is_setup) == (RETRY, True)
    assert text.startswith("CUDA: the container has no driver (libcuda.so.1: cannot open shared")


@pytest.mark.parametrize(
    ("code", "severity", "is_setup", "words"),
    [
        (803, RETRY, True, "of another version than the host's driver"),
        (804, RETRY, True, "compatibility libraries do not support this GPU"),
        (802, RETRY, True, "the fabric manager must run"),
        (100, RETRY, True, "CUDA finds no GPU"),
        (999, RETRY, True, "the driver has failed"),
        (214, REPLACE, False, "an uncorrectable ECC error"),
        (711, RETRY, True, "see the CUDA Driver API"),
    ],
)
def test_each_error_of_the_start_has_its_meaning(
    folder: Path, code: int, severity: int, is_setup: bool, words: str
) -> None:
    found = described(folder, FAKE_CUDA_INIT=str(code))
    assert found[:2] == (severity, is_setup)
    assert found[2].startswith(f"CUDA: cuInit: error {code}: ") and words in found[2]


@pytest.mark.parametrize(
    ("found", "environ", "severity", "words"),
    [
        ({**DRIVER_570, "torch": "13.0"}, {}, RETRY,
         "the image's torch is for CUDA 13, which needs driver 580 or newer; the host's supports "
         "CUDA 12.8"),
        ({**DRIVER_570, "torch": "12.9"}, {}, OK, ""),  # minor versions are compatible
        ({**DRIVER_570, "torch": "12.6"}, {"CUDA_VERSION": "13.0.1"}, OK, ""),
        ({**DRIVER_570, "torch": "99.0"}, {}, RETRY, "needs a newer driver"),
        # The program may bring a CUDA of its own, unless nothing starts.
        (DRIVER_570, {"CUDA_VERSION": "13.0.1"}, MONITOR, "the image is for CUDA 13"),
        ({**DRIVER_570, "init": 3}, {"CUDA_VERSION": "13.0.1"}, RETRY, "the image is for CUDA 13"),
        (DRIVER_570, {"CUDA_VERSION": "latest"}, OK, ""),
        ({}, {}, OK, ""),
    ],
)  # fmt: skip
def test_a_driver_is_compared_with_the_images_cuda(
    found: dict[str, Any], environ: dict[str, str], severity: int, words: str
) -> None:
    result = judge_cuda(found, environ, is_mounted=False)
    assert result.severity == severity and words in result.text
    assert result.is_setup == (severity != OK)


def test_a_mounted_driver_that_the_loader_does_not_search_is_named() -> None:
    found = judge_cuda({"missing": "libcuda.so.1: no such file"}, {}, is_mounted=True)
    assert found.text == "the driver is at /usr/local/nvidia/lib64, which is not in LD_LIBRARY_PATH"


def test_the_version_is_that_of_the_images_torch(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('it is not imported')")
    version = tmp_path / "torch" / "version.py"
    version.write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    text = described(folder, PYTHONPATH=str(tmp_path), FAKE_CUDA_VERSION="12080")[2]
    assert "the image's torch is for CUDA 13" in text
    version.write_text("cuda: Optional[str] = None\n")
    assert described(folder, PYTHONPATH=str(tmp_path), FAKE_CUDA_VERSION="12080")[0] == OK


def test_a_driver_that_never_answers_is_broken_and_a_probe_that_dies_says_nothing(
    tmp_path: Path,
) -> None:
    for script, severity, text in (
        ("sleep 600", REPLACE, "no answer within 0.2 s"),
        ("exit 7", 1, "its check ended with code 7"),
    ):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        limit = 0.2 if severity == REPLACE else 60.0
        assert [(c.severity, c.text) for c in check_cuda({}, str(python), limit)] == [
            (severity, text)
        ]


def test_code_that_was_not_built_for_the_gpu_is_a_fault_of_the_image() -> None:
    told = b'[["cuda:0", "failed", "CUDA error: no kernel image is available for execution"]]'
    assert [(c.severity, c.is_setup) for c in read_results(told, 0)] == [(RETRY, True)]
