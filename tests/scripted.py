"""Fixtures `toolbox` and `tiny`: scripted stand-ins for a model, a tokenizer and a verifier, one token a character; the
embedded model."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from creditgraph.pipeline.core.component import Component, Context
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Scores, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories, Weights

STOP = "</thought>"


class CharTokenizer:
    """Token id = code point."""

    eos_token_id = 0
    chat_template = None

    def decode(self, ids, skip_special_tokens=False, **_):
        return "".join(chr(i) for i in ids)

    def batch_decode(self, rows, **options):
        return [self.decode(row) for row in rows]

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text]}

    def encode(self, text, **_):
        return [ord(c) for c in text]

    def convert_ids_to_tokens(self, ids):
        return [chr(i) for i in ids]


class ScriptedPolicy(Policy):
    """`script(context, n)` is the whole text of the n-th completion requested for this context.

    It is cut by the limits of the request.
    """

    def __init__(self, script: Callable[[str, int], str], version: int = 3) -> None:
        self.script, self.version, self.tokenizer = script, version, CharTokenizer()
        self.calls: list[Requests] = []
        self.completed: Counter[str] = Counter()

    def generate(self, requests: Requests) -> Completions:
        self.calls.append(requests)
        rows = [self._complete(requests, i) for i in range(len(requests.seed))]
        texts, keys = [r[0] for r in rows], (requests.seed % 97).tolist()
        return Completions(
            tokens=Jagged.from_rows([[ord(c) for c in t] for t in texts], torch.int32),
            logprobs=Jagged.from_rows(
                [[-0.01 * k - 0.001 * i for i in range(len(t))] for t, k in zip(texts, keys, strict=True)],
                torch.float32,
            ),
            entropies=Jagged.from_rows([[0.5 + 0.001 * i for i in range(len(t))] for t in texts], torch.float32),
            thought_ends=Jagged.from_rows([r[1] for r in rows], torch.int32),
            finish_reason=[r[2] for r in rows],
            text=texts,
        )

    def _complete(self, requests: Requests, row: int) -> tuple[str, list[int], str]:
        context = "".join(chr(i) for i in requests.tokens.row(row).tolist())
        text, reason = self.script(context, self.completed[context]), "eos"
        self.completed[context] += 1
        budget = requests.sampling.max_tokens if requests.max_tokens is None else int(requests.max_tokens[row])
        assert budget > 0
        limits = requests.sampling.thoughts
        if limits is None:
            return (text, [], reason) if len(text) <= budget else (text[:budget], [], "length")
        most = limits.max_thoughts if requests.max_thoughts is None else int(requests.max_thoughts[row])
        ends, place = [], 0
        while place < len(text) and len(ends) < most:
            result = text.find(limits.stop, place)
            place = len(text) if result < 0 else result + len(limits.stop)
            ends.append(place)
            if limits.final in text[(ends[-2] if len(ends) > 1 else 0) : place]:
                reason = "final"
                break
        else:
            reason = "thoughts" if len(ends) == most else "eos"
        text = text[: ends[-1]] if ends else ""
        if len(text) > budget:
            text, reason = text[:budget], "length"
            ends = [e for e in ends if e < budget] + [budget]
        return text, ends, reason

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        raise NotImplementedError


class ScriptedVerifier(Verifier):
    """`rule(text)` → value; right at 1 or more. NaN stays NaN; an exception is an invalid row."""

    def __init__(self, rule: Callable[[str], float]) -> None:
        self.rule, self.verified = rule, 0

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        prompts.index_of(trajectories.prompt_uid)
        values, valid, detail = [], [], []
        for text in trajectories.text:
            self.verified += 1
            try:
                values.append(float(self.rule(text)))
                valid.append(True)
                detail.append("")
            except RuntimeError as error:
                values.append(0.0)
                valid.append(False)
                detail.append(str(error))
        value = torch.tensor(values, dtype=torch.float32)
        return Rewards(
            uid=trajectories.uid,
            value=value,
            correct=value >= 1.0,
            valid=torch.tensor(valid, dtype=torch.bool),
            detail=detail,
        )


@dataclass
class Toolbox:
    """What tests of components need, in one fixture."""

    STOP = STOP
    policy = ScriptedPolicy
    verifier = ScriptedVerifier
    tokenizer = CharTokenizer

    @staticmethod
    def prompts(
        texts: list[str], answers: list[str] | None = None, metadata: list[dict] | None = None, first_uid: int = 100
    ) -> Prompts:
        return Prompts(
            uid=torch.arange(first_uid, first_uid + len(texts)),
            tokens=Jagged.from_rows([[ord(c) for c in t] for t in texts], torch.int32),
            text=texts,
            answer=answers or ["1"] * len(texts),
            metadata=metadata or [{"template": "plain"} for _ in texts],
        )

    @staticmethod
    def trajectories(
        texts: list[str],
        group: list[int] | None = None,
        inherited: list[int] | None = None,
        first_uid: int = 1000,
        **changes,
    ) -> Trajectories:
        """Rows with the given texts; thought ends after each stop string and at the end."""
        ends = []
        for text in texts:
            places = [i + len(STOP) for i in range(len(text)) if text.startswith(STOP, i)]
            ends.append(places + ([len(text)] if text and (not places or places[-1] < len(text)) else []))
        count = len(texts)
        lengths = torch.tensor([len(t) for t in texts], dtype=torch.int64)
        total = int(lengths.sum())
        uid = torch.arange(first_uid, first_uid + count)
        tokens = Jagged.from_rows([[ord(c) for c in t] for t in texts], torch.int32)
        fields = {
            "uid": uid,
            "prompt_uid": torch.full((count,), 100),
            "group": torch.tensor(group, dtype=torch.int64) if group is not None else torch.full((count,), 100),
            "parent": torch.full((count,), -1),
            "prompt_tokens": Jagged.from_rows([[80]] * count, torch.int32),
            "response_tokens": tokens,
            "inherited": torch.tensor(inherited or [0] * count, dtype=torch.int64),
            "engine_logprobs": Jagged.from_lengths(-torch.arange(total, dtype=torch.float32) / 100, lengths),
            "entropies": Jagged.from_lengths(torch.arange(total, dtype=torch.float32) / 10, lengths),
            "thought_ends": Jagged.from_rows(ends, torch.int32),
            "policy_version": torch.zeros(count, dtype=torch.int64),
            "finish_reason": ["eos"] * count,
            "text": texts,
        }
        return Trajectories(**{**fields, **changes})

    @staticmethod
    def rewards(uid: torch.Tensor, values: list[float], valid: list[bool] | None = None) -> Rewards:
        value = torch.tensor(values, dtype=torch.float32)
        flags = torch.ones(len(values), dtype=torch.bool) if valid is None else torch.tensor(valid, dtype=torch.bool)
        return Rewards(uid=uid, value=value, correct=value >= 1, valid=flags, detail=[""] * len(values))

    @staticmethod
    def start(kind: type[Component], iteration: int = 0, **settings) -> Component:
        """A component that has been set up, with a context of its own."""
        component = kind(kind.Config(**settings))
        component.setup(Context(node=kind.__name__.lower(), node_index=5, seed=1, iteration=iteration, iterations=10))
        return component


@dataclass
class Tiny:
    """The embedded model behind the local engine, with a batch of problems of the embedded task."""

    prompts: Prompts
    policy: Policy
    context: Context
    started: int = 1

    def start(self, kind: type[Component], **settings) -> Component:
        component = kind(kind.Config(**settings))
        self.started += 1
        node = {"node": kind.__name__.lower(), "node_index": self.started % 128}
        component.setup(dataclasses.replace(self.context, **node, metrics={}, rejected=[]))
        return component


@pytest.fixture(scope="session")
def toolbox() -> type[Toolbox]:
    return Toolbox


@pytest.fixture(scope="session")
def tiny(device: str) -> Tiny:
    from creditgraph.components.engine.local.engine import LocalEngine
    from creditgraph.components.models.load import resolve_model_path
    from creditgraph.components.prompts.dataset import DatasetPrompts

    entry = {"source": "chains", "size": 12, "difficulty": {"steps": [4, 5], "hard_facts": [1, 2]}}
    context = Context(
        node="engine", seed=0, iterations=2, device=device, data={"train": entry, "eval": {**entry, "split": "eval"}}
    )
    engine = LocalEngine(LocalEngine.Config())
    engine.setup(context)
    dataset = DatasetPrompts(DatasetPrompts.Config(batch=6))
    dataset.setup(dataclasses.replace(context, node="prompts", node_index=1))
    policy = engine.run(weights=Weights(version=0, path=resolve_model_path("tiny"))).policy
    return Tiny(prompts=dataset.run().batch, policy=policy, context=context)
