"""The class that algorithms extend."""


def iter_trainable_traces(episodes):
    """Episodes and their traces without an error, of agents that are trained, with a sampled token."""
    for episode in episodes:
        for trace in episode.traces:
            if not trace.has_error and trace.agent.trainable and any(any(node.mask) for node in trace.nodes):
                yield episode, trace


class Algorithm:
    """Scores groups of episodes."""

    def __init__(self, config, policy_pool):
        self.policy_pool = policy_pool

    async def finalize_group(self, episodes):
        """What the orchestrator calls."""
        await self.score_group(episodes)
