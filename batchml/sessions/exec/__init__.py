"""Commands and shells inside a running run: on this machine, in its containers, in AWS."""
