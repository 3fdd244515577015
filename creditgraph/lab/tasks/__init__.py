"""Task families beside chains: generated problems whose every step can be checked."""
