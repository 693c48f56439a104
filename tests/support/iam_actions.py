"""The IAM action that allows an operation of AWS.

Source: Service Authorization Reference. Most actions have the operation's name.
"""

# botocore's service -> IAM's prefix, where they differ.
_PREFIXES = {
    "efs": "elasticfilesystem",
    "service-quotas": "servicequotas",
    "resourcegroupstaggingapi": "tag",
    "elbv2": "elasticloadbalancing",
}
# Calls that need no permission.
FREE = frozenset({"sts:GetCallerIdentity", "sts:GetSessionToken", "sso:GetRoleCredentials"})
_S3 = {
    "HeadObject": "GetObject",
    "HeadBucket": "ListBucket",
    "ListObjects": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "ListObjectVersions": "ListBucketVersions",
    "DeleteObjects": "DeleteObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}


def action_of(service: str, operation: str) -> str:
    """The action for an operation of a botocore service; "" for calls that need no permission."""
    name = _S3.get(operation, operation) if service == "s3" else operation
    action = f"{_PREFIXES.get(service, service)}:{name}"
    return "" if action in FREE else action
