"""`srun` and other programs of Slurm inside a run, for Slurm scripts."""
