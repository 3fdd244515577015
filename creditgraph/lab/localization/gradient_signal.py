"""The size of the gradient's coefficient, token by token: |A|/T · (1 − π).

The loss −A/T · log π(y) of a sampled token y has the derivative −A/T · (1 − π(y)) by that token's logit, where T is the
number of trained tokens of its response, by which `seq_mean_token_mean` divides. A token without advantage, or one that
the policy gives anyway, moves nothing. That this is the quantity of the paper's figure (2605.25507) is our reading; the
paper's body was not available to us.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditgraph.pipeline.app.report.rollouts import columns_of, roles
from creditgraph.pipeline.app.report.source import RunSource
from creditgraph.pipeline.core.payloads import Batch, Credit, TokenLogprobs, Trajectories

BINS = 10
Floats = NDArray[np.float64]


@dataclass
class Signal:
    """Sums over the trained tokens of responses of a kind.

    Attributes:
        responses: number of responses with a trained token.
        silent: those whose advantage is 0 on all of their trained tokens.
        tokens, sums: trained tokens and their summed coefficient, [2, BINS]: by place in the response (prefix
            included), from 0 to 1, and by probability.
    """

    responses: int = 0
    silent: int = 0
    tokens: Floats = field(default_factory=lambda: np.zeros((2, BINS)))
    sums: Floats = field(default_factory=lambda: np.zeros((2, BINS)))

    def add(self, advantage: Any, mask: Any, logprobs: Any) -> None:
        """Adds one response; all arguments have one entry per response token, log-probs in nats (NaN: unknown)."""
        mask = np.asarray(mask, bool)
        logprobs = np.asarray(logprobs, np.float64)
        length = int(mask.sum())
        trained = np.flatnonzero(mask & np.isfinite(logprobs))
        if not len(trained):
            return
        probability = np.exp(np.minimum(logprobs[trained], 0.0))
        size = np.abs(np.asarray(advantage, np.float64)[trained])
        coefficient = size / length * (1 - probability)
        self.responses += 1
        self.silent += not size.any()
        for axis, at in enumerate((trained / len(mask), probability)):
            place = np.minimum((at * BINS).astype(np.int64), BINS - 1)
            self.tokens[axis] += np.bincount(place, minlength=BINS)
            self.sums[axis] += np.bincount(place, weights=coefficient, minlength=BINS)

    @property
    def mean(self) -> float:
        """Mean coefficient of a trained token; NaN without any."""
        return float(self.sums[0].sum() / self.tokens[0].sum()) if self.responses else float("nan")

    def numbers(self) -> dict[str, Any]:
        """For JSON; bins without a token have no mean."""
        means = np.divide(self.sums, self.tokens, out=np.full_like(self.sums, np.nan), where=self.tokens > 0)
        names = ("by_position", "by_probability")
        return {
            "responses": self.responses,
            "silent": self.silent,
            "tokens": int(self.tokens[0].sum()),
            "mean": self.mean,
            **{
                name: {"tokens": self.tokens[i].astype(int).tolist(), "mean": means[i].tolist()}
                for i, name in enumerate(names)
            },
        }


def gradient_signal(run: RunSource, failures: Iterable[int]) -> dict[str, Signal]:
    """The signal of the run's trained responses, suffixes of these failures apart from all others ("base").

    π is the learner's where its log-probs are recorded, else the engine's. Tokens without a log-prob are left out.
    """
    kinds = roles(run)
    parents = set(failures)
    signals = {"base": Signal(), "suffix": Signal()}
    for iteration in sorted({i for name in kinds["Credit"] for i in run.iterations(name)}):
        credit, rollouts, learner = (
            _rows(run, kinds[kind.__name__], iteration, kind) for kind in (Credit, Trajectories, TokenLogprobs)
        )
        for uid, (table, i) in credit.items():
            if uid not in rollouts:
                run.note(f"the rollouts of iteration {iteration} are not all recorded; their gradient is left out")
                continue
            sampled, row = rollouts[uid]
            logprobs = np.asarray(sampled["engine_logprobs"][row], np.float64)
            if uid in learner:
                own = np.asarray(learner[uid][0]["logprobs"][learner[uid][1]], np.float64)
                logprobs = np.where(np.isfinite(own), own, logprobs)
            kind = "suffix" if sampled["parent"][row] in parents else "base"
            signals[kind].add(table["advantage"][i], table["mask"][i], logprobs)
    return {name: signal for name, signal in signals.items() if signal.responses}


def _rows(run: RunSource, names: list[str], iteration: int, kind: type[Batch]) -> dict[int, tuple[Any, int]]:
    """uid → (columns, row); later outputs replace earlier ones, the learner's credit is the last."""
    rows: dict[int, tuple[Any, int]] = {}
    for name in names:
        batch = run.read(name, iteration)
        if isinstance(batch, kind):
            table = columns_of(batch)
            rows |= {uid: (table, i) for i, uid in enumerate(table["uid"])}
    return rows
