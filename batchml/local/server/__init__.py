"""The embedded AWS Batch over HTTP: protocol, signatures, validation, the process."""
