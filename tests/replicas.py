"""Replicas in a test: the rows that each makes, and replicas on threads that sum and exchange as ranks do."""

import threading

import torch

from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.run.distributed.wire_format import pack, unpack


def own_rows(ranks, trajectories, credit):
    """The batches of this replica: a contiguous share of the prompts, as samplers make it."""
    prompts = torch.unique(trajectories.prompt_uid)[ranks.share(len(torch.unique(trajectories.prompt_uid)))]
    mine = torch.isin(trajectories.prompt_uid, prompts)
    return trajectories.select(mine), credit.select(mine)


def run_own(learner, trajectories, credit):
    """What this rank's learner returns, trained on the rows of its replica."""
    trajectories, credit = own_rows(learner.context.ranks, trajectories, credit)
    return learner.run(trajectories=trajectories, credit=credit)


def of_all(learner, values):
    """The values of the rows of all replicas."""
    return torch.cat([x.values for x in learner.context.exchange([values] * learner.context.ranks.num_replicas)])


class Threads:
    """Learners as replicas. `received[r]` is all that the replicas have sent to replica r."""

    def __init__(self, learners):
        self.count = len(learners)
        self.received = [[] for _ in learners]
        self._slots = [None] * self.count
        self._barrier = threading.Barrier(self.count)
        for rank, learner in enumerate(learners):
            learner.context.ranks = Ranks(rank=rank, world=self.count, num_replicas=self.count)
            learner.context.all_sum = lambda x, rank=rank: sum(self._all(rank, x.clone()))
            learner.context.exchange = lambda parts, rank=rank: self._exchange(rank, parts)

    def _all(self, rank, value):
        self._slots[rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._slots)
        self._barrier.wait(timeout=60)
        return values

    def _exchange(self, rank, parts):
        assert len(parts) == self.count
        theirs = [sent[rank] for sent in self._all(rank, [pack(part) for part in parts])]
        self.received[rank] += [unpack(data) for data in theirs]
        return [parts[rank] if i == rank else unpack(data) for i, data in enumerate(theirs)]

    def run(self, work):
        """work(rank) on every replica at once; their results."""
        out = [None] * self.count
        errors = []

        def one(rank):
            try:
                out[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return out
