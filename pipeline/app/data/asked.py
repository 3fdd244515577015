"""What every node of a graph asks the policy, found by running the graph on a policy that answers by rote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.text.stops import ends_of_stop, token_texts
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Completions, Environments, Policy, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.node_runner import NodeFailure
from creditgraph.pipeline.run.session import GraphSession

BOX = "\\boxed{"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Something that a node asks: tokens of the request, or the reason why it cannot be shown."""

    node: str
    tokens: list[int]
    reason: str = ""


class ByRote(Policy):
    """Gives every request the same answer of three thoughts, and remembers the last row of each call in `calls`.

    The answer is most likely wrong; as one to "which step is wrong?" it says the second. Log-probs are zeros.
    """

    version = 0

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.calls: list[list[int]] = []

    def generate(self, requests: Requests) -> Completions:
        """The answer, without its end where the budget is smaller."""
        self._remember(requests.tokens)
        thoughts = requests.sampling.thoughts
        stop, final = (thoughts.stop, thoughts.final) if thoughts else ("\n", "")
        text = f"First step. {stop} Second step. {stop} {final or BOX} 2 }}"
        answer = self.tokenizer.encode(text, add_special_tokens=False)[: requests.sampling.max_tokens]
        answer = answer or [self.tokenizer.eos_token_id]
        rows = len(requests.seed)
        tokens = Jagged.from_rows([answer] * rows, torch.int32)
        pieces = token_texts(self.tokenizer, Jagged.from_rows([answer]))[0]
        ends = sorted({*ends_of_stop(pieces, stop), len(answer)}) if thoughts else []
        zeros = tokens.with_values(torch.zeros(len(tokens.values)))
        return Completions(
            tokens=tokens,
            logprobs=zeros,
            entropies=zeros,
            thought_ends=Jagged.from_rows([ends] * rows, torch.int32),
            finish_reason=["final" if thoughts else "eos"] * rows,
            text=["".join(pieces)] * rows,
        )

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Zeros."""
        self._remember(context)
        zeros = tokens.with_values(torch.zeros(len(tokens.values)))
        none: Tensor | None = torch.zeros(len(tokens.values), top, dtype=torch.int64) if top else None
        return Scores(
            logprobs=zeros, entropies=zeros, top_tokens=none, top_logprobs=none if none is None else none + 0.0
        )

    def _remember(self, tokens: Jagged) -> None:
        if len(tokens):
            self.calls.append(tokens.row(len(tokens) - 1).tolist())  # of states within a response the latest


def asked(session: GraphSession, prompts: Node, batch: Prompts, tokenizer: Any) -> Iterator[Asked]:
    """What each node asks that asks something else than the problems of a batch; environments are not played.

    Args:
        session: of the configuration, on the CPU.
        prompts: the node that draws the problems.
        batch: some of its problems.
        tokenizer: the model's.
    """
    policy = ByRote(tokenizer)
    session.give(prompts.name, 0, {"batch": batch})
    for node in session.graph.nodes:
        session.give(node.name, 0, dict.fromkeys(node.outputs_of(Policy), policy))
    problems = [row.tolist() for row in batch.tokens.rows()]
    for node in session.graph.nodes:
        if node.placement == "collective" or node.cls.final_pass or not _asks(node):
            continue
        above = session.graph.ancestors([node.name]) | {node.name}
        if any(other.outputs_of(Environments) for other in session.graph.nodes if other.name in above):
            continue
        try:
            inputs = session.inputs(node, 0)
            policy.calls = []  # its inputs may have asked too
            session.give(node.name, 0, session.runner(node).run(0, inputs))
        except (CreditgraphError, NodeFailure) as error:
            yield Asked(node=node.name, tokens=[], reason=str(error).partition("\n")[0])
            continue
        others = [tokens for tokens in policy.calls if tokens not in problems]
        if others:
            yield Asked(node=node.name, tokens=others[0])


def _asks(node: Node) -> bool:
    return any(socket.carries(Policy) for socket in node.sockets.inputs.values())


def on_cpu(experiment: Experiment) -> Experiment:
    """The experiment with the CPU as its device."""
    return dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, device="cpu"))
