"""Trees of episodes: which rows there are, what they continue, on what their numbers depend, and what faults cost."""

import pytest
import torch

from creditgraph.components.advantage.trees.siblings import TreeSiblings
from creditgraph.components.rewards.episode import EpisodeRewards
from creditgraph.components.rollouts.turn_rows import by_episode
from creditgraph.components.sampler.environment import EnvironmentSampler
from creditgraph.components.sampler.turn_tree import TurnTree
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Environments

CLOSED = []


class Word:
    """As many turns as the problem has, or until "z" is said; "x" in turn `fault` raises; the state is all that was."""

    def reset(self, problem):
        self.problem, self.said = problem, []
        return problem["prompt"] + (str(problem["seed"]) if problem.get("random") else "")

    @property
    def state(self):
        return "".join(self.said)

    def step(self, text):
        self.said.append(text)
        if self.problem.get("fault") == len(self.said) and "x" in text:
            raise KeyError("lost")
        done = len(self.said) == self.problem["turns"] or "z" in text
        return "|", float(text == "a"), done

    def close(self):
        CLOSED.append(self)


class Made(Environments):
    def make(self):
        return Word()


@pytest.fixture
def grow(toolbox):
    """Trees over prompts with this metadata, with a policy that says `script(context, seed)`."""

    def run(metadata, script, uids=None, **settings):
        CLOSED.clear()
        prompts = toolbox.prompts(
            ["PQRS"[i] for i in range(len(metadata))], metadata=[{"template": "plain", **row} for row in metadata]
        )
        if uids is not None:
            prompts = prompts.select(torch.tensor(uids))
        policy = toolbox.policy(script)
        node = toolbox.start(TurnTree, max_tokens=2, max_turns=6, **settings)
        return node.run(prompts=prompts, policy=policy, environments=Made()), node

    return run


def letter(context, n):
    return "abc"[n % 3]


def paths(out):
    """Episodes as (prompt, first turn, parent row or −1, texts)."""
    rows = out.trajectories
    place = {uid: i for i, uid in enumerate(rows.uid.tolist())}
    lengths = by_episode(rows, out.turns).lengths.tolist()
    found, at = [], 0
    for n in lengths:
        parent = int(rows.parent[at])
        found.append((int(rows.prompt_uid[at]), int(out.turns.turn[at]), place.get(parent, -1), rows.text[at : at + n]))
        assert rows.parent[at + 1 : at + n].tolist() == [-1] * (n - 1)
        at += n
    return found


def test_rows_of_a_tree(grow, toolbox):
    out, node = grow([{"turns": 3}, {"turns": 1}], letter, group_size=2, branching=(3, 1, 2))
    episodes = paths(out)
    # P: two episodes of three turns, each with two more from turn 1; turn 2 is not branched at, and turn 3 is none.
    assert [(p, begin) for p, begin, *_ in episodes] == [(100, 0)] * 2 + [(100, 1)] * 4 + [(101, 0)] * 2
    # The row of the first turn of its own tree, the second episode being three rows further.
    assert [parent for *_, parent, _ in episodes] == [-1, -1, 0, 3, 0, 3, -1, -1]
    assert [len(texts) for *_, texts in episodes] == [3, 3, 2, 2, 2, 2, 1, 1]
    assert out.trajectories.group.tolist() == [100] * 14 + [101] * 2
    # The prompt of a branch is the conversation that its parent had, with its parent's exact tokens.
    rows = out.trajectories
    for _, begin, parent, _ in episodes[2:6]:
        first = next(i for i in range(len(rows)) if begin and rows.parent[i] == rows.uid[parent])
        assert rows.prompt_tokens.row(first).tolist() == rows.prompt_tokens.row(parent + 1).tolist()
        assert out.turns.state[first] == out.turns.state[parent + 1]
    metrics = node.context.metrics
    assert (metrics["branches"], metrics["repeated_turns"], metrics["episodes"]) == (4, 4, 8)
    assert len(CLOSED) == 8
    # Rows of all turns are learned once, so that tokens sampled are tokens trained.
    rewards = toolbox.start(EpisodeRewards).run(turns=out.turns).rewards
    advantage = toolbox.start(TreeSiblings, max_probability=1.0)
    credit = advantage.run(trajectories=rows, rewards=rewards, turns=out.turns).credit
    assert int(credit.mask.values.sum()) == metrics["sampled_tokens"]
    assert advantage.context.metrics["leaves"] == 4  # of trees of six and of two


def test_every_second_turn_and_branches_of_branches(grow):
    out, _ = grow([{"turns": 5}], letter, group_size=1, branching=(2, 2), every=2)
    assert [(begin, len(texts)) for _, begin, _, texts in paths(out)] == [(0, 5), (2, 3), (4, 1), (4, 1)]
    # The second branch of turn 4 continues the first branch: rows 0–4 are the first episode, 5–7 that branch.
    assert [parent for *_, parent, _ in paths(out)] == [-1, 1, 3, 6]


def test_a_tree_depends_on_its_prompt_alone(grow):
    shape = {"group_size": 2, "branching": (2, 3)}
    metadata = [{"turns": 3}] * 3
    both, _ = grow(metadata, lambda context, n: "a", **shape)
    alone, _ = grow(metadata, lambda context, n: "a", uids=[2], **shape)
    # The log-probs of this policy are functions of the seeds of its requests.
    numbers = lambda out: [  # noqa: E731
        float(row[0])
        for row, prompt in zip(
            out.trajectories.engine_logprobs.rows(), out.trajectories.prompt_uid.tolist(), strict=True
        )
        if prompt == 102
    ]
    assert numbers(alone) == numbers(both)
    assert len(numbers(alone)) == 2 * (3 + 2 + 2 * 2)
    assert len(set(numbers(alone))) > 10  # of 18 draws from 97


def test_without_branching_it_is_the_sampler_of_episodes(grow, toolbox):
    out, _ = grow([{"turns": 3}, {"turns": 2}], letter, group_size=2, branching=())
    prompts = toolbox.prompts(["P", "Q"], metadata=[{"template": "plain", "turns": n} for n in (3, 2)])
    plain = toolbox.start(EnvironmentSampler, max_tokens=2, max_turns=6, group_size=2).run(
        prompts=prompts, policy=toolbox.policy(letter), environments=Made()
    )
    assert out.trajectories.text == plain.trajectories.text
    assert out.turns.turn.tolist() == plain.turns.turn.tolist()


def test_a_fault_costs_its_episode_alone(grow, toolbox):
    # The first episode says x in turn 2 and is lost there; its branches from turn 1 say a and go on.
    said = lambda context, n: "x" if n == 0 and context.count("|") == 1 else "a"  # noqa: E731
    out, node = grow([{"turns": 3, "fault": 2}], said, group_size=2, branching=(2,))
    metrics = node.context.metrics
    rewards = toolbox.start(EpisodeRewards).run(turns=out.turns).rewards
    lost = [i for i, fault in enumerate(out.turns.fault) if fault]
    assert metrics["faults"] == metrics["faults_raised"] >= 1
    assert 0 < len(lost) < len(out.turns)
    advantage = toolbox.start(TreeSiblings, max_probability=1.0)
    texts = advantage.explain({}, trajectories=out.trajectories, rewards=rewards, turns=out.turns)
    # Its first turn is continued by a valid branch, its last one by none.
    assert "invalid" not in texts[lost[0]]
    assert "invalid" in texts[lost[1]]


def test_environments_that_turns_do_not_determine_have_no_branches(grow):
    out, node = grow([{"turns": 3, "random": True}], letter, group_size=2, branching=(2,))
    assert [begin for _, begin, *_ in paths(out)] == [0, 0]
    assert node.context.metrics["faults_replay"] == 2
    assert node.context.metrics["branches"] == 0


@pytest.mark.parametrize("settings", [{"branching": (0,)}, {"every": 0}, {"branching": (4000, 4000)}])
def test_shapes_that_are_none_are_refused(toolbox, settings):
    with pytest.raises((ConfigError, ValueError), match=r"expected (branching and every ≥ 1|group_size · the product)"):
        TurnTree.Config(**settings)
