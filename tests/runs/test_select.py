"""Which run a word means."""

from collections.abc import Iterable, Iterator, Sequence

import pytest

from batchml.errors import NotFound, UsageError
from batchml.model.run import Record, RunName
from batchml.runs import names
from batchml.runs.names import ALL_PROJECTS, ListRuns, ProjectScope
from tests.support.known_runs import KnownList

IDS = ["6b0e0000-0000-4000-8000-000000000001", "6b0f0000-0000-4000-8000-000000000002"]
KEY = "2abcdefghijklmnop"


def select_run(
    word: str, history: Iterable[RunName], runs: ListRuns, scope: ProjectScope = ALL_PROJECTS
) -> str:
    return names.select_run(word, KnownList(history), runs, scope)


def known() -> Iterator[tuple[str, str]]:
    yield IDS[1], "train"
    yield IDS[0], f"train-{KEY}"


def none() -> Iterable[tuple[str, str]]:
    return []


def nobody() -> Iterable[tuple[str, str]]:
    raise AssertionError("AWS was asked")


HISTORY = [
    Record(key="3" + KEY[1:], name="later", job_name="later-3" + KEY[1:], refused="no such queue"),
    Record(key="4" + KEY[1:], name="open", job_name="open-4" + KEY[1:]),
    Record(job_id=IDS[1], name="second", env="local"),
    Record(job_id=IDS[0], name="train", key=KEY, job_name=f"train-{KEY}", env="local"),
]


def test_a_run_is_named_by_id_prefix_name_or_last() -> None:
    history = [Record(job_id=IDS[0], name="train", env="local", at=1)]
    assert select_run(IDS[0], [], known) == IDS[0]
    assert select_run(f"arn:aws:batch:us-east-1:000000000000:job/{IDS[0]}", [], known) == IDS[0]
    assert select_run("@last", history, known) == IDS[0]
    assert select_run("6b0f", [], known) == IDS[1]
    assert select_run("train", [], known) == IDS[1]  # the newest
    with pytest.raises(UsageError, match="too short"):
        select_run("6b0", [], known)
    alike = [(f"6b0e000{i}-0000-4000-8000-000000000001", "n") for i in (1, 2)]
    with pytest.raises(UsageError, match="the start of 2 job ids"):
        select_run("6b0e", [], lambda: alike)
    shadowing = [(IDS[0], "victim"), (IDS[1], "6b0e")]
    assert select_run("6b0e", [], lambda: shadowing) == IDS[1]
    with pytest.raises(NotFound):
        select_run("nope", [], known)
    with pytest.raises(NotFound, match="Nothing was submitted"):
        select_run("@last", [], known)


@pytest.mark.parametrize("word", [IDS[0], KEY, f"train-{KEY}", "train", "6b0e0000", "@last~2"])
def test_a_run_of_this_machine_is_found_without_asking_aws(word: str) -> None:
    assert select_run(word, HISTORY, nobody) == IDS[0]


@pytest.mark.parametrize("word", [KEY, f"train-{KEY}"])
def test_a_run_of_another_machine_is_found_by_its_key(word: str) -> None:
    assert select_run(word, [], known) == IDS[0]


def test_a_child_or_node_is_named_behind_any_word() -> None:
    assert select_run("train:3", HISTORY, nobody) == f"{IDS[0]}:3"
    assert select_run("@last~1:12", HISTORY, nobody) == f"{IDS[1]}:12"
    assert select_run("@last~2#0", HISTORY, nobody) == f"{IDS[0]}#0"
    assert select_run(f"{IDS[0]}:3", [], nobody) == f"{IDS[0]}:3"


def test_last_passes_over_what_was_never_submitted() -> None:
    assert select_run("@last~1", HISTORY, none) == IDS[1]
    with pytest.raises(NotFound, match="Only 3 runs"):
        select_run("@last~3", HISTORY, none)
    with pytest.raises(NotFound, match=f"batchml reconcile 4{KEY[1:]}"):
        select_run("@last", HISTORY, none)  # it may be the newest: an older one is not meant


@pytest.mark.parametrize("word", ["@last", "open", f"open-4{KEY[1:]}", f"4{KEY[1:]}"])
def test_a_run_whose_id_could_not_be_kept_is_the_servers(word: str) -> None:
    listed = [(IDS[1], "second"), (IDS[0], f"open-4{KEY[1:]}")]
    assert select_run(word, HISTORY, lambda: listed) == IDS[0]


def test_a_submission_without_a_run_says_what_became_of_it() -> None:
    with pytest.raises(NotFound, match="It was refused: no such queue"):
        select_run("later", HISTORY, none)
    with pytest.raises(NotFound, match=r"^Run 'later' does not exist\."):  # as it was asked for
        select_run("later", HISTORY, none)
    with pytest.raises(NotFound, match=f"batchml reconcile 4{KEY[1:]}"):
        select_run("open", HISTORY, none)


def test_a_name_passes_over_what_was_refused_when_a_run_has_it() -> None:
    again = Record(key="5" + KEY[1:], name="train", job_name="train-5" + KEY[1:], refused="no")
    assert select_run("train", [again, *HISTORY], nobody) == IDS[0]
    with pytest.raises(NotFound, match="It was refused: no"):
        select_run("5" + KEY[1:], [again, *HISTORY], none)
    lost = Record(key="6" + KEY[1:], name="train", job_name="train-6" + KEY[1:])
    with pytest.raises(NotFound, match="batchml reconcile"):  # it may be the newest of that name
        select_run("train", [lost, *HISTORY], none)


@pytest.mark.parametrize("word", ["", "arn:aws:batch:us-east-1:000000000000:job/"])
def test_an_empty_word_is_no_run(word: str) -> None:
    with pytest.raises((UsageError, NotFound)):
        select_run(word, [Record(job_id=IDS[0])], known)


def test_a_prefix_that_here_and_in_aws_means_two_is_refused() -> None:
    with pytest.raises(UsageError, match="2 job ids"):
        select_run("6b0e", HISTORY, lambda: [("6b0e9999-0000-4000-8000-000000000009", "x")])


# --- projects -------------------------------------------------------------------------------

OURS, THEIRS, OLD = (f"{number}b0e0000-0000-4000-8000-000000000000" for number in (1, 2, 3))
SENT = [
    Record(job_id=THEIRS, name="train", key="5" + KEY[1:], env="local", project="theirs.00000001"),
    Record(job_id=OLD, name="old", key="7" + KEY[1:], env="local"),
    Record(job_id=OURS, name="fit", key="6" + KEY[1:], env="local", project="ours"),
]
SCOPE = ProjectScope("ours")


def test_last_and_names_are_of_the_project() -> None:
    assert select_run("@last", SENT, nobody, SCOPE) == OURS
    assert select_run("fit", SENT, nobody, SCOPE) == OURS
    assert select_run("old", SENT, nobody, SCOPE) == OLD  # of no project
    with pytest.raises(NotFound, match="Only 1 run was submitted in the project ours"):
        select_run("@last~1", SENT, nobody, SCOPE)
    with pytest.raises(NotFound, match="Nothing was submitted in the project ours yet"):
        select_run("@last", SENT[:2], nobody, SCOPE)


@pytest.mark.parametrize("word", ["train", "2b0e"])
def test_a_word_that_only_names_a_run_of_another_project_is_an_error(word: str) -> None:
    with pytest.raises(NotFound, match=r"2b0e0000, .* --project theirs"):
        select_run(word, SENT, none, SCOPE)
    assert select_run(word, SENT, none, ProjectScope("theirs.00000001")) == THEIRS


@pytest.mark.parametrize("word", [THEIRS, "2b0e0000", "5" + KEY[1:]])
def test_an_id_and_a_key_name_runs_of_any_project(word: str) -> None:
    assert select_run(word, SENT, nobody, SCOPE) == THEIRS


def test_a_name_of_another_machine_is_looked_up_with_its_project() -> None:
    listed = [(THEIRS, f"fit-5{KEY[1:]}"), (OURS, f"fit-6{KEY[1:]}")]
    asked: list[str] = []

    def projects(job_ids: Sequence[str]) -> dict[str, str]:
        asked.extend(job_ids)
        return {THEIRS: "theirs", OURS: "ours"}

    assert select_run("fit", [], lambda: listed, ProjectScope("ours", projects)) == OURS
    assert asked == [THEIRS, OURS]
    with pytest.raises(NotFound, match="--project theirs"):
        select_run("fit", [], lambda: listed[:1], ProjectScope("other", projects))


# --- runs that ls lists -----------------------------------------------------------------------


def sent_run(number: int, name: str, project: str = "ours", **tags: str) -> Record:
    tags = {f"batchml:{tag}": value for tag, value in tags.items()}
    job_id = f"{number:08x}-0000-4000-8000-000000000000"
    return Record(job_id=job_id, name=name, env="local", project=project, tags=tags)


def test_last_is_the_newest_run_that_ls_lists() -> None:
    own, older = sent_run(1, "fit"), sent_run(0, "prep")
    hidden = [
        sent_run(9, "s2-w7", sweep=KEY), sent_run(8, "s2-controller", sweep=KEY),
        sent_run(7, "fit-fallback", watches=KEY), sent_run(6, "vit-decoders", gang=KEY),
    ]  # fmt: skip
    history = [*hidden, own, older]
    assert select_run("@last", history, nobody, SCOPE) == own.job_id
    assert select_run("@last~1", history, nobody, SCOPE) == older.job_id
    assert select_run("s2-w7", history, nobody, SCOPE) == hidden[0].job_id  # by its name, any run
    with pytest.raises(NotFound, match="Only sweeps were submitted: `batchml sweeps show @last`"):
        select_run("@last", hidden, nobody, SCOPE)
    with pytest.raises(NotFound, match="Nothing was submitted in the project ours yet"):
        select_run("@last", hidden[2:], nobody, SCOPE)


def test_an_error_lists_the_newest_names_of_the_project_and_no_trials() -> None:
    own = [sent_run(20 + number, f"run{number:02}") for number in range(12)]
    history = [sent_run(1, "s2-w7", sweep=KEY), sent_run(2, "other", "theirs"), *own]
    everything = [(each.job_id, each.name) for each in history]
    with pytest.raises(NotFound) as caught:
        select_run("nope", history, lambda: everything, SCOPE)
    names = ", ".join(f"run{number:02}" for number in range(10))
    assert f"Known: {names}, ... " in str(caught.value)
    with pytest.raises(NotFound, match="Did you mean 'run11'"):  # also a name that is not listed
        select_run("rum11", history, lambda: everything, SCOPE)
