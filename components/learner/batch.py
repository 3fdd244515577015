"""Splits a rollout batch into mini-batches, shares of replicas and micro-batches.

A replica keeps the rows that it made. All ranks know of every row its prompt, its cost and how much of it is trained
on, so all cuts are the same everywhere; rows move to the replica that computes them, one part at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.learner.objective import LossInputs, Meters
from creditgraph.components.learner.packing.balance import assign, contiguous, imbalance
from creditgraph.components.learner.packing.pack import PackedBatch, check_rows, pack, plan
from creditgraph.components.learner.packing.prefix import Sorted, plan_shared, unique_tokens, without_last
from creditgraph.components.learner.settings import LearnerSettings
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories, no_experts


class Part:
    """Rows that this replica computes, on the CPU until a micro-batch needs them.

    Args:
        prompt, response: Jagged tokens.
        experts: `Trajectories.routed_experts`, or None.
        settings: settings of the learner.
        shares_prefixes: whether a prefix is computed once for all rows of a micro-batch that begin with it.
        device: device of micro-batches.

    Attributes:
        lengths: int64 [rows], input tokens of each row (all but the last); 0 for a row without a response.
    """

    def __init__(
        self,
        prompt: Jagged,
        response: Jagged,
        experts: Jagged | None,
        settings: LearnerSettings,
        shares_prefixes: bool,
        device: str,
    ) -> None:
        self.prompt = prompt
        self.response = response
        self.experts = experts
        self.lengths = torch.where(response.lengths > 0, prompt.lengths + response.lengths - 1, 0)
        self._budget = settings.micro_batch_tokens
        self._device = device
        self._shares_prefixes = shares_prefixes

    @cached_property
    def _tree(self) -> Sorted | None:
        return Sorted.of(self.prompt.join(self.response)) if self._shares_prefixes else None

    def plan(self) -> list[Tensor]:
        """Returns the row indices of each micro-batch; rows without a response are left out."""
        if self._tree is None:
            return plan(self.lengths, self._budget)
        return plan_shared(self._tree.restrict(self.lengths > 0), self.lengths, self._budget)

    def pack(self, rows: Tensor, candidates: Tensor | None = None) -> PackedBatch:
        """The model input of some rows, and of `candidates` [tokens of their responses, k] to score beside these."""
        prompt, response = (x.select(rows).to(self._device) for x in (self.prompt, self.response))
        candidates = None if candidates is None else candidates.to(self._device)
        index = torch.arange(len(rows), device=self._device)
        experts = None if self.experts is None else self._experts(self.experts.select(rows), rows)
        return pack(prompt, response, index, self._shares_prefixes, candidates, experts)

    def _experts(self, known: Jagged, rows: Tensor) -> Tensor | None:
        """As of `PackedBatch`, of all input tokens of some rows; None for no known row."""
        lengths = self.lengths[rows]
        width = int((known.lengths // lengths.clamp(min=1)).max()) if len(rows) else 0
        if not width:
            return None
        fits = known.lengths == lengths * width
        wrong = (~fits & (known.lengths > 0)).nonzero()[:, 0]
        if len(wrong):
            row = int(wrong[0])
            raise AlignmentError(
                f"Trajectories.routed_experts: expected {width} experts for each token but the last, or none, got "
                f"{int(known.lengths[row])} for a row of {int(lengths[row])} such tokens. They come with the tokens of "
                "an engine; a node that changes these leaves them out."
            )
        out = torch.full((int(lengths.sum()), width), -1, dtype=torch.int16)
        out[fits.repeat_interleave(lengths)] = known.values.view(-1, width).to(out.dtype)
        return out

    def places(self, rows: Tensor, values: Jagged) -> Tensor:
        """int64 [total]: the places of the response tokens of some rows among those of all, on the values' device."""
        starts = self.response.offsets[:-1][rows].to(values.values.device)
        return starts[values.row_ids] + values.positions

    def unique_tokens(self) -> int:
        """Smallest number of tokens that must be computed for the rows, every shared prefix once."""
        return 0 if self._tree is None else unique_tokens(self._tree.restrict(self.lengths > 0), self.lengths)

    def costs(self, chosen: Tensor, prompt_uid: Tensor) -> Tensor:
        """int64 [rows]: tokens that each `chosen` row (bool [rows]) adds to a pass of the chosen rows of its prompt."""
        if self._tree is None:
            return torch.where(chosen, self.lengths, 0)
        costs = torch.zeros_like(self.lengths)
        tree = self._tree.restrict(chosen & (self.lengths > 0))
        sizes = self.lengths[tree.order]
        overlap = without_last(tree.overlap, sizes + 1)
        uids = prompt_uid[tree.order]
        overlap[1:] *= uids[1:] == uids[:-1]
        costs[tree.order] = sizes - overlap
        return costs


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """The rows of one part, by the replica that keeps them and the one that computes them.

    Attributes:
        to: per replica, int64, this replica's rows that it computes.
        counts: per replica, how many of its rows are computed here; they follow each other in the part.
    """

    to: list[Tensor]
    counts: list[int]


class RolloutBatch:
    """The rows of this replica, on the CPU, and what is known of all rows.

    Rows of all replicas are numbered in the order of replicas; `rows` below are such numbers.

    Args:
        settings: settings of the learner.
        context: context of its node.
        trajectories: the rows of this replica.
        max_context: longest sequence the model supports, in tokens; 0 means no limit.
        packs: whether the model supports packed sequences; otherwise no prefixes are shared.

    Attributes:
        own: the rows of this replica.
        shares_prefixes: whether a prefix is computed once for all rows of a micro-batch that begin with it.
        temperature: sampling temperature of the rows of all replicas.
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
        self.shares_prefixes = settings.share_prefixes and packs
        experts = trajectories.routed_experts
        if any(context.exchange([experts is not None] * context.ranks.num_replicas)):
            experts = (experts or no_experts(len(trajectories))).to("cpu")
        self.own = self._part(trajectories.prompt_tokens.to("cpu"), trajectories.response_tokens.to("cpu"), experts)
        self._own_prompts = trajectories.prompt_uid.cpu()
        replica, count = context.ranks.replica, len(trajectories)
        self._source = self.of_all(torch.full((count,), replica))
        self._prompt_uid = self.of_all(self._own_prompts)
        self._lengths = self.of_all(self.own.lengths)
        self._start = int((self._source < replica).sum())
        self.temperature = self._common("Trajectories.temperature", trajectories.temperature, trajectories.temperature)

    def _part(self, prompt: Jagged, response: Jagged, experts: Jagged | None) -> Part:
        return Part(prompt, response, experts, self._settings, self.shares_prefixes, self._context.device)

    def __len__(self) -> int:
        return len(self._source)

    def rows(self) -> Tensor:
        """All rows, int64."""
        return torch.arange(len(self._source))

    def of_all(self, own: Tensor) -> Tensor:
        """Values of all rows, from those of this replica's rows; all ranks call it."""
        return torch.cat(self._context.exchange([own] * self._context.ranks.num_replicas))

    def columns(self, credit: Credit) -> dict[str, Jagged]:
        """The credit's columns; those of the other replicas, without rows, if this one has no rows."""
        kinds = {name: str(c.values.dtype).removeprefix("torch.") for name, c in credit.columns.items()}
        common = self._common("Credit.columns", kinds, {})
        if len(credit):
            return {name: c.to("cpu") for name, c in credit.columns.items()}
        return {n: Jagged(torch.zeros(0, dtype=getattr(torch, k)), torch.zeros(1).long()) for n, k in common.items()}

    def _common(self, what: str, own: Any, without: Any) -> Any:
        """The value of all replicas that have rows, `without` if none has."""
        ranks = self._context.ranks
        sent = [own] if len(self.own.lengths) else []
        found = [value for part in self._context.exchange([sent] * ranks.num_replicas) for value in part]
        if any(value != found[0] for value in found):
            raise AlignmentError(f"{what}: values {found} differ between replicas; expected one value for all.")
        return found[0] if found else without

    def costs(self, chosen: Tensor | None = None) -> Tensor:
        """int64 [rows of all replicas]: tokens to compute for each of them, or for each chosen (bool) one of ours."""
        if self._context.ranks.num_replicas == 1:
            return self.own.lengths
        chosen = torch.ones_like(self._own_prompts, dtype=torch.bool) if chosen is None else chosen
        return self.of_all(self.own.costs(chosen, self._own_prompts))

    def minibatches(self, epoch: int) -> list[Tensor]:
        """Rows per optimiser step: prompts shuffled by a keyed stream and split evenly; one keeps the order."""
        count = self._settings.minibatches
        if count == 1:
            return [self.rows()]
        uids, which = torch.unique(self._prompt_uid, return_inverse=True)
        order = torch.from_numpy(self._context.rng().generator(draw=f"epoch {epoch}").permutation(len(uids)))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(uids))
        # By prompt and not by row, because a group is compared within one optimiser step.
        part = place[which] * count // max(1, len(uids))
        return [(part == i).nonzero(as_tuple=True)[0] for i in range(count)]

    def fetch(self, rows: Tensor, costs: Tensor, meters: Meters | None = None) -> tuple[Route, Part]:
        """Moves the tokens of rows to the replicas that compute them; all ranks call it.

        Args:
            rows: int64, ascending.
            costs: those of all rows, see `costs`.
            meters: get the balance of the work.

        Returns:
            where the rows came from, and this replica's part of them.
        """
        ranks = self._context.ranks
        sizes = costs[rows], self._lengths[rows], self._prompt_uid[rows]
        replica = assign(*sizes, ranks.num_replicas)
        if meters is not None and ranks.num_replicas > 1:
            for name, by in (("before", contiguous(sizes[2], ranks.num_replicas)), ("after", replica)):
                share = torch.tensor(imbalance(*sizes, by, ranks.num_replicas))
                meters.add(f"imbalance_{name}", share, torch.ones(()))
        mine = self._source[rows] == ranks.replica
        to = [rows[mine & (replica == r)] - self._start for r in range(ranks.num_replicas)]
        # One after the other, so that copies of few columns exist at a time.
        prompts = self._context.exchange([_rows_of(self.own.prompt, i) for i in to])
        responses = self._context.exchange([_rows_of(self.own.response, i) for i in to])
        route = Route(to=to, counts=[len(x) for x in responses])
        if responses == [self.own.response]:
            return route, self.own
        experts = self.own.experts
        if experts is not None:
            experts = Jagged.concat(self._context.exchange([_rows_of(experts, i) for i in to]))
        return route, self._part(Jagged.concat(prompts), Jagged.concat(responses), experts)

    def fetch_inputs(self, route: Route, inputs: LossInputs) -> LossInputs:
        """The loss inputs of this replica's part, from those of its own rows; all ranks call it."""
        return LossInputs.concat(self._context.exchange([_rows_of(inputs, i) for i in route.to]))

    def give_back(self, route: Route, values: Jagged, into: Tensor) -> None:
        """Writes values of a part's response tokens into those `into` of the rows' own replicas; all ranks call it."""
        ends = torch.tensor([0, *route.counts]).cumsum(0).tolist()
        parts = [values.select(torch.arange(a, b)) for a, b in pairwise(ends)]
        for rows, part in zip(route.to, self._context.exchange(parts), strict=True):
            into[self.own.places(rows, part)] = part.values


def _rows_of(values: Any, rows: Tensor) -> Any:
    """Ascending rows of a Jagged or of loss inputs; without a copy if they are all."""
    return values if len(rows) == len(values) else values.select(rows)
