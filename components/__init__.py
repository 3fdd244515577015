"""The nodes of graphs, and what several of them share. No node imports another; graphs connect them."""

DISTRIBUTION = "creditgraph"  # `creditgraph.py` checks it: another package may install a folder of this name
