"""Files that outlive a container: a folder or S3, by the standard library alone."""
