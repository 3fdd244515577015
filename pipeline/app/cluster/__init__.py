"""SLURM jobs from a recipe and a cluster description: render, submit, show the status, cancel."""
