"""Verification by the problem's own simulator, for tasks with many right responses."""

from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import split_thoughts
from creditgraph.components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong


class Steps(VerifierComponent):
    """Verifies by the task family's own rules: a response is right if its steps are legal and reach the goal."""

    references = frozenset({"steps"})

    def verdict(self, item: Item) -> Verdict:
        """Runs the response through the simulator; a wrong one's detail names its first wrong step."""
        task = TASKS.get(str(item.metadata.get("task")))
        if task is None:
            return undecided(f"the prompt is of no task family ({', '.join(TASKS)})")
        thoughts = split_thoughts(item.text)
        if task.accepts(item.metadata, thoughts, item.extracted()):
            return RIGHT
        return wrong(f"step {task.first_error(item.metadata, thoughts)} of {len(thoughts)} is the first wrong one")
