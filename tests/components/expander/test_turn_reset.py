"""Resets over turns: repeated turns reach the recorded state, and new turns have their rows, groups and numbers."""

import pytest
import torch

from creditgraph.components.buffer.failed_episodes import FailedEpisodes
from creditgraph.components.buffer.merge_turns import MergeTurns
from creditgraph.components.expander.turn_reset import TurnReset
from creditgraph.components.localizer.uniform import UniformLocalizer
from creditgraph.components.rewards.episode import EpisodeRewards
from creditgraph.components.sampler.environment import EnvironmentSampler
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.handles import Environments
from creditgraph.pipeline.core.payloads import StepErrors

MADE = []


class Echo:
    """Three turns, or until "e"; the state is all that was said. The reward is 1 for an episode without "w"."""

    def __init__(self):
        MADE.append(self)

    def reset(self, problem):
        self.said, self.turns = "", 0
        self.start = problem["prompt"] + (str(problem["seed"]) if problem.get("random") else "")
        return self.start

    @property
    def state(self):
        return f"{self.start}|{self.said}"

    def step(self, text):
        self.said += text
        self.turns += 1
        return f"[{self.turns}]", float(self.turns == 3 and "w" not in self.said), self.turns == 3 or "e" in text

    def close(self):
        pass


class Made(Environments):
    def make(self):
        return Echo()


@pytest.fixture
def case(toolbox):
    """Prompts P and Q with two episodes each; the first of P and both of Q say "w" in turn 2."""

    def make(metadata=({}, {}), wrong="bw", after="[1]"):
        MADE.clear()
        prompts = toolbox.prompts(["P", "Q"], metadata=[{"template": "plain", **row} for row in metadata])

        def script(context, n):
            return wrong if context.endswith(after) and (n == 0 or context[0] == "Q") else "ab"

        policy = toolbox.policy(script)
        settings = {"max_tokens": 4, "max_turns": 5}
        sampler = toolbox.start(EnvironmentSampler, group_size=2, **settings)
        played = sampler.run(prompts=prompts, policy=policy, environments=Made())
        rewards = toolbox.start(EpisodeRewards).run(turns=played.turns).rewards
        return prompts, policy, played, rewards, settings

    return make


def reset(toolbox, case, steps, **more):
    prompts, _, played, rewards, settings = case
    chosen = toolbox.start(FailedEpisodes, failures=2).run(
        trajectories=played.trajectories, turns=played.turns, rewards=rewards
    )
    failures = chosen.failures
    errors = StepErrors(uid=failures.uid, step=torch.tensor(steps), source=["oracle"] * len(steps))
    policy = toolbox.policy(lambda context, n: "xy")
    component = toolbox.start(TurnReset, suffixes=2, **{**settings, **more})
    out = component.run(
        prompts=prompts, failures=failures, errors=errors, episodes=played.trajectories, turns=played.turns,
        policy=policy, environments=Made(),
    )  # fmt: skip
    return failures, out, policy, component


def test_failed_episodes_are_responses_whose_thoughts_are_turns(toolbox, case):
    made = case()
    failures, *_ = reset(toolbox, made, [1, 2, 3])
    assert failures.text == ["abbwab"] * 3
    first = failures.select(torch.tensor([0]))
    said = "".join(map(chr, first.response_tokens.row(0).tolist()))
    assert said == "ab[1]bw[2]ab"
    assert first.thought_ends.to_lists() == [[2, 7, 12]]
    assert [bool(x) for x in first.engine_logprobs.row(0).isnan()] == [c in "[]12" for c in said]
    assert failures.prompt_uid.tolist() == [100, 101, 101]
    steps = toolbox.start(UniformLocalizer).run(failures=failures).errors.step
    assert bool(((steps >= 1) & (steps <= 3)).all())


def test_repeated_turns_reach_the_recorded_state(toolbox, case):
    made = case()
    failures, out, policy, component = reset(toolbox, made, [1, 2, 9])
    # Suffixes of step 1 sample three turns, of step 2 two, and of a step beyond the last turn the last one.
    turns = out.turns
    assert turns.turn.tolist() == [0, 1, 2] * 2 + [1, 2] * 2 + [2] * 2
    assert out.trajectories.group.tolist() == [failures.uid[0]] * 6 + [failures.uid[1]] * 4 + [failures.uid[2]] * 2
    assert turns.state == ["P|", "P|xy", "P|xyxy"] * 2 + ["Q|ab", "Q|abxy"] * 2 + ["Q|abbw"] * 2
    contexts = ["".join(map(chr, row)) for row in out.trajectories.prompt_tokens.to_lists()]
    assert contexts[6] == "Qab[1]"
    assert contexts[10] == "Qab[1]bw[2]"
    old = made[2].trajectories.prompt_tokens.to_lists()
    assert out.trajectories.prompt_tokens.to_lists()[6] in old  # exact tokens
    assert set(turns.episode.tolist()) <= set(turns.uid.tolist())
    assert bool(turns.done[turns.turn == 2].all())
    assert component.context.metrics["repeated_turns"] == 2 * (0 + 1 + 2)
    assert {len(c.seed) for c in policy.calls} == {2, 4, 6}  # turns of all episodes share a batch


def test_merged_turns_get_rewards_and_keep_their_rows(toolbox, case):
    made = case()
    prompts, _, played, _, _ = made
    _, out, *_ = reset(toolbox, made, [2, 2, 2])
    given = {"trajectories": [played.trajectories, out.trajectories], "turns": [played.turns, out.turns]}
    first_uid = int(played.trajectories.uid.max()) + 1
    given["trajectories"][1] = out.trajectories.replace(uid=out.trajectories.uid + first_uid)
    with pytest.raises(AlignmentError, match="different populations"):
        toolbox.start(MergeTurns).run(**given, prompts=[prompts])
    given["turns"][1] = out.turns.replace(uid=out.turns.uid + first_uid, episode=out.turns.episode + first_uid)
    merged = toolbox.start(MergeTurns).run(**given, prompts=[prompts])
    rewards = toolbox.start(EpisodeRewards).run(turns=merged.turns).rewards
    assert rewards.value.tolist() == [0] * 3 + [1] * 3 + [0] * 6 + [1] * 4 + [1] * 8
    assert merged.turns.uid.tolist() == merged.trajectories.uid.tolist()


def test_more_new_turns_than_the_last_recorded_episode_has(toolbox, case):
    """The last episodes end after one turn, and their new ones have three."""
    made = case(wrong="we", after="")
    failures, out, _, _ = reset(toolbox, made, [1] * 4)
    assert failures.uid[-1] == made[2].trajectories.uid[-1]
    assert out.turns.turn.tolist() == [0, 1, 2] * 8
    assert (out.trajectories.parent == -1).all()


def test_an_environment_that_turns_do_not_determine_costs_its_episodes(toolbox, case):
    made = case(({}, {"random": True}))
    _, out, _, component = reset(toolbox, made, [2, 2, 1])
    assert out.turns.state == ["P|ab", "P|abxy"] * 2
    assert component.context.metrics["faults_replay"] == 4
    assert len(component.context.rejected) == 4
    assert "repeated turns led to another state" in str(component.context.rejected[0])


def test_a_batch_whose_repeated_turns_are_all_lost_goes_on(toolbox, case):
    made = case(({"random": True}, {"random": True}))
    _, out, _, component = reset(toolbox, made, [2, 2, 2, 2])
    assert len(out.trajectories) == len(out.turns) == 0
    assert out.turns.turn.dtype == torch.int64
    assert component.context.metrics["faults_replay"] == 8


def test_without_failures_there_are_no_rows(toolbox, case):
    prompts, _, played, rewards, settings = case()
    rewards = rewards.replace(correct=torch.ones_like(rewards.correct))
    _, out, policy, _ = reset(toolbox, (prompts, None, played, rewards, settings), [])
    assert len(out.trajectories) == len(out.turns) == 0
    assert not policy.calls


def test_a_prompt_without_the_conversation_is_refused(toolbox, case):
    prompts, policy, _, _, settings = case()
    played = toolbox.start(EnvironmentSampler, group_size=1, history="none", **settings).run(
        prompts=prompts, policy=policy, environments=Made()
    )
    rewards = toolbox.rewards(played.turns.uid, [0.0] * len(played.turns))
    with pytest.raises(AlignmentError, match="set the sampler's history to 'all'"):
        toolbox.start(FailedEpisodes).run(trajectories=played.trajectories, turns=played.turns, rewards=rewards)
