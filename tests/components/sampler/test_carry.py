"""Groups over several iterations: the same tokens as in one, complete groups only, staleness, state."""

import logging

import pytest
import torch

from creditgraph.components.rollouts.carry import CARRY_METRICS, Carry
from creditgraph.components.sampler.chains import Chains
from creditgraph.pipeline.core.encoding import decode, encode
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Completions, Policy, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.ranks import Ranks


class Letters(Policy):
    """Repeats the prompt's letter (its number + 0 to 2, by the seed) times; token t has log-prob −version − t/100.

    Every token goes to two experts, whose number is the version.
    """

    continues = True

    def __init__(self, tokenizer, version):
        self.version, self.tokenizer, self.calls, self.scored = version, tokenizer, [], 0

    def generate(self, requests):
        self.calls.append(requests)
        rows = []
        for i, prompt in enumerate(requests.tokens.to_lists()):
            whole = chr(prompt[0]) * (int("".join(map(chr, prompt[1:]))) + requests.seed[i].item() % 3)
            begun = len(requests.progress.tokens.row(i)) if requests.progress else 0
            left = min(len(whole), requests.sampling.max_tokens) - begun
            most = left if requests.pause is None else min(left, int(requests.pause[i]))
            reason = "paused" if most < left else "eos" if len(whole) <= requests.sampling.max_tokens else "length"
            rows.append(
                ([ord(whole[0])] * most, [-self.version - (begun + t) / 100 for t in range(most)], begun, reason)
            )
        sizes = [len(p) + r[2] + len(r[0]) - 1 for p, r in zip(requests.tokens.to_lists(), rows, strict=True)]
        return Completions(
            routed_experts=Jagged.from_rows([[self.version] * 2 * n for n in sizes], torch.uint8),
            tokens=Jagged.from_rows([r[0] for r in rows], torch.int32),
            logprobs=Jagged.from_rows([r[1] for r in rows], torch.float32),
            entropies=Jagged.from_rows([[0.5] * len(r[0]) for r in rows], torch.float32),
            thought_ends=Jagged.from_rows([[] for _ in rows], torch.int32),
            finish_reason=[r[3] for r in rows],
            text=["".join(map(chr, r[0])) for r in rows],
        )

    def score(self, context, tokens, temperature=1.0, top=0):
        self.scored += len(tokens)
        return Scores(
            logprobs=tokens.with_values(-self.version - tokens.positions / 100),
            entropies=tokens.with_values(tokens.positions * 0.0),
        )


def step(toolbox, node, texts, iteration, version=None):
    node.context.iteration = iteration
    node.context.metrics.clear()
    policy = Letters(toolbox.tokenizer(), iteration if version is None else version)
    out = node.run(prompts=toolbox.prompts(texts, first_uid=100 * (iteration + 1)), policy=policy)
    return out, policy


def test_complete_groups_leave_and_the_others_go_on(toolbox):
    node = toolbox.start(Chains, group_size=3, max_tokens=40, carry=Carry(tokens=10))
    first, policy = step(toolbox, node, ["a5", "b25", "c8"], 0)
    assert first.prompts.text == ["a5", "c8"]
    assert set(first.trajectories.prompt_uid.tolist()) == {100, 102}
    assert policy.calls[0].pause.tolist() == [10] * 9
    metrics = dict(node.context.metrics)
    assert (metrics["carried_prompts"], metrics["carried_rollouts"], metrics["carried_tokens"]) == (1, 3, 30)
    assert (metrics["delivered_prompts"], metrics["decode_steps"], metrics["token_staleness"]) == (2, 10, 0)
    assert metrics["sampled_tokens"] == len(first.trajectories.response_tokens.values) + 30
    second, policy = step(toolbox, node, ["d1"], 1)
    assert second.prompts.text == ["d1"]
    assert policy.calls[0].progress.tokens.lengths.tolist() == [10, 10, 10, 0, 0, 0]
    assert policy.calls[0].progress.versions.tolist() == [0, 0, 0, 1, 1, 1]
    third, policy = step(toolbox, node, ["e2"], 2)
    assert policy.calls[0].progress.versions.tolist() == [0, 0, 0, 2, 2, 2]
    assert third.prompts.text == ["b25", "e2"]
    late = third.trajectories.select(torch.arange(3))
    assert late.prompt_uid.tolist() == late.group.tolist() == [101] * 3
    assert late.policy_version.tolist() == [0] * 3
    for row in range(3):
        length = len(late.text[row])
        assert late.text[row] == "b" * length
        assert late.token_versions.row(row).tolist() == [0] * 10 + [1] * 10 + [2] * (length - 20)
        # The last request has passed all tokens through the model.
        tokens = len(late.prompt_tokens.row(row)) + length - 1
        assert late.routed_experts.row(row).tolist() == [2] * 2 * tokens
        # Each token keeps the log-prob of the weights that sampled it.
        expected = torch.tensor([-float(t // 10) - t / 100 for t in range(length)])
        torch.testing.assert_close(late.engine_logprobs.row(row), expected)
    assert node.context.metrics["staleness_max"] == 2
    assert node.context.metrics["rollout_staleness"] == 1.0
    assert node.context.metrics["carried_prompts"] == 0


def test_seeds_stay_and_a_row_gets_the_uid_of_the_iteration_that_delivers_it(toolbox):
    node = toolbox.start(Chains, group_size=2, max_tokens=40, carry=Carry(tokens=4))
    _, before = step(toolbox, node, ["a9"], 0)
    _, again = step(toolbox, node, ["b1"], 1)
    assert before.calls[0].seed.tolist() == again.calls[0].seed.tolist()[:2]
    done, _ = step(toolbox, node, ["c1"], 2)
    assert len(done.trajectories.uid.unique()) == 4
    assert (done.trajectories.uid >> 39).tolist() == [2] * 4


@pytest.mark.parametrize("on_stale", ["finish", "drop"])
def test_a_rollout_at_its_limit_is_finished_or_its_group_dropped(toolbox, on_stale):
    node = toolbox.start(Chains, group_size=2, max_tokens=60, carry=Carry(tokens=5, max_staleness=2, on_stale=on_stale))
    for iteration in range(2):
        out, _ = step(toolbox, node, ["a40"] if iteration == 0 else ["b1"], iteration)
        assert "a40" not in out.prompts.text
    out, policy = step(toolbox, node, ["c40"], 2)
    metrics = node.context.metrics
    assert metrics["carried_prompts"] == 1
    if on_stale == "finish":
        assert policy.calls[0].pause.tolist() == [60, 60, 5, 5]
        assert out.prompts.text == ["a40"]
        assert metrics["staleness_max"] == 2
        assert metrics["dropped_prompts"] == 0
        assert not node.context.rejected
    else:
        assert len(out.trajectories) == 0
        assert (metrics["dropped_prompts"], metrics["dropped_tokens"]) == (1, 30)
        assert node.context.rejected == [
            {
                "node": "chains",
                "iteration": 2,
                "row": {"prompt_uid": 100, "prompt": "a40", "tokens": 30},
                "reason": "unfinished at carry.max_staleness 2; the prompt is dropped",
            }
        ]


def test_tokens_of_older_weights_may_be_scored_again(toolbox):
    node = toolbox.start(Chains, group_size=2, max_tokens=40, carry=Carry(tokens=10, on_continue="rescore"))
    step(toolbox, node, ["a15", "b2"], 0)
    out, policy = step(toolbox, node, ["c3"], 1)
    assert out.prompts.text == ["a15", "c3"]
    rows = out.trajectories
    expected = -1.0 - rows.response_tokens.positions / 100
    torch.testing.assert_close(rows.engine_logprobs.values, expected)
    assert policy.scored == 2
    assert node.context.metrics["rescored_tokens"] == 20
    assert rows.token_versions.row(0).tolist()[:11] == [0] * 10 + [1]
    assert rows.entropies.row(0).tolist()[9:11] == [0.0, 0.5]


def test_versions_that_stand_still_age_nothing(toolbox):
    node = toolbox.start(Chains, group_size=1, max_tokens=60, carry=Carry(tokens=5, max_staleness=1))
    for iteration in range(5):
        out, _ = step(toolbox, node, ["a22"] if iteration == 0 else [], iteration, version=7)
    assert out.prompts.text == ["a22"]
    assert node.context.metrics["staleness_max"] == 0


def test_carry_off_samples_by_iteration_and_remembers_nothing(tiny):
    node = tiny.start(Chains, group_size=3, max_tokens=60)
    a = node.run(prompts=tiny.prompts, policy=tiny.policy)
    assert a.trajectories.token_versions is None
    assert a.prompts.uid.tolist() == tiny.prompts.uid.tolist()
    assert node.state_dict() == {}
    node.context.iteration = 1
    assert node.run(prompts=tiny.prompts, policy=tiny.policy).trajectories.text != a.trajectories.text
    assert not {metric.name for metric in CARRY_METRICS} & set(node.context.metrics)


@pytest.mark.parametrize("mode", ["thought", "plain"])
def test_frozen_weights_give_the_tokens_of_an_uninterrupted_run(tiny, mode):
    settings = {"group_size": 3, "max_tokens": 90, "mode": mode, "stop": ("}",) if mode == "plain" else ()}
    whole = tiny.start(Chains, **settings, carry=Carry(tokens=90))
    cut = tiny.start(Chains, **settings, carry=Carry(tokens=7, max_staleness=1))
    expected = whole.run(prompts=tiny.prompts, policy=tiny.policy).trajectories
    place = {(p, n): i for i, (p, n) in enumerate((p, n) for p in tiny.prompts.uid.tolist() for n in range(3))}
    rows_of, iterations = {}, 0
    while len(rows_of) < len(expected):
        # The prompts come once; later iterations bring none.
        out = cut.run(
            prompts=tiny.prompts if iterations == 0 else tiny.prompts.select(torch.zeros(6, dtype=torch.bool)),
            policy=tiny.policy,
        )
        cut.context.iteration = iterations = iterations + 1
        rows = out.trajectories
        for uid in out.prompts.uid.tolist():
            mine = (rows.prompt_uid == uid).nonzero()[:, 0].tolist()
            rows_of |= {place[uid, n]: rows.select(torch.tensor([i])) for n, i in enumerate(mine)}
        assert iterations < 20
    assert iterations > 2
    for i, row in rows_of.items():
        assert row.response_tokens.to_lists()[0] == expected.response_tokens.row(i).tolist()
        assert row.thought_ends.to_lists()[0] == expected.thought_ends.row(i).tolist()
        assert (row.text[0], row.finish_reason[0]) == (expected.text[i], expected.finish_reason[i])
        torch.testing.assert_close(row.engine_logprobs.values, expected.engine_logprobs.row(i), atol=2e-5, rtol=1e-4)
    assert cut.context.metrics["carried_prompts"] == 0


def test_groups_in_flight_survive_a_restart(toolbox):
    settings = {"group_size": 2, "max_tokens": 60, "carry": Carry(tokens=5)}
    node, other = toolbox.start(Chains, **settings), toolbox.start(Chains, **settings)
    step(toolbox, node, ["a18", "b2"], 0)
    other.load_state_dict(decode(encode(node.state_dict(), "sampler")))
    for iteration in range(1, 5):
        a, b = (step(toolbox, n, ["c7"], iteration)[0] for n in (node, other))
        assert a.prompts.text == b.prompts.text
        assert a.trajectories.uid.tolist() == b.trajectories.uid.tolist()
        assert a.trajectories.engine_logprobs.equal(b.trajectories.engine_logprobs)
        assert a.trajectories.token_versions.equal(b.trajectories.token_versions)
        assert node.context.metrics == other.context.metrics
    assert toolbox.start(Chains, **settings).state_dict() == {"prompts_in_flight": 0}


def test_with_carry_off_a_checkpoint_s_groups_are_finished(toolbox, caplog):
    node, off = (
        toolbox.start(Chains, group_size=2, max_tokens=60, carry=Carry(tokens=5)),
        toolbox.start(Chains, group_size=2, max_tokens=60),
    )
    step(toolbox, node, ["a18", "b2"], 0)
    with caplog.at_level(logging.WARNING, "creditgraph"):
        off.load_state_dict(node.state_dict())
    assert "holds 1 prompts in flight, but carry.tokens is 0; the next iteration finishes them" in caplog.text
    out, _ = step(toolbox, off, ["c30"], 1)
    assert out.prompts.text == ["a18", "c30"]
    assert off.state_dict() == {}
    later, _ = step(toolbox, off, ["d1"], 2)
    assert later.trajectories.token_versions is None


def test_two_replicas_carry_what_one_process_carries(toolbox):
    settings = {"group_size": 2, "max_tokens": 60, "carry": Carry(tokens=5)}
    alone, *halves = (toolbox.start(Chains, **settings) for _ in range(3))
    for replica, node in enumerate(halves):
        node.context.ranks = Ranks(rank=replica, world=2, num_replicas=2)
    late = 0
    for iteration in range(4):
        texts = [f"a{7 * iteration + 3}", "b2", f"c{11 - iteration}", "d9"]
        whole, _ = step(toolbox, alone, texts, iteration)
        parts = []
        for replica, node in enumerate(halves):
            node.context.iteration = iteration
            prompts = toolbox.prompts(texts, first_uid=100 * (iteration + 1)).select(
                torch.arange(2 * replica, 2 * replica + 2)
            )
            parts.append(node.run(prompts=prompts, policy=Letters(toolbox.tokenizer(), iteration)).trajectories)
        joined = type(whole.trajectories).concat(parts)
        assert len(joined.uid.unique()) == len(joined)

        def seen(rows):
            columns = (
                rows.prompt_uid.tolist(),
                rows.text,
                rows.token_versions.to_lists(),
                rows.engine_logprobs.to_lists(),
            )
            return sorted(zip(*columns, strict=True))

        assert seen(joined) == seen(whole.trajectories)
        late += int((whole.trajectories.policy_version < iteration).sum())
    assert late > 4


@pytest.mark.parametrize("replicas", [1, 3])
def test_another_number_of_replicas_shares_out_the_groups_in_flight(toolbox, replicas):
    """Two replicas are interrupted; one or three go on, and sample what the two would have."""
    settings = {"group_size": 2, "max_tokens": 60, "carry": Carry(tokens=5)}
    pair = [toolbox.start(Chains, **settings) for _ in range(2)]
    texts = ["a18", "b2", "c30", "d25", "e40", "f9"]

    def run(nodes, iteration):
        parts, share = [], len(texts) // len(nodes)
        for replica, node in enumerate(nodes):
            node.context.ranks = Ranks(rank=replica, world=len(nodes), num_replicas=len(nodes))
            node.context.iteration = iteration
            mine = torch.arange(share * replica, share * replica + share)
            prompts = toolbox.prompts(texts, first_uid=100 * (iteration + 1)).select(mine)
            parts.append(node.run(prompts=prompts, policy=Letters(toolbox.tokenizer(), iteration)).trajectories)
        rows = type(parts[0]).concat(parts)
        columns = (rows.prompt_uid.tolist(), rows.text, rows.token_versions.to_lists(), rows.engine_logprobs.to_lists())
        return sorted(zip(*columns, strict=True))

    run(pair, 0)
    states = [decode(encode(node.state_dict(), "sampler")) for node in pair]
    assert all(state["prompts_in_flight"] for state in states)
    others = [toolbox.start(Chains, **settings) for _ in range(replicas)]
    for replica, node in enumerate(others):
        node.load_state_dict(Chains.state_for(states, replica, replicas))
    held = [node.state_dict()["prompts_in_flight"] for node in others]
    assert sum(held) == sum(state["prompts_in_flight"] for state in states)
    assert max(held) - min(held) <= 1
    for iteration in range(1, 4):
        assert run(others, iteration) == run(pair, iteration)
    assert Chains.state_for([{"prompts_in_flight": 0}], 2, 3) == {"prompts_in_flight": 0}


def test_a_policy_that_cannot_go_on_is_reported_at_once(toolbox):
    node = toolbox.start(Chains, carry=Carry(tokens=5))
    with pytest.raises(
        CreditgraphError,
        match=r"carry.tokens is 5, but ScriptedPolicy cannot continue .* Use engine.local, engine.vllm or",
    ):
        node.run(prompts=toolbox.prompts(["a"]), policy=toolbox.policy(lambda context, n: "x"))


def test_a_carry_that_no_rollout_reaches_is_reported(toolbox, caplog):
    with caplog.at_level(logging.WARNING, "creditgraph"):
        toolbox.start(Chains, max_tokens=60, carry=Carry(tokens=60))
    assert "carry.tokens (60) is not below max_tokens (60), so every rollout ends in its own iteration" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tokens": -1}, "expected carry.tokens ≥ 0 .* got -1"),
        ({"max_staleness": 0}, "expected carry.max_staleness ≥ 1, got 0"),
    ],
)
def test_impossible_settings_are_reported(settings, text):
    with pytest.raises(ValueError, match=text):
        Carry(**settings)
