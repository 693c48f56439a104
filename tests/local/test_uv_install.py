"""uv gets pip's settings, its progress is read, and pip stands in where it may succeed."""

from pathlib import Path

import pytest

from batchml.local.uv_install import (
    UvProgress,
    install,
    read_pip_settings,
    uv_error,
    uv_settings,
    why_pip,
)
from tests.support.fakes import FakeClock

NO_SOLUTION = [
    "Using Python 3.11.7 environment at: e",
    "error: No solution found when resolving dependencies",
    "cause: Because there is no version of numpy==99.0 and you require numpy==99.0, we can "
    "conclude that your requirements are unsatisfiable.",
    "hint: Packages were unavailable because index lookups were disabled",
]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A user whose configuration files are below `tmp_path`, and no other's."""
    return {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- pip's settings -------------------------------------------------------------------------------


def test_variables_win_over_the_users_file_and_that_over_the_systems(
    environ: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "xdg/pip/pip.conf", "[global]\nindex_url = http://a\ntimeout = 1\nretries = 9")
    write(tmp_path / "home/.config/pip/pip.conf", "[install]\ntimeout = 2\n[global]\ntimeout = 3\n")
    found = read_pip_settings({**environ, "PIP_FIND_LINKS": "/w", "PIP_RETRIES": "4"})
    wanted = {"index-url": "http://a", "timeout": "2", "retries": "4", "find-links": "/w"}
    assert wanted.items() <= found.items()


def test_a_file_that_is_named_stands_in_for_the_users(
    environ: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "home/.pip/pip.conf", "[global]\nproxy = http://mine\n")
    write(tmp_path / "own.conf", "[global]\nindex-url = http://own\n")
    own = read_pip_settings({**environ, "PIP_CONFIG_FILE": str(tmp_path / "own.conf")})
    assert own["index-url"] == "http://own" and "proxy" not in own
    assert read_pip_settings({**environ, "PIP_CONFIG_FILE": "/dev/null"}) == {}


def test_a_file_that_is_no_configuration_is_ignored(
    environ: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "home/.pip/pip.conf", "no section\n")
    assert "no section" not in read_pip_settings(environ)


def test_settings_get_the_names_that_uv_has_for_them() -> None:
    found = uv_settings(
        {
            "index-url": "https://mirror/simple", "extra-index-url": "https://a https://b",
            "find-links": "/wheels\n/more", "cert": "/ca.pem", "trusted-host": "mirror",
            "constraint": "/c.txt", "no-index": "yes", "pre": "1", "only-binary": ":all:",
            "require-hashes": "false", "no-cache-dir": "1", "progress-bar": "off",
        },
        [],
    )  # fmt: skip
    assert found.variables == {
        "UV_DEFAULT_INDEX": "https://mirror/simple", "UV_INDEX": "https://a https://b",
        "UV_FIND_LINKS": "/wheels,/more", "SSL_CERT_FILE": "/ca.pem",
        "UV_INSECURE_HOST": "mirror", "UV_CONSTRAINT": "/c.txt",
    }  # fmt: skip
    assert set(found.flags) == {"--no-index", "--prerelease=allow", "--only-binary=:all:"}
    assert found.has_own_index and not found.needs_pip


@pytest.mark.parametrize(
    "line", ["-i http://x", "--extra-index-url=http://x", "-f w", "--no-index"]
)
def test_a_line_that_names_an_index_keeps_pytorchs_from_being_added(line: str) -> None:
    assert uv_settings({}, ["torch", line]).has_own_index
    assert not uv_settings({}, ["torch"]).has_own_index


def test_options_in_a_file_of_requirements_have_pips_meaning() -> None:
    found = uv_settings(
        {"trusted-host": "a"}, ["--pre", "--trusted-host b", "x==1 --hash=sha256:0"]
    )
    assert found.variables == {"UV_INSECURE_HOST": "a b"}
    assert set(found.flags) == {"--prerelease=allow", "--require-hashes"}
    assert "--frobnicate" in uv_settings({}, ["--frobnicate=1"]).needs_pip
    assert "setting target" in uv_settings({"target": "/x"}, []).needs_pip


# --- progress -------------------------------------------------------------------------------------


class Clock:
    """Tells the time that a test has set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def draw(*bars: tuple[str, str]) -> str:
    """What uv draws while packages arrive: rows without line ends, padded to the terminal."""
    rows = [f"{name}  {'-' * 30} {sizes}".ljust(120) for name, sizes in bars]
    return "\x1b[2K\x1b[1A\u2839 Preparing packages... (2/13)".ljust(120) + "".join(rows) + "\r"


def test_downloads_are_shown_with_sizes_rate_and_time_left() -> None:
    clock = Clock()
    progress = UvProgress(clock)
    assert progress.feed("\u280b Resolving dependencies...\r\x1b[2K\u2819 torch==2.13.0\r") == [
        "finding torch"
    ]
    clock.now += 1
    first = draw(("scipy", "0 B/40.00 MiB"), ("torch", "10.00 MiB/160.00 MiB"))
    assert progress.feed(first) == ["fetching torch, scipy: 10 MiB of 200 MiB"]
    assert progress.feed(draw(("torch", "11.00 MiB/160.00 MiB"))) == [], "not twice in a moment"
    clock.now += 2
    half = draw(("torch", "70.00 MiB/160.00 MiB"))
    assert progress.feed(half[:70]) == [], "half of a drawing"
    (line,) = progress.feed(half[70:])
    assert line == "fetching torch: 110 MiB of 200 MiB, 50 MiB/s, 2 s left", "scipy has arrived"
    assert progress.finish() == []


def test_of_what_is_drawn_nothing_is_taken_for_a_message() -> None:
    progress = UvProgress(Clock())
    progress.feed(
        "Updating https://x (HEAD)   \u280b Resolving dependencies...   \r\x1b[2K"
        "Updating https://x (HEAD)      error: Git operation failed\r\n  cause: no route\r\n"
    )
    lines = progress.finish()
    assert uv_error(lines) == "Git operation failed: no route"


def test_a_package_that_is_built_is_named() -> None:
    assert UvProgress(Clock()).feed("   Building slow==1.0\r\n") == ["building slow"]


# --- PyTorch's build ------------------------------------------------------------------------------

# A stand-in for uv: it notes its calls, and reaches no network.
_UV = """#!/bin/sh
echo "backend=$UV_TORCH_BACKEND" "$@" >> {calls}
case "$*" in *--dry-run*) {dry_run};; esac
"""
_NO_ROUTE = "echo 'error: Failed to fetch: https://download.pytorch.org/whl/cpu/torch/'; exit 2"


@pytest.mark.parametrize(
    ("variables", "gpu", "dry_run", "backends"),
    [
        ({}, False, "exit 0", ["cpu", "cpu"]),
        ({}, False, _NO_ROUTE, ["cpu", ""]),
        ({}, False, "echo 'error: numpy: no such file'; exit 2", ["cpu", "cpu"]),
        ({}, True, "exit 0", [""]),
        ({"PIP_INDEX_URL": "https://mirror/simple"}, False, "exit 0", [""]),
        ({"UV_TORCH_BACKEND": "cu126"}, False, "exit 0", ["cu126"]),
    ],
    ids=["CPU", "no route", "another error", "GPU", "the user's index", "the user's choice"],
)
def test_without_a_gpu_pytorchs_build_for_cpus_is_preferred(
    environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    variables: dict[str, str], gpu: bool, dry_run: str, backends: list[str],
) -> None:  # fmt: skip
    uv, calls, requirements = tmp_path / "uv", tmp_path / "calls", tmp_path / "r.txt"
    uv.write_text(_UV.format(calls=calls, dry_run=dry_run))
    uv.chmod(0o755)
    requirements.write_text("torch\n")
    target = tmp_path / "e"
    write(target / "bin" / "pip", "")  # so that the call that installs pip is left out
    environ = {**environ, **variables, "PATH": "/bin"}
    cache = str(tmp_path / "c")
    assert install(str(uv), str(requirements), str(target), cache, environ=environ, gpu=gpu) == ""
    words = [line.split() for line in calls.read_text().splitlines()]
    assert [each[0].removeprefix("backend=") for each in words] == backends
    said = capfd.readouterr().out
    assert ("build for CUDA, several GiB" in said) == (dry_run == _NO_ROUTE)


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_is_one_line() -> None:
    assert uv_error(NO_SOLUTION) == (
        "Because there is no version of numpy==99.0 and you require numpy==99.0."
    )
    assert uv_error(
        ["error: Failed to build `x==1`", "cause: The build backend returned an error", "",
         "[stderr]", "Traceback (most recent call last):", "ValueError: no compiler"]
    ) == "Failed to build `x==1`: ValueError: no compiler"  # fmt: skip
    assert uv_error(
        ["  \u00d7 No solution found when resolving dependencies:",
         "  \u2570\u2500\u25b6 Because a was not found in the package registry and you require a,",
         "      we can conclude that your requirements are unsatisfiable."]
    ).startswith("Because a was not found")  # fmt: skip
    assert uv_error([]) == "uv ended without a message"


def test_pip_is_tried_only_where_it_may_succeed() -> None:
    assert why_pip(1, NO_SOLUTION) == ""
    assert why_pip(2, ["error: Request failed after 3 retries", "cause: Failed to fetch: x"]) == ""
    assert why_pip(1, ["error: Failed to build `x`"]) == ""
    assert why_pip(2, ["error: Unexpected '-': r.txt:1:1"]).startswith("uv says: Unexpected")
    assert "pre-releases" in why_pip(1, [*NO_SOLUTION, "hint: a pre-release was requested"])
    assert why_pip(-11, []) == "uv ended with code -11"


def test_a_bar_of_a_download_that_broke_off_is_no_part_of_the_error() -> None:
    progress = UvProgress(FakeClock().monotonic)
    pad = " " * 300
    progress.feed(
        f"\u280b Preparing packages... (3/40){pad}\rpyyaml  ------ 15.89 KiB/808.61 KiB{pad}"
    )
    progress.feed(
        f"torch  ------ 115.89 MiB/208.61 MiB{pad}\r\x1b[2K  \u00d7 Failed to download `ray`\r\n"
    )
    progress.feed("  \u2570\u2500\u25b6 operation timed out\r\n")
    assert uv_error(progress.finish()) == "Failed to download `ray`: operation timed out"
