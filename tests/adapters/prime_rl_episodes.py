"""A group of episodes, for prime_rl_hooks.py and its test."""

READ = [[7, 7], [8], [7, 7], [9]]
"""what each episode reads before its second turn, as token ids"""
REWARDS = [1.3, 0.5, 1.0, 0.25]
TWO_AGENTS = [[0.5, 1.0, 0.0], [0.25, 3.0, 0.5], [1.0, 7.0, 7.0]]
"""of each episode, the rewards of one that proposes a problem and of two that solve it"""
CONTINUED = [([3, 4, 44, 7, 45], 1.0), ([6, 7, 8], 0.0)]
"""responses of the embedded model's tokens, and their rewards"""
