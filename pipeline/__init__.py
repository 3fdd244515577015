"""The declared graph: what it is (`core`), what runs it (`run`), and what people use (`app`)."""

from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]  # the package: holds pipeline, components, configs and slurm
