"""Recorded log-probs, token ids and roles: faulty dumps are found and their likely fault said, right ones pass."""

import json

import numpy as np
import pytest

from creditgraph.pipeline.app.audit.audit import failures, run_checks
from creditgraph.pipeline.app.audit.records import read_records
from creditgraph.pipeline.app.audit.records_tokens import RECORDS

ROWS, TOKENS, WORDS = 12, 10, 50
TOOL = slice(4, 7)  # tokens of a tool's answer


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def dump(engine_temperature=1.0, seed=0):
    """A right dump: tokens sampled by an engine, whose log-probs the trainer computes again with other kernels."""
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.standard_normal((ROWS, TOKENS, WORDS))
    sampling = log_softmax(logits / engine_temperature)
    tokens = np.array([[rng.choice(WORDS, p=np.exp(p)) for p in row] for row in sampling])
    pick = tokens[..., None]
    engine = np.take_along_axis(sampling, pick, -1)[..., 0]
    trainer = np.take_along_axis(log_softmax(logits + 0.01 * rng.standard_normal(logits.shape)), pick, -1)[..., 0]
    mask = np.ones((ROWS, TOKENS), dtype=bool)
    mask[:, TOOL] = False
    engine[:, TOOL] = 0.0
    return {"rollout_logprob": engine, "old_logprob": trainer, "mask": mask}


def written(tmp_path, columns):
    file = tmp_path / "dump.jsonl"
    rows = [{k: v[i].tolist() if isinstance(v, np.ndarray) else v[i] for k, v in columns.items()} for i in range(ROWS)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def found(tmp_path, columns):
    (records,) = read_records(written(tmp_path, columns), {})
    return {r.check.name: r.finding for r in run_checks(records, RECORDS)}


def bad(findings):
    return {name for name, finding in findings.items() if finding.verdict == "fail"}


def late(columns):
    columns["old_logprob"] = np.roll(columns["old_logprob"], 1, axis=1)


def other_rows(columns):
    columns["old_logprob"] = columns["old_logprob"][::-1]


def another_temperature(columns):
    columns.update(dump(engine_temperature=0.6))


def another_prompt(columns):
    columns["old_logprob"][:, 0] -= 1.5
    columns["old_logprob"][:, 7] -= 1.5


def tool_is_trained(columns):
    columns["mask"][:] = True


def probabilities(columns):
    columns["old_logprob"] = -columns["old_logprob"]


FAULTS = {
    late: (
        "records_alignment",
        "old_logprob is shifted by one token against rollout_logprob: each is that of the previous",
    ),
    other_rows: ("records_alignment", "old_logprob of a row is that of another row"),
    another_temperature: ("records_temperature", "are at different temperatures"),
    another_prompt: ("records_first_tokens", "the trainer's prompt ends otherwise than the engine's"),
    tool_is_trained: ("records_sampled", "tokens of a tool or of the environment are trained"),
    probabilities: ("records_logprobs", "a sign is turned round"),
}


@pytest.mark.parametrize("seed", range(3))
def test_a_right_dump_passes(tmp_path, seed):
    findings = found(tmp_path, dump(seed=seed))
    assert bad(findings) == set()
    assert findings["records_alignment"].verdict == "pass"
    assert findings["records_temperature"].verdict == "pass"
    assert findings["records_sampled"].verdict == "pass"
    assert findings["records_baseline"].message == "no advantages, rewards and groups are recorded"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_faulty_dump_is_found_and_the_likely_fault_said(tmp_path, fault):
    columns = dump()
    fault(columns)
    check, words = FAULTS[fault]
    findings = found(tmp_path, columns)
    assert check in bad(findings)
    assert words in findings[check].likely


def test_a_policy_that_has_moved_is_no_fault(tmp_path):
    columns = dump()
    columns["old_logprob"] += 0.05 * np.random.default_rng(1).standard_normal((ROWS, TOKENS))
    assert bad(found(tmp_path, columns)) == set()


def test_roles_say_which_trained_tokens_are_of_a_tool(tmp_path):
    columns = {**dump(), "role": [["assistant"] * 4 + ["tool"] * 3 + ["assistant"] * 3] * ROWS}
    assert "records_sampled" not in bad(found(tmp_path, columns))
    columns["mask"][:, 5] = True
    finding = found(tmp_path, columns)["records_sampled"]
    assert finding.message == "12 trained tokens have the role tool"


def turns(drops):
    """Six trajectories of two turns; in each prompt there is one token of the user, 9, before the response."""
    rows = {"trajectory": [], "prompt_ids": [], "response_ids": [], "old_logprob": []}
    for i in range(6):
        first = [1, 2, 30 + i]
        thought, answer = [70, 71], [40 + i]
        kept = answer if drops else thought + answer
        for prompt, response in ((first, thought + answer), (first + kept + [9], [50])):
            rows["trajectory"].append(f"t{i}")
            rows["prompt_ids"].append(prompt)
            rows["response_ids"].append(response)
            rows["old_logprob"].append([-0.5] * len(response))
    return rows


def test_a_template_that_drops_the_thoughts_of_earlier_turns(tmp_path):
    assert found(tmp_path, turns(drops=False))["records_prefixes"].verdict == "pass"
    finding = found(tmp_path, turns(drops=True))["records_prefixes"]
    assert finding.verdict == "fail"
    assert "in 6 of 6 turns" in finding.message
    assert "the chat template drops or rewrites earlier turns" in finding.likely
    assert finding.example["first difference at token"] == 3
    assert finding.example["of"] == "the response"


def test_token_checks_are_beside_those_of_credit(tmp_path):
    rewards = np.array([1.0, 0.0] * 6)
    columns = {**dump(), "reward": rewards, "group": [i // 4 for i in range(ROWS)], "advantage": rewards - 0.5}
    (records,) = read_records(written(tmp_path, columns), {})
    results = run_checks(records, RECORDS)
    assert [r.check.name for r in failures(results)] == ["records_outside"]  # one number per row covers the tool too
    columns["advantage"] = np.where(columns["mask"], (rewards - 0.5)[:, None], 0.0)
    (records,) = read_records(written(tmp_path, columns), {})
    assert not failures(run_checks(records, RECORDS))
