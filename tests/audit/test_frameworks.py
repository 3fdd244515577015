"""The examples of docs/audit.md for other trainers, on functions with their signatures."""

import re
from pathlib import Path

import pytest
import stand_ins

from creditgraph.pipeline.app.audit.audit import all_checks
from creditgraph.pipeline.app.cli import main

PAGE = (Path(__file__).parents[2] / "docs/audit.md").read_text()
FILES = dict(re.findall(r"^```python title=\"(\w+\.py)\"\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
SECTION = PAGE.partition("## Audit your trainer in five minutes")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^creditgraph audit (.*)$", SECTION, re.MULTILINE)


def test_every_framework_has_a_command():
    for name in ("verl", "slime", "openrlhf", "nemo_rl", "trl"):
        assert any(name in command for command in COMMANDS), name


def test_the_page_lists_every_check():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [check.name for check in all_checks()]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_of_a_framework_runs(command, tmp_path, monkeypatch, capsys):
    stand_ins.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    arguments = command.partition("#")[0].split()
    assert main(["audit", *arguments]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "✗" not in out
    assert out.count("✓") >= 8


def test_a_setting_of_a_framework_is_used(monkeypatch, capsys):
    stand_ins.install(monkeypatch)
    target = "verl.trainer.ppo.core_algos:compute_grpo_outcome_advantage"
    assert main(["audit", target, "--layer", "metamorphic"]) == 0
    assert "token_level_rewards: token_rewards, response_mask: mask, index: groups" in capsys.readouterr().out
    assert main(["audit", "slime.utils.ppo_utils:compute_policy_loss"]) not in (0, 1)
    text = capsys.readouterr().err
    assert "nothing is known of eps_clip, eps_clip_high" in text
    assert "-s eps_clip=VALUE" in text
    assert main(["audit", "openrlhf.models.loss:PolicyLoss", "-s", "clip=0.3"]) not in (0, 1)
    assert "Give its settings with -s NAME=VALUE" in capsys.readouterr().err
