"""Checks of functions that take the values of a critic: which error of the textbook formula theirs is, if any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Bools, Floats, make
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.gradient import OfAdvantages
from creditgraph.pipeline.app.audit.gradient import judged as along
from creditgraph.pipeline.app.audit.problems import PROBLEMS
from creditgraph.pipeline.app.audit.search import compare, judged, rounded
from creditgraph.pipeline.app.audit.targets import GAMMA, LAMBDA, AdvantageTarget
from creditgraph.pipeline.core.errors import raised_text

TRIED = {"gamma": (0.9, 1.0, 0.99, 0.95), "lam": (0.8, 1.0, 0.95, 0.99, 0.97, 0.9, 0.0)}
"""γ and λ of a function without such a setting are among these; the first are those that are set"""

BATCHES = (
    make(
        [1.0, 0.0, 0.5, -1.0],
        [0, 0, 1, 1],
        lengths=[4, 3, 4, 2],
        values=[[0.1, 0.7, 0.3, 0.4], [0.6, -0.2, 0.5], [0.35, 0.05, 0.9, 0.2], [-0.3, 0.8]],
    ),
    make(
        [0.0, 1.0, 1.0, 0.0],
        [0, 0, 1, 1],
        lengths=[2, 4, 3, 4],
        values=[[0.9, 0.15], [0.2, 0.45, -0.1, 0.6], [0.3, 0.8, 0.25], [0.55, 0.4, 0.1, 0.75]],
    ),
)


@dataclass(frozen=True)
class Row:
    """One response: float64 [T] rewards and values, values after each token, and γ and λ."""

    r: Floats
    v: Floats
    after: Floats
    gamma: float
    lam: float

    def summed(self, delta: Floats, decay: float) -> Floats:
        """A_t = Σ_k decay^k δ_{t+k}."""
        out, carried = np.zeros_like(delta), 0.0
        for t in reversed(range(len(delta))):
            carried = delta[t] + decay * carried
            out[t] = carried
        return out

    def of(self, v: Floats, after: Floats, decay: float | None = None) -> Floats:
        """The advantages with other values."""
        return self.summed(self.r + self.gamma * after - v, self.gamma * self.lam if decay is None else decay)


def gae(row: Row) -> Floats:
    """A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t, 0 after the last token (Schulman et al., 1506.02438)."""
    return row.of(row.v, row.after)


def _moved(values: Floats, by: int) -> Floats:
    out = np.zeros_like(values)
    if by > 0:
        out[by:] = values[:-by]
    else:
        out[:by] = values[-by:]
    return out


# What people get wrong in it → what is then returned.
PREVIOUS = "values are shifted by one: V of the previous token is read"
FAULTS: Mapping[str, Callable[[Row], Floats]] = {
    PREVIOUS: lambda x: x.of(_moved(x.v, 1), x.v),
    f"{PREVIOUS}, and 0 after the last one": lambda x: x.of(_moved(x.v, 1), np.append(x.v[:-1], 0.0)),
    f"{PREVIOUS}, and the first one twice": lambda x: x.of(np.append(x.v[0], x.v[:-1]), x.v),
    "values are shifted by one: V of the next token is read": lambda x: x.of(x.after, _moved(x.after, -1)),
    "it bootstraps from V of the same token, not of the next one": lambda x: x.of(x.v, x.v),
    "it bootstraps from V two tokens on": lambda x: x.of(x.v, _moved(x.after, -1)),
    "after the last token it bootstraps from the last value; a response that ended has value 0": lambda x: x.of(
        x.v, np.append(x.v[1:], x.v[-1])
    ),
    "V of the next token is missing in δ": lambda x: x.of(x.v, np.zeros_like(x.v)),
    "no value is subtracted in δ": lambda x: x.of(np.zeros_like(x.v), x.after),
    "it returns returns (advantage plus value), not advantages": lambda x: gae(x) + x.v,
    "the value is subtracted twice": lambda x: gae(x) - x.v,
    "δ is added up with λ alone, not γλ": lambda x: x.of(x.v, x.after, x.lam),
    "δ is added up with γ alone: λ has no effect": lambda x: x.of(x.v, x.after, x.gamma),
    "δ is added up with γ²λ": lambda x: x.of(x.v, x.after, x.gamma**2 * x.lam),
    "γ is missing in δ": lambda x: x.summed(x.r + x.after - x.v, x.gamma * x.lam),
    "γ and λ are exchanged": lambda x: x.summed(x.r + x.lam * x.after - x.v, x.gamma * x.lam),
    "δ is never added up: λ has no effect": lambda x: x.of(x.v, x.after, 0.0),
    "the sum runs from the first token on, not from the last one back": lambda x: x.summed(
        (x.r + x.gamma * x.after - x.v)[::-1], x.gamma * x.lam
    )[::-1],
    "advantages are shifted by one: a token gets that of the next one": lambda x: _moved(gae(x), -1),
    "advantages are shifted by one: a token gets that of the previous one": lambda x: _moved(gae(x), 1),
    "the reward is a token early": lambda x: x.summed(_moved(x.r, -1) + x.gamma * x.after - x.v, x.gamma * x.lam),
    "the reward never arrives": lambda x: x.summed(x.gamma * x.after - x.v, x.gamma * x.lam),
    "the sign is turned round": lambda x: -gae(x),
}


def _across_rows(batch: Batch, gamma: float, lam: float, values_too: bool) -> Floats:
    """Without a reset at the end of a row: the sum, and the value, go on into the next row."""
    mask = batch.mask
    v = batch.values[mask]
    after = np.append(v[1:], 0.0) if values_too else batch.next_values[mask]
    row = Row(batch.token_rewards[mask], v, after, gamma, lam)
    out = np.zeros(mask.shape)
    out[mask] = gae(row)
    return out


def _by_row(batch: Batch, form: Callable[[Row], Floats], gamma: float, lam: float) -> Floats:
    out = np.zeros(batch.mask.shape)
    for i, n in enumerate(batch.lengths):
        row = Row(batch.token_rewards[i, :n], batch.values[i, :n], batch.next_values[i, :n], gamma, lam)
        out[i, :n] = form(row)
    return out


def forms(batch: Batch, gamma: float, lam: float) -> Iterator[tuple[str, Floats]]:
    """Each fault with the advantages [N, T] that it gives; "" for none."""
    yield "", _by_row(batch, gae, gamma, lam)
    for words, form in FAULTS.items():
        yield words, _by_row(batch, form, gamma, lam)
    yield "the sum goes on into the next row: the reset at `done` is missing", _across_rows(batch, gamma, lam, False)
    yield "the sum and V go on into the next row: `dones` are ignored", _across_rows(batch, gamma, lam, True)


def _fits(found: Floats, form: Floats, mask: Bools) -> bool:
    """Whether one is the other, or what whitening over the batch makes of it."""
    a, b = form[mask], found[mask]
    if np.ptp(a) < 1e-9 or not np.isfinite(b).all():
        return False
    slope = float(((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum())
    return slope > 0 and bool(np.abs(b.mean() + slope * (a - a.mean()) - b).max() < 1e-4 * max(np.ptp(b), 1e-9))


def _named(target: AdvantageTarget, names: tuple[str, ...]) -> str:
    return next((name for name in names if name in target.settings), "")


def generalised(target: AdvantageTarget) -> Finding:
    """Its advantages, or what whitening makes of them, are those of GAE; if not, the fault they come from is named."""
    if "values" not in target.reads:
        return skipped("takes no values")
    gamma, lam = _named(target, GAMMA), _named(target, LAMBDA)
    changes = {name: TRIED[kind][0] for kind, name in (("gamma", gamma), ("lam", lam)) if name}
    if changes and target.with_settings:
        target = target.with_settings(changes)
    try:
        found = [target.advantages(batch) for batch in BATCHES]
    except Exception as error:  # what a function from outside raises is its refusal
        return skipped(f"not judged: raises {raised_text(error)}")
    pairs = [(g, w) for w in TRIED["lam"][: 1 if lam else None] for g in TRIED["gamma"][: 1 if gamma else None]]
    fitting: dict[
        str, tuple[float, float]
    ] = {}  # words → γ, λ; the right form before faults, which may agree with it at other γ and λ
    for g, w in pairs:
        held = [dict(forms(batch, g, w)) for batch in BATCHES]
        for words in held[0]:
            if all(_fits(f, h[words], b.mask) for f, h, b in zip(found, held, BATCHES, strict=True)):
                fitting.setdefault(words, (g, w))
    if "" in fitting:
        return passed("GAE with γ {:g}, λ {:g}".format(*fitting[""]))
    if not fitting:
        return skipped("not judged: neither GAE nor one of its usual errors; the gradient checks judge it")
    words, (g, w) = next(iter(fitting.items()))
    batch = BATCHES[0]
    return Finding(
        verdict="fail",
        message=words,
        likely=words,
        example={
            "batch": batch.shown(),
            "values": [batch.values[i, :n].tolist() for i, n in enumerate(batch.lengths)],
            "γ, λ": [g, w],
            "advantages": rounded(found[0]),
            "of GAE": rounded(_by_row(batch, gae, g, w)),
        },
        size=1.0,
    )


def padding(target: AdvantageTarget) -> Finding:
    """Values in padding, where a critic gives numbers of no meaning."""
    if "values" not in target.reads:
        return skipped("takes no values")
    if not {"mask", "dones", "lengths", "turns"} & target.reads:
        return skipped("is not told where rows end")
    batch = BATCHES[0]
    beyond = np.arange(batch.width)[None, :] >= batch.lengths[:, None]
    other = batch.with_(values=np.where(beyond, 3.0, batch.values))
    try:
        case = compare(target, batch, other, "values in padding, 0, became 3")
    except Exception as error:  # what a function from outside raises is its refusal
        return skipped(f"not judged: raises {raised_text(error)}")
    if not case.gap:
        return passed()
    finding = judged(case, "advantages differ")
    likely = "the last token bootstraps from the value in the padding: is that set to 0 before it is called?"
    return dataclasses.replace(finding, likely=likely)


def of_no_meaning(target: AdvantageTarget) -> Finding:
    """At γ = λ = 1 any critic is a baseline, and E[g] is ∇J whatever its values are."""
    if not target.has_critic:
        return skipped("takes no values")
    changes = {name: 1.0 for names in (GAMMA, LAMBDA) if (name := _named(target, names))}
    if "values" in target.reads and not _named(target, LAMBDA):
        return skipped("has no setting λ, which would have to be 1")
    target = target.with_settings(changes) if changes and target.with_settings else target
    problem = next(problem for problem in PROBLEMS if problem.name == "chain")
    return along(OfAdvantages(target=target, noise=0.8), problem)


CRITIC = (
    Check(
        name="critic_gae",
        layer="metamorphic",
        title="Advantages are Σ (γλ)^k δ, δ = r + γ V(next) − V, with V = 0 after the last token.",
        run=generalised,
    ),
    Check(name="critic_padding", layer="metamorphic", title="Values in padding do not matter.", run=padding),
    Check(
        name="critic_baseline",
        layer="gradient",
        title="E[g] is along ∇J for a critic of no meaning at γ = λ = 1.",
        run=of_no_meaning,
    ),
)
