"""A group of episodes, for prime_rl_hooks.py and its test."""

READ = [[7, 7], [8], [7, 7], [9]]
"""what each episode reads before its second turn, as token ids"""
REWARDS = [1.3, 0.5, 1.0, 0.25]
