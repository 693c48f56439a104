"""Buttons that change something: each has a confirmation, and the command line that does the same.

A page calls `action_button`. The script `act.js` opens the confirmation, keeps its command line and
its preview in step with the fields, and sends what was chosen as JSON to the path of the action,
once. The route of the path (below /act/) is a function of a `PageQuery` that calls the client and
returns `done(...)`; the sentence of each BatchmlError that it raises is shown in the confirmation.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from batchml.dashboard.app import PageQuery
from batchml.dashboard.html import Child, Html, join, tag, visible
from batchml.dashboard.layout import command_line
from batchml.errors import UsageError

READ_ONLY = "This dashboard was started with --read-only. The command works in a terminal."
Body = Mapping[str, Any]


class ActionField(Struct, frozen=True, kw_only=True):
    """A field of a confirmation. A value that is `present` is neither sent nor shown.

    `name` is its key in the body, below the key `under` if that is given. On the command line it is
    `flag` and `prefix` with the value: `-p lr=0.1` has the flag "-p" and the prefix "lr=".
    `choices` are the values of a list, with their labels. A field with `is_flag` is a checkbox.
    `is_more`: among the options that are folded at first. `is_first`: has the focus at first;
    `selected` is the part of its value that is selected then (all of it if None).
    """

    name: str
    label: str
    value: str = ""
    present: str | None = None  # None: `value`
    flag: str = ""
    prefix: str = ""
    under: str = ""
    hint: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    is_flag: bool = False
    is_number: bool = False
    is_more: bool = False
    is_first: bool = False
    selected: str | None = None


class PageAction(Struct, frozen=True, kw_only=True):
    """A button and its confirmation.

    `question` names what is changed: "Cancel lenet 1a2b3c4d?". `path` is below /act/, `body` what
    is sent to it besides the fields. `cost` is the path of a panel with what it has cost or will
    cost; `preview` the path of one that also gets the body, as `?body=`, whenever a field changes.
    """

    label: str
    question: str
    path: str
    command: str
    body: Mapping[str, Any] = {}
    confirm: str = ""  # the label of the button that acts; else `label`
    back: str = "Back"
    notes: tuple[Child, ...] = ()
    fields: tuple[ActionField, ...] = ()
    cost: str = ""
    preview: str = ""
    is_destructive: bool = False


def action_buttons(actions: Iterable[PageAction], *, read_only: bool) -> Html:
    """Several actions in a row."""
    return tag("div", *(action_button(each, read_only=read_only) for each in actions),
               class_="bar actions")  # fmt: skip


def action_button(action: PageAction, *, read_only: bool) -> Html:
    """The button, and its confirmation, which is closed until the button is pressed.

    Without scripts the command line stands there in place of the button. With `read_only` the
    confirmation opens, but only for its command line.
    """
    opener = tag("button", action.label, type="button", class_="open-action", hidden=True,
                 aria_haspopup="dialog")  # fmt: skip
    back = tag("button", action.back, type="button", class_="close-action")
    form = action_form(action, back, read_only=read_only)
    dialog = tag("dialog", form, aria_label=action.question, class_="action")
    plain = tag("noscript", command_line(action.command, action.label))
    return tag("div", opener, plain, dialog, class_="act")


def action_form(action: PageAction, back: Html | None = None, *, read_only: bool) -> Html:
    """The confirmation alone, for a page that consists of it."""
    parts: list[Child] = [
        tag("h2", action.question),
        *(tag("p", each) for each in action.notes),
        tag("div", data_later=action.cost) if action.cost else None,
        *_fields(action.fields),
        tag("div", data_preview=action.preview, role="status") if action.preview else None,
        command_line(action.command),
        tag("p", READ_ONLY, class_="problem") if read_only else None,
        tag("p", "", class_="problem", role="alert", hidden=True),
        tag(
            "div",
            back,
            tag("button", action.confirm or action.label, type="submit", disabled=read_only,
                class_="danger" if action.is_destructive else "main"),
            class_="bar end",
        ),
    ]  # fmt: skip
    return tag(
        "form", *parts, method="dialog", data_act=action.path, data_command=action.command,
        data_body=json.dumps(dict(action.body)), novalidate=True, autocomplete="off",
    )  # fmt: skip


def _fields(fields: Iterable[ActionField]) -> Iterator[Html]:
    first = [each for each in fields if not each.is_more]
    more = [each for each in fields if each.is_more]
    if first:
        yield tag("div", *map(_field, first), class_="fields")
    if more:
        is_open = any(each.present not in (None, each.value) for each in more)
        yield tag("details", tag("summary", "More options"),
                  tag("div", *map(_field, more), class_="fields"), open=is_open)  # fmt: skip


def _field(field: ActionField) -> Html:
    before = field.value if field.present is None else field.present
    about = {
        "name": field.name, "data_under": field.under or None, "data_flag": field.flag,
        "data_prefix": field.prefix or None, "data_value": visible(before),
        "data_first": field.is_first, "data_selected": field.selected,
    }  # fmt: skip
    if field.is_flag:
        box = tag("input", type="checkbox", checked=field.value == "true", **about)
        return tag("label", box, " ", field.label, _hint(field), class_="check")
    if field.choices:
        options = (
            tag("option", label, value=value, selected=value == field.value)
            for value, label in field.choices
        )
        control = tag("select", *options, **about)
    elif "\n" in field.value:  # whose first newline the browser drops
        control = tag("textarea", "\n", field.value, rows=4, spellcheck="false", **about)
    else:
        control = tag("input", type="text", value=field.value, spellcheck="false",
                      inputmode="decimal" if field.is_number else None, **about)  # fmt: skip
    return tag("label", tag("span", field.label), control, _hint(field))


def _hint(field: ActionField) -> Html | None:
    return tag("small", field.hint, class_="dim") if field.hint else None


# --- What a route reads and returns ---------------------------------------------------------------


def done(text: str, go: str = "", link: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """The answer of an action: a sentence, the path of the page to go to, a link to another."""
    return {"text": visible(text), "go": go, "link": list(link)}


def preview_body(query: PageQuery) -> PageQuery:
    """The query of a preview as the query of the action itself. Raises UsageError."""
    try:
        body = json.loads(query.params.get("body", "{}"))
    except (ValueError, RecursionError) as error:
        raise UsageError("body: is not JSON.") from error
    if not isinstance(body, dict):
        raise UsageError("body: is not a JSON object.")
    return PageQuery(query.path, query.parts, query.params, query.lists, body)


def read_text(body: Body, name: str, default: str | None = None) -> str:
    """A text of the body; without a `default` it must be there. Raises UsageError."""
    given = body.get(name, default)
    if not isinstance(given, str) or not (given or default is not None):
        raise UsageError(f"{name}: a text is missing.")
    return given


def read_flag(body: Body, name: str) -> bool:
    """A checkbox of the body: false if it is not there. Raises UsageError."""
    given = body.get(name, False)
    if not isinstance(given, bool):
        raise UsageError(f"{name}: is neither true nor false.")
    return given


def read_number(body: Body, name: str, kind: type[int] | type[float] = int) -> Any:
    """A number of the body, which the page sends as a text; None if it is empty or not there.

    Raises UsageError for a text that is no such number.
    """
    text = read_text(body, name, "").strip()
    if not text:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not text.isascii() or "_" in text or not abs(number) < float("inf"):
        raise UsageError(f"{name}: {text}: write a {'whole ' * (kind is int)}number.")
    return number


def read_texts(body: Body, name: str) -> dict[str, str]:
    """The object of texts below a name of the body. Raises UsageError."""
    given = body.get(name, {})
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise UsageError(f"{name}: is not an object of texts.")
    return given


def shell(*words: str) -> str:
    """A command line of these words, quoted as a shell needs it."""
    return shlex.join(words)


def paragraphs(texts: Iterable[str], class_: str = "dim") -> Html:
    """Sentences, one a paragraph."""
    return join(tag("p", each, class_=class_) for each in texts)
