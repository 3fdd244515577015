"""Exact match of the extracted answer."""

from creditgraph.components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong


def normalise(answer: str) -> str:
    """Collapses white space, drops a final full stop, and lowers the case.

    >>> normalise("  Forty  Two. ")
    'forty two'
    """
    return " ".join(answer.split()).removesuffix(".").strip().casefold()


class Exact(VerifierComponent):
    """Verifies by string equality: integers, choices, yes/no. Equal values in different notation are wrong.

    White space, case and a final full stop do not count.
    """

    references = frozenset({"value", "choice", "boolean"})

    def verdict(self, item: Item) -> Verdict:
        """Compares the extracted answer with the reference after `normalise`."""
        if not item.answer.strip():
            return undecided("the prompt has no reference answer")
        answer = item.extracted()
        if answer is None:
            return wrong("no answer in the response")
        if normalise(answer) == normalise(item.answer):
            return RIGHT
        return wrong(f"answered '{answer[:40]}'")
