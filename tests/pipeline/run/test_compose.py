"""Overrides: what is written after `=` arrives as it is."""

import re
import shlex

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.preflight import check_present
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, GraphError
from creditgraph.pipeline.run.compose.choices import read_yaml
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

NAMES = [
    "plain",
    "two words",
    "toy_srpo-group_size=4-s0",
    "q'uote",
    'double"quote',
    "d$x",
    "br{a}",
    "ünï",
    "a#b",
    "a&b;c",
]
NAMES += ["back\\", "b\\'c", "end\\\\'"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_may_have_characters_of_the_override_grammar(name):
    assert compose(["recipe=toy_grpo", f"run.name={name}"])["run"]["name"] == name


@pytest.mark.parametrize("folder", ["a b", "ünï", "q'uote", "a=1,2]", "br{a}$x", "100%20#"])
def test_a_folder_of_configs_may_have_characters_of_the_override_grammar(folder, tmp_path):
    (tmp_path / folder / "recipe").mkdir(parents=True)
    (tmp_path / folder / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - toy_grpo\n  - _self_\nrun: {seed: 7}\n"
    )
    assert compose(["recipe=mine"], [tmp_path / folder])["run"]["seed"] == 7


def test_an_unknown_setting_names_the_component_that_has_it():
    own = compose(["recipe=toy_grpo", "verifier.function=mine.py:right"])
    with pytest.raises(
        GraphError, match=r"verifier\.function has it; choose it with verifier\.use=verifier\.function\."
    ):
        build_experiment(own)


VALUES = [
    ("[1,2]", [1, 2]),
    ("'1,2'", "1,2"),
    ('"a=b"', "a=b"),
    ("{a: 1}", {"a": 1}),
    ("1e-3", 0.001),
    ("null", None),
    ("true", True),
]
VALUES += [("${run.seed}", 0), ("", ""), ("x:y", "x:y"), ("a/b.c", "a/b.c")]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values_that_the_grammar_knows_keep_their_meaning(text, value):
    assert compose(["recipe=toy_grpo", f"sampler.anything={text}"])["sampler"]["anything"] == value


def test_a_run_may_be_named_by_the_name_it_got():
    changed = ["recipe=toy_grpo", "sampler.group_size=4", "learner.learning_rate=1e-3"]
    name = compose(changed)["run"]["name"]
    assert name == "toy_grpo-group_size=4-learning_rate=1e-3-s0"
    assert compose([*changed, f"run.name={name}"]) == compose(changed)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["graph=grpo", "data=gsm8k", "model.path=Qwen/Qwen2.5-0.5B-Instruct"], "grpo-gsm8k-Qwen2.5-0.5B-Instruct-s0"),
        (["graph=grpo", "data=math", "model.path=/home/me/models/mine/", "run.seed=3"], "grpo-math-mine-s3"),
        (
            ["recipe=your_own", "data.train.path=~/data/sums.jsonl.gz", "verifier.function=lib/rewards.py:right"],
            "your_own-sums-right-s0",
        ),
        (["recipe=your_own", "data.train.user_prompt=<a> {question} </a>"], "your_own-user_prompt=_a_question_a_-s0"),
    ],
)
def test_a_run_of_paths_has_a_short_name(overrides, name):
    assert compose(overrides)["run"]["name"] == name


def test_long_names_are_cut_and_differ():
    text = "data.train.user_prompt=Answer the question with one number and nothing else: {question}"
    many = ["recipe=your_own", text, *(f"learner.optimizer.lr{i}=0.000{i}" for i in range(9))]
    names = {
        compose(overrides)["run"]["name"]
        for overrides in ([*many, "sampler.top_p=.8"], [*many, "sampler.top_p=.9"], [*many, "run.seed=1"], many)
    }
    assert len(names) == 4
    assert compose([*many, "run.iterations=7"])["run"]["name"] in names  # continues the run of `many`
    assert all(len(name) <= 130 for name in names)
    assert sum(name.endswith("-s1") for name in names) == 1


@pytest.mark.parametrize("name", [".", "..", "two\nlines", "bell\a"])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(GraphError, match="expected the name of a folder below root"):
        build_experiment(compose(["recipe=toy_grpo", f"run.name={name}"]))


def test_an_evaluation_job_has_its_suite_and_its_folders(tmp_path, capsys):
    run, mine = tmp_path / "run", tmp_path / "mine"
    (mine / "suite").mkdir(parents=True)
    (mine / "suite" / "small.yaml").write_text("title: Small\n")
    run.mkdir()
    (run / "config.yaml").write_text("run: {}\n")
    command = ["submit", "--eval", str(run), "cluster=one_node", "--dry-run"]
    assert main([*command, "suite=small"]) == 2
    assert "suite=small: no suite of that name; expected a file of configs/suite" in capsys.readouterr().err
    assert main([*command, "suite=small", "--config-dir", str(mine)]) == 0
    assert f" eval {run} suite=small --config-dir {mine}" in capsys.readouterr().out


def test_a_disaggregated_job_of_changed_settings_can_be_composed_again(tmp_path, capsys):
    changed = ["recipe=toy_srpo", "engine=vllm", "sampler.group_size=4", f"run.root={tmp_path}"]
    assert main(["submit", *changed, "cluster=disaggregated", "cluster.nodes=1", "--dry-run"]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if " train recipe=toy_srpo " in text]

    words = shlex.split(line.partition(" train ")[2].rstrip(" &"))
    values = compose([w for w in words if "=" in w])
    assert values["run"]["name"] == compose(changed)["run"]["name"] == "toy_srpo-engine=vllm-group_size=4-s0"
    assert values["engine"]["rendezvous"] == str(tmp_path / values["run"]["name"] / "servers")


def test_settings_of_files_for_a_replaced_component_are_dropped_with_a_line(caplog):
    values = compose(["recipe=toy_srpo", "localizer.use=localizer.uniform"])
    assert caplog.messages == [
        "localizer.use=localizer.uniform: dropped top_p=1.0, max_tokens=128, set by files for localizer.self; "
        "localizer.uniform has no such settings."
    ]
    assert values["localizer"] == {"use": "localizer.uniform"}
    build_experiment(values)
    caplog.clear()
    values = compose(["recipe=toy_grpo", "nodes.advantage.use=advantage.tree_paths"])
    assert "dropped normalize=std, set by files for advantage.group" in caplog.text
    assert values["nodes"]["advantage"]["config"] == {}


def test_settings_that_both_components_have_stay(caplog):
    values = compose(["recipe=toy_grpo", "learner=megatron"])
    learner = build_experiment(values).graph["learner"].config
    assert (learner.objective.aggregate, learner.optimizer.lr) == ("seq_mean_token_mean", 1e-4)
    assert caplog.messages == []


def test_a_setting_of_the_command_line_is_not_dropped():
    with pytest.raises(GraphError, match=r"localizer\.max_tokens: unknown setting"):
        build_experiment(compose(["recipe=toy_srpo", "localizer.use=localizer.uniform", "localizer.max_tokens=9"]))
    with pytest.raises(GraphError, match=r"localizer\.max_tokns: unknown setting"):
        build_experiment(compose(["recipe=toy_srpo", "localizer.use=localizer.uniform", "localizer.max_tokns=9"]))


def test_a_recipe_may_replace_a_component_of_its_graph(tmp_path, caplog):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/graph: grpo, /setup: toy]\nadvantage: {use: advantage.additive}\n"
    )
    values = compose(["recipe=mine"], [tmp_path])
    assert "advantage.use=advantage.additive: dropped normalize=std" in caplog.text
    assert values["nodes"]["advantage"]["config"] == {}


@pytest.mark.parametrize("group", ["graph", "recipe", "setup"])
def test_a_file_without_its_first_line_is_named(group, tmp_path):
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text("nodes: {prompts: {use: prompts.dataset}}\n")
    with pytest.raises(ConfigError, match=rf"^{group}/mine.yaml: .*'# @package _global_' the first line"):
        compose([f"{group}=mine"], [tmp_path])


def test_settings_of_files_for_a_replaced_objective_are_dropped_with_a_line(caplog):
    values = compose(["recipe=toy_gspo", "learner.objective.use=reinforce"])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("learner.objective.use=reinforce: dropped clip_")
    assert caplog.messages[0].endswith("set by files for gspo; reinforce has no such settings.")
    (learner,) = (node for node in build_experiment(values).graph.nodes if node.name == "learner")
    assert learner.config.objective.use == "reinforce"
    # What both have stays, and so does what is typed, even where it is wrong.
    kept = compose(["recipe=toy_gspo", "learner.objective.use=ppo_clip"])
    assert kept["nodes"]["learner"]["config"]["objective"]["config"]["clip_low"] == 3e-4
    with pytest.raises(GraphError, match=r"learner\.objective\.config\.clip_low: unknown setting"):
        build_experiment(
            compose(["recipe=toy_gspo", "learner.objective.use=reinforce", "learner.objective.config.clip_low=1"])
        )


def test_a_broken_file_spoils_no_other_recipe_of_its_folder(tmp_path):
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcde", "bcdef", strict=True)
    )
    (tmp_path / "recipe").mkdir()
    files = {
        "bomb": f"defaults: [toy_grpo]\n{bomb}",
        "open": "defaults: [toy_grpo\n",
        "sound": "defaults: [toy_grpo]\n",
        "including": "defaults: [bomb]\n",
    }
    for name, text in files.items():
        (tmp_path / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    assert compose(["recipe=sound"], [tmp_path])["recipe"] == "sound"
    for name in ("bomb", "including"):
        with pytest.raises(ConfigError, match=r"recipe/bomb\.yaml: its aliases .* expand to 1\.23e\+06 values"):
            compose([f"recipe={name}"], [tmp_path])
    with pytest.raises(ConfigError, match=r"open\.yaml, line \d+: no YAML"):
        compose(["recipe=open"], [tmp_path])


def test_a_path_beside_a_source_that_reads_none_is_refused():
    with pytest.raises(GraphError, match=r"data.train: path '/nonexistent' would be ignored: source 'chains' makes"):
        build_experiment(compose(["recipe=toy_grpo", "data.train.path=/nonexistent"]))


@pytest.mark.parametrize(("text", "line"), [("a: 1\nb: {c: 1}\na: 2\n", 3), ("b: {a: 1, c: 2, a: 3}\n", 1)])
def test_a_key_that_stands_twice_is_refused(tmp_path, text, line):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: found duplicate key a\n.*line {line}"):
        read_yaml(tmp_path / "mine.yaml")


def test_a_key_may_replace_one_of_a_merged_mapping(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert read_yaml(tmp_path / "mine.yaml")["b"] == {"x": 3, "y": 2}


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("nodes", True), {}, "True: not a node name"),
        (("nodes", "verifier", "use"), 0.5, "verifier.use: expected a component name"),
        (("data", "train", "source"), ["chains"], "source: expected str, got"),
        ((3,), {"a": 1}, "section '3': no such node"),
        (("learner", "objective"), [None], "learner.objective: expected settings"),
    ],
)
def test_names_and_values_that_are_no_texts_are_named(path, value, sentence):
    values = compose(["recipe=toy_grpo"])
    below = values
    for key in path[:-1]:
        below = below[key]
    below[path[-1]] = value
    with pytest.raises(CreditgraphError, match=re.escape(sentence)):
        check_present(build_experiment(values))


@pytest.mark.parametrize("choice", ["[1]", "[[x]]", "[chains,nope]"])
def test_a_list_is_no_choice(choice):
    with pytest.raises(ConfigError, match=f"override {re.escape(repr('data=' + choice))}: a list; expected one choice"):
        compose(["recipe=toy_grpo", f"data={choice}"])
