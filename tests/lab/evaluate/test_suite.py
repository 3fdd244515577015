"""Suites: every shipped one is sound and says where its settings come from; mistakes come together."""

import dataclasses

import pytest
import yaml

from creditgraph.lab.evaluate.sets import data_entry
from creditgraph.lab.evaluate.suite import load_suite
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.registry import load_class
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices

SHIPPED = ["code", "math", "math_16", "reset_paper", "toy"]
SAMPLING = ("mode", "max_tokens", "temperature", "top_p", "samples")


def write(folder, **content):
    (folder / "suite").mkdir(exist_ok=True)
    (folder / "suite" / "mine.yaml").write_text(yaml.safe_dump({"title": "t", "version": 1, **content}))
    return [CONFIG_DIR, folder]


def test_these_are_the_shipped_suites():
    assert sorted(list_choices("suite", [CONFIG_DIR])) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_suites_are_sound(name):
    suite = load_suite(name, [CONFIG_DIR])
    assert suite.title
    for task_name, task in suite.tasks.items():
        entry = data_entry(task.data, task.split, task_name)
        load_class((task.verifier or {"use": entry["verifier"]})["use"])
        for setting in ("max_tokens", *(("temperature", "top_p", "samples") if task.samples else ("greedy",))):
            assert setting in task.origin, f"{task_name} does not say where {setting} comes from"


def test_the_reset_suite_has_the_settings_of_the_paper():
    suite = load_suite("reset_paper", [CONFIG_DIR])
    assert len(suite.tasks) == 11
    for task in suite.tasks.values():
        assert (task.template, task.mode, task.max_tokens, task.greedy, task.samples, task.problems) == (
            "thought",
            "thought",
            5120,
            True,
            0,
            500,
        )
        assert task.shuffle
        assert (task.thoughts.max_tokens, task.thoughts.max_thoughts, task.thoughts.stop) == (256, 20, "</thought>")
        assert not task.thoughts.ends_at_eos
    assert {t.split for n, t in suite.tasks.items() if n.startswith("sciknoweval")} == {
        "",
        "physics",
        "biology",
        "materials",
    }


def test_the_mean_of_the_reset_suite_leaves_programs_out():
    suite = load_suite("reset_paper", [CONFIG_DIR])
    assert [name for name, task in suite.tasks.items() if not task.in_mean] == ["livecodebench"]


def test_five_sets_of_mathematics_with_avg_and_pass_at_16():
    suite = load_suite("math_16", [CONFIG_DIR])
    assert list(suite.tasks) == ["aime_2024", "amc23", "math_500", "minerva_math", "olympiadbench"]
    assert {(task.samples, task.k) for task in suite.tasks.values()} == {(16, (16,))}


def test_defaults_are_under_tasks_and_changes_above(tmp_path):
    dirs = write(
        tmp_path,
        defaults={"samples": 4, "k": [2], "temperature": 0.5, "origin": {"samples": "ours"}},
        tasks={"a": {"data": "chains", "samples": 8, "origin": {"k": "ours"}}, "b": None},
    )
    suite = load_suite("mine", dirs, {"seed": 3, "tasks": {"b": {"temperature": 0.9}}})
    a, b = suite.tasks["a"], suite.tasks["b"]
    assert (a.samples, a.k, a.temperature, a.data, a.origin) == (
        8,
        (2,),
        0.5,
        "chains",
        {"samples": "ours", "k": "ours"},
    )
    assert (b.samples, b.temperature, b.data, suite.seed) == (4, 0.9, "b", 3)
    assert list(load_suite("mine", dirs, only=["b"]).tasks) == ["b"]


def test_an_unknown_suite(tmp_path):
    with pytest.raises(ConfigError, match=r"suite=maths: no suite of that name.*Did you mean 'math'\?"):
        load_suite("maths", [CONFIG_DIR])


@pytest.mark.parametrize(
    ("task", "part"),
    [
        (
            {"samples": 4, "k": [1, 8]},
            "k: expected 1 ≤ k ≤ samples, got k = 8 and 4 samples. Raise samples or lower k.",
        ),
        ({"k": [1]}, "k: expected 1 ≤ k ≤ samples, got k = 1 and 0 samples"),
        ({"samples": 4, "k": [2, 2]}, "expected each k once"),
        ({"samples": 4, "temperature": 0.0}, "samples at temperature 0 are all equal"),
        ({"greedy": False}, "greedy is off and samples is 0"),
        ({"problems": -1}, "expected problems ≥ 0"),
        ({"temperatures": 1.0}, "tasks.a.temperatures: unknown setting. Did you mean 'temperature'?"),
        ({"origin": {"sample": "ours"}}, "origin: 'sample' is no setting of a task. Did you mean 'samples'?"),
        ({"samples": "many"}, "'many'"),
    ],
)
def test_a_wrong_task_gets_a_sentence(tmp_path, task, part):
    with pytest.raises(ConfigError) as error:
        load_suite("mine", write(tmp_path, tasks={"a": task}))
    assert part in str(error.value)


def test_all_mistakes_of_a_suite_come_together(tmp_path):
    dirs = write(tmp_path, confidence=1.5, tasks={"a": {"k": [1]}, "b": {"greedy": False}})
    with pytest.raises(ConfigError) as error:
        load_suite("mine", dirs, {"tasks": {"c": {}}}, only=["a", "d", "b"])
    for part in (
        "tasks.a: k: expected 1 ≤ k",
        "tasks.b: greedy is off",
        "tasks.c: no such task",
        "tasks=d: no such task",
        "confidence: expected 0 < confidence < 1, such as 0.95, got 1.5",
    ):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="tasks: expected one entry per task"):
        load_suite("mine", write(tmp_path))


def test_contamination_settings():
    suite = load_suite("toy", [CONFIG_DIR], {"contamination": {"n": 8, "share": 0.7}})
    assert dataclasses.asdict(suite.contamination) == {"n": 8, "share": 0.7}
    with pytest.raises(ConfigError, match="n: expected at least 2 words"):
        load_suite("toy", [CONFIG_DIR], {"contamination": {"n": 1}})
