"""A supervisor for each node that starts and restarts ranks as torchrun does."""
