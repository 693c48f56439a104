"""The embedded AWS Batch: AWS's JSON seen from the server."""
