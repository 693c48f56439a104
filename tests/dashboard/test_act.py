"""Buttons that act: their markup, and what routes read."""

import pytest

from batchml.dashboard.act import (
    ActionField,
    PageAction,
    action_button,
    preview_body,
    read_flag,
    read_number,
    read_text,
    read_texts,
)
from batchml.dashboard.app import PageQuery
from batchml.errors import UsageError

STOP = PageAction(
    label="Stop", question="Stop <b>it</b>?", path="/act/stop", command="batchml cancel 'a b'",
    body={"run": "</form>"}, is_destructive=True, cost="/run/a/cost",
    fields=(ActionField(name="lr", label="lr", value='"0.1', flag="-p", prefix="lr=",
                        under="params"),
            ActionField(name="wait", label="Wait", flag="--wait", is_flag=True)),
)  # fmt: skip


def test_the_confirmation_names_what_it_changes_and_shows_the_command_line() -> None:
    made = str(action_button(STOP, read_only=False))
    assert "Stop &lt;b&gt;it&lt;/b&gt;?" in made and "<b>" not in made
    assert 'data-copy="batchml cancel &#x27;a b&#x27;"' in made
    assert 'data-later="/run/a/cost"' in made
    assert 'data-flag="-p" data-prefix="lr=" data-value="&quot;0.1"' in made
    assert made.count("</form>") == 1 and "disabled" not in made


def test_read_only_shows_the_command_and_disables_the_button() -> None:
    made = str(action_button(STOP, read_only=True))
    assert 'type="submit" disabled' in made and "started with --read-only" in made
    assert "batchml cancel" in made


def test_values_of_a_body_are_checked() -> None:
    body = {"run": "a", "empty": "", "on": True, "n": "7", "x": "0.5", "p": {"lr": "1"}, "l": [1]}
    assert (read_text(body, "run"), read_text(body, "none", "b")) == ("a", "b")
    assert (read_flag(body, "on"), read_flag(body, "off")) == (True, False)
    assert (read_number(body, "n"), read_number(body, "x", float)) == (7, 0.5)
    assert (read_number(body, "empty"), read_number(body, "none")) == (None, None)
    assert (read_texts(body, "p"), read_texts(body, "none")) == ({"lr": "1"}, {})


@pytest.mark.parametrize("given", [None, 1, [], {}, True, {"lr": 1}, {"lr": None}])
def test_values_of_another_type_are_refused(given: object) -> None:
    with pytest.raises(UsageError):
        read_text({"x": given}, "x")
    with pytest.raises(UsageError):
        read_text({"x": given}, "x", "")
    if given is not True:
        with pytest.raises(UsageError):
            read_flag({"x": given}, "x")
    if given != {}:
        with pytest.raises(UsageError):
            read_texts({"x": given}, "x")


@pytest.mark.parametrize("given", ["a", "1.5", "1_0", "\u0661", "0x1", "nan", "inf", "--"])
def test_what_is_no_whole_number_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="write a whole number"):
        read_number({"n": given}, "n")
    with pytest.raises(UsageError, match="write a number"):
        read_number({"n": "nan"}, "n", float)


def test_a_required_text_may_not_be_empty() -> None:
    with pytest.raises(UsageError, match="run"):
        read_text({"run": ""}, "run")


def test_a_preview_reads_the_body_of_its_action() -> None:
    query = PageQuery("/preview", params={"body": '{"run": "a", "__proto__": "b"}'})
    assert preview_body(query).body == {"run": "a", "__proto__": "b"}
    for wrong in ("[", "[]", "1", "[" * 100_000):
        with pytest.raises(UsageError):
            preview_body(PageQuery("/preview", params={"body": wrong}))
