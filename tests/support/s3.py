"""An S3 to talk to: moto's, which neither side of ours wrote."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BUCKET = "batchml-lab-123456789012-eu-west-1"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextmanager
def moto_s3() -> Iterator[str]:
    """moto's server with an empty bucket; its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        s3 = client(address)
        s3.create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        yield address
        # All of moto's servers in one process share their state.
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for each in page.get("Contents", ()):
                s3.delete_object(Bucket=BUCKET, Key=each["Key"])
        s3.delete_bucket(Bucket=BUCKET)
    finally:
        server.stop()


def client(address: str) -> Any:
    """boto3's client for it."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=address, region_name="eu-west-1",
        aws_access_key_id="a", aws_secret_access_key="b",
    )  # fmt: skip
