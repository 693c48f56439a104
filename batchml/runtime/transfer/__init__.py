"""Copy a folder into an archive and back: an archive is a folder, or a prefix in S3."""
