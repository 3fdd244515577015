"""Advantages over the turns of episodes, whose rows are turns."""
