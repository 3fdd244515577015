"""Learners, one per folder, and what they share: objectives, packing and the training step."""
