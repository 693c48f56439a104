"""The steps of a proof that only AWS, or another implementation of it, can answer."""

from collections.abc import Iterator, Mapping

from batchml.prove.proof import Asker, Proof
from batchml.prove.steps import ClaimAnswer

_LATER = "this version of prove does not ask it yet"


def ask_image(proof: Proof) -> Iterator[ClaimAnswer]:
    """Push the image of the probe, and compare the processor in its manifest with the hosts'."""
    yield ClaimAnswer("image-pushed", None, _LATER)
    yield ClaimAnswer("image-processor", None, _LATER)


def ask_submitter(proof: Proof) -> Iterator[ClaimAnswer]:
    """Submit the probe with a role that has the stack's policy for submitters, and nothing else."""
    yield ClaimAnswer("as-submitter", None, _LATER)


def ask_doctor_role(proof: Proof) -> Iterator[ClaimAnswer]:
    """Submit the probe with a role that has exactly the statement that doctor prints."""
    yield ClaimAnswer("as-doctor", None, _LATER)


def ask_search(proof: Proof) -> Iterator[ClaimAnswer]:
    """Search by the tag `batchml:env` of the proof; only keys pending deletion may be left."""
    yield ClaimAnswer("nothing-left", None, _LATER)


def terminate_host(proof: Proof, job: str) -> ClaimAnswer | None:
    """Wait until `job` has saved its checkpoint, and terminate the instance on which it runs.

    Returns the answer to `host-lost` if that is impossible.
    """
    return ClaimAnswer("host-lost", None, _LATER)


ASKERS: Mapping[str, Asker] = {
    "image": ask_image,
    "submitter": ask_submitter,
    "doctor-role": ask_doctor_role,
    "search": ask_search,
}
