"""Samplers of several stages, carried: under frozen weights, what they sample in one iteration they sample in many."""

import hashlib
import json

import pytest
import torch

from creditgraph import main
from creditgraph.components.expander.reset import Reset
from creditgraph.components.expander.tree import Tree
from creditgraph.components.expander.tree_growth import SegmentRule, UncertainRule
from creditgraph.components.rollouts.carry import Carry
from creditgraph.components.sampler.dynamic import Dynamic
from creditgraph.components.sampler.failures import Failures
from creditgraph.components.verifier.exact import Exact
from creditgraph.pipeline.core.encoding import decode, encode
from creditgraph.pipeline.core.payloads import Prompts, StepErrors, Trajectories

FEW = 12  # tokens per iteration; responses of the embedded task have 30 to 90
WHOLE = 1_000
LIMITS = {"max_tokens": 90, "mode": "thought", "temperature": 1.0, "top_p": 1.0}
RULES = {
    "segments": {"rule": "segments", "segments": SegmentRule(branching=(3, 2), tokens=15)},
    "uncertain": {"rule": "uncertain", "uncertain": UncertainRule(chains=2, points=2, rounds=2, branches=1)},
}


def nothing(prompts):
    return prompts.select(torch.zeros(len(prompts), dtype=torch.bool))


def described(rows: Trajectories, prompt: int) -> list:
    """The rows of a prompt by what does not depend on when they were delivered; parents by their place in it."""
    mine = rows.select(rows.prompt_uid == prompt)
    place = {uid: i for i, uid in enumerate(mine.uid.tolist())}
    return [
        (tokens, ends, text, reason, inherited, place.get(parent, -1))
        for tokens, ends, text, reason, inherited, parent in zip(
            mine.response_tokens.to_lists(),
            mine.thought_ends.to_lists(),
            mine.text,
            mine.finish_reason,
            mine.inherited.tolist(),
            mine.parent.tolist(),
            strict=True,
        )
    ]


def in_turns(node, prompts: Prompts, run):
    """Runs the node until it has delivered all prompts, restarting it from its state each time; the outputs."""
    outputs = []
    while sum(len(out.prompts) for out in outputs) < len(prompts):
        node.context.iteration = len(outputs)
        outputs.append(run(node, prompts if not outputs else nothing(prompts), len(outputs) == 0))
        metrics = node.context.metrics
        # Waves, levels and rounds of a prompt share the tokens of an iteration.
        assert metrics["decode_steps"] <= FEW * 4
        state = decode(encode(node.state_dict(), "node"))
        node.load_state_dict(state)
        assert len(outputs) < 40
    assert len(outputs) > 2
    assert node.state_dict()["prompts_in_flight"] == 0
    return outputs


@pytest.mark.parametrize("rule", list(RULES))
def test_trees(tiny, rule):
    settings = LIMITS | RULES[rule]
    run = lambda node, prompts, _: node.run(prompts=prompts, policy=tiny.policy)  # noqa: E731
    whole = run(tiny.start(Tree, **settings, carry=Carry(tokens=WHOLE)), tiny.prompts, True)
    parts = in_turns(tiny.start(Tree, **settings, carry=Carry(tokens=FEW, max_staleness=9)), tiny.prompts, run)
    rows = Trajectories.concat([part.trajectories for part in parts])
    for prompt in tiny.prompts.uid.tolist():
        assert described(rows, prompt) == described(whole.trajectories, prompt)
    torch.testing.assert_close(
        rows.select(torch.argsort(rows.prompt_uid, stable=True)).engine_logprobs.values,
        whole.trajectories.select(torch.argsort(whole.trajectories.prompt_uid, stable=True)).engine_logprobs.values,
        atol=2e-5,
        rtol=1e-4,
    )


def test_failures_and_their_resets(tiny):
    verifier = tiny.start(Exact).run().verifier

    def sample(node, prompts, _):
        return node.run(prompts=prompts, policy=tiny.policy, verifier=verifier)

    settings = LIMITS | {"split": "1x2", "group_size": 4, "max_attempts": 6}
    whole = sample(tiny.start(Failures, **settings, carry=Carry(tokens=WHOLE)), tiny.prompts, True)
    parts = in_turns(tiny.start(Failures, **settings, carry=Carry(tokens=FEW, max_staleness=9)), tiny.prompts, sample)
    assert len(whole.failures) > 2
    for output in ("trajectories", "failures"):
        rows = Trajectories.concat([getattr(part, output) for part in parts])
        for prompt in tiny.prompts.uid.tolist():
            assert described(rows, prompt) == described(getattr(whole, output), prompt)

    failures = whole.failures
    errors = StepErrors(uid=failures.uid, step=failures.uid % 3 + 1, source=["uniform"] * len(failures))

    def reset(node, prompts, first):
        rows = torch.arange(len(failures) if first else 0)
        return node.run(prompts=prompts, failures=failures.select(rows), errors=errors.select(rows), policy=tiny.policy)

    settings = LIMITS | {"suffixes": 2}
    once = reset(tiny.start(Reset, **settings, carry=Carry(tokens=WHOLE)), tiny.prompts, True)
    parts = in_turns(tiny.start(Reset, **settings, carry=Carry(tokens=FEW, max_staleness=9)), tiny.prompts, reset)
    rows = Trajectories.concat([part.trajectories for part in parts])
    assert len(rows) == 2 * len(failures)
    for prompt in tiny.prompts.uid.tolist():
        assert described(rows, prompt) == described(once.trajectories, prompt)
    parents = Trajectories.concat([part.parents for part in parts])
    assert sorted(parents.uid.tolist()) == sorted(failures.uid.tolist())
    for part in parts:
        # Failures, their errors and their suffixes leave together, with their prompts.
        assert part.steps.uid.tolist() == part.parents.uid.tolist()
        assert set(part.trajectories.group.tolist()) == set(part.parents.uid.tolist())
        assert set(part.parents.prompt_uid.tolist()) <= set(part.prompts.uid.tolist())


def test_dynamic_sampling_keeps_paused_groups_apart_from_those_without_a_signal(tiny):
    verifier = tiny.start(Exact).run().verifier
    settings = {**LIMITS, "group_size": 4, "groups": 6, "max_waves": 2}
    sample = lambda node, prompts: node.run(prompts=prompts, policy=tiny.policy, verifier=verifier)  # noqa: E731
    whole = sample(tiny.start(Dynamic, **settings, carry=Carry(tokens=WHOLE)), tiny.prompts)
    node = tiny.start(Dynamic, **settings, carry=Carry(tokens=FEW, max_staleness=9))
    delivered = []
    for iteration in range(12):
        node.context.iteration = iteration
        out = sample(node, tiny.prompts if not iteration else nothing(tiny.prompts))
        delivered.append(out)
        assert node.context.metrics["carried_prompts"] + node.context.metrics["backlog"] <= 6
    rows = Trajectories.concat([out.trajectories for out in delivered])
    assert sorted(torch.cat([out.prompts.uid for out in delivered]).tolist()) == sorted(whole.prompts.uid.tolist())
    for prompt in whole.prompts.uid.tolist():
        assert described(rows, prompt) == described(whole.trajectories, prompt)


@pytest.mark.parametrize("kind", [Dynamic, Reset])
def test_another_number_of_replicas_deals_out_what_waits(tiny, toolbox, kind):
    uids = tiny.prompts.uid.tolist()
    rows = toolbox.trajectories(["a", "b", "c"], prompt_uid=torch.tensor(uids[:3]))
    steps = StepErrors(uid=rows.uid, step=torch.ones(3, dtype=torch.int64), source=["uniform"] * 3)
    node = kind(kind.Config(carry=Carry(tokens=3)))
    states = []
    for half in ([0, 1], [2]):
        part = tiny.prompts.select(torch.tensor(half))
        node._prompts = part
        node._begun = toolbox_begun(part.uid)
        if kind is Reset:
            node._waiting = (rows.select(torch.tensor(half)), steps.select(torch.tensor(half)))
        else:
            node._backlog = tiny.prompts.select(torch.tensor([i + 3 for i in half]))
        states.append(node.state_dict())
    dealt = [kind.state_for(states, replica, 3) for replica in range(3)]
    assert [state["prompts"].uid.tolist() for state in dealt] == [[uid] for uid in sorted(uids[:3])]
    assert [state["begun"].prompt_uid.tolist() for state in dealt] == [[uid] for uid in sorted(uids[:3])]
    if kind is Reset:
        assert [state["failures"].prompt_uid.tolist() for state in dealt] == [[uid] for uid in sorted(uids[:3])]
        assert all(state["errors"].uid.equal(state["failures"].uid) for state in dealt)
    else:
        assert [state["backlog"].uid.tolist() for state in dealt] == [[uid] for uid in sorted(uids[3:])]


def toolbox_begun(prompt_uid):
    from creditgraph.components.rollouts.continuing import Begun

    return Begun.blank(prompt_uid + 10_000, prompt_uid)


def test_a_carried_srpo_run_is_the_same_whether_interrupted_or_not(tmp_path):
    settings = [
        "recipe=toy_srpo",
        "prompts.batch=3",
        "evaluator.every=0",
        "evaluator.num_problems=2",
        "sampler.carry.tokens=20",
        "expander.carry.tokens=20",
        "run.checkpoint.every=1",
        f"run.root={tmp_path}",
    ]
    assert main(["train", *settings, "run.name=whole", "run.iterations=6"]) == 0
    assert main(["train", *settings, "run.name=cut", "run.iterations=3"]) == 0
    assert main(["train", *settings, "run.name=cut", "run.iterations=6"]) == 0

    def seen(name):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [
            {k: v for k, v in line.items() if "seconds" not in k and not k.startswith("utilisation/")}
            for line in lines
            if line["iteration"] < 6
        ], hashlib.sha256((tmp_path / name / "checkpoints" / "000005" / "tensors.safetensors").read_bytes()).hexdigest()

    whole, cut = seen("whole"), seen("cut")
    assert whole == cut
    assert whole[0][3]["expander/carried_prompts"] > 0
    assert sum(line["expander/delivered_prompts"] for line in whole[0]) > 0
