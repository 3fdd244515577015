"""Credit graphs inside other trainers: `creditgraph.adapters.trl`, `.verl`, `.skyrl`, `.prime_rl`, `.slime`, …"""
