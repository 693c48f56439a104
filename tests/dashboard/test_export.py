"""Pages as files: their links, panels and data, and the folder that they are in."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchml.dashboard.export.folder import MANIFEST, export_folder
from batchml.dashboard.export.rewrite import ExportedPages, PageFrame, rewrite_page
from batchml.dashboard.export.site import choose_comparisons, data_script, safe_name
from batchml.dashboard.html import Html, tag
from batchml.errors import UsageError
from tests.dashboard.test_hub import found

PAGES = ExportedPages({
    "/": "index.html", "/run/a": "run/a.html", "/cost": "cost.html",
    "/cost?since=30d": "cost-30d.html",
})  # fmt: skip


def rewritten(source: Html, fill: dict[str, Html | None] | None = None, root: str = "../") -> str:
    frame = PageFrame("/run/a", root, PAGES, (fill or {}).get, ["data/x.js"], "Exported <now>")
    return rewrite_page(source.source, frame)


@pytest.mark.parametrize(
    ("href", "address"),
    [
        ("/run/a", "../run/a.html"),
        ("/?q=failed", "../index.html?q=failed"),
        ("/run/a#log", "../run/a.html#log"),
        ("/cost?since=30d", "../cost-30d.html"),
        ("/cost?since=30d&queue=x", None),
        ("/run/b", None),
        ("/constructor", None),
    ],
)
def test_links_lead_to_files_or_nowhere(href: str, address: str | None) -> None:
    link = f'<a href="{address}">x</a>' if address else "<a>x</a>"
    assert rewritten(tag("a", "x", href=href)) == link


def test_texts_and_other_tags_stay_as_they_are() -> None:
    nasty = "</script><img src=x onerror=alert(1)> \" ' & &amp; \u202e\x00"
    source = tag("p", nasty, tag("svg", tag("rect", x=1), viewBox="0 0 1 1"), title=nasty)
    assert rewritten(source) == source.source
    assert "<img" not in rewritten(tag("a", nasty, href="/run/a", title=nasty))


def test_panels_are_filled_and_their_links_too() -> None:
    panel = tag("div", tag("b", "Loading"), data_panel="/run/a/state", data_live=True, class_="c")
    made = rewritten(tag("i", panel, "after"), {"/run/a/state": tag("a", "run", href="/run/a")})
    assert made == '<i><div class="c"><a href="../run/a.html">run</a></div>after</i>'
    assert rewritten(tag("i", panel, "after")) == "<i>after</i>"


def test_what_needs_a_server_is_left_out() -> None:
    act = tag("div", tag("dialog", tag("div", "x"), tag("br")), class_="act")
    download = tag("a", "Download", href="/run/a/log.txt", download=True)
    submit = tag("a", "Submit", href="/submit")
    assert rewritten(tag("p", act, download, submit, "stays")) == "<p>stays</p>"


def test_a_page_names_its_scripts_and_forbids_others() -> None:
    page = tag("html", tag("head", tag("script", src="/static/app.js", defer=True)),
               tag("body", tag("span", id="connection"), data_view="run"))  # fmt: skip
    made = rewritten(page)
    assert '<script src="../static/app.js" defer></script>' in made
    assert '<script src="../data/x.js" defer></script></head>' in made
    assert "default-src 'none'; script-src 'self' file:" in made
    assert 'data-exported data-path="/run/a" data-root="../">' in made
    assert "Exported &lt;now&gt;" in made


def test_data_is_text_until_it_is_asked_for() -> None:
    answer: dict[str, Any] = {"__proto__": "it's \\ \n </script>\u2028", "n": [1.5, None]}
    script = data_script({"/run/a/series": answer})
    literal = script.split(" = ", 1)[1].strip().removesuffix(";")
    text = literal[1:-1].replace("\\'", "'").replace("\\\\", "\\")
    assert json.loads(text) == answer and literal.count("\n") == 0


def test_names_of_files_are_safe() -> None:
    assert safe_name("0a1b-2c") == "0a1b-2c"
    assert set(safe_name("../x")) <= set("0123456789abcdef")


def test_runs_of_one_job_are_compared() -> None:
    runs = [found("1", name="a"), found("2", name="b"), found("3", name="a")]
    assert [(each.name, len(each.runs)) for each in choose_comparisons(runs)] == [("a", 2)]


# --- the folder -----------------------------------------------------------------------------------


def export(target: Path, **files: str) -> None:
    with export_folder(target) as folder:
        for name, text in files.items():
            folder.write(f"{name}/x.html", text)


def test_an_export_replaces_an_export_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    export(target, a="1", b="2")
    export(target, a="3")
    assert sorted(each.name for each in target.iterdir()) == ["a", MANIFEST]
    assert (target / "a/x.html").read_text() == "3"
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt is not of the export"):
        export(target, a="4")
    assert (target / "a/x.html").read_text() == "3"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_other_folders_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years")
    (tmp_path / "file").write_text("x")
    for name, words in (("mine", "neither empty nor an export"), ("file", "it is a file"),
                        ("file/below", "file is a file")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            export(tmp_path / name, a="1")
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", a="1")
    assert (tmp_path / "mine/thesis.tex").read_text() == "years"


def test_folders_beside_an_export_are_kept_unless_an_export_has_left_them(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years")
    (tmp_path / ".a.part").symlink_to("home")
    (tmp_path / ".b.old").symlink_to("home")
    for name in (".c.part", ".d.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine")
    for name in "abcd":
        with pytest.raises(UsageError, match="is in the way"):
            export(tmp_path / name, a="1")
    assert (tmp_path / "home/thesis.tex").read_text() == "years"
    assert all((tmp_path / each / "notes").exists() for each in (".c.part", ".d.old"))
    # Of exports that were killed
    (tmp_path / ".e.part/x").mkdir(parents=True)
    (tmp_path / ".e.part/.lock").touch()
    export(tmp_path / "e", a="1")
    (tmp_path / "e").rename(tmp_path / ".e.old")
    export(tmp_path / "e", a="2")
    assert (tmp_path / "e/a/x.html").read_text() == "2" and not (tmp_path / ".e.old").exists()


def test_a_link_in_an_export_is_not_lost(tmp_path: Path) -> None:
    export(tmp_path / "out", a="1")
    (tmp_path / "out/data").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="data is not of the export"):
        export(tmp_path / "out", a="2")


def test_nothing_half_done_is_left(tmp_path: Path) -> None:
    target = tmp_path / "out"
    export(target, a="1")
    with pytest.raises(KeyboardInterrupt), export_folder(target) as folder:
        folder.write("b.html", "2")
        raise KeyboardInterrupt
    assert (target / "a/x.html").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_two_exports_do_not_write_one_folder(tmp_path: Path) -> None:
    with export_folder(tmp_path / "out") as folder:
        folder.write("a.html", "1")
        with pytest.raises(UsageError, match="another export is writing it"):
            export(tmp_path / "out", b="2")
    assert (tmp_path / "out/a.html").read_text() == "1"
