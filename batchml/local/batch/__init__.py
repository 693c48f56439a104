"""The rules of the embedded AWS Batch: state, lifecycle, scheduling, operations."""
