"""Copy a folder into an archive and back. An archive is a folder, or a prefix in S3."""
