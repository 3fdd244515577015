"""Rollouts of other trainers as run directories: a reader per format, one form of row, and one writer."""
