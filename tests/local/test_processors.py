"""Which processors an attempt gets for itself, and that no other server gives them away."""

import os
import subprocess
import sys

from batchml.local.executors.processors import (
    MachineProcessors,
    Processor,
    bound_to,
    choose_processors,
    claim_processors,
    claimed_processors,
    find_processors,
    give_processors,
)

FOUR = [Processor(number, (0, number)) for number in range(4)]
# Two cores with two processors each, as Linux numbers them.
CORES = [Processor(0, (0, 0)), Processor(2, (0, 0)), Processor(1, (0, 1)), Processor(3, (0, 1))]


def test_attempts_share_no_processor_while_there_is_room() -> None:
    used: set[int] = set()
    for count in (1, 2, 1):
        chosen = choose_processors(FOUR, used, count)
        assert len(chosen) == count and not used & set(chosen)
        used |= set(chosen)
    assert used == {0, 1, 2, 3}


def test_an_attempt_that_finds_too_few_may_use_all() -> None:
    assert choose_processors(FOUR, {0, 1, 2}, 2) == ()
    assert choose_processors(FOUR, (), 5) == ()
    assert choose_processors((), (), 1) == ()


def test_a_core_is_shared_only_when_no_core_is_free() -> None:
    first = choose_processors(CORES, (), 1)
    second = choose_processors(CORES, first, 1)
    third = choose_processors(CORES, (*first, *second), 1)
    assert (first, second, third) == ((0,), (1,), (2,))


def test_two_processors_are_those_of_one_core() -> None:
    assert choose_processors(CORES, (), 2) == (0, 2)
    assert choose_processors(CORES, (0,), 2) == (1, 3), "and not 2, whose core is in use"


def test_processors_that_others_use_and_this_machine_lacks_do_no_harm() -> None:
    assert choose_processors(FOUR, {77, 0}, 3) == (1, 2, 3)


def test_processors_that_another_server_claims_at_any_moment_are_in_use() -> None:
    claimed: set[int] = set()
    machine = MachineProcessors(FOUR, claimed.intersection)
    assert machine.choose([1, 2, 3], 1) == (0,)
    claimed.add(0)  # as soon as the first attempt here has given it back
    assert machine.choose([2, 3], 1) == (1,)
    assert machine.choose([1, 2, 3], 1) == ()
    assert claimed == {0}


def test_the_processors_of_this_process_are_found() -> None:
    assert {each.number for each in find_processors()} == os.sched_getaffinity(0)


def test_a_claim_is_seen_by_every_process_until_it_ends() -> None:
    claims = claim_processors([60_001, 60_002])
    assert claimed_processors([60_000, 60_001, 60_002]) == {60_001, 60_002}
    for claim in claims:
        claim.close()
    assert claimed_processors([60_001, 60_002]) == set()
    assert claim_processors([]) == []


def test_a_processor_that_is_claimed_twice_stays_claimed_by_the_first() -> None:
    (first,) = claim_processors([60_004])
    second, other = claim_processors([60_004, 60_005])
    second.close()
    assert claimed_processors([60_004, 60_005]) == {60_004, 60_005}
    first.close()
    other.close()
    assert claimed_processors([60_004, 60_005]) == set()


def test_a_claim_ends_with_a_process_that_is_killed() -> None:
    code = (
        "import os; from batchml.local.executors.processors import claim_processors as c;"
        "held = c([60_003]); print('held', flush=True); os.read(0, 1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        assert claimed_processors([60_003]) == {60_003}
        process.kill()
        process.wait()
        assert claimed_processors([60_003]) == set()


def test_a_program_that_is_bound_uses_its_processors_and_this_thread_all_again() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    code = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with bound_to([one]):
        assert subprocess.check_output(code, text=True).strip() == f"[{one}]"
    assert os.sched_getaffinity(0) == before
    with bound_to([99_999]):  # this machine does not have it
        assert os.sched_getaffinity(0) == before
    with bound_to([]):
        assert os.sched_getaffinity(0) == before


def test_a_container_gets_its_processors_from_the_engine() -> None:
    config: dict[str, object] = {"HostConfig": {"Memory": 6}}
    give_processors(spec := {"config": config}, (1, 3))
    assert spec["config"] == {"HostConfig": {"Memory": 6, "CpusetCpus": "1,3"}}
    give_processors(spec := {"config": {"HostConfig": {}}}, ())
    assert spec["config"] == {"HostConfig": {}}
