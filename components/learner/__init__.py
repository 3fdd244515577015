"""Learners: one choice per file, over the shared objective functions."""
