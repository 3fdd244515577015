import dataclasses

import pytest
import torch

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.components.learner.packing.pack import pack
from creditgraph.components.learner.packing.prefix import (
    PATH_BUDGETS,
    Sorted,
    bags,
    overlaps,
    paths,
    plan_shared,
    unique_tokens,
    without_last,
)
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.executor import Executor

VOCAB = 42


def draw(length, g):
    return torch.randint(0, VOCAB, (length,), generator=g).tolist()


def tree_rows(kind, seed=0):
    """Prompts and responses: "grpo" shares prompts, "srpo" nested prefixes too, "odd" repeats rows and their parts.

    "turns" are two episodes per prompt, of up to four turns; "thoughts" are those whose later prompts lose the first
    two tokens of each response.
    """
    g = torch.Generator().manual_seed(seed)
    size = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
    prompts, responses = [], []
    for _ in range(3):
        prompt = draw(size(2, 9), g)
        if kind in ("turns", "thoughts"):
            for _ in range(2):
                before = prompt
                for _ in range(size(2, 5)):
                    prompts.append(before)
                    responses.append(draw(size(3, 8), g))
                    before = before + responses[-1][2 * (kind == "thoughts") :] + draw(size(1, 4), g)
            continue
        seeds = [draw(size(4, 14), g) for _ in range(3)]
        rows = list(seeds)
        if kind == "srpo":
            for parent in seeds[:2]:
                cut = size(2, len(parent))
                rows += [parent[:cut] + draw(size(1, 9), g) for _ in range(3)]
                rows += [rows[-1][: cut + 1] + draw(size(1, 5), g)]
        if kind == "odd":
            rows += [seeds[0], seeds[0][:2], seeds[0][:1], seeds[0] + [7]]
            prompts.append(prompt + seeds[1][:2])
            responses.append([*seeds[1][2:], 3])
        prompts += [prompt] * len(rows)
        responses += rows
    mixed = torch.randperm(len(prompts), generator=g).tolist()
    return Jagged.from_rows([prompts[i] for i in mixed], torch.int32), Jagged.from_rows(
        [responses[i] for i in mixed], torch.int32
    )


def nodes(rows):
    return len({tuple(r[: i + 1]) for r in rows for i in range(len(r))})


def make_model(kind, device):
    import transformers

    torch.manual_seed(0)
    more = {"sliding_window": 5} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        **more,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(device).eval()


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("rows", ["grpo", "srpo", "odd", "turns", "thoughts"])
@pytest.mark.parametrize("kind", ["Qwen2", "Mistral"])
def test_shared_equals_separate(reference, device, kind, rows, sort):
    model = make_model(kind, device)
    prompts, responses = (x.to(device) for x in tree_rows(rows))
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(len(responses.values), generator=g).to(device) for _ in range(2))
    expected, wanted_entropy = (
        torch.cat(x) for x in reference.separate_logprobs(model, prompts.to_lists(), responses.to_lists(), 0.7)
    )
    parameters = list(model.parameters())
    gradient = torch.autograd.grad((a * expected + b * wanted_entropy).sum(), parameters)
    learner = LearnerModel(model, slow_attention=True)
    order = Sorted.of(prompts.join(responses)).order if sort else torch.arange(len(prompts), device=device)
    batch = pack(prompts, responses, order, share=True)
    assert (batch.saved > 0) or not sort
    logprobs, entropies = learner.logprobs(batch, 0.7)
    flat = responses.with_values(torch.arange(len(responses.values), device=device)).select(order).values
    torch.testing.assert_close(logprobs.values, expected[flat], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.values, wanted_entropy[flat], rtol=1e-5, atol=1e-5)
    actual = torch.autograd.grad((a[flat] * logprobs.values + b[flat] * entropies.values).sum(), parameters)
    scale = max(float(x.abs().max()) for x in gradient)
    assert max(float((x - y).abs().max()) for x, y in zip(actual, gradient, strict=True)) < 1e-5 * scale


def test_pack_by_hand():
    # 1 2 → 4 5 6 and 1 2 → 4 7 8: inputs 1 2 4 5 and 7 (6 and 8 are dropped); the 4 at place 2 predicts 5 and 7.
    batch = pack(
        Jagged.from_rows([[1, 2], [1, 2]]), Jagged.from_rows([[4, 5, 6], [4, 7, 8]]), torch.tensor([0, 1]), share=True
    )
    assert batch.input_ids.tolist() == [[1, 2, 4, 5, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3]]
    assert list(zip(batch.predict.tolist(), batch.next_tokens.tolist(), strict=True)) == [
        (1, 4),
        (2, 5),
        (3, 6),
        (2, 7),
        (4, 8),
    ]
    assert batch.spread.tolist() == [0, 1, 2, 0, 3, 4]
    assert batch.targets.to_lists() == [[4, 5, 6], [4, 7, 8]]
    assert (batch.tokens, batch.saved) == (5, 3)


def test_turns_of_an_episode_are_one_sequence():
    # 1 → 2 3, then 4 → 5 6, then 7 → 8 9 and, of another episode, 1 → 2 8: inputs 1 2 3 4 5 6 7 8, each once, without
    # copies of keys; the other one's input 2 is that of the first, so it needs none.
    prompts, responses = [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]], [[2, 3], [5, 6], [8, 9]]
    rows = [Jagged.from_rows(x, torch.int32) for x in (prompts, responses)]
    batch = pack(*rows, torch.arange(3), share=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.layout.lengths.tolist() == [8]
    assert batch.layout.keys is None
    assert batch.predict[batch.spread].tolist() == [0, 1, 3, 4, 6, 7]
    assert batch.next_tokens[batch.spread].tolist() == [2, 3, 5, 6, 8, 9]
    assert (batch.tokens, batch.saved) == (8, 2 + 5 + 8 - 8)
    other = [Jagged.from_rows(x, torch.int32) for x in ([*prompts, [1]], [*responses, [2, 8]])]
    tree = Sorted.of(other[0].join(other[1]))
    batch = pack(*other, tree.order, share=True)
    assert (batch.layout.lengths.tolist(), batch.tokens) == ([8], 8)
    # A path that grows with the turns is one path: 17 turns of 8 tokens fit where 17 paths would not.
    lengths = 8 * torch.arange(1, 18)
    whole = Jagged.from_rows([list(range(n + 1)) for n in lengths.tolist()], torch.int32)
    assert int(lengths.sum()) > PATH_BUDGETS * 136
    assert [len(piece) for piece in plan_shared(Sorted.of(whole), lengths, 136)] == [17]


def test_rows_without_anything_in_common_are_packed_as_before():
    prompts, responses = Jagged.from_rows([[1, 2], [3]]), Jagged.from_rows([[4, 5], [6, 7]])
    batch = pack(prompts, responses, torch.tensor([0, 1]), share=True)
    assert batch.layout.keys is None
    assert batch.spread is None


def test_overlaps_by_hand():
    rows = Jagged.from_rows([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5], [], [1], [1, 9]])
    assert overlaps(rows).tolist() == [0, 2, 4, 0, 0, 1]
    assert overlaps(Jagged.from_rows([], torch.int32)).tolist() == []
    # Without their last tokens: 1 2 | 1 2 4 | 1 2 4 | 1 | …
    assert without_last(torch.tensor([0, 2, 4]), torch.tensor([3, 4, 4])).tolist() == [0, 2, 3]


def test_bags():
    places, starts = bags(torch.tensor([2, 0, 2, 3]), 5)
    assert places.tolist() == [1, 0, 2, 3]
    assert starts.tolist() == [0, 1, 1, 3, 4]


@pytest.mark.parametrize("kind", ["grpo", "srpo", "odd"])
@pytest.mark.parametrize("seed", range(4))
def test_tree_counts_distinct_prefixes(kind, seed):
    prompts, responses = tree_rows(kind, seed)
    whole = prompts.join(responses)
    tree = Sorted.of(whole)
    inputs = [r[:-1] for r in whole.to_lists()]
    assert unique_tokens(tree, whole.lengths - 1) == nodes(inputs)
    result = paths(tree.overlap, whole.lengths[tree.order])
    assert len(set(result.values.tolist())) == nodes(whole.to_lists())
    some = torch.rand(len(whole), generator=torch.Generator().manual_seed(seed)) < 0.5
    part = tree.restrict(some)
    assert sorted(part.order.tolist()) == some.nonzero()[:, 0].tolist()
    assert part.overlap.tolist() == overlaps(whole.select(part.order)).tolist()


@pytest.mark.parametrize("budget", [0, 1, 20, 60, 1000])
def test_plan_covers_every_row_once_within_budget(budget):
    prompts, responses = tree_rows("srpo")
    whole = prompts.join(responses)
    pieces = plan_shared(Sorted.of(whole), whole.lengths - 1, budget)
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(whole)))
    for piece in pieces:
        tokens = pack(prompts, responses, piece, share=True).tokens
        assert budget == 0 or tokens <= budget or len(piece) == 1


def test_plan_bounds_the_copied_paths():
    # 40 continuations of one token on 50: computed tokens would fit in one micro-batch of 100, their paths, 40 × 51,
    # need 3 of 800.
    prompts, responses = Jagged.from_rows([list(range(50))] * 40), Jagged.from_rows([[i, 0] for i in range(40)])
    whole = prompts.join(responses)
    assert [len(p) for p in plan_shared(Sorted.of(whole), whole.lengths - 1, 100)] == [15, 15, 10]


def test_plan_of_nothing():
    tree = Sorted.of(Jagged.from_rows([[1], [2]]))
    assert plan_shared(tree.restrict(torch.zeros(2, dtype=torch.bool)), torch.tensor([0, 0]), 5) == []


def shared_batch(make_batch, kind="srpo"):
    prompts, responses = tree_rows(kind)
    trajectories, credit = make_batch(rows=len(prompts))
    g = torch.Generator().manual_seed(5)
    wide = responses.with_values(torch.rand(len(responses.values), generator=g))
    trajectories = trajectories.replace(
        prompt_tokens=prompts,
        response_tokens=responses,
        engine_logprobs=wide.with_values(-2 - wide.values),
        entropies=wide,
        thought_ends=Jagged.from_rows([[n] for n in responses.lengths.tolist()], torch.int32),
    )
    weights = responses.with_values(torch.randn(len(responses.values), generator=g))
    return trajectories, dataclasses.replace(credit, advantage=weights, mask=responses.with_values(weights.values > -1))


@pytest.mark.parametrize(("budget", "kind"), [(0, "srpo"), (50, "srpo"), (0, "turns"), (50, "thoughts")])
def test_learner_takes_the_same_step(make_learner, make_batch, budget, kind):
    results = []
    for share in (True, False):
        learner = make_learner(
            share_prefixes=share,
            micro_batch_tokens=budget,
            old_logprobs="recompute",
            minibatches=2,
            objective=ObjectiveSettings(entropy_bonus=0.01),
            optimizer=OptimizerSettings(lr=1e-3),
        )
        trajectories, credit = shared_batch(make_batch, kind)
        out = learner.run(trajectories=trajectories, credit=credit)
        moments = torch.cat([m["exp_avg"].flatten() for m in learner.state_dict()["optimizer"]["moments"].values()])
        results.append((out.report.metrics, moments))
    (on, moments_on), (off, moments_off) = results
    assert float((moments_on - moments_off).abs().max()) < 1e-5 * float(moments_off.abs().max())
    assert on["forward_tokens"] + on["shared_tokens"] == off["forward_tokens"]
    assert on["shared_tokens"] > 0
    work = {"forward_tokens", "shared_tokens", "unique_tokens"}
    assert {k: v for k, v in on.items() if k not in work} == pytest.approx(
        {k: off[k] for k in on if k not in work}, rel=1e-4, abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["toy_grpo", "toy_srpo", "toy_grpo_thoughts"])
def test_computed_tokens_of_real_batches(recipe, tmp_path, monkeypatch):
    changes = [
        "run.iterations=1",
        "prompts.batch=2",
        "evaluator.every=0",
        "evaluator.num_problems=1",
        f"run.root={tmp_path}",
    ]
    experiment = build_experiment(compose([f"recipe={recipe}", *changes]))
    seen = []
    original = HFLearner.run
    monkeypatch.setattr(
        HFLearner, "run", lambda self, **inputs: (seen.append(inputs["trajectories"]), original(self, **inputs))[1]
    )
    executor = Executor(experiment.graph, experiment.run, model=experiment.model, data=experiment.data)
    executor.setup()
    executor.restore()
    executor.run()
    prompts, responses = seen[0].prompt_tokens, seen[0].response_tokens
    whole = prompts.join(responses)
    tree = Sorted.of(whole)
    unique = nodes([r[:-1] for r in whole.to_lists()])
    assert unique_tokens(tree, whole.lengths - 1) == unique
    for budget in (0, 16384):
        pieces = plan_shared(tree, whole.lengths - 1, budget)
        assert sum(pack(prompts, responses, piece, share=True).tokens for piece in pieces) <= 1.05 * unique
    assert unique < 0.8 * (len(whole.values) - len(whole))
