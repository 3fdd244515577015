"""Stages of tools/gpu_acceptance: what one GPU can prove, each in a process of its own."""
