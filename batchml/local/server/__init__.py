"""The server of the embedded AWS Batch: its process, HTTP interface, signatures and validation."""
