"""Two responses of the embedded model's tokens, and a graph that continues them at a server."""

import torch

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts

PROMPT = [46, 3, 9]
RESPONSES = [[3, 4, 44, 7, 45], [6, 7, 8, 44, 9]]
REWARDS = [1.0, 0.0]
LOGPROBS = [[-0.5, -0.25, -1.0, -0.75, -0.125]] * 2
CUT = ["model=tiny", "segmenter.use=segmenter.fixed", "segmenter.tokens=2"]
SCORED = {"recipe=toy_rredcot": CUT, "distill": ["model=tiny", "teacher.model=tiny"]}
"""graphs that score the responses, and their settings"""


def settings_of(folder):
    """Settings of `vineppo` without its server, with a reward of its own that reads no answers."""
    (folder / "mine.py").write_text("def reward(response):\n    return len(response) % 7 / 8\n")
    verifier = ["verifier.use=verifier.function", f"verifier.function={folder / 'mine.py'}:reward"]
    return [*CUT, *verifier, "value.continuations=1", "value.temperature=0", "value.max_tokens=12"]


def advantages(graph, **further):
    """Advantages of the tokens of each response."""
    batch = Rollouts(
        mask=torch.ones(2, 5),
        rewards=torch.tensor(REWARDS),
        group=[0, 0],
        tokens=torch.tensor(RESPONSES),
        prompts=[PROMPT] * 2,
        **further,
    )
    return graph(batch)


def expected(folder, policy):
    """Advantages of the tokens of each response, with a policy in this process."""
    found = advantages(CreditGraph("vineppo", *settings_of(folder), policy=policy))
    assert len(set(found.flatten().tolist())) > 3
    return found
