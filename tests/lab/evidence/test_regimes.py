"""Properties of families by a slow loop over rollouts, and rules by hand."""

import json

import pytest

import creditgraph.testing
from creditgraph.components.tasks import TASKS
from creditgraph.lab.evidence.across import Across
from creditgraph.lab.evidence.declaration import DECLARED, read_declaration
from creditgraph.lab.evidence.pages import NOTHING, regimes_block
from creditgraph.lab.evidence.regimes import MEANING, properties, regime
from creditgraph.lab.evidence.verdicts import Results, read_results


def test_properties_equal_a_slow_loop():
    out = creditgraph.testing.batch("toy_grpo", "sampler.group_size=8", "prompts.batch=3")
    prompts, rows, rewards = out["sampler.prompts"], out["sampler.trajectories"], out["rewards.rewards"]
    tokenizer = out["engine.policy"].tokenizer
    found = properties(prompts, rows, rewards, tokenizer)
    right = [bool(c) for c in rewards.correct]
    groups = [right[i : i + 8] for i in range(0, 24, 8)]
    nats = thoughts = 0.0
    places, recovered = [], []
    for i, uid in enumerate(rows.prompt_uid.tolist()):
        problem = prompts.metadata[prompts.uid.tolist().index(uid)]
        steps = [
            s + "</thought>" for s in tokenizer.decode(rows.response_tokens.row(i)).split("</thought>") if s.strip()
        ]
        error = TASKS[problem["task"]].first_error(problem, steps)
        nats -= float(rows.engine_logprobs.row(i).double().sum())
        thoughts += len(rows.thought_ends.row(i))
        if 0 < error <= len(rows.thought_ends.row(i)):
            places.append(error / len(rows.thought_ends.row(i)))
            recovered.append(right[i])
    assert found == pytest.approx(
        {
            "accuracy": sum(right) / 24,
            "silent": sum(sum(g) in (0, 8) for g in groups) / 3,
            "choice": nats / thoughts,
            "thoughts": thoughts / 24,
            "recovered": sum(recovered) / len(recovered),
            "error_place": sum(places) / len(places),
        }
    )
    assert set(found) == set(MEANING)


def rule(gains, **values):
    row = Across(method="m", baseline="b", gains=dict(zip("abcdef", gains, strict=True)), knows_errors=False)
    known = {f: {name: column[i] for name, column in values.items()} for i, f in enumerate("abcdef")}
    return regime(row, known)


def test_a_rule_by_hand():
    # Fitted on a, c, e: gains where choice is 1 and 2, not at 8. Midpoints 1.5 and 5: below 5 all three are right.
    # Tested on b (3, gain: right), d (6, loss: right), f (9, gain: wrong). By sign: gains in two of three, two right.
    found = rule([0.1, 0.1, 0.1, -0.1, -0.1, 0.1], choice=[1, 3, 2, 6, 8, 9])
    assert (found.name, found.threshold, found.above) == ("choice", 5.0, False)
    assert (found.fitted, found.tested, found.majority) == ((3, 3), (2, 3), 2)


def test_of_equal_rules_the_one_with_the_wider_gap_is_taken():
    found = rule([0.1, 0, -0.1, 0, -0.1, 0], accuracy=[0.3, 0, 0.29, 0, 0.1, 0], silent=[0.1, 0, 0.8, 0, 0.9, 0])
    assert (found.name, found.above) == ("silent", False)


def test_few_families_have_no_rule():
    row = Across(method="m", baseline="b", gains=dict.fromkeys("abcde", 0.1), knows_errors=False)
    assert regime(row, {f: {"choice": float(i)} for i, f in enumerate("abcde")}) is None
    assert rule([0.1] * 6, choice=[1.0] * 6) is None  # a property that is the same everywhere separates nothing


def test_the_page(tmp_path):
    declaration = read_declaration(DECLARED)
    results = Results(declaration, read_results(DECLARED.parents[3] / "docs" / "evidence" / "results.json"))
    file = tmp_path / "regimes.json"
    assert regimes_block(results, file) == NOTHING
    file.write_text(json.dumps({f: {"choice": float(i)} for i, f in enumerate(declaration.families)}))
    text = regimes_block(results, file)
    assert "the rules are right" in text
    assert "| `rredcot` | `grpo` | `choice`" in text
