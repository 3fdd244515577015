"""Splits a rollout batch into mini-batches, shares of replicas and micro-batches.

Every learner rank holds the global batch, so all cuts are the same everywhere without communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.learner.objective import Meters
from components.learner.packing.balance import assign, contiguous, imbalance
from components.learner.packing.pack import PackedBatch, check_rows, pack, plan
from components.learner.packing.prefix import Sorted, plan_shared, unique_tokens, without_last
from components.learner.settings import LearnerSettings
from pipeline.core.component import Context
from pipeline.core.payloads import Trajectories


class RolloutBatch:
    """The rows of all replicas, on this rank's device.

    Args:
        settings: settings of the learner.
        context: context of its node.
        trajectories: the rows.
        max_context: longest sequence the model supports, in tokens; 0 means no limit.
        packs: whether the model supports packed sequences; otherwise no prefixes are shared.

    Attributes:
        prompt, response: Jagged tokens.
        lengths: int64 [rows], input tokens of each row (all but the last); 0 for a row without a response.
        shares_prefixes: whether a prefix is computed once for all rows of a micro-batch that begin with it.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        context: Context,
        trajectories: Trajectories,
        max_context: int,
        packs: bool = True,
    ) -> None:
        check_rows(trajectories.prompt_tokens, trajectories.response_tokens, max_context)
        self._settings = settings
        self._context = context
        self.prompt = trajectories.prompt_tokens.to(context.device)
        self.response = trajectories.response_tokens.to(context.device)
        self.lengths = torch.where(self.response.lengths > 0, self.prompt.lengths + self.response.lengths - 1, 0)
        self._prompt_uid = trajectories.prompt_uid
        self.shares_prefixes = settings.share_prefixes and packs
        self._tree = Sorted.of(self.prompt.join(self.response)) if self.shares_prefixes else None

    def rows(self) -> Tensor:
        """All row indices, int64."""
        return torch.arange(len(self.lengths), device=self.lengths.device)

    def minibatches(self, epoch: int) -> list[Tensor]:
        """Row indices per optimiser step: prompts shuffled by a keyed stream and split evenly; one keeps the order."""
        count = self._settings.minibatches
        if count == 1:
            return [self.rows()]
        uids, which = torch.unique(self._prompt_uid, return_inverse=True)
        order = torch.from_numpy(self._context.rng().generator(draw=f"epoch {epoch}").permutation(len(uids)))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(uids))
        # By prompt and not by row, because a group is compared within one optimiser step.
        part = place[which] * count // max(1, len(uids))
        return [(part == i).nonzero(as_tuple=True)[0].to(self.lengths.device) for i in range(count)]

    def share(self, rows: Tensor, meters: Meters | None = None) -> Tensor:
        """Returns the subset of rows that this replica computes; adds the balance of the work to `meters`."""
        count = self._context.ranks.num_replicas
        if count == 1:
            return rows
        costs = self._costs(rows)
        group = self._prompt_uid.to(rows.device)[rows]
        replica = assign(costs, group, count)
        if meters is not None:
            for name, by in (("before", contiguous(group, count)), ("after", replica)):
                meters.add(f"imbalance_{name}", torch.tensor(imbalance(costs, by, count)), torch.ones(()))
        return rows[replica == self._context.ranks.replica]

    def _costs(self, rows: Tensor) -> Tensor:
        """int64, number of tokens that each row adds to a forward pass."""
        if self._tree is None:
            return self.lengths[rows]
        tree = self._subtree(rows)
        sizes = self.lengths[tree.order]
        costs = torch.zeros_like(self.lengths)
        costs[tree.order] = sizes - without_last(tree.overlap, sizes + 1)
        return costs[rows]

    def _subtree(self, rows: Tensor) -> Sorted:
        assert self._tree is not None
        keep = torch.zeros_like(self.lengths, dtype=torch.bool)
        keep[rows] = True
        return self._tree.restrict(keep & (self.lengths > 0))

    def plan(self, rows: Tensor) -> list[Tensor]:
        """Returns the row indices of each micro-batch; rows without a response are left out."""
        budget = self._settings.micro_batch_tokens
        if self._tree is None:
            return [rows[p] for p in plan(self.lengths[rows], budget)]
        return plan_shared(self._subtree(rows), self.lengths, budget)

    def pack(self, rows: Tensor) -> PackedBatch:
        """The model input of some rows."""
        return pack(self.prompt, self.response, rows, share=self.shares_prefixes)

    def unique_tokens(self, rows: Tensor) -> int:
        """Smallest number of tokens that must be computed for some rows, every shared prefix once."""
        return unique_tokens(self._subtree(rows), self.lengths) if self.shares_prefixes else 0
