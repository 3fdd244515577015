from itertools import pairwise

import pytest
import torch

from creditgraph.adapters.estimator import Estimator
from creditgraph.adapters.graph import CreditGraph, graph_names
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, DataError
from tests.adapters import slow

MASK = [
    [1, 1, 0, 0, 1, 1, 0],
    [1, 1, 1, 0, 1, 0, 0],
    [1, 0, 1, 1, 1, 1, 1],
    [0, 1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 1, 1],
]
GROUP = ["a", "b", "a", "b", "a"]


def rollouts(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(MASK)
    # Few token ids, so that turns share states.
    tokens = torch.randint(1, 3, mask.shape, generator=generator)
    rewards = torch.randn(mask.shape, generator=generator) * mask
    given = {"mask": mask, "rewards": rewards, "group": GROUP, "tokens": tokens}
    return Rollouts(**(given | changes))


def turn_rewards(batch):
    """A reward belongs to the last turn that began at or before it; the first turn also has those before it."""
    out = []
    for row, runs in zip(batch.rewards.tolist(), slow.turns(MASK), strict=True):
        begins = [0, *(begin for begin, _ in runs[1:]), len(row)]
        out.append([sum(row[b:e]) for b, e in pairwise(begins)])
    return out


def close(graph, batch, expected):
    torch.testing.assert_close(graph(batch), torch.tensor(expected, dtype=torch.float32), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_equal_loops_over_the_trainers_tensors(seed):
    batch = rollouts(seed)
    states = slow.states_of(MASK, batch.tokens.tolist())
    close(CreditGraph("grpo"), batch, slow.grpo(MASK, batch.rewards.sum(1).tolist(), GROUP))
    per_turn = turn_rewards(batch)
    close(CreditGraph("gigpo", "advantage.omega=0.5"), batch, slow.gigpo(MASK, per_turn, GROUP, states, 0.5))
    close(CreditGraph("gae_turns"), batch, slow.turn_gae(MASK, per_turn, GROUP, states))


def test_rewards_may_be_given_per_row_per_token_or_per_turn():
    batch = rollouts()
    graph = CreditGraph("mt_grpo")
    same = graph(rollouts(turn_rewards=turn_rewards(batch)))
    torch.testing.assert_close(graph(batch), same)
    last = [[0.0] * (len(r) - 1) + [sum(r)] for r in turn_rewards(batch)]
    torch.testing.assert_close(graph(rollouts(rewards=batch.rewards.sum(1))), graph(rollouts(turn_rewards=last)))


def test_states_may_be_given_and_without_tokens_only_that_of_the_first_turn_is_known():
    graph = CreditGraph("gigpo")
    states = slow.states_of(MASK, rollouts().tokens.tolist())
    torch.testing.assert_close(graph(rollouts(tokens=None, states=states)), graph(rollouts()))
    first = [["start", *(f"{i}.{k}" for k in range(1, len(runs)))] for i, runs in enumerate(slow.turns(MASK))]
    torch.testing.assert_close(graph(rollouts(tokens=None)), graph(rollouts(states=first)))


def steps(batch, merged=(), **changes):
    """The same episodes with a row for each turn, as trainers of steps have them; `merged` rows stay whole."""
    out = {name: [] for name in ("mask", "rewards", "tokens", "values", "group", "episode", "prompts")}
    places = []
    for i, runs in enumerate(slow.turns(MASK)):
        begins = [0] if i in merged else [0, *(begin for begin, _ in runs[1:])]
        # The last token of a turn ends its row; what it led to is in the prompt of the next.
        ends = [batch.mask.shape[1]] if i in merged else [end for _, end in runs]
        for begin, end in zip(begins, ends, strict=True):
            places.append((i, begin, end))
            for name in ("mask", "rewards", "tokens", "values"):
                row = torch.zeros(9, dtype=getattr(batch, name).dtype)
                row[: end - begin] = getattr(batch, name)[i, begin:end]
                out[name].append(row)
            out["group"].append(GROUP[i])
            out["episode"].append(f"episode {i}")
            out["prompts"].append([7, 8, 9][: 2 + (GROUP[i] == "a")] + batch.tokens[i, :begin].tolist())
    stacked = {name: torch.stack(value) if torch.is_tensor(value[0]) else value for name, value in out.items()}
    return Rollouts(**(stacked | changes)), places


@pytest.mark.parametrize("merged", [(), (1, 4)], ids=["", "two rows stay whole"])
@pytest.mark.parametrize("graph", ["grpo", "drgrpo", "mt_grpo", "gigpo", "gae_turns", "turn_ppo", "ppo"])
def test_steps_of_episodes_are_credited_as_episodes_in_one_row(graph, merged):
    tokens = rollouts().tokens
    tokens[3, 0] = 0  # not in the prompt, which its group shares
    values = torch.rand(5, 7, generator=torch.Generator().manual_seed(5))
    mask = torch.tensor(MASK)
    # Rewards at tokens of turns only: between them they would be in no row.
    batch = rollouts(values=values, tokens=tokens, rewards=rollouts().rewards * mask)
    in_rows, places = steps(batch, merged)
    credit = CreditGraph(graph)
    whole, parts = credit(batch), credit(in_rows)
    for part, (i, begin, end) in zip(parts, places, strict=True):
        torch.testing.assert_close(part[: end - begin], whole[i, begin:end])
        assert not part[end - begin :].any()
    assert whole.any()


def test_the_state_of_a_step_is_what_is_new_in_its_prompt():
    mask = torch.ones(5, 2)
    given = {"mask": mask, "rewards": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.5]), "group": ["a"] * 5}
    given |= {"episode": [0, 0, 1, 1, 2], "tokens": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8], [9, 9]])}
    graph = CreditGraph("gigpo")
    # The first episode's second prompt goes on with what it sampled, the other's was written again.
    histories = graph(Rollouts(**given, prompts=[[0], [0, 1, 2, 20], [0], [20], [0]]))
    same = graph(Rollouts(**given, states=[["start"], ["20"], ["start"], ["20"], ["start"]]))
    other = graph(Rollouts(**given, states=[["start"], ["20"], ["start"], ["21"], ["start"]]))
    torch.testing.assert_close(histories, same)
    assert (same[1] - other[1]).abs().max() > 0.1
    unknown = graph(Rollouts(**given))
    torch.testing.assert_close(unknown, graph(Rollouts(**given, states=[["start"], [""], ["start"], [""], ["start"]])))


def test_a_reward_per_step_belongs_to_its_last_turn():
    batch = rollouts(tokens=torch.zeros(5, 7, dtype=torch.int64), values=torch.zeros(5, 7))
    in_rows, _ = steps(batch)
    of_step = in_rows.rewards.sum(1)
    graph = CreditGraph("mt_grpo")
    torch.testing.assert_close(graph(steps(batch, rewards=of_step)[0]), graph(in_rows))
    torch.testing.assert_close(graph(steps(batch, turn_rewards=of_step[:, None].tolist())[0]), graph(in_rows))
    of_step[0] = float("nan")
    lost = CreditGraph("grpo")(steps(batch, rewards=of_step)[0])
    assert not lost[:2].any(), "the rows of the episode whose outcome is not known"
    assert lost[2:].any()


def test_steps_that_are_apart_or_of_two_groups_or_read_as_texts_are_refused():
    given = {"mask": torch.ones(3, 2), "rewards": torch.ones(3), "entropies": torch.ones(3, 2), "prompts": [[4]] * 3}
    with pytest.raises(
        DataError, match=r"row 2 is apart from the other rows of its episode. Sort the batch by episode"
    ):
        Rollouts(**given, group=[0, 0, 0], episode=[5, 6, 5])
    with pytest.raises(DataError, match=r"row 1 has another group than the first row of its episode"):
        Rollouts(**given, group=[0, 1, 1], episode=[5, 5, 6])
    with pytest.raises(DataError, match=r"2 entries in episode, but 3 rows"):
        Rollouts(**given, group=[0, 1, 1], episode=[5, 5])
    graph = CreditGraph("rredcot", "model.path=anything", policy=object())
    with pytest.raises(ConfigError, match="the trainer's hook passes no token ids"):  # what slime gives is not refused
        graph(Rollouts(**given, group=[0, 0, 0], episode=[5, 6, 7]))
    graph._check_rollouts(Rollouts(**given, group=[0, 0, 0], episode=[5, 6, 7], tokens=torch.ones(3, 2)))
    with pytest.raises(DataError, match=r"the steps of an episode have none in one piece"):
        graph(Rollouts(**given, group=[0, 0, 0], episode=[5, 5, 6], tokens=torch.ones(3, 2, dtype=torch.int64)))


def test_padding_order_and_further_batches_change_nothing():
    graph = CreditGraph("gigpo")
    batch = rollouts()
    plain = graph(batch)
    wide = {name: torch.nn.functional.pad(getattr(batch, name), (0, 3)) for name in ("mask", "rewards", "tokens")}
    torch.testing.assert_close(graph(rollouts(**wide))[:, :7], plain)
    order = torch.tensor([3, 0, 4, 2, 1])
    moved = {name: getattr(batch, name)[order] for name in ("mask", "rewards", "tokens")}
    torch.testing.assert_close(graph(rollouts(**moved, group=[GROUP[i] for i in order])), plain[order])


def test_a_row_without_a_finite_reward_gets_no_credit_and_is_in_no_mean():
    batch = rollouts()
    value = batch.rewards.sum(1)
    value[2] = float("nan")
    advantage = CreditGraph("grpo")(rollouts(rewards=value))
    assert advantage[2].abs().max() == 0
    kept = [0, 1, 3, 4]
    expected = slow.grpo([MASK[i] for i in kept], value[kept].tolist(), [GROUP[i] for i in kept])
    torch.testing.assert_close(advantage[kept], torch.tensor(expected), atol=2e-6, rtol=2e-6)


def test_token_gae_reads_the_trainers_values_and_skips_what_tools_wrote():
    batch = rollouts(values=torch.rand(5, 7, generator=torch.Generator().manual_seed(5)))
    graph = CreditGraph("ppo", "advantage.whiten=false", "advantage.lam=0.7")
    expected = torch.zeros(5, 7)
    for i, row in enumerate(MASK):
        places, after, running = [t for t, m in enumerate(row) if m], None, 0.0
        for t in reversed(places):
            nxt = float(batch.rewards[i].sum()) if after is None else float(batch.values[i, after])
            running = nxt - float(batch.values[i, t]) + (0.0 if after is None else 0.7 * running)
            expected[i, t], after = running, t
    torch.testing.assert_close(graph(batch), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"it reads values, but the trainer gives none; see Rollouts.values"):
        graph(rollouts())


def test_gae_over_turns_reads_the_trainers_values_at_their_starts():
    batch = rollouts(values=torch.rand(5, 7, generator=torch.Generator().manual_seed(5)))
    per_turn, out = turn_rewards(batch), []
    for i, runs in enumerate(slow.turns(MASK)):
        value, row, running = [*(float(batch.values[i, begin]) for begin, _ in runs), 0.0], [], 0.0
        for t in reversed(range(len(runs))):
            running = per_turn[i][t] + 0.99 * value[t + 1] - value[t] + 0.99 * 0.9 * running
            row.insert(0, running)
        out.append(row)
    close(CreditGraph("turn_ppo"), batch, slow.spread(MASK, out))


def test_metrics_are_those_of_the_last_batch():
    graph = CreditGraph("grpo")
    graph(rollouts())
    assert graph.metrics["advantage/groups"] == 2
    one = rollouts(group=["a"] * 5)
    graph(one)
    assert graph.metrics["advantage/groups"] == 1


@pytest.mark.slow
def test_every_shipped_graph_credits_or_says_what_it_lacks():
    credited, refused = [], {}
    entropies = torch.rand(5, 7)
    for name in graph_names():
        try:
            graph = CreditGraph(name)
            assert torch.isfinite(graph(rollouts(values=torch.rand(5, 7), entropies=entropies))).all()
            credited.append(name)
        except CreditgraphError as error:
            refused[name] = str(error)
    assert {"grpo", "gigpo", "gae_turns", "mt_grpo", "s_trace", "grpo_lambda", "ppo", "turn_ppo", "hicra"} <= set(
        credited
    )
    assert {"srpo", "rredcot", "vineppo", "treerl", "distill"} <= set(refused)
    assert [name for name, sentence in refused.items() if name not in sentence] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gipgo"], r"no graph 'gipgo'; expected one of .* Did you mean 'gigpo'\?"),
        (
            ["grpo", "sampler.group_size=4"],
            "graph 'grpo': sampler.group_size=4 has no effect here, where another trainer samples, rewards and learns",
        ),
        (
            ["grpo", "learner.minibatches=4"],
            r"learner.minibatches=4 has no effect .* Expected a setting of advantage or learner",
        ),
        (["rrpo", "run.device=cuda"], "run.device=cuda has no effect here"),
        (["rlsd", "model.path=tiny"], "advantage.self_teacher shows reference solutions, which no trainer gives"),
        (["prime"], r"graph 'prime': value.implicit trains a model of its own"),
        (["vineppo"], r"segmenter.thought reads where thoughts end"),
        (["grpo", "advantage.normalise=std"], r"advantage.normalise.*normalize"),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_built(arguments, sentence):
    with pytest.raises(CreditgraphError, match=sentence):
        CreditGraph(*arguments)


@pytest.mark.slow
def test_a_graph_whose_loss_is_all_that_it_adds_is_refused_where_the_loss_is_the_trainers():
    refused = set()
    for name in graph_names():
        try:
            graph = CreditGraph(name)
        except CreditgraphError:  # reads texts, or trains a model of its own
            continue
        graph.check_loss(True)
        try:
            graph.check_loss(False, "Pass objective=True.")
        except ConfigError as error:
            refused.add((name, str(error).partition(",")[0]))
    only_loss = ("cispo", "dapo", "entropy_8020", "fipo", "grpo_lambda", "gspo", "p_trace", "s_trace")
    said = "its advantages are those of GRPO"
    assert refused == {(name, f"graph '{name}': {said}") for name in only_loss}
    with pytest.raises(ConfigError, match="its method is its loss"):
        CreditGraph("s_trace", "advantage.normalize=mean").check_loss(False)
    graph = CreditGraph("gigpo", "learner.objective.config.clip_high=0.3")
    graph.check_loss(True)
    with pytest.raises(
        ConfigError, match=r"clip_high=0.3 has no effect here, where the loss is .* Pass objective=True"
    ):
        graph.check_loss(False, "Pass objective=True.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["rredcot"],
        ["vineppo", "sampler.mode=line"],
    ],
)
def test_a_policy_that_nobody_gives_is_missed_before_anything_is_sampled(arguments):
    sentence = "node 'value' asks the policy; name a server that has its weights by --endpoint=URL, or"
    graph = CreditGraph(*arguments, "model.path=tiny")
    with pytest.raises(ConfigError, match=sentence):
        graph.check_given(values=True)
    with pytest.raises(ConfigError, match=sentence):
        graph(rollouts())
    graph.check_given(values=True, entropies=True, policy=True, continues=True)


def test_an_estimator_that_was_refused_stays_refused():
    estimator = Estimator("srpo")
    for _ in range(2):
        with pytest.raises(ConfigError, match="samples responses of its own"):
            _ = estimator.credit


@pytest.mark.parametrize("name", ["trace_td", "sdpo"])
def test_the_model_of_a_trainer_stands_for_no_other(name):
    with pytest.raises(
        ConfigError, match="asks another model than the one that is trained; name a server that has it by --endp"
    ):
        CreditGraph(name, "model.path=tiny").check_given(values=True, policy=True)


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        ("srpo", {}, r"'srpo': it samples responses of its own \(sampler.failures, expander.reset\)"),
        ("srpo", {"rows": True}, "'srpo': localizer.self reads where thoughts end"),
        ("tree_turns", {"rows": True}, "it plays episodes of its own"),
        ("intervention", {"rows": True}, "or stops after a thought"),
        ("sdpo", {}, "it reads log-probs of the sampled tokens, but the trainer gives none; see Rollouts.logprobs"),
    ],
)
def test_rows_and_log_probs_that_a_trainer_has_not_are_missed_before_anything_is_sampled(name, more, sentence, policy):
    graph = CreditGraph(name, "model.path=tiny")
    graph.policy = policy
    with pytest.raises(ConfigError, match=sentence):
        graph.check_given(values=True, entropies=True, continues=True, **more)


def test_entropies_that_nobody_gives_are_missed_before_anything_is_sampled():
    with pytest.raises(ConfigError, match="'hicra': it reads entropies, but the trainer gives none; see Rollouts"):
        CreditGraph("hicra").check_given(values=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mask": torch.ones(5)}, r"expected a mask of shape \[N, T\]"),
        ({"tokens": torch.ones(5, 6)}, r"tokens has shape \(5, 6\), but the mask \(5, 7\)"),
        ({"rewards": torch.ones(4)}, r"rewards of shape \(4,\); expected \(5,\) or \(5, 7\)"),
        ({"group": ["a"]}, "1 entries in group, but 5 rows"),
    ],
)
def test_wrong_shapes_are_refused(changes, sentence):
    with pytest.raises(DataError, match=sentence):
        rollouts(**changes)


def test_a_loss_with_one_ratio_per_response_takes_graphs_of_whole_responses_alone():
    batch = rollouts()
    assert CreditGraph("grpo")(batch, by_response="level=sequence").equal(CreditGraph("grpo")(batch))
    sentence = "graph 'gigpo': its credit differs within responses, but with level=sequence the trainer's loss moves"
    with pytest.raises(ConfigError, match=sentence):
        CreditGraph("gigpo")(batch, by_response="level=sequence")
    # A row of its own for each turn has one advantage.
    steps = rollouts(mask=torch.tensor([[1, 1, 1, 0, 0, 0, 0]] * 5), episode=[0, 1, 2, 3, 3], group=list("ababb"))
    assert CreditGraph("gigpo")(steps, by_response="level=sequence").any()


def test_turn_rewards_must_have_one_entry_per_turn():
    short = [[0.0] * len(runs) for runs in slow.turns(MASK)]
    short[3] = [1.0]
    with pytest.raises(DataError, match=r"turn_rewards has 1 entries in row 3, but its mask has 2 turns"):
        CreditGraph("gigpo")(rollouts(turn_rewards=short))
