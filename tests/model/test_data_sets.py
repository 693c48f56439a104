"""`[data]` of a job.toml, and `data` of an environment."""

import pytest

from batchml.errors import ConfigError
from batchml.model.data import misspelt_data, prefix_arns, prefix_mistakes, unlisted_data
from batchml.model.job import JobSpec, change_job, read_job

BASE = {"image": "python", "command": ["train", "{data.train}"]}


def mistakes(data: object, **more: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_job({**BASE, "data": data, **more}, "job.toml")
    return [str(each) for each in caught.value.mistakes]


def test_addresses_may_be_in_s3_or_folders() -> None:
    for address in ("s3://bucket/a/b", "s3://bucket", "/sets/a", "{workspace}/a", "{data}/a"):
        spec = read_job({**BASE, "data": {"train": address}}, "job.toml")
        assert spec.data == {"train": address}
        assert spec.argv() == ["train", "{data.train}"], "the runtime fills it in"


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("", "found ''. Write"),
        ("data/mnist", "found 'data/mnist'. Write"),
        ("gs://bucket/a", "found 'gs://bucket/a'. Write"),
        ("s3://", "'' is no name of a bucket"),
        ("s3://Big_Bucket/a", "'Big_Bucket' is no name of a bucket"),
        ("/sets/../etc", "which has `..`"),
        ("s3://bucket/" + "a" * 2000, "of 2012 characters"),
        ("{outputs}/a", "found '{outputs}/a'. Write"),
    ],
)
def test_other_addresses_are_refused(address: str, found: str) -> None:
    (mistake,) = mistakes({"train": address})
    assert mistake.startswith("data.train: ") and found in mistake


def test_all_mistakes_come_at_once() -> None:
    many = {f"set{number}": "s3://bucket/a" for number in range(21)}
    found = "\n".join(mistakes({"Train-1": "s3://bucket/a", "dir": "x", "cache": "/a", **many}))
    for part in (
        "data: has 24 data sets; at most 20",
        "data.Train-1: is no name for a data set",
        "data.dir: BATCHML_DATA_DIR is the folder of data sets. Rename it.",
        "data.dir: found 'x'",
        "data.cache: BATCHML_DATA_CACHE is the folder of the cache",
        "command: {data.train} is no data set under [data].",
    ):
        assert part in found
    assert mistakes({"train": 5})[0].startswith("data.train: ")
    (seconds,) = mistakes({"train": "/a", "seconds": "/b"})
    assert seconds == "data.seconds: BATCHML_DATA_SECONDS is the time that copying took. Rename it."


def test_an_option_replaces_one_address() -> None:
    spec = read_job({**BASE, "data": {"train": "s3://a-b/a", "test": "s3://a-b/t"}}, "job.toml")
    changed = change_job(spec, {"data": {"train": "/sets/b"}}, "The command line")
    assert changed.data == {"train": "/sets/b", "test": "s3://a-b/t"}
    assert isinstance(changed, JobSpec)


def test_prefixes_that_an_environment_lists_may_be_read() -> None:
    data = {
        "own": "s3://ours/data/mnist", "listed": "s3://team/sets/a", "same": "s3://team/sets",
        "beside": "s3://team/sets2/a", "other": "s3://other/x", "folder": "/sets/a",
    }  # fmt: skip
    found = unlisted_data(data, ("s3://team/sets/",), "ours")
    assert list(found) == ["beside", "other"]
    assert prefix_arns(("s3://team/sets/", "s3://all"), "eu-west-1") == (
        ["arn:aws:s3:::team/sets", "arn:aws:s3:::team/sets/*", "arn:aws:s3:::all/*"],
        ["arn:aws:s3:::team", "arn:aws:s3:::all"],
    )
    assert prefix_arns(("s3://all",), "cn-north-1")[1] == ["arn:aws-cn:s3:::all"]
    wrong = ("team/sets", "s3://x/*", "arn:aws:s3:::x", "s3://")
    assert len(list(prefix_mistakes((*wrong, "s3://team/sets")))) == 4


def test_a_misspelt_data_set_is_refused_and_a_new_one_is_not() -> None:
    known = ("train", "valid")
    (mistake,) = misspelt_data({"tran": "s3://sets/q", "train": "s3://sets/p"}, known)
    assert "--data tran=...: [data] has no such name. Did you mean 'train'?" in mistake
    assert misspelt_data({"extra": "s3://sets/q", "valid": "s3://sets/v"}, known) == []
