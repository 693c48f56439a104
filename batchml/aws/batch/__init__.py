"""AWS Batch: its requests, calls and responses."""
