"""Cluster files and their overrides."""

import pytest

from creditgraph.pipeline.app.cluster.settings import Cluster, load_cluster, split_overrides
from creditgraph.pipeline.core.errors import ConfigError, GraphError
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices


@pytest.mark.parametrize("name", sorted(list_choices("cluster", [CONFIG_DIR])))
def test_shipped_clusters_are_sound(name):
    cluster = load_cluster(name, {})
    assert cluster.ranks >= 1
    assert (cluster.servers > 0) == (cluster.placement == "disaggregated")


def test_numbers_of_nodes_ranks_and_servers():
    cluster = load_cluster(
        "disaggregated", {"nodes": "3", "engine_nodes": "2", "gpus_per_node": "8", "gpus_per_server": "2"}
    )
    assert (cluster.all_nodes, cluster.ranks, cluster.servers) == (5, 24, 8)
    shared = load_cluster(
        "disaggregated",
        {"nodes": "1", "engine_nodes": "0", "gpus_per_node": "0", "ranks_per_node": "2", "servers_per_node": "2"},
    )
    assert (shared.all_nodes, shared.ranks, shared.servers) == (1, 2, 2)


def test_times_as_yaml_reads_them():
    assert load_cluster("one_node", {"time": "1:30:00"}).time == "01:30:00"
    assert load_cluster("one_node", {"time": "2-12:00:00"}).time == "2-12:00:00"
    with pytest.raises(
        GraphError, match="time: expected hours:minutes:seconds or days-hours:minutes:seconds, got 'soon'"
    ):
        load_cluster("one_node", {"time": "soon"})


def test_mistakes_get_sentences():
    with pytest.raises(
        ConfigError, match=r"cluster=colocatd: no such file in configs/cluster\. Did you mean 'colocated'"
    ):
        load_cluster("colocatd", {})
    with pytest.raises(GraphError, match=r"partitoin: unknown setting\. Did you mean 'partition'"):
        load_cluster("one_node", {"partitoin": "gpu"})
    with pytest.raises(ValueError, match="gpus_per_node 0 is a CPU job; expected ranks_per_node"):
        Cluster(gpus_per_node=0)
    with pytest.raises(ValueError, match="8 ranks take 8 GPUs and its engine servers 8, but gpus_per_node is 8"):
        Cluster(placement="disaggregated")
    with pytest.raises(ValueError, match="16 ranks take 16 GPUs and its engine servers 0, but gpus_per_node is 8"):
        Cluster(ranks_per_node=16)
    assert Cluster(placement="disaggregated", ranks_per_node=4, servers_per_node=4).servers == 4
    with pytest.raises(ValueError, match="disaggregated, but no engine server"):
        Cluster(placement="disaggregated", gpus_per_node=0, ranks_per_node=1)


def test_overrides_are_split():
    name, own, rest = split_overrides(["recipe=toy_srpo", "cluster=one_node", "cluster.nodes=2", "run.seed=1"])
    assert (name, own, rest) == ("one_node", {"nodes": "2"}, ["recipe=toy_srpo", "run.seed=1"])


def test_servers_over_several_nodes():
    wide = {"engine_nodes": "4", "nodes_per_server": "2", "gpus_per_server": "16"}
    cluster = load_cluster("disaggregated", wide)
    assert (cluster.all_nodes, cluster.ranks, cluster.servers) == (6, 16, 2)
    on_cpus = {"gpus_per_node": "0", "ranks_per_node": "1", "gpus_per_server": "4"}
    assert load_cluster("disaggregated", wide | on_cpus).servers == 2
    for change, message in (
        ({"nodes_per_server": "1"}, "expected at most 8, the GPUs of a node, got 16. .*set nodes_per_server=2 too"),
        ({"nodes_per_server": "3"}, "and engine_nodes a multiple of it, got disaggregated with engine_nodes 4"),
        ({"engine_nodes": "0"}, "and engine_nodes a multiple of it, got disaggregated with engine_nodes 0"),
        ({"placement": "colocated"}, "expected disaggregated servers, .* got colocated with engine_nodes 4"),
        ({"gpus_per_server": "8"}, "so gpus_per_server 16 and servers_per_node 0, got 8 and 0"),
        ({"servers_per_node": "1"}, "so gpus_per_server 16 and servers_per_node 0, got 16 and 1"),
        (on_cpus | {"gpus_per_server": "3"}, "so gpus_per_server 2 and servers_per_node 0, got 3 and 0"),
    ):
        with pytest.raises(GraphError, match=message):
            load_cluster("disaggregated", wide | change)
