"""From a recipe and a cluster description to a SLURM job, and back: render, submit, look, cancel."""
