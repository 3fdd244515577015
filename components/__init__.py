"""The nodes of graphs, and what several of them share. No node imports another; graphs connect them."""
