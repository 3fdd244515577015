"""The embedded environments: their answers, rewards, states and ends."""

import itertools
import json

import pytest
from http_server import serving

from creditgraph.components.environment.calculator import Calculator, calculate
from creditgraph.components.environment.code import CodeFeedback
from creditgraph.components.environment.custom import Custom
from creditgraph.components.environment.http import Remote
from creditgraph.components.environment.stop import Stop, stop_values
from creditgraph.components.environment.thoughts import ThoughtTurns
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError


def made(kind, **settings):
    component = kind(kind.Config(**settings))
    component.setup(Context(node="environment"))
    return component.make()


def problem(index=0, family="chains"):
    task = TASKS[family]
    row = task.generate(0, index)
    return {**row, "prompt": task.solve_prompt(row["question"]), "answer": task.answer(row), "seed": 3}


def test_stop_values_are_the_mean_over_all_ways_to_act():
    rewards, chance = (0.2, 0.4, 1.0, 0.3), (0.1, 0.5, 0.25, 0.8)
    values = stop_values(chance, rewards, end=0.6)
    for start in range(4):
        total = 0.0
        for ways in itertools.product([True, False], repeat=4 - start):
            environment = made(Stop, rewards=rewards, end=0.6)
            environment.reset({})
            for _ in range(start):
                environment.step("go on")
            probability, steps = 1.0, []
            for turn, stops in zip(range(start, 4), ways, strict=True):
                probability *= chance[turn] if stops else 1 - chance[turn]
                if not steps or not steps[-1].done:
                    steps.append(environment.step("I stop here" if stops else "stopping? no"))
            assert steps[-1].done
            total += probability * sum(step.reward for step in steps)
        assert total == pytest.approx(values[start])
    assert values[4] == 0.6


def test_stop_names_its_states():
    environment = made(Stop)
    assert environment.reset({}).startswith("Turn 0: write stop to end with 0.2 points")
    assert environment.state == "0"
    assert "1 points" in environment.step("no").observation + environment.step("no").observation
    assert environment.state == "2"


@pytest.mark.parametrize("reward", ["answer", "steps"])
def test_thoughts_are_checked_one_by_one(reward):
    row = problem()
    right = TASKS["chains"].solution(row)
    environment = made(ThoughtTurns, reward=reward)
    assert environment.reset(row) == row["prompt"]
    steps = [environment.step(text) for text in right]
    assert [s.done for s in steps] == [False] * (len(right) - 1) + [True]
    assert sum(s.reward for s in steps) == pytest.approx(1)
    assert steps[0].reward == (0 if reward == "answer" else pytest.approx(1 / len(right)))
    environment = made(ThoughtTurns, reward=reward)
    environment.reset(row)
    assert environment.state == "0 right"
    wrong = [right[0], right[1].replace("s2", "s3"), *right[2:]]
    steps = [environment.step(text) for text in wrong]
    assert environment.state.startswith(f"{len(right)} wrong s{len(right)}")
    # The answer is right although a step is not: the steps after the first wrong one give nothing.
    assert sum(s.reward for s in steps) == pytest.approx(1 if reward == "answer" else 1 / len(right))


@pytest.mark.parametrize("family", TASKS)
def test_every_family_is_an_environment(family):
    row = problem(family=family)
    right = TASKS[family].solution(row)
    environment = made(ThoughtTurns, reward="steps")
    environment.reset(row)
    steps = [environment.step(text) for text in right]
    assert [s.done for s in steps] == [False] * (len(right) - 1) + [True]
    assert sum(s.reward for s in steps) == pytest.approx(1)
    environment = made(ThoughtTurns)
    environment.reset(row)
    assert [environment.step(text).reward for text in right][-1] == 1


def test_a_budget_of_moves_bounds_the_turns():
    row = {"task": "hanoi", "question": "x1 to y1 in 5", "start": [0], "goal": [1], "moves": 5}
    environment = made(ThoughtTurns)
    environment.reset(row | {"prompt": ""})
    moves = ["z1 : z1", "x1 : x1", "z1 : z1", "x1 : x1", "y1 : y1 \\boxed{ done }"]  # the solution has one
    steps = [environment.step(f"{move} </thought>") for move in moves]
    assert [s.done for s in steps] == [False] * 4 + [True]
    assert steps[-1].reward == 1


def test_states_in_which_other_cells_are_filled_differ():
    row = problem(family="mini_sudoku")
    first, second, third = TASKS["mini_sudoku"].solution(row)[:3]

    def state(*thoughts):
        environment = made(ThoughtTurns)
        environment.reset(row)
        for thought in thoughts:
            environment.step(thought)
        return environment.state

    assert state(first, third) == state(third, first)
    assert state(first, third) != state(second, third)


def test_a_problem_without_steps_is_a_fault():
    with pytest.raises(ValueError, match=r"task 'math' has no steps to check; expected one of chains"):
        made(ThoughtTurns).reset({"prompt": "1 + 1", "task": "math"})


@pytest.mark.parametrize("text", ["s1 7 * 4 2", "s1 7 * 4 2 <eos>", ""])
def test_a_thought_that_is_not_closed_ends_the_episode(text):
    environment = made(ThoughtTurns)
    environment.reset(problem())
    assert environment.step(text) == made_step(done=True)


def made_step(done, reward=0.0, observation=""):
    from creditgraph.pipeline.core.handles import Step

    return Step(observation=observation, reward=reward, done=done)


def test_a_call_of_the_calculator_is_answered():
    environment = made(Calculator)
    assert environment.reset({"prompt": "7·(3+2)?", "question": "", "answer": "35.0"}) == "7·(3+2)?"
    text = "so <calculator>3+2</calculator> and <calculator>7 * 5</calculator>"
    assert environment.step(text) == made_step(False, observation="\n<result>35</result>\n")
    assert environment.step("It is \\boxed{35}.") == made_step(True, 1.0)
    assert made(Calculator).reset({"prompt": "x", "question": "y", "answer": ""}) == "x"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1e300 * 1e300", "error: a number beyond 1e+15"),
        ("__import__('os')", "error: expected numbers, + - * / // % and brackets"),
        ("(" * 150 + ")" * 50, "error: this is no expression"),
        ("1" * 300, "error: longer than 200 characters"),
        ("-7 // 2", "-4"),
        ("True + 1", "error: expected numbers, + - * / // % and brackets"),
    ],
)
def test_the_calculator_only_calculates(expression, value):
    assert calculate(expression) == value


def test_code_is_answered_with_the_test_that_fails():
    tests = [{"input": "1\n", "output": "2\n", "public": True}, {"input": "4\n", "output": "8\n"}]
    environment = made(CodeFeedback, attempts=2, allow_unsandboxed=True, partial=True)
    assert environment.reset({"prompt": "Double it.", "tests": tests}) == "Double it."
    first = environment.step("```python\nprint(int(input()) + 1)\n```")
    assert not first.done
    assert first.reward == 0
    assert first.observation.startswith("\nPassed 1 of 2 tests. Test 2 failed.\n")
    assert "Input" not in first.observation  # a private test
    assert environment.step("no program") == made_step(True, 0.0)
    environment = made(CodeFeedback, allow_unsandboxed=True)
    environment.reset({"prompt": "Double it.", "tests": tests})
    assert environment.step("```python\nprint(int(input()) * 2)\n```") == made_step(True, 1.0)


@pytest.mark.parametrize(
    "leak",
    [
        "print(secret)",
        "raise ValueError(secret)",
        "raise type(secret, (Exception,), {})()",
        "import os\nos._exit(ord(secret[0]))",
        "import os\nos.kill(os.getpid(), (9, 15)[ord(secret[0]) % 2])",
        "import sys\nsys.exit(secret)",
    ],
)
def test_a_private_test_is_not_in_the_feedback(leak):
    """Whatever the program says of its input: two inputs have the same feedback."""
    seen = set()
    for secret in ("PRIVATE-271828", "QRIVATE-31415926"):
        environment = made(CodeFeedback, allow_unsandboxed=True)
        environment.reset({"prompt": "?", "tests": [{"input": secret, "output": "never"}]})
        observation = environment.step(f"```python\nsecret = input()\n{leak}\n```").observation
        assert secret not in observation
        seen.add(observation)
    assert len(seen) == 1
    assert "Passed 0 of 1 tests. Test 1 failed.\n" in seen.pop()


def test_an_environment_on_a_server():
    """The reference server: a counter per episode that ends at its third step."""
    episodes = {}

    def play(how, path, body):
        if path == "/game/reset":
            number = len(episodes)
            episodes[number] = 0
            reply = {"id": number, "observation": body["problem"]["prompt"], "state": "0"}
        elif path == "/game/step" and body["id"] in episodes:
            episodes[body["id"]] = turn = episodes[body["id"]] + 1
            reply = {"observation": f"{turn} {body['text']}", "reward": turn / 2, "done": turn == 3, "state": str(turn)}
        elif path == "/game/close":
            episodes.pop(body["id"])
            reply = {}
        else:
            return 404, "{}"
        return 200, json.dumps(reply)

    with serving(play) as server:
        play_two_episodes(f"{server.url}/game")
    assert not episodes


def play_two_episodes(url):
    component = Remote(Remote.Config(url=url))
    component.setup(Context(node="environment"))
    first, second = component.make(), component.make()
    assert [e.reset({"prompt": "hello"}) for e in (first, second)] == ["hello"] * 2
    assert first.step("a") == ("1 a", 0.5, False)
    assert (first.state, second.state) == ("1", "0")
    assert second.step("b") == ("1 b", 0.5, False)
    first.close()
    with pytest.raises(RuntimeError, match=r"/game/step: HTTP 404"):
        first.step("c")
    second.close()
    component.close()


def test_a_class_of_the_users_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def reset(self, problem): return 'x'\n    step = close = reset\n")
    assert made(Custom, name=f"{file}:Mine").reset({}) == "x"
    file.write_text("class Mine:\n    def reset(self, problem): return 'x'\n")
    with pytest.raises(ValueError, match=r"expected a class with the methods reset, step, close, got a class without"):
        Custom.Config(name=f"{file}:Mine")
    with pytest.raises(ValueError, match=r"has no class 'Mind'. Did you mean 'Mine'"):
        Custom.Config(name=f"{file}:Mind")
    with pytest.raises(ConfigError, match=r"node 'environment': no environment; set name to"):
        made(Custom)
