"""`batchml dashboard`: pages about runs, sweeps, hosts and costs, served from this machine."""
