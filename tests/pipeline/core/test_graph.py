"""Graphs of toy components: what a sound one answers, and the text of every problem of an unsound one."""

from typing import Any

import pytest

from creditgraph.pipeline.core.errors import ConfigError, GraphError
from creditgraph.pipeline.core.graph import Graph, build_graph

Nodes = dict[str, Any]


def problems(nodes: Any) -> list[str]:
    with pytest.raises(GraphError) as caught:
        build_graph({"nodes": nodes})
    return caught.value.problems


def only(nodes: Nodes) -> str:
    result = problems(nodes)
    assert len(result) == 1, result
    return result[0]


def graph(nodes: Nodes) -> Graph:
    return build_graph({"nodes": nodes})


def test_sound_graph_is_sorted_and_typed(srpo: Nodes) -> None:
    reverse = dict(reversed(srpo.items()))
    built = graph(reverse)
    place = {n: i for i, n in enumerate(built.names)}
    assert set(place) == set(srpo)
    assert all(place[w.source] < place[n.name] for n in built.nodes for _, w in n.all_wires if not w.delay)
    assert [str(w) for w in built["buffer"].wires["trajectories"]] == ["sampler.trajectories", "expander.trajectories"]
    assert str(built["engine"].wires["weights"][0]) == "learner.weights@1"
    assert built["sampler"].config.group_size == 8
    assert built["sampler"].settings == {}
    assert "errors" not in built["sampler"].wires


def test_order_follows_the_file_where_wires_leave_a_choice() -> None:
    nodes = {name: {"use": "graph_toys:Source"} for name in ("c", "a", "b")}
    assert graph(nodes).names == ["c", "a", "b"]


def test_settings_reach_the_config(srpo: Nodes) -> None:
    srpo["learner"]["config"] = {"objective": "reinforce", "optimizer": {"lr": "1e-4", "betas": [0.8, 0.9]}}
    config = graph(srpo)["learner"].config
    assert (config.objective, config.optimizer.lr, config.optimizer.betas) == ("reinforce", 1e-4, (0.8, 0.9))


def test_ancestors_sinks_delay_and_unknown_node(srpo: Nodes) -> None:
    built = graph(srpo)
    assert built.ancestors(["localizer"]) == {
        "localizer",
        "prompts",
        "sampler",
        "engine",
        "verifier",
    }
    assert built.ancestors([]) == set()
    assert built.max_delay == 1
    assert "learner" in built
    assert "lerner" not in built
    assert {(n.name, s) for n, s, _ in built.readers("sampler")} == {
        ("localizer", "failures"),
        ("expander", "failures"),
        ("buffer", "trajectories"),
    }
    with pytest.raises(ConfigError, match=r"no node 'lerner' in this graph\. Did you mean 'learner'\?"):
        built["lerner"]


def test_lanes_follow_the_learner_within_an_iteration(srpo: Nodes) -> None:
    srpo["after"] = {"use": "graph_toys:Watch", "in": {"policy": "engine.policy", "report": "learner.report"}}
    lanes = graph(srpo).lanes
    assert {n for n, lane in lanes.items() if lane == "learning"} == {"learner", "after"}


@pytest.mark.parametrize(
    ("delay", "overlaps"), [("1", False), ("2", True), ("3", True), ("<=1", False), ("<=3", True), ("≤3", True)]
)
def test_overlap_needs_two_iterations_on_the_way_back(srpo: Nodes, delay: str, overlaps: bool) -> None:
    srpo["engine"]["in"]["weights"] = f"learner.weights@{delay}"
    built = graph(srpo)
    assert built.overlaps is overlaps
    assert built.max_delay == int(delay[-1])
    assert str(built["engine"].wires["weights"][0]) == f"learner.weights@{delay}".replace("≤", "<=")


def test_one_lane_alone_does_not_overlap() -> None:
    assert graph({"prompts": {"use": "graph_toys:Source"}}).overlaps is False


def test_subclass_fits_and_any_fits(srpo: Nodes) -> None:
    srpo["all"] = {"use": "graph_toys:AnyBatch", "in": {"batch": "rewards.rewards"}}
    srpo["watch"]["in"]["anything"] = "verifier.verifier"
    assert "all" in graph(srpo)


def test_null_unwires_an_optional_input(srpo: Nodes) -> None:
    srpo["sampler"]["in"]["verifier"] = None
    assert "verifier" not in graph(srpo)["sampler"].wires


def test_one_wire_is_enough_for_a_list(srpo: Nodes) -> None:
    srpo["buffer"]["in"]["trajectories"] = "sampler.trajectories"
    srpo.pop("expander")
    assert len(graph(srpo)["buffer"].wires["trajectories"]) == 1


def test_no_nodes() -> None:
    for description in ({}, {"nodes": None}, {"nodes": []}, None):
        with pytest.raises(GraphError, match=r"nodes: expected 'nodes: \{name: \{use"):
            build_graph(description)


def test_unknown_component_names_the_nearest() -> None:
    assert only({"a": {"use": "advantage.grup"}}).startswith(
        "a.use: unknown component 'advantage.grup'; expected a registered name"
    )
    assert only({"a": {"use": "advantage.grup"}}).endswith("Did you mean 'advantage.group'?")


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            "graph_toys:Samplr",
            "a.use: component 'graph_toys:Samplr': no class 'Samplr' in graph_toys. Did you mean 'Sampler'?",
        ),
        (
            "no_such_module:X",
            "a.use: component 'no_such_module:X': module 'no_such_module' cannot be imported; install it or correct",
        ),
        ("broken_toys:X", "a.use: importing 'broken_toys:X' failed with RuntimeError: no such accelerator"),
        (
            "graph_toys:NotAComponent",
            "a.use: graph_toys:NotAComponent is not a component; derive it from creditgraph.Component.",
        ),
        ("graph_toys:Positional", "a.use: Positional.run: 'batch' is not keyword-only; write run(self, *, batch: …)."),
        (None, "a.use: expected a component name or 'package.module:Class', got None."),
        (7, "a.use: expected a component name or 'package.module:Class', got 7."),
    ],
)
def test_classes_that_cannot_be_used(use: Any, text: str) -> None:
    assert only({"a": {"use": use}}).startswith(text)


def test_entries_that_are_no_nodes() -> None:
    assert only({"a": "prompts.dataset"}) == "a: expected '{use: prompts.dataset}', got 'prompts.dataset'."
    assert only({"a": [1]}) == "a: expected a mapping with 'use' and, where needed, 'in' and 'config', got [1]."
    assert (
        only({"a": {"use": "graph_toys:Source", "inn": {}}})
        == "a.inn: unknown key; a node has 'use', 'in' and 'config'. Did you mean 'in'?"
    )
    assert only({"a": {"use": "graph_toys:Source", "in": [1]}}) == "a.in: expected 'input: node.output' pairs, got [1]."
    assert (
        only({"a": {"use": "graph_toys:Source", "config": 3}})
        == "a: expected settings as 'name: value' pairs, got 3 (int)."
    )


@pytest.mark.parametrize("name", ["A", "1st", "a-b", "a.b", ""])
def test_bad_names(name: str) -> None:
    assert only({name: {"use": "graph_toys:Source"}}).startswith(
        f"{name}: not a node name; expected lower-case letters, digits and '_'"
    )


def test_reserved_names_and_too_many_nodes() -> None:
    assert only({"model": {"use": "graph_toys:Source"}}).startswith(
        "model: this name is reserved for a section of the configuration"
    )
    many = {f"n{i}": {"use": "graph_toys:Source"} for i in range(129)}
    assert only(many) == "nodes: expected at most 128, got 129."


def test_a_delayed_handle_is_refused(srpo):
    srpo["sampler"]["in"]["policy"] = "engine.policy@1"
    (problem,) = problems(srpo)
    assert problem.startswith(
        "sampler.policy: wire 'engine.policy@1' delays a Policy, a handle whose past cannot be kept"
    )


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (
            "sampler",
            "localizer.failures: expected a wire, 'node.output', 'node.output@k' or 'node.output@<=k', got 'sampler'.",
        ),
        (3, "localizer.failures: expected a wire, 'node.output', 'node.output@k' or 'node.output@<=k', got 3."),
        (
            "sampler.failures@x",
            "localizer.failures: expected a wire, 'node.output', 'node.output@k' or 'node.output@<=k', got "
            "'sampler.failures@x'.",
        ),
        (
            "sampler.failures@0",
            "localizer.failures: wire 'sampler.failures@0' reads 0 iterations back; expected k ≥ 1 in '@k', or "
            "no '@k' for",
        ),
        (
            "sampler.failures@-1",
            "localizer.failures: wire 'sampler.failures@-1' reads -1 iterations back; expected k ≥ 1",
        ),
        (
            "sampler.failures@<2",
            "localizer.failures: expected a wire, 'node.output', 'node.output@k' or 'node.output@<=k', got "
            "'sampler.failures@<2'.",
        ),
        (
            "sampler.failures@<=0",
            "localizer.failures: wire 'sampler.failures@<=0' reads 0 iterations back; expected k ≥ 1",
        ),
        (
            "sampler.failures@<=2",
            "localizer.failures: wire 'sampler.failures@<=2' reads the newest value that is there; expected weights "
            "and a node that every replica runs for itself. Write '@2'.",
        ),
        (
            "samplr.failures",
            "localizer.failures: wire 'samplr.failures' starts at an unknown node 'samplr'. Did you mean 'sampler'?",
        ),
        (
            "sampler.failure",
            "localizer.failures: wire 'sampler.failure': sampler (graph_toys:Sampler) has no output 'failure'. "
            "Did you mean 'failures'?",
        ),
        ("rewards.rewards", "localizer.failures: wire 'rewards.rewards' carries Rewards; expected Trajectories."),
        (
            "watch.x",
            "localizer.failures: wire 'watch.x': watch (graph_toys:Watch) has no output 'x'. It has no outputs.",
        ),
        (
            "sampler.failures@2",
            "localizer.failures: wire 'sampler.failures@2' reads an earlier iteration, but graph_toys:Sampler "
            "defines no initial() "
            "to start from; remove '@2' or define Sampler.initial.",
        ),
        (
            ["sampler.failures", "sampler.trajectories"],
            "localizer.failures: expected one wire, got 2 (sampler.failures + sampler.trajectories); this input "
            "is not a list.",
        ),
        ([], "localizer.failures: expected at least one wire, got an empty list."),
    ],
)
def test_wire_texts(srpo: Nodes, wire: Any, text: str) -> None:
    srpo["localizer"]["in"]["failures"] = wire
    assert any(p.startswith(text) for p in problems(srpo)), problems(srpo)


def test_unknown_input_and_missing_input_offer_what_fits(srpo: Nodes) -> None:
    srpo["advantage"]["in"] = {"trajectories": "buffer.trajectories", "reward": "rewards.rewards"}
    assert problems(srpo) == [
        "advantage.reward: graph_toys:Advantage has no such input. Did you mean 'rewards'?",
        "advantage.rewards: not wired; graph_toys:Advantage needs this Rewards. Outputs that fit: rewards.rewards.",
    ]


def test_missing_input_when_nothing_fits() -> None:
    assert only({"engine": {"use": "graph_toys:Engine"}}) == (
        "engine.weights: not wired; graph_toys:Engine needs this Weights. No output in this graph fits."
    )
    source = {"use": "graph_toys:Source", "in": {"x": "b.batch"}}
    assert (
        only({"a": source, "b": {"use": "graph_toys:Source"}})
        == "a.x: graph_toys:Source has no such input. It has no inputs."
    )


def test_misaligned_wires_name_both_populations(srpo: Nodes) -> None:
    srpo["advantage"]["in"]["trajectories"] = "sampler.trajectories"
    assert problems(srpo) == [
        "advantage: 'rewards' must have the rows of 'trajectories', but rewards.rewards has the rows of "
        "buffer.trajectories and "
        "sampler.trajectories has the rows of sampler.trajectories; wire both from the same population.",
        "learner: 'credit' must have the rows of 'trajectories', but advantage.credit has the rows of "
        "sampler.trajectories and "
        "buffer.trajectories has the rows of buffer.trajectories; wire both from the same population.",
    ]


def test_seeds_and_trajectories_of_one_sampler_are_two_populations(srpo: Nodes) -> None:
    srpo["expander"]["in"]["failures"] = "sampler.trajectories"
    assert only(srpo) == (
        "expander: 'errors' must have the rows of 'failures', but localizer.errors has the rows of "
        "sampler.failures and "
        "sampler.trajectories has the rows of sampler.trajectories; wire both from the same population."
    )


def test_rows_of_lists_are_stacked_in_order(srpo: Nodes) -> None:
    both = ["sampler.trajectories", "expander.trajectories"]
    srpo["buffer"]["use"] = "graph_toys:Stack"
    srpo["rewards"] = {"use": "graph_toys:StackOutcome", "in": {"trajectories": both}}
    assert len(graph(srpo)) == len(srpo)
    srpo["rewards"]["in"]["trajectories"] = both[::-1]
    assert problems(srpo)[0] == (
        "advantage: 'rewards' must have the rows of 'trajectories', but rewards.rewards has the rows of "
        "expander.trajectories + "
        "sampler.trajectories and buffer.trajectories has the rows of sampler.trajectories + expander.trajectories; "
        "wire both from the same population."
    )


def test_rows_of_another_iteration_are_another_population() -> None:
    nodes = {
        "s": {"use": "graph_toys:Expander", "in": {}},
        "r": {"use": "graph_toys:StackOutcome", "in": {"trajectories": "s.trajectories@1"}},
        "a": {"use": "graph_toys:Advantage", "in": {"trajectories": "s.trajectories", "rewards": "r.rewards"}},
    }
    assert any(
        "rows of s.trajectories@1 and s.trajectories has the rows of s.trajectories;" in p for p in problems(nodes)
    )


def test_cycle_shows_its_path_and_the_wire_to_delay(srpo: Nodes) -> None:
    srpo["engine"]["in"]["weights"] = "learner.weights"
    result = only(srpo)
    assert result.startswith("cycle: engine → sampler → ")
    assert result.endswith(
        "learner → engine; read the iteration before, for example 'engine.weights: learner.weights@1'."
    )


def test_cycle_without_initial_and_self_loop() -> None:
    merge = {"use": "graph_toys:Merge", "in": {"trajectories": ["b.trajectories"]}}
    nodes = {"a": merge, "b": {"use": "graph_toys:Merge", "in": {"trajectories": "a.trajectories"}}}
    assert (
        only(nodes)
        == "cycle: a → b → a; one of these wires must read the iteration before from a node that defines initial()."
    )
    assert only({"a": {"use": "graph_toys:Merge", "in": {"trajectories": "a.trajectories"}}}).startswith(
        "cycle: a → a; "
    )


def test_two_cycles_are_two_problems() -> None:
    def loop(a: str, b: str) -> Nodes:
        return {
            a: {"use": "graph_toys:Merge", "in": {"trajectories": f"{b}.trajectories"}},
            b: {"use": "graph_toys:Merge", "in": {"trajectories": f"{a}.trajectories"}},
        }

    assert [p.partition(";")[0] for p in problems(loop("a", "b") | loop("c", "d"))] == [
        "cycle: a → b → a",
        "cycle: c → d → c",
    ]


def test_credit_nobody_reads(srpo: Nodes) -> None:
    srpo["other"] = {"use": "graph_toys:Advantage", "in": srpo["advantage"]["in"]}
    assert (
        only(srpo)
        == "other.credit: no node reads this Credit, so it trains nothing; wire it to a learner or remove it."
    )


def test_settings_problems_carry_the_node(srpo: Nodes) -> None:
    srpo["learner"]["config"] = {"objectiv": "token", "optimizer": {"lr": "fast"}}
    srpo["prompts"]["config"] = {"x": 1}
    assert problems(srpo) == [
        "prompts.x: unknown setting. There are no settings here.",
        "learner.objectiv: unknown setting. Did you mean 'objective'?",
        "learner.optimizer.lr: expected float, got 'fast' (str).",
    ]


def test_all_problems_come_in_one_message(srpo: Nodes) -> None:
    srpo["prompts"]["use"] = "graph_toys:Sorce"
    srpo["sampler"]["config"] = {"group_size": "many"}
    srpo["rewards"]["in"]["verifier"] = "verifier.verifer"
    srpo["localizer"]["in"].pop("failures")
    with pytest.raises(GraphError) as caught:
        build_graph({"nodes": srpo}, "configs/graph/x.yaml")
    text = str(caught.value)
    assert text.startswith("configs/graph/x.yaml: 4 problems\n  1. prompts.use: ")
    for part in (
        "sampler.group_size: expected int, got 'many'",
        "wire 'verifier.verifer'",
        "localizer.failures: not wired",
    ):
        assert part in text
