"""The process that looks after one attempt: a program or a container."""
