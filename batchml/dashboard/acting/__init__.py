"""What the pages do: cancel and rerun runs, submit jobs, open TensorBoard and notebooks."""
