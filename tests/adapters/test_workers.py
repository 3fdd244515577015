"""Rows that a trainer's workers are sent, and what is made of their scores; each trainer's own have tests of theirs."""

import pytest
import torch

from creditgraph.adapters import workers
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.jagged import Jagged


class Sums(workers.WorkerPolicy):
    """A token's log-prob is minus its id, minus the sum of its row's prompt."""

    def rows(self, ids, read, width, temperature):
        assert len(ids) % self.multiple == 0
        prompts, responses = (ids * read)[:, :-width], ids[:, -width:]
        # Prompts end and responses begin at the same place.
        assert (read[:, -width - 1 : -width + 1] == 1).all()
        self.sent.append(len(ids))
        return -(responses + prompts.sum(1, keepdim=True)).float().unsqueeze(1)


def test_rows_are_sent_in_whole_batches_and_come_back_in_their_order(monkeypatch):
    monkeypatch.setattr(workers, "AT_ONCE", 4)
    policy = Sums("the trainer", None, multiple=2, temperature=0.7)
    policy.sent = []
    before = [[1], [2, 3], [4], [5, 6, 7], [8]]
    after = [[10, 11], [12], [13, 14, 15], [16], [17, 18]]
    context, tokens = (Jagged.from_rows(rows, torch.int32) for rows in (before, after))
    scores = policy.score(context, tokens, temperature=0.7)
    expected = [[-float(t + sum(prompt)) for t in row] for prompt, row in zip(before, after, strict=True)]
    assert scores.logprobs.to_lists() == expected
    assert scores.entropies.values.isnan().all()
    assert policy.sent == [4, 2]  # the last row fills the second batch
    with pytest.raises(RunError, match=r"asked for log-probs at temperature 1, but they give those at 0\.7"):
        policy.score(context, tokens)
    with pytest.raises(RunError, match="asked for 3 further tokens"):
        policy.score(context, tokens, temperature=0.7, top=3)
    with pytest.raises(RunError, match="score texts and sample none"):
        policy.generate(None)
