"""Rows of several replicas: each is fetched once, by the replica that computes it, and the steps are those of one."""

from types import SimpleNamespace

import pytest
import torch
from learner_steps import distance, run
from replicas import Threads

from creditgraph.components.learner.batch import RolloutBatch
from creditgraph.components.learner.objective import EntropyMask, LossInputs, ObjectiveSettings
from creditgraph.components.learner.objective.entropy_mask import high_by_scope, threshold
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.components.learner.packing.balance import assign
from creditgraph.components.learner.settings import LearnerSettings
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit

OPTIMIZER = OptimizerSettings(lr=3e-3, eps=1e-3)  # with a small ε Adam would blow up rounding of tiny gradients
UNEVEN = ([*range(8)], [*range(8, 12)], [])  # rows of each replica, two per prompt; the last one has none
CUT = {"forward_tokens", "shared_tokens", "unique_tokens", "imbalance_before", "imbalance_after"}


def split(batch, rows=UNEVEN):
    return [tuple(x.select(torch.tensor(r, dtype=torch.int64)) for x in batch) for r in rows]


def stubs(count):
    return [SimpleNamespace(context=Context(node="learner")) for _ in range(count)]


def numbered(trajectories, numbers):
    """Loss inputs whose group is the number of the row, and whose advantages say it for each token."""
    response = trajectories.response_tokens
    values = response.spread(numbers.float())
    return LossInputs(
        logprobs=values,
        old_logprobs=values,
        engine_logprobs=values,
        advantage=values,
        mask=values.to(torch.bool),
        group=numbers,
        old_entropies=values,
        columns={"gate": values},
    )


@pytest.mark.parametrize("share", [True, False])
def test_a_row_goes_to_the_replica_that_computes_it_and_to_no_other(make_batch, share):
    whole, _ = batch = make_batch(rows=12)
    owners, settings = stubs(3), LearnerSettings(share_prefixes=share)
    team = Threads(owners)
    parts = split(batch)
    lengths = whole.prompt_tokens.lengths + whole.response_tokens.lengths - 1
    expected = assign(lengths, lengths, whole.prompt_uid, 3)
    chosen = torch.tensor([0, 1, 4, 5, 6, 7, 8, 9])

    def work(rank):
        rows = RolloutBatch(settings, owners[rank].context, parts[rank][0], 0)
        every, every_part = rows.fetch(rows.rows(), rows.costs())
        team.received[rank].clear()
        route, part = rows.fetch(chosen, rows.costs())
        inputs = rows.fetch_inputs(route, numbered(parts[rank][0], torch.tensor(UNEVEN[rank], dtype=torch.int64)))
        received = list(team.received[rank])
        # Values of all rows, as computed here, go back to their owners.
        own = torch.full((len(parts[rank][0].response_tokens.values),), -1.0)
        rows.give_back(every, every_part.response.with_values(every_part.response.values * 2.0), own)
        return part, inputs, received, own, every_part

    results = team.run(work)
    seen = [inputs.group.tolist() for _, inputs, _, _, _ in results]
    assert sorted(row for rows in seen for row in rows) == chosen.tolist()
    assert [len(p.response) for *_, p in results] == [int((expected == r).sum()) for r in range(3)]
    for rank, (part, inputs, received, own, _) in enumerate(results):
        assert part.response.equal(whole.response_tokens.select(inputs.group))
        assert part.prompt.equal(whole.prompt_tokens.select(inputs.group))
        assert inputs.advantage.equal(part.response.spread(inputs.group.float()))
        assert inputs.columns["gate"].values is inputs.old_logprobs.values or not len(inputs)  # one copy
        # What came over the wire: the tokens of these rows, once, and nothing of any other row.
        tokens = len(part.response.values)
        assert sum(len(x.advantage.values) for x in received if isinstance(x, LossInputs)) == tokens
        jagged = [x for x in received if isinstance(x, Jagged)]
        assert sum(len(x.values) for x in jagged) == tokens + len(part.prompt.values)
        assert own.tolist() == (2.0 * parts[rank][0].response_tokens.values).tolist()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_uneven_replicas_and_one_without_rows_make_the_steps_of_one(make_learner, make_batch, minibatches):
    objective = ObjectiveSettings(use="trace", entropy_mask=EntropyMask(keep=0.4, where="trace_and_loss"))
    settings = {"objective": objective, "optimizer": OPTIMIZER, "minibatches": minibatches, "epochs": 2}
    trajectories, credit = make_batch(rows=12)
    batch = trajectories, credit.replace(columns={"gate": credit.advantage})
    alone = make_learner(**settings)
    expected = run(alone, batch)
    learners = [make_learner(**settings) for _ in range(3)]
    team = Threads(learners)
    parts = split(batch)
    parts[2] = parts[2][0], parts[2][1].replace(columns={})  # nothing was made there that could name its columns
    outs = team.run(lambda rank: run(learners[rank], parts[rank]))
    learned = {k: v for k, v in expected.report.metrics.items() if k not in CUT}
    for out in outs:
        assert {k: out.report.metrics[k] for k in learned} == pytest.approx(learned, rel=1e-4, abs=1e-6)
        assert distance(out.weights.tensors, expected.weights.tensors) < 1e-5
    assert [len(o.logprobs) for o in outs] == [8, 4, 0]
    actual = torch.cat([o.logprobs.logprobs.values for o in outs])
    torch.testing.assert_close(actual, expected.logprobs.logprobs.values, rtol=0, atol=1e-4, equal_nan=True)
    # Loss inputs are fetched once per row, and again where another epoch has other mini-batches.
    fetched = sum(len(x) for received in team.received for x in received if isinstance(x, LossInputs))
    assert fetched == 12 * (1 if minibatches == 1 else 2)


def test_replicas_agree_on_temperature_and_columns(make_learner, make_batch):
    trajectories, credit = make_batch(rows=12)
    warm, named = split((trajectories, credit)), split((trajectories, credit))
    warm[1] = warm[1][0].replace(temperature=0.5), warm[1][1]
    named[1] = named[1][0], named[1][1].replace(columns={"gate": named[1][1].advantage})
    for parts, text in ((warm, r"Trajectories.temperature: values \[1.0, 0.5\]"), (named, "Credit.columns: values")):
        learners = [make_learner() for _ in range(3)]
        with pytest.raises(AlignmentError, match=text):
            Threads(learners).run(lambda rank, parts=parts, learners=learners: run(learners[rank], parts[rank]))


@pytest.mark.parametrize("keep", [0.05, 0.2, 0.5, 0.999])
def test_the_threshold_of_all_replicas_is_that_of_a_sort(keep):
    g = torch.Generator().manual_seed(1)
    entropies = torch.cat([torch.rand(300, generator=g), torch.tensor([0.0, -0.0, 0.5, 0.5, 0.5, -1e-8, 1e-30, 7.0])])
    everywhere = torch.ones(len(entropies), dtype=torch.bool)
    expected = high_by_scope(entropies, everywhere, torch.zeros(len(entropies), dtype=torch.int64), keep)
    kept = torch.sort(entropies, descending=True).values[int(expected.sum()) - 1]
    owners = stubs(3)
    parts = [entropies[:100], entropies[100:], entropies[:0]]
    found = Threads(owners).run(lambda r: threshold(parts[r], keep, owners[r].context.all_sum))
    assert [float(x) for x in found] == [float(kept)] * 3
    assert torch.equal(entropies >= found[0], expected)


def test_no_rows_anywhere(make_learner, make_batch):
    learners = [make_learner() for _ in range(2)]
    empty = [x.select(torch.zeros(0, dtype=torch.int64)) for x in make_batch()]
    outs = Threads(learners).run(lambda rank: run(learners[rank], empty))
    assert [o.report.metrics["steps"] for o in outs] == [0, 0]
    assert isinstance(empty[1], Credit)
