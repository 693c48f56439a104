"""docs/performance.md: what it shows, and that it is of the kept results."""

import xml.etree.ElementTree as ElementTree

from benchmarks import page
from benchmarks.results import FOLDER, Machine, Results, merge
from benchmarks.rows import Curve, Row, paired


def curve(name: str, *points: tuple[int, float]) -> Curve:
    return Curve(
        name=f"curves/{name}", title=f"The <{name}>", axis="jobs", unit="us", how="so",
        points=[*points], peers={"tar & co": [(100, 0.0), (1_000, 2.0)]},
    )  # fmt: skip


FOUND = merge(
    Results(Machine("A processor", 2, 24, "Linux")),
    [
        paired("array/plain", "an array", "ms", [(2.0, 1.0)], beside="tsp", goal=1),
        Row(name="curves/queued_x", measured="x", unit="us", ours=2.0),
        Row(name="logs/write.cpu", measured="CPU", unit="ms", ours=2.0),
    ],
    [
        curve("queued_x", (100, 1.0), (1_000, 3.0)), curve("files_y", (100, 5.0)),
        curve("z", (10, 1.0)),
    ],
    date="2026-11-28", commit="abc", versions={"python": "3.11"}, modules=["array", "curves"],
)  # fmt: skip


def test_each_curve_is_in_the_picture_of_its_kind() -> None:
    found = {title: [each.name for each in curves] for title, curves in page.groups(FOUND).items()}
    assert found == {
        "Queued jobs": ["curves/queued_x"], "Files of a workspace archive": ["curves/files_y"],
        "Others": ["curves/z"],
    }  # fmt: skip
    assert len({page.file_of(title) for title in page.GROUPS}) == len(page.GROUPS)


def test_a_picture_is_small_and_well_formed_and_shows_all_sizes() -> None:
    text = page.picture([*page.groups(FOUND)["Queued jobs"]] * 4)
    assert len(text) < 10_000
    picture = ElementTree.fromstring(text)
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("The <queued_x>") == 4 and words.count("tar & co") == 4
    assert {"100", "1k", "us"} <= {*words}


def test_the_page_shows_how_much_a_cost_grows_and_ratios_to_other_tools() -> None:
    text = page.page(FOUND)
    assert "| The <queued_x> | 1 us (100) | 3 (1,000 jobs) | x3 | so |" in text
    assert "| an array | 2 ms | tsp: 1 | x2 |  | at most 1 |" in text
    assert "CPU |" not in text and text.count("curves/") == 0


def test_the_page_in_the_documents_is_that_of_the_kept_results() -> None:
    """If not: python -m benchmarks.page"""
    kept = page.newest(FOLDER)
    assert kept is not None
    assert page.PAGE.read_text("utf-8") == page.page(kept)
    pictures = {path.name: path.read_text("utf-8") for path in page.PICTURES.glob("*.svg")}
    assert pictures == {
        page.file_of(title): page.picture(curves) for title, curves in page.groups(kept).items()
    }
