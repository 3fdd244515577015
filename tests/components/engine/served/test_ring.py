"""Where groups go: evenly over shared servers, whole where that is fair, on to the next ones where it is not."""

import pytest

from creditgraph.components.engine.served.ring import Ring


class Server:
    outstanding = 0


def load(leaders, prompts, group, servers, lost=()):
    """Requests at each server when every leader sends all of its groups at once, seeing its own requests only."""
    total = [0] * servers
    used = []
    for leader in range(leaders):
        own = [Server() for _ in range(servers)]
        usable = [s for i, s in enumerate(own) if i not in lost]
        ring = Ring(own, leader, leaders)
        for prompt in range(prompts):
            chosen = []
            for _ in range(group):
                server = ring.choose(prompt, usable, 256)
                server.outstanding += 1
                chosen.append(own.index(server))
            used.append(len(set(chosen)))
        total = [t + s.outstanding for t, s in zip(total, own, strict=True)]
    return total, used


@pytest.mark.parametrize(
    ("leaders", "prompts", "group", "servers"),
    [
        (256, 2, 16, 256),
        (64, 8, 16, 256),
        (32, 1, 16, 32),
        (8, 4, 16, 8),
        (256, 2, 16, 32),
        (16, 5, 64, 64),
        (1, 9, 8, 3),
    ],
)
def test_leaders_that_do_not_see_each_other_load_servers_evenly(leaders, prompts, group, servers):
    total, used = load(leaders, prompts, group, servers)
    assert max(total) <= 1.25 * sum(total) / servers
    assert max(used) <= -(-group // 16)  # servers of a group: as few as its size allows


def test_groups_of_a_lost_server_go_to_all_others():
    total, _ = load(16, 16, 16, 16, lost=[3])
    assert total[3] == 0
    # 256 groups of 16 on 15 servers: 17.07 groups each; a neighbour that took all of server 3's would have 32.
    assert max(total) <= 20 * 16


def test_the_ring_by_hand():
    servers = [Server() for _ in range(3)]
    ring = Ring(servers, 1, 3)  # begins at server 1

    def choose(group, usable=servers, most=99):
        return servers.index(ring.choose(group, usable, most))

    assert [choose(group) for group in (70, 80, 90, 70)] == [1, 2, 0, 1]
    servers[1].outstanding = 16
    assert choose(70) == 2  # 16 is more than 1.25 × 17/3, and than a whole group
    servers[0].outstanding = servers[2].outstanding = 14
    assert choose(70) == 1  # 1.25 × 45/3 = 18.75
    assert choose(70, servers[:1]) == 0
    assert ring.choose(70, servers, 14) is None  # all are full
    ring.clear()
    assert [choose(group, most=99) for group in (90, 70)] == [1, 2]
