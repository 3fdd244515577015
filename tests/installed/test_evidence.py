"""`creditgraph evidence` from what a wheel installs, with a method of the user's own."""

import json
import os
import re
import subprocess
import sys

import pytest

from creditgraph.lab.evidence.trial import CODES

pytestmark = pytest.mark.xdist_group("installed")

DECLARATION = """\
families:
  one: {title: One, settings: [data=chains_one, prompts.batch=4, data.train.size=40, data.eval.size=20]}
claims: {}
cells: {}
recipe:
  a:
    {title: A., family: one, regime: "", tokens: 3000, every: 9, rates: [1.0e-4, 3.0e-4], sweep_seeds: [100], seeds: 2,
     widenings: 0, methods: {grpo: {recipe: toy_grpo, rate: 1.0e-4}}}
"""
RECIPE = """\
# @package _global_
defaults: [/graph: grpo, /setup: toy]
nodes: {advantage: {use: "ideas:Mine"}}
"""
IDEA = '''\
from creditgraph.components.advantage.group import GroupAdvantage


class Mine(GroupAdvantage):
    """Group advantage."""
'''


@pytest.mark.slow
def test_a_recipe_of_ones_own_takes_every_stage(site, tmp_path):
    """From what a wheel installs, with a component and a recipe in the user's folder."""
    (tmp_path / "cells.yaml").write_text(DECLARATION)
    (tmp_path / "ideas.py").write_text(IDEA)
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / "configs" / "recipe" / "mine.yaml").write_text(RECIPE)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "creditgraph", "evidence", "recipe=mine", "--declaration", "cells.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    # With two runs of three thousand tokens nothing is seen, not even the controls.
    assert done.returncode == CODES["too noisy"], done.stdout + done.stderr
    assert re.search(r"mine against grpo: too noisy .*the control \w+ is not seen", done.stdout)
    rows = json.loads((tmp_path / "runs" / "evidence" / "mine.json").read_text())["cells"]["a"]["methods"]
    assert list(rows) == ["grpo", "oracle", "flipped", "mine"]
    again = subprocess.run([*command, "--again"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "mine-" in again.stderr
    assert "grpo-" not in again.stderr  # the baseline's runs are kept
