"""What methods gained over their baseline in several families, with families as the units."""

from __future__ import annotations

from dataclasses import dataclass

from creditgraph.lab.bench.paired import Paired, paired
from creditgraph.lab.evidence.declaration import Cell
from creditgraph.lab.evidence.verdicts import Results, few

FEWEST_FAMILIES = 4


@dataclass(frozen=True, kw_only=True)
class Across:
    """A method and its baseline in several families.

    Attributes:
        method, baseline: recipes, with the settings that only one of the two has.
        gains: family → difference in accuracy at equal sampled tokens, method − baseline; the mean over seeds, and over
            cells of the family.
        knows_errors: whether the method is given the true first errors.
    """

    method: str
    baseline: str
    gains: dict[str, float]
    knows_errors: bool

    @property
    def result(self) -> Paired:
        """Mean over families, with its interval."""
        return paired(list(self.gains.values()))


def across_families(results: Results, fewest: int = FEWEST_FAMILIES) -> list[Across]:
    """Methods that were compared with one baseline in so many families or more, the largest mean gain first."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    knowing = set()
    for name, cell in results.declaration.cells.items():
        for method in results.cells.get(name, {}).get("methods", {}):
            pair = results.pair(name, method, cell.baseline_of(method), "tokens")
            if pair is None or any(map(few, pair["fewest_steps"])):
                continue
            names, gain = labels(cell, method), results.compared(name, pair).difference
            if not cell.methods[method].baseline and len(names[0]) < len(names[1]):
                names, gain = names[::-1], -gain  # of two baselines the plainer one is the other's
            found.setdefault(names, {}).setdefault(cell.family, []).append(gain)
            if cell.methods[method].knows_errors:
                knowing.add(names[0])
    rows = [
        Across(
            method=method,
            baseline=baseline,
            gains={family: sum(gains) / len(gains) for family, gains in families.items()},
            knows_errors=method in knowing,
        )
        for (method, baseline), families in found.items()
        if len(families) >= fewest
    ]
    return sorted(rows, key=lambda row: -row.result.difference)


def labels(cell: Cell, method: str) -> tuple[str, str]:
    """A method and its baseline, without the settings that both have: cells of other batches name them alike."""
    one, other = cell.methods[method], cell.methods[cell.baseline_of(method)]
    first, second = (
        " ".join([entry.recipe.removeprefix("toy_"), *(s for s in entry.set if s not in against.set)])
        for entry, against in ((one, other), (other, one))
    )
    return first, second
