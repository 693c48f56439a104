"""Signatures as botocore makes them: for S3, whose paths are escaped once and keep their dots."""

import hashlib
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as TheirCredentials
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.runtime.storage.credentials import Credentials, escape_path, escape_query, sign

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE"]),
    key=TEXT,
    query=st.dictionaries(TEXT.filter(bool), TEXT, max_size=3),
    token=st.sampled_from(["", "token/+="]),
    body=st.binary(max_size=20),
)
def test_a_request_is_signed_as_botocore_signs_it(
    method: str, key: str, query: dict[str, str], token: str, body: bytes
) -> None:
    path, asked = escape_path(f"/runs/{key}"), escape_query(list(query.items()))
    credentials = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG", token)
    digest = hashlib.sha256(body).hexdigest()
    headers = {"if-none-match": "*"}
    host = "bucket.s3.eu-west-1.amazonaws.com"
    ours = sign(credentials, "eu-west-1", method, host, path, asked, headers, digest, 1.8e9)

    url = f"https://{host}{path}" + (f"?{asked}" if asked else "")
    theirs = AWSRequest(method, url, headers={**headers, "X-Amz-Content-SHA256": digest}, data=body)
    assert urlsplit(url).path == path
    theirs.context["timestamp"] = ours["x-amz-date"]
    theirs.headers["X-Amz-Date"] = ours["x-amz-date"]
    if token:
        theirs.headers["X-Amz-Security-Token"] = token
    auth = S3SigV4Auth(
        TheirCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG", token or None), "s3", "eu-west-1"
    )
    canonical = auth.canonical_request(theirs)
    signature = auth.signature(auth.string_to_sign(theirs, canonical), theirs)
    assert ours["authorization"].endswith(f"Signature={signature}")
