"""How many sockets megatron-core's groups open, which the limit of open files must allow."""

import os

import pytest


def opened(sizes):
    """Sockets that the groups of a layout open on this rank."""
    from creditgraph.components.learner.megatron.parallel import ParallelLayout, destroy, init_parallel

    def count():
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            try:
                found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
            except OSError:  # the listing's own
                continue
        return found

    destroy()
    before = count()
    init_parallel(ParallelLayout(**sizes))
    return count() - before


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}, {"expert_parallel": 4}])
def test_groups_open_no_more_sockets_than_are_counted(pool, sizes):
    from creditgraph.components.learner.megatron.learner import MegatronLearner

    most = max(pool.run(opened, sizes))
    assert 0 < most <= MegatronLearner.files(None, 4)
