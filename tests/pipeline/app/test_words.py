"""What a first user types wrong, and the sentence that says how it is written; options mean the same everywhere."""

import argparse
import subprocess

import pytest

from creditgraph.pipeline.app.cli import all_commands, main
from creditgraph.pipeline.core import contract


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model").mkdir()
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("learner.lr=1e-4", "learner.lr: unknown setting. Did you mean learner.optimizer.lr?"),
        ("learning_rate=1e-4", "Here it is called learner.optimizer.lr."),
        ("learner.objective=gspo", "Write learner.objective.use=gspo."),
        ("learner.objective.clip=0.2", "Here it is called learner.objective.config.clip_low."),
        ("sampler.num_generations=4", "Here it is called sampler.group_size."),
        ("algorithm.adv_estimator=grpo", "Here it is called recipe=NAME, or advantage.use."),
        ("data.train_batch_size=8", "Here it is called prompts.batch."),
        ("model=./my_model", "A file or folder of yours is written model.path=./my_model."),
        ("data=mine.jsonl", "A file or folder of yours is written data=file data.train.path=mine.jsonl."),
        ("model.path=./typo", "model.path './typo': expected an existing folder"),
        ("recipe=toy_srpo", "recipe=toy_grpo recipe=toy_srpo: 2 choices of one recipe; expected one."),
        ("run.wandb=true", "Its settings begin with run.wandb.mode ('disabled' or 'offline' or 'online')."),
    ],
)
def test_a_mistake_is_answered_by_what_to_write(typed, answer, capsys) -> None:
    assert main(["train", "recipe=toy_grpo", typed, "--check"]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["resume", "runs/a"], "unknown command 'resume'. Here: `creditgraph train RUN` continues a run."),
        (["evaluate"], "Here: `creditgraph eval`."),
        (["trian"], "Did you mean 'train'?"),
        (["report", "runs"], "runs: no such run directory."),
    ],
)
def test_a_command_of_elsewhere_is_answered_by_ours(typed, answer, capsys) -> None:
    assert main(typed) == 2
    assert answer in capsys.readouterr().err


IDEAS = '''
from dataclasses import dataclass
from typing import Annotated
from creditgraph import Component, Credit, Rewards, Trajectories, same_rows, training_mask

@dataclass(frozen=True, kw_only=True)
class Outputs:
    credit: Annotated[Credit, same_rows("trajectories")]

class Above(Component):
    """The reward above one half."""

    def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        tokens = trajectories.response_tokens
        advantage = VALUE
        mask = training_mask(tokens, trajectories.inherited)
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask))
'''


def test_a_class_in_a_file_is_checked_and_used_alike(folder, capsys) -> None:
    (folder / "ideas.py").write_text(IDEAS.replace("VALUE", "tokens.spread(rewards.value - 0.5)"))
    assert main(["check", "ideas.py:Above"]) == 0
    assert main(["train", "recipe=toy_grpo", "advantage.use=ideas.py:Above", "--check"]) == 0
    assert "valid: 8 nodes" in capsys.readouterr().out


def test_a_number_per_row_in_place_of_one_per_token(folder, capsys) -> None:
    (folder / "flat.py").write_text(IDEAS.replace("VALUE", "rewards.value"))
    assert main(["check", "flat.py:Above"]) == 1
    said = capsys.readouterr().out
    assert "Credit.advantage: expected a Jagged with one value per response token, got a Tensor." in said
    assert "trajectories.response_tokens.spread(numbers)" in said


def test_an_import_over_its_limit_is_a_finding(folder, monkeypatch, capsys) -> None:
    (folder / "slow.py").write_text(IDEAS.replace("VALUE", "tokens.spread(rewards.value)"))

    def late(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(contract.subprocess, "run", late)
    assert main(["check", "slow.py:Above", "--static"]) == 1
    assert "importing own_slow alone took more than 120 s" in capsys.readouterr().out


def test_one_meaning_per_option_letter_over_all_commands() -> None:
    names: dict[str, set] = {}
    for name, command in all_commands().items():
        parser = argparse.ArgumentParser(prog=name)
        command.configure(parser)
        for action in parser._actions:
            long = [option for option in action.option_strings if option.startswith("--")]
            assert action.dest == "help" or not action.option_strings or long, f"{name}: {action.option_strings}"
            for option in set(action.option_strings) - set(long):
                names.setdefault(option, set()).update(long)
            if long and long[0] in ("--output", "--set", "--config-dir"):
                assert len(action.option_strings) == 2, f"{name}: {long[0]} has no letter"
            assert not {"--out", "--recipes", "--outputs"} & set(long), name
    assert names == {
        "-h": {"--help"},
        "-c": {"--config-dir"},
        "-f": {"--follow"},
        "-m": {"--multirun"},
        "-n": {"--lines"},
        "-o": {"--output"},
        "-s": {"--set"},
    }
