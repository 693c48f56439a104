"""Files of a run in the dashboard."""

import pytest

from batchml.dashboard.outputs import attachment, code_page, code_panel, file_key
from batchml.errors import NotFound
from batchml.jobs.code_diff import CodeFile
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.search import FoundRun

FOUND = FoundRun(
    Run("a" * 36, "lenet", "gpu", JobStatus.SUCCEEDED),
    Record(code=f"x/{'0' * 64}.tar.gz", commit="1a2b3c4d", dirty=True),
)
FILES = {"train.py": CodeFile(b"print('<script>')"), "data.bin": CodeFile(b"\0\1")}


def test_a_name_of_a_file_cannot_break_the_header() -> None:
    assert attachment("a/b/model.pt").startswith('attachment; filename="model.pt"')
    for name in ('x"\r\nSet-Cookie: a', "../..\\x", "\u202egpj.exe", "\udcff", "/"):
        found = attachment(name)
        assert found.isascii() and found.isprintable()
        assert found.count('"') == 2 and "/" not in found


def test_a_file_is_asked_for_by_a_digest_and_only_listed_files_are_found() -> None:
    page = str(code_page(FOUND, FILES, file_key("train.py"), "local"))
    assert "print(&#x27;&lt;script&gt;&#x27;)" in page
    assert "not a text" in str(code_page(FOUND, FILES, file_key("data.bin"), "local"))
    for key in ("train.py", "../train.py", "", file_key("other.py")):
        with pytest.raises(NotFound):
            code_page(FOUND, FILES, key, "local")


def test_the_code_has_its_commit_and_whether_it_was_changed() -> None:
    panel = str(code_panel(FOUND, FILES))
    assert "1a2b3c4d" in panel and "not committed" in panel and file_key("train.py") in panel
    assert "had no files" in str(code_panel(FOUND, {}))
    assert "No code was sent" in str(code_panel(FoundRun(FOUND.run, None), {}))
