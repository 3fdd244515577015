"""Rollouts of other trainers as run directories: rows by hand, what is skipped, and what reads the run."""

import argparse
import json
from pathlib import Path

import pytest
import torch
import yaml

from creditgraph.adapters.commands import import_rollouts
from creditgraph.adapters.imports.batch import Texts
from creditgraph.adapters.imports.formats import FORMATS
from creditgraph.adapters.imports.row import Options, Part, Row
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.run.recording import read_payload
from creditgraph.pipeline.run.trust import outside_code

ROWS = [
    {"group": "a", "prompt": "p", "prompt_ids": [1, 2], "tokens": [5, 6, 7], "reward": 1, "advantage": 0.5},
    {"group": "a", "prompt": "p", "prompt_ids": [1, 2], "tokens": [5, 8], "reward": 0, "advantage": -0.5},
    {"group": "b", "prompt": "q", "prompt_ids": [3], "tokens": [9], "reward": 0.25, "advantage": [0.0]},
]
MORE = {
    "mask": [1, 0, 1],
    "logprobs": [-1.0, None, -2.0],
    "old_logprobs": [-1.5, None, -2.0],
    "reference_logprobs": [-1.0, None, -1.0],
    "entropies": [0.5, None, 0.25],
    "answer": "7",
}


def command(*arguments):
    """What `creditgraph import` does, whatever is installed."""
    parser = argparse.ArgumentParser()
    import_rollouts.configure(parser)
    return import_rollouts.main(parser.parse_intermixed_args([str(a) for a in arguments]))


@pytest.fixture
def lines(tmp_path):
    def write(rows, name="rollouts.jsonl"):
        file = tmp_path / name
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return file

    return write


def record(run, output, step=0):
    return read_payload(run / "record" / output / f"{step:06d}.parquet")


def test_a_run_has_what_the_lines_have(lines, tmp_path, capsys):
    run = tmp_path / "run"
    assert command(lines([ROWS[0] | MORE, *ROWS[1:]]), "--from", "jsonl", "-o", run) == 0
    trajectories = record(run, "rollouts.trajectories")
    assert trajectories.prompt_tokens.to_lists() == [[1, 2], [1, 2], [3]]
    assert trajectories.response_tokens.to_lists() == [[5, 6, 7], [5, 8], [9]]
    assert trajectories.group.tolist() == [0, 0, 1]
    assert trajectories.policy_version.tolist() == [-1, -1, -1]
    sampled = trajectories.engine_logprobs.values
    assert sampled[[0, 2]].tolist() == [-1.0, -2.0]
    assert sampled[[1, 3, 4, 5]].isnan().all()
    credit = record(run, "rollouts.credit")
    # The token that is not trained on has no credit; one number is that of all trained tokens.
    assert credit.advantage.to_lists() == [[0.5, 0.0, 0.5], [-0.5, -0.5], [0.0]]
    assert credit.mask.to_lists() == [[True, False, True], [True, True], [True]]
    assert record(run, "rollouts.rewards").value.tolist() == [1.0, 0.0, 0.25]
    assert record(run, "trainer.logprobs").logprobs.values[:1].tolist() == [-1.5]
    assert record(run, "trainer.reference").logprobs.values[[0, 2]].tolist() == [-1.0, -1.0]
    assert record(run, "rollouts.prompts").answer == ["7", ""]
    assert outside_code(yaml.safe_load((run / "config.yaml").read_text())) == []  # reading it loads nothing
    assert "read 3 responses of 1 steps" in capsys.readouterr().out


def test_rows_that_cannot_be_read_are_skipped_and_written_down(lines, tmp_path, capsys):
    bad = [
        "{",
        "[1]",
        ROWS[0] | {"mask": [1, 0]},
        {"reward": 1.0},
        ROWS[0] | {"tokens": []},
        ROWS[0] | {"reward": "high"},
        {"prompt": "p", "response": "a text", "reward": 1},
        ROWS[0] | {"tokens": [5, "b", 7]},
        ROWS[0] | {"tokens": [5, 6, -7]},
        ROWS[0] | {"step": [1]},
        ROWS[0] | {"prompt": [{"role": "user", "content": 5}]},
        ROWS[0] | {"finish": {"reason": "stop"}},
        ROWS[0] | {"response": 5},
        ROWS[0] | {"response": ["a text"]},
    ]
    run = tmp_path / "run"
    command(lines([ROWS[0], *bad]), "--from", "jsonl", "-o", run)
    rejected = [json.loads(line) for line in (run / "rejected.jsonl").read_text().splitlines()]
    assert [row["row"].rpartition(" ")[2] for row in rejected] == [f"{i}" for i in range(2, 16)]
    reasons = " | ".join(row["reason"] for row in rejected)
    for part in (
        "no JSON",
        "expected a JSON object",
        "2 entries in mask, but 3 tokens",
        "neither token ids nor a text",
        "the response is empty",
        "reward: input should be a valid number",
        "--tokenizer FOLDER",
        "tokens: input should be a valid integer",
        "tokens: input should be greater than or equal to 0",
        "step: input should be a valid integer",
        "the content of a message: expected a text or its parts, got int",
        "finish: input should be a valid string",
        "response: expected a text or messages, got int",
        "expected a text or messages, got a list of str",
    ):
        assert part in reasons
    out = capsys.readouterr().out
    assert "skipped 14 rows" in out
    assert "note: no masks, so all tokens of a response count as trained" in out


def test_mistakes_end_in_a_sentence(lines, tmp_path):
    file = lines(ROWS)
    with pytest.raises(DataError, match="no rollout was read from 1 files: 1 × it has neither"):
        command(lines([{}], "empty.jsonl"), "--from", "jsonl", "-o", tmp_path / "none")
    with pytest.raises(ConfigError, match="no such file or folder"):
        command(tmp_path / "nothing", "--from", "verl", "-o", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no \*\*/completions_\*\.parquet"):
        command(tmp_path, "--from", "trl", "-o", tmp_path / "none")
    with pytest.raises(ConfigError, match="expected all three"):
        command(file, "--from", "jsonl", "--endpoint", "http://x/v1", "-o", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"advantage\.eps=1: is a setting of a graph"):
        command(file, "advantage.eps=1", "--from", "jsonl", "-o", tmp_path / "none")
    with pytest.raises(ConfigError, match="samples responses of its own"):
        command(file, "--from", "jsonl", "--graph", "srpo", "-o", tmp_path / "none")
    with pytest.raises(ConfigError, match="it reads a SegmentValues, which recorded rollouts do not have"):
        command(file, "--from", "jsonl", "--graph", "ppo", "-o", tmp_path / "none")
    command(file, "--from", "jsonl", "-o", tmp_path / "run")
    with pytest.raises(Exception, match="holds a run already"):
        command(file, "--from", "jsonl", "-o", tmp_path / "run")


def test_a_graph_computes_the_credit_and_replays_it(lines, tmp_path, capsys):
    run = tmp_path / "run"
    settings = ["--graph", "grpo", "advantage.normalize=mean"]
    command(lines([row | {"step": step} for step in (3, 4) for row in ROWS]), *settings, "--from", "jsonl", "-o", run)
    # Rewards 1 and 0 have the mean ½; a group of one has nothing to compare with.
    expected = [[0.5, 0.5, 0.5], [-0.5, -0.5], [0.0]]
    assert record(run, "advantage.credit", 4).advantage.to_lists() == expected
    assert main(["replay", str(run), "--iteration", "4", "--node", "advantage"]) == 0
    assert "advantage.credit: the same bits as recorded" in capsys.readouterr().out
    assert main(["replay", str(run), "--iteration", "4", "--node", "trainer"]) == 2
    assert "only that trainer makes such values again" in capsys.readouterr().err
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in metrics] == [3, 4]
    assert metrics[0]["advantage/groups"] == 2


def test_turns_become_rows(lines, tmp_path):
    run = tmp_path / "run"
    rows = [
        ROWS[0] | {"mask": [1, 0, 1], "turn_rewards": [0.25, 0.75]},
        ROWS[0] | {"tokens": [5], "turn_rewards": [0.0]},
    ]
    command(lines(rows), "--from", "jsonl", "--graph", "mt_grpo", "-o", run)
    turns = record(run, "rollouts.turns")
    assert turns.reward.tolist() == [0.25, 0.75, 0.0]
    assert turns.turn.tolist() == [0, 1, 0]
    assert record(run, "rollouts.trajectories").prompt_tokens.to_lists() == [[1, 2], [1, 2, 5, 6], [1, 2]]
    assert len(record(run, "advantage.credit")) == 3


def test_steps_of_an_episode_are_its_turns(lines, tmp_path):
    run = tmp_path / "run"
    steps = [
        {"prompt_ids": [1], "tokens": [5, 6], "reward": 0.25, "group": "a", "episode": 7},
        {"prompt_ids": [1, 5, 6, 9], "tokens": [7], "reward": 0.5, "group": "a", "episode": 7},
        {"prompt_ids": [1], "tokens": [8], "reward": 1.0, "group": "a"},
    ]
    command(lines(steps), "--from", "jsonl", "--graph", "mt_grpo", "-o", run)
    turns = record(run, "rollouts.turns")
    assert turns.reward.tolist() == [0.25, 0.5, 1.0]
    assert turns.turn.tolist() == [0, 1, 0]
    assert turns.state == ["start", "9", "start"]
    assert turns.episode[0] == turns.episode[1] != turns.episode[2]
    assert record(run, "rollouts.rewards").value.tolist() == [0.75, 0.75, 1.0]
    assert record(run, "rollouts.trajectories").prompt_tokens.to_lists() == [[1], [1, 5, 6, 9], [1]]
    with pytest.raises(DataError, match="row 2 is apart from the other rows of its episode"):
        command(lines([steps[0], steps[2], steps[1]]), "--from", "jsonl", "-o", tmp_path / "apart")


def test_outputs_of_a_session_of_verl_are_steps_with_one_score(lines, tmp_path, capsys):
    run = tmp_path / "run"

    def output(uid, score, advantage, tokens):
        texts = {"input": "a", "output": "b", "gts": "7", "score": score, "step": 3, "uid": uid}
        ids = {"prompts": [1], "responses": tokens, "response_mask": [1] * len(tokens)}
        return texts | ids | {"advantages": [advantage] * len(tokens)}

    # verl copies a session's score to its outputs, and counts it once in its group.
    rows = [output("p_0_0", 1.0, 1.0, [5, 6]), output("p_0_1", 1.0, 1.0, [7]), output("p_1_0", 0.0, -1.0, [8])]
    command(lines(rows), "--from", "verl", "--graph", "grpo_turns", "-o", run)
    turns = record(run, "rollouts.turns", 3)
    assert turns.reward.tolist() == [0.0, 1.0, 0.0]
    assert turns.turn.tolist() == [0, 1, 0]
    assert turns.episode[0] == turns.episode[1] != turns.episode[2]
    assert record(run, "rollouts.rewards", 3).value.tolist() == [1.0, 1.0, 0.0]
    computed = record(run, "advantage.credit", 3).advantage.to_lists()
    assert computed == [
        [pytest.approx(1.0, abs=1e-5)] * 2,
        [pytest.approx(1.0, abs=1e-5)],
        [pytest.approx(-1.0, abs=1e-5)],
    ]
    assert main(["audit", str(run)]) == 0
    assert capsys.readouterr().out.count("✓ records_baseline") == 2
    with pytest.raises(ConfigError, match=r"--graph grpo: it credits whole responses, but the rows are turns"):
        command(lines(rows), "--from", "verl", "--graph", "grpo", "-o", tmp_path / "whole")
    # Sessions of one output are responses, as ever.
    alone = [output("p_0_0", 1.0, 1.0, [5, 6]), output("p_1_0", 0.0, -1.0, [8])]
    command(lines(alone), "--from", "verl", "-o", tmp_path / "alone")
    assert not (tmp_path / "alone" / "record" / "rollouts.turns").exists()


def test_samples_of_a_rollout_of_slime_are_steps_where_they_share_a_reward(tmp_path):
    def sample(rollout, reward):
        return {"tokens": [1, 5], "response_length": 1, "group_index": 0, "rollout_id": rollout, "reward": reward}

    samples = [sample(4, 1.0), sample(4, 1.0), sample(5, 0.5), sample(5, 0.25), sample(6, 0.0), sample(None, 0.75)]
    torch.save({"rollout_id": 2, "samples": samples}, tmp_path / "data_2.pt")
    command(tmp_path / "data_2.pt", "--from", "slime", "-o", tmp_path / "run")
    turns = record(tmp_path / "run", "rollouts.turns", 2)
    assert turns.reward.tolist() == [0.0, 1.0, 0.5, 0.25, 0.0, 0.75]
    assert turns.turn.tolist() == [0, 1, 0, 0, 0, 0]
    assert (turns.episode - turns.episode[0]).tolist() == [0, 0, 2, 3, 4, 5]


@pytest.mark.slow
def test_other_commands_read_it(lines, tmp_path, capsys):
    run = tmp_path / "run"
    steps = [row | {"step": step} for step in range(2) for row in ROWS]
    command(lines(steps), "--from", "jsonl", "-o", run)
    assert main(["report", str(run)]) == 0
    assert main(["audit", str(run)]) == 0
    capsys.readouterr()
    assert main(["localization", str(run), "-o", str(tmp_path / "l")]) == 2
    assert "nor credit with log-probs are recorded" in capsys.readouterr().err
    recipes = "recipe=toy_grpo,toy_vineppo,toy_s_trace,toy_srpo,toy_gigpo_stop"
    assert main(["credit", recipes, str(run)]) == 0
    out = capsys.readouterr().out
    assert "note: this run has no policy" in out
    shown = {line.split()[0]: line for line in out.splitlines() if line.startswith("toy_")}
    assert shown["toy_grpo"].strip() == "toy_grpo"
    for name, reason in {
        "toy_vineppo": "this run has no policy: its rollouts were imported",
        "toy_s_trace": "the engine gave no entropy for 6 of 6 tokens",
        "toy_srpo": "it needs further sampling",
        "toy_gigpo_stop": "it needs further sampling",
    }.items():
        assert reason in shown[name]
    page = (run / "report.html").read_text()
    assert 'id="h-curves"' in page
    assert 'id="h-phases"' not in page  # nothing took time


def test_turns_are_credited_by_recipes_of_episodes_alone(lines, tmp_path, capsys):
    run = tmp_path / "run"
    command(lines([row | {"mask": [1] * len(row["tokens"])} for row in ROWS]), "--turns", "--from", "jsonl", "-o", run)
    assert main(["credit", "recipe=toy_mt_grpo_thoughts,toy_grpo", str(run)]) == 0
    lines_ = capsys.readouterr().out.splitlines()
    assert any(line.strip() == "toy_mt_grpo_thoughts" for line in lines_)
    assert any(line.startswith("toy_grpo ") and "sampler.chains" in line for line in lines_)


@pytest.mark.parametrize(("uid", "group"), [("p_7_1_0", "p_7"), ("8f-2e", "8f-2e"), ("", "2 + 2"), ("a_b_1", "a_b_1")])
def test_the_group_of_a_verl_row_is_the_prompt_of_its_key(uid, group):
    entry = {"input": "2 + 2", "output": "4", "score": 1.0, "uid": uid, "step": 1, "gts": 4}
    (row,) = FORMATS["verl"].rows(entry, Path("1.jsonl"), Options())
    assert (row.group, row.answer, row.reward) == (group, "4", 1.0)


def test_slime_samples_are_read_without_running_them(tmp_path, capsys):
    sample = {
        "group_index": 2, "prompt": "p", "tokens": [1, 2, 5, 6], "response": "x", "response_length": 2, "label": "7",
        "reward": 1.0, "loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0], "status": "completed",
    }  # fmt: skip
    several = sample | {"reward": {"acc": 1.0, "format": 0.5}, "loss_mask": None}
    aborted = sample | {"response_length": 0, "status": "aborted"}
    torch.save({"rollout_id": 4, "samples": [sample, several, aborted]}, tmp_path / "data_4.pt")
    run = tmp_path / "run"
    command(tmp_path, "--from", "slime", "--rewards", "acc=1,format=2", "-o", run)
    assert record(run, "rollouts.rewards", 4).value.tolist() == [1.0, 2.0]
    assert record(run, "rollouts.trajectories", 4).prompt_tokens.to_lists() == [[1, 2]] * 2
    assert record(run, "rollouts.trajectories", 4).engine_logprobs.to_lists() == [[-0.5, 0.0]] * 2
    assert "a response of 0 tokens in 4: aborted" in capsys.readouterr().out

    class Bomb:
        def __reduce__(self):
            return (print, ("it ran",))

    torch.save({"rollout_id": 5, "samples": [sample | {"metadata": Bomb()}]}, tmp_path / "data_5.pt")
    with pytest.raises(DataError, match="could run code"):
        command(tmp_path / "data_5.pt", "--from", "slime", "-o", tmp_path / "other")
    assert "it ran" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parents", "reason"),
    [
        ([0, 0], ""),
        ([None, 2, 1, 2], ""),
        ([None, 5], ""),
        ([None, -1], ""),
        ([1, 0], "a trace without a last message"),
    ],
)
def test_a_trace_whose_messages_follow_none_is_skipped(parents, reason, tmp_path):
    message = {"message": {"role": "assistant", "content": "7"}, "sampled": True}
    trace = {"agent": {}, "nodes": [message | {"parent": parent} for parent in parents], "task": {"data": {}}}
    (tmp_path / "traces.jsonl").write_text(json.dumps({"traces": [trace], "task": {"key": "a", "data": {}}}))
    reason = reason or r"message \d follows message -?\d; expected an earlier one"
    with pytest.raises(DataError, match=f"1 × {reason}"):
        command(tmp_path, "--from", "verifiers", "--tokenizer", "tiny", "-o", tmp_path / "run")


def test_roles_mask_the_texts_of_tools():
    texts = Texts(load_tokenizer(ModelSpec(path="tiny")))
    row = texts.with_tokens(
        Row(group="g", prompt="<solve> 3", parts=[Part(" 3 +"), Part(" 4", trained=False), Part(" 5")])
    )
    assert len(row.tokens) == 4
    assert row.mask == [True, True, False, True]
    assert texts.made == 1


def test_a_tokenizer_makes_texts_of_token_ids_and_keeps_those_of_the_file():
    texts = Texts(load_tokenizer(ModelSpec(path="tiny")))
    ids = {"prompt_ids": texts.tokenizer("<solve> 3")["input_ids"], "tokens": texts.tokenizer(" 3 + 4")["input_ids"]}
    row = texts.with_tokens(Row(group="g", **ids))
    assert (row.prompt, row.text) == tuple(texts.tokenizer.decode(ids[name]) for name in ("prompt_ids", "tokens"))
    kept = texts.with_tokens(Row(group="g", prompt="P", parts=[Part("R")], **ids))
    assert (kept.prompt, kept.text, kept.tokens) == ("P", "R", ids["tokens"])
    assert texts.made == 0


def test_a_graph_of_responses_says_that_it_credits_what_tools_wrote(lines, tmp_path, capsys):
    file = lines([ROWS[0] | MORE, *ROWS[1:]])
    assert command(file, "--from", "jsonl", "--graph", "grpo", "-o", tmp_path / "whole") == 0
    assert "note: 1 responses hold tokens that the policy did not sample; grpo credits those" in capsys.readouterr().out
    assert command(file, "--from", "jsonl", "--graph", "grpo_turns", "-o", tmp_path / "turns") == 0
    assert "did not sample" not in capsys.readouterr().out
