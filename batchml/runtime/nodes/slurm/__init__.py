"""srun inside a multi-node run, for scripts of Slurm."""
