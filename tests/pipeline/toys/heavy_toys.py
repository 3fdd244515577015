"""Imports more than it should, and derives from a shipped component."""

import colorsys  # noqa: F401

from creditgraph.components.advantage.group import GroupAdvantage


class Heavy(GroupAdvantage):
    """Loads colorsys at import."""
