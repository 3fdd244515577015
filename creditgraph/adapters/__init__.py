"""Credit graphs inside TRL, verl, SkyRL, prime-rl, slime and NeMo-RL, each in a module of its own."""
