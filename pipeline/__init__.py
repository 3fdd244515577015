"""The declared graph: what it is (`core`), what runs it (`run`), and what people use (`app`)."""

from pathlib import Path

DISTRIBUTION = "creditgraph"  # `creditgraph.py` checks it: another package may install a folder of this name
ROOT = Path(__file__).resolve().parent.parent  # holds pipeline, components, configs and slurm
