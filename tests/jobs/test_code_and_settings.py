"""Settings, finding jobs, runs and images, the code archive, fitting and submitting."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.cli.render import duration, printable, table, timestamp
from batchml.config.settings import load_settings
from batchml.errors import ConfigError, NotFound
from batchml.jobs.code import pack
from batchml.jobs.find import find_image, find_job, load_job
from batchml.model.job import JobSpec, Resources
from batchml.runs.fit import Capacity, fit_job
from batchml.runtime.entry.fetch import unpack

# --- settings -------------------------------------------------------------------------------


def test_a_value_comes_from_flag_then_variable_then_file_then_default(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert load_settings({}, below, None).env.source == "default"
    text = 'default = "dev"\n[env.dev]\nregion = "us-east-1"\n[env.prod]\nregion = "eu-west-1"\n'
    (tmp_path / "batchml.toml").write_text(text)
    from_file = load_settings({}, below, None)
    assert (from_file.env.value, from_file.env.source) == ("dev", str(tmp_path / "batchml.toml"))
    from_variable = load_settings({"BATCHML_ENV": "prod"}, below, None)
    assert (from_variable.env.value, from_variable.env.source) == ("prod", "BATCHML_ENV")
    from_flag = load_settings({"BATCHML_ENV": "prod"}, below, "local")
    assert (from_flag.env.value, from_flag.env.source) == ("local", "flag --env")


def test_all_mistakes_of_batchml_toml_are_reported_at_once(tmp_path: Path) -> None:
    text = 'default = "dve"\ncolour = 1\n[env.dev]\nregoin = "x"\n[env.local]\nregion = "y"\n'
    (tmp_path / "batchml.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings({}, tmp_path, None)
    assert len(caught.value.mistakes) == 5
    assert "Did you mean 'region'?" in str(caught.value)
    assert "Did you mean 'dev'?" in str(caught.value)


def test_a_data_folder_is_taken_from_where_the_user_stands(tmp_path: Path) -> None:
    settings = load_settings({"BATCHML_DATA_DIR": "../data"}, tmp_path / "x", None)
    assert settings.data_dir is not None
    assert settings.data_dir.value == str(tmp_path / "data")


# --- jobs and images ------------------------------------------------------------------------


def test_a_job_is_a_folder_or_a_name_looked_up_near_before_far(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for folder in (near / "a", far / "a", far / "b", tmp_path / "c"):
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text('image = "python"\ncommand = ["true"]\n')
    folders = [near, far]
    assert find_job("a", folders, tmp_path) == near / "a"
    assert find_job("b", folders, tmp_path) == far / "b"
    assert find_job("c", folders, tmp_path) == tmp_path / "c"
    assert load_job(tmp_path / "c").name == "c"
    with pytest.raises(NotFound, match="Known: a, b"):
        find_job("d", folders, tmp_path)


@pytest.mark.parametrize("line", ["", 'name = "train"\n'])
def test_the_name_of_the_current_folders_job_leads_to_that_folder(
    tmp_path: Path, line: str
) -> None:
    here = tmp_path / ("other" if line else "train")
    here.mkdir()
    (here / "job.toml").write_text(f'{line}image = "python"\ncommand = ["true"]\n')
    with pytest.raises(NotFound, match=r"The job of this folder is called train: name it '\.'"):
        find_job("train", [], here)
    (here / "job.toml").write_text("not TOML")
    with pytest.raises(NotFound, match=r"Give a folder with a job\.toml"):
        find_job("train", [], here)


def test_what_is_no_job_is_told_how_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "job.toml").write_text('image = "python"\ncommand = ["true"]\n')
    assert find_job("./train/job.toml", [], tmp_path) == tmp_path / "train"
    assert find_job("job.toml", [], tmp_path / "train") == tmp_path / "train"
    with pytest.raises(NotFound, match="Did you mean 'train'"):
        find_job("trian", [], tmp_path)
    for name, command in (("a.py", "python a.py"), ("b c.sh", "bash 'b c.sh'"), ("x", "./x")):
        (tmp_path / name).touch()
        with pytest.raises(NotFound) as caught:
            find_job(name, [], tmp_path)
        assert str(caught.value).endswith(f"As a command: batchml submit -- {command}")


def test_an_unknown_image_is_reported_with_the_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "requirements.txt").touch()
    (tmp_path / "job.toml").write_text('image = "pyton"\ncommand = [""]\n')
    with pytest.raises(ConfigError) as caught:
        load_job(tmp_path, [tmp_path])
    assert len(caught.value.mistakes) == 2
    assert "Did you mean 'python'?" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_job(tmp_path)
    assert len(caught.value.mistakes) == 1


def test_an_image_is_a_folder_or_a_reference_but_never_a_misspelling(tmp_path: Path) -> None:
    (tmp_path / "pytorch").mkdir()
    (tmp_path / "pytorch" / "requirements.txt").write_text("")
    assert find_image("pytorch", [tmp_path]) == tmp_path / "pytorch"
    assert find_image("docker.io/library/python:3.12", [tmp_path]) is None
    with pytest.raises(NotFound, match="Did you mean 'pytorch'"):
        find_image("pytroch", [tmp_path])


# --- code -----------------------------------------------------------------------------------


def test_code_travels_whole_without_caches_and_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg" / "__pycache__").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "train.py").write_text("print()")
    (source / "run.sh").write_text("#!/bin/sh")
    (source / "run.sh").chmod(0o755)
    (source / "pkg" / "data.bin").write_bytes(bytes(range(256)))
    (source / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"")
    (source / ".git" / "config").write_text("")
    (source / "out").symlink_to("/etc/passwd")
    (source / "in").symlink_to("run.sh")
    archive = pack(source)
    assert archive == pack(source)
    assert archive.left_out == ("out",)
    path = tmp_path / archive.name
    path.write_bytes(archive.data)
    target = tmp_path / "target"
    target.mkdir()
    assert unpack(str(path), str(target)) == 4
    found = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert found == ["in", "pkg/data.bin", "run.sh", "train.py"]
    assert (target / "pkg" / "data.bin").read_bytes() == bytes(range(256))
    assert (target / "run.sh").stat().st_mode & 0o100


def test_the_archives_name_follows_content_not_time(tmp_path: Path) -> None:
    import os

    (tmp_path / "a.py").write_text("1")
    before = pack(tmp_path).name
    os.utime(tmp_path / "a.py", (1, 1))
    assert pack(tmp_path).name == before
    (tmp_path / "a.py").write_text("2")
    assert pack(tmp_path).name != before


def test_a_folder_too_large_to_travel_is_refused_with_its_largest_file(tmp_path: Path) -> None:
    with open(tmp_path / "data.bin", "wb") as file:
        file.truncate(300 * 1024**2)
    with pytest.raises(ConfigError, match=r"data\.bin"):
        pack(tmp_path)


# --- fitting and submitting -----------------------------------------------------------------


@given(st.integers(1, 64), st.integers(4, 10**6), st.integers(0, 16))
def test_a_fitted_job_fits_and_says_each_cut(vcpus: int, memory: int, gpus: int) -> None:
    spec = JobSpec(name="j", resources=Resources(vcpus=vcpus, memory=memory, gpus=gpus))
    fitted = fit_job(spec, Capacity(4, 16_000, 2))
    resources = fitted.spec.resources
    assert (resources.vcpus, resources.memory_mib, resources.gpus) == (
        min(vcpus, 4),
        min(memory, 16_000),
        min(gpus, 2),
    )
    assert len(fitted.cuts) == (vcpus > 4) + (memory > 16_000) + (gpus > 2)


@given(st.integers(1, 12), st.integers(1, 64), st.integers(4, 10**6), st.integers(0, 16))
def test_nodes_fit_all_at_once_or_are_refused(
    nodes: int, vcpus: int, memory: int, gpus: int
) -> None:
    wanted = Resources(vcpus=vcpus, memory=memory, gpus=gpus)
    spec = JobSpec(name="j", nodes=nodes, resources=wanted)
    if nodes > 8:
        with pytest.raises(ConfigError, match=f"batchml local start --vcpus {nodes}"):
            fit_job(spec, Capacity(8, 16_000, 4))
        return
    fitted = fit_job(spec, Capacity(8, 16_000, 4))
    got = fitted.spec.resources
    assert nodes * got.vcpus <= 8
    assert nodes * got.memory_mib <= 16_000
    assert nodes * got.gpu_count <= 4
    assert (got == wanted) == (fitted.cuts == ())
    assert got.vcpus == min(vcpus, 8 // nodes) >= 1
    assert nodes == 1 or all(cut.endswith("on each node") for cut in fitted.cuts)


# --- text -----------------------------------------------------------------------------------


def test_text_forms() -> None:
    assert timestamp(1_763_751_777_076) == "2025-11-21T19:02:57.076Z"
    assert [duration(s) for s in (0, 42.9, 723, 11_100)] == ["0:00", "0:42", "12:03", "3:05:00"]
    assert table([["A", "BB"], ["ccc", ""]]) == "A    BB\nccc"


@given(st.text())
def test_what_goes_to_a_terminal_cannot_control_it(text: str) -> None:
    shown = printable(text)
    assert all(char == "\t" or char.isprintable() for char in shown)


def test_a_progress_bar_shows_its_last_state() -> None:
    assert printable("10%\r50%\r100%\r") == "100%"


def test_the_state_folder_never_travels_with_the_code(tmp_path: Path) -> None:
    (tmp_path / "state" / "local").mkdir(parents=True)
    (tmp_path / "state" / "local" / "keys.json").write_text("{}")
    (tmp_path / "train.py").write_text("")
    assert pack(tmp_path, tmp_path / "state").files == 1
    assert pack(tmp_path).files == 2
