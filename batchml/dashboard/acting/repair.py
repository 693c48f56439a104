"""Why a run waits or failed, and what helps: a form that is filled in, or a link, and the command.

`explain` recommends a command. A person who knows no commands gets a button for it: the rerun, or
the job's form, with the recommended values. An error in the program has the form of a rerun.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import replace

from batchml.dashboard.act import PageAction, action_button
from batchml.dashboard.acting.runs import (
    can_run_again,
    in_own_project,
    read_rerun_flags,
    rerun_action,
)
from batchml.dashboard.acting.submit import (
    SubmitPreset,
    is_image_name,
    read_flags,
    submit_action,
)
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.layout import command_line, nothing
from batchml.dashboard.runs import state_of
from batchml.explain.suggest import own_image
from batchml.jobs.find import KnownJob
from batchml.model.explanation import Explanation
from batchml.model.names import short_id
from batchml.runs.rerun.rules import changeable_command
from batchml.runs.search import FoundRun

_CLUSTER = ("top", "queue", "compute")  # commands whose answer is on the page of the cluster
_OF_ARGUMENTS = ("bad-argument", "unknown-flag")
_OF_COMMAND = ("missing-file", "missing-command", "exception")  # if a word of it is in the error
_CORRECTED = "Run again corrected"
_IN_ERROR = "This value occurs in the error."
_NOTHING_TO_EXPLAIN = ("running", "succeeded")  # causes
_TITLES = {
    "waiting": "Why it waits", "starting": "Why it waits", "running": "What happens",
    "succeeded": "What happened", "failed": "Why it failed", "cancelled": "Why it ended",
    "unknown": "What happened",
}  # fmt: skip


class Remedy(Struct, frozen=True):
    """What helps: the button of an action, or a link: (its words, its address), or neither."""

    action: PageAction | None = None
    link: tuple[str, str] | None = None


def explanation_panel(
    found: FoundRun, why: Explanation, env_option: str, jobs: Callable[[], Sequence[KnownJob]],
    here: Path, project: str = "", *, read_only: bool,
) -> Html:  # fmt: skip
    """The verdict, its evidence, and what helps; nothing for a run that neither waits nor failed.

    `jobs` and `here`: see `remedy_for`; `project`: the one of the dashboard.
    """
    if why.cause in _NOTHING_TO_EXPLAIN:
        return nothing()
    parts = [tag("h2", _TITLES[state_of(found)]), tag("p", tag("strong", why.verdict))]
    if why.evidence:
        parts.append(tag("ul", *(tag("li", each) for each in why.evidence)))
    if why.fix:
        parts.append(tag("p", why.fix))
    remedy = remedy_for(found, why, env_option, jobs, here)
    if remedy.action is not None:
        action = in_own_project(remedy.action, found, project)
        parts.append(action_button(action, read_only=read_only))
    if remedy.link is not None:
        words, address = remedy.link
        parts.append(tag("p", tag("a", words, href=address, class_="next")))
    if why.command:
        # A command without a job sends the folder where it is typed.
        is_bare = why.command.startswith("batchml submit -") and found.record is not None
        folder = found.record.folder if is_bare and found.record else ""
        where = f", in {folder}" if folder else ""
        parts.append(command_line(why.command, f"In a terminal{where}"))
    return join(parts)


def remedy_for(
    found: FoundRun, why: Explanation, env_option: str, jobs: Callable[[], Sequence[KnownJob]],
    here: Path,
) -> Remedy:  # fmt: skip
    """What helps. `jobs` reads the jobs that can be submitted, if needed; `here`: the folder from
    which a command names a job's folder."""
    try:
        words = shlex.split(why.command.removesuffix(env_option))
    except ValueError:
        words = []
    verb, rest = (words[1], words[2:]) if words[:1] == ["batchml"] and words[1:] else ("", [])
    if verb == "rerun" and rest:
        return Remedy(_rerun(found, rest, env_option))
    if verb == "submit" and rest and rest[0].startswith("-"):  # a command without a job
        again = _submit_command(found, why, rest, env_option)
        if again is not None:
            return Remedy(again)
    elif verb == "submit" and rest:
        return Remedy(_submit(found, why, rest, env_option, jobs(), here))
    link = _link(found, verb, rest)
    has_failed = found.run is not None and found.run.status.value == "FAILED"
    if not (has_failed and why.is_problem and can_run_again(found)):
        return Remedy(None, link)
    if verb in ("explain", "show"):  # another run is the cause
        return Remedy(None, link)
    return Remedy(_run_again(found, why, env_option), link)


def _rerun(found: FoundRun, words: Sequence[str], env_option: str) -> PageAction | None:
    """The rerun of a command such as `rerun 1a2b3c4d --memory "4 GiB"`."""
    if not can_run_again(found) or not found.job_id.startswith(words[0]):
        return None
    preset = read_rerun_flags(words[1:])
    return None if preset is None else rerun_action(found, env_option, preset)


def _submit_command(
    found: FoundRun, why: Explanation, words: Sequence[str], env_option: str
) -> PageAction | None:
    """The rerun that does the same as a command such as `submit --image . -- python train.py`."""
    at = words.index("--") if "--" in words else len(words)
    preset, command = read_rerun_flags(words[:at]), tuple(words[at + 1 :])
    present = changeable_command(found)
    if preset is None or not can_run_again(found) or not present:
        return None
    if preset.get("name") == found.name:
        del preset["name"]
    image = preset.pop("image", "")
    if image and not is_image_name(image):
        image = ""  # the run's own, by its reference
    if found.run is not None and image == own_image(found.run.image):
        image = ""
    if image:
        preset["image"] = image
    if found.code:
        preset["code"] = "true"
    sent = found.command
    other = command if command and command not in (present, tuple(sent)) else None
    is_plain = not image and other is None
    suspect = suspect_in_command(found, why) if is_plain else None
    made = rerun_action(found, env_option, preset, command=other, suspect=suspect)
    if suspect is not None:
        return replace(made, label=_CORRECTED)
    if other is None:
        return made
    return replace(made, label=f"Run again with the command {shlex.join(other)}")


def _run_again(found: FoundRun, why: Explanation, env_option: str) -> PageAction:
    """A rerun after an error of the program: with other values, or with corrected code."""
    hints = dict.fromkeys(suspects(found, why), _IN_ERROR)
    suspect = None if hints else suspect_in_command(found, why)
    preset = {}
    if found.run is not None and found.run.children.get("SUCCEEDED"):
        preset["failed"] = "true"
    if found.code and not hints and suspect is None:
        preset["code"] = "true"
    made = rerun_action(found, env_option, preset, hints, suspect=suspect)
    if suspect is not None:
        return replace(made, label=_CORRECTED)
    if not hints:
        return made
    return replace(made, label=f"Run again with another {' or '.join(hints)}")


def suspects(found: FoundRun, why: Explanation) -> list[str]:
    """The parameters whose values occur in the error; of numbers only if their name does, too."""
    text = " ".join((why.verdict, *why.evidence))
    names = []
    for name, value in found.params.items():
        word = str(value)
        is_number = re.fullmatch(r"[-+.\deE]+|True|False|true|false", word) is not None
        if len(word) < 2 and not is_number:
            continue
        if _has_word(text, word) and (not is_number or _has_word(text, name)):
            names.append(name)
    return names[:3]


def suspect_in_command(found: FoundRun, why: Explanation) -> str | None:
    """The word of the command that seems to be wrong: its value if the error has that, else its
    flag. "" if the program refused its arguments, and none of them is in the error; None if
    nothing says that the command is wrong."""
    command = changeable_command(found)
    values: list[str] = []
    flags: list[str] = []
    # The verdict names what is wrong; the evidence may name the program, too, as a traceback does.
    for text in (why.verdict, " ".join(why.evidence)):
        _add_words_in(text, command[1:], values, flags)
    if why.cause in _OF_ARGUMENTS:
        named = [*flags, *values] if why.cause == "unknown-flag" else [*values, *flags]
        return next(iter(named), "") if command else None
    return values[0] if values and why.cause in _OF_COMMAND else None


def _add_words_in(text: str, command: Sequence[str], values: list[str], flags: list[str]) -> None:
    """Add the values and the flags of a command that occur in a text."""
    flag = ""
    for word in command:
        name, equals, own = word.partition("=")
        is_flag = name.startswith("-") and not re.fullmatch(r"-[\d.].*", name)
        value = own if is_flag and equals else "" if is_flag else word
        flag = name if is_flag else flag
        is_number = re.fullmatch(r"[-+.\deE]+", value) is not None
        is_known = (len(value) > 1 and not is_number) or (flag and _has_word(text, flag.strip("-")))
        if is_flag and _has_word(text, name):
            flags.append(name)
        # A program names itself before its message, `train.py: error: ...`, and a traceback names
        # the file of each line: `train.py, line 1`.
        itself = rf'{re.escape(value)}"?(?:: error|, line \d)'
        if value and is_known and _has_word(re.sub(itself, "", text), value):
            values.append(value)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w])(?!\.\w)", text) is not None


def _submit(
    found: FoundRun, why: Explanation, words: Sequence[str], env_option: str,
    jobs: Sequence[KnownJob], here: Path,
) -> PageAction | None:  # fmt: skip
    """The job's form with the flags of a command such as `submit jobs/lenet -- python train.py`."""
    preset = read_flags(words[1:])
    if preset is None or not can_run_again(found):
        return None
    for job in jobs:
        if job.spec is not None and here / words[0] == job.folder:
            break
    else:
        return None
    own = {name: str(value) for name, value in found.params.items()}
    hints = dict.fromkeys(suspects(found, why), _IN_ERROR)
    filled = SubmitPreset({**own, **preset.params}, preset.options, preset.command, preset.image,
                          hints)  # fmt: skip
    label = "Submit it again corrected"
    if preset.command is not None:
        label = f"Submit it with the command {shlex.join(preset.command)}"
    elif preset.image:
        what = "made of the job's files" if preset.image == "." else preset.image
        label = f"Submit it with the image {what}"
    elif hints:
        label = f"Submit it with another {' or '.join(hints)}"
    action = submit_action(job, job.spec, env_option, filled)
    return replace(action, label=label, question=f"Submit {job.name} again?", confirm="Submit")


def _link(found: FoundRun, verb: str, words: Sequence[str]) -> tuple[str, str] | None:
    """The place in the dashboard that has what a command would print."""
    if verb in _CLUSTER:
        return "See the cluster", "/cluster"
    if verb == "ls" and words[:1] == ["--queue"] and len(words) == 2:
        return f"See the runs of the queue {words[1]}", f"/?{urlencode({'q': words[1]})}"
    if verb not in ("logs", "explain", "show") or not words:
        return None
    names = [word for word in words if not word.startswith("-")]
    if not names:
        return None
    run_id, _, child = names[0].partition(":")
    if run_id == found.job_id and not child:
        return ("See the log", "#log-title") if verb == "logs" else None
    words_of = f"child {child}" if run_id == found.job_id else f"the run {short_id(run_id)}"
    return f"See {words_of}", f"/run/{names[0]}"
