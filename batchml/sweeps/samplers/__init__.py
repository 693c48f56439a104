"""Samplers: the parameters of the next trials, by random, grid, Sobol, TPE or Optuna."""
