"""A function of the user's own: its result, what goes wrong in it, and what is wrong with it."""

import os
import random
import sys
import time

import pytest

from creditgraph.components.verifier.function import Function
from creditgraph.components.verifier.function_worker import load_function
from creditgraph.components.verifier.worker_pool import WorkerPool
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.settings import build_config

FILE = '''
import os, random, sys, time

COUNT = []

def share(prompt, response, answer):
    """The share of the answer's letters."""
    return sum(letter in response for letter in answer) / len(answer)

def all_arguments(prompt, response, answer, metadata):
    return float((prompt, response, answer, metadata["level"]) == ("1 + 1?", "two", "2", 3))

def of_keywords(**known):
    return float(sorted(known) == ["answer", "metadata", "prompt", "response"])

def is_right(response, answer):
    print("a line that is no reply")
    return response == answer

def draws(response):
    return random.random()

def by_command(response, answer):
    """Does what the response says."""
    if response == "raise":
        return {}["missing"]
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(4)
    if response == "hang":
        while True:
            time.sleep(.01)
    return {"none": None, "text": "0.5", "nan": float("nan"), "inf": float("inf"), "low": -0.5, "high": 1.5,
            "list": [1.0]}.get(response, 1)

def hostile(response):
    """Its number, after what the response says was done."""
    what, _, value = response.partition(" ")
    if what == "fork":
        os.fork()
    if what == "lines":
        for fd in range(3, 64):
            try:
                os.write(fd, b'{"value": 0.875}\\n{"number": 1, "value": 0.875}\\nnonsense\\n')
            except OSError:
                pass
    if what in ("daemon", "late") and os.fork() == 0:
        os.setsid()
        open(os.environ["DAEMONS"], "a").write(f"{os.getpid()} ")
        time.sleep(60)
    if what == "late":
        time.sleep(60)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "large":
        return 10 ** 400
    if what == "class":
        return type("Odd", (), {"__repr__": lambda self: 1 / 0})()
    return float(value)

def hashes(response):
    return hash(response) % 1000 / 1000

def numpy_number(response):
    import numpy
    return numpy.float32(0.25)

def raises(response):
    raise ValueError("no JSON")

async def waits(response):
    return 1.0

def other_names(completions, ground_truth):
    return 1.0

def positional(response, /):
    return 1.0

def nothing():
    return 1.0

class Reward:
    pass

number = 3
'''


@pytest.fixture
def verify(tmp_path, toolbox):
    (tmp_path / "rewards.py").write_text(FILE)
    nodes = []

    def run(name, texts, answers=None, metadata=None, node=None, **settings):
        if node is None:
            node = toolbox.start(
                Function, **{"function": f"{tmp_path}/rewards.py:{name}", "workers": 1, "seconds": 20, **settings}
            )
            nodes.append(node)
        prompts = toolbox.prompts(["p"] * len(texts), answers, metadata)
        return node.run().verifier.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid)), node

    yield run
    for node in nodes:
        node.close()


def test_its_number_is_the_reward(verify):
    rewards, _ = verify("share", ["a", "ab", "c"], ["ab"] * 3)
    assert rewards.value.tolist() == [0.5, 1.0, 0.0]
    assert rewards.correct.tolist() == [False, True, False]
    assert rewards.valid.all()
    assert rewards.detail == ["reward 0.5", "", "reward 0"]


def test_arguments_are_passed_by_name(verify):
    row = {"question": "1 + 1?", "level": 3, "template": "chat"}
    assert verify("all_arguments", ["two<|im_end|>"], ["2"], [row])[0].value.tolist() == [1.0]
    assert verify("of_keywords", ["two"])[0].value.tolist() == [1.0]


def test_truth_values_and_numbers_of_numpy_are_numbers_and_prints_are_no_replies(verify):
    assert verify("is_right", ["1", "2"], ["1", "1"])[0].value.tolist() == [1.0, 0.0]
    assert verify("numpy_number", ["1"])[0].value.tolist() == [0.25]


def test_a_range_of_its_own_and_what_counts_as_correct(verify):
    texts = ["low", "high", "1"]
    rewards, _ = verify("by_command", texts, lowest=-1, highest=2, correct_from=1)
    assert rewards.value.tolist() == [-0.5, 1.5, 1.0]
    assert rewards.correct.tolist() == [False, True, True]


FAILURES = {
    "raise": "raised KeyError: 'missing', rewards.py line 26",
    "exit": "raised SystemExit: 3, rewards.py line 28",
    "none": "returned None, expected a finite number",
    "text": "returned '0.5' (str), expected a finite number",
    "list": "returned [1.0] (list), expected a finite number",
    "nan": "returned nan, expected a finite number",
    "inf": "returned inf, expected a finite number",
    "low": "returned -0.5, outside 0 to 1 (settings lowest and highest)",
    "high": "returned 1.5, outside 0 to 1 (settings lowest and highest)",
    "die": "the worker ended with exit code 4",
}


def test_a_call_that_fails_is_invalid_counted_and_alone_in_that(verify):
    texts = ["fine", *FAILURES, "fine, too"]
    rewards, node = verify("by_command", texts)
    assert dict(zip(texts, rewards.detail, strict=True)) == {"fine": "", **FAILURES, "fine, too": ""}
    assert rewards.valid.tolist() == [True, *[False] * len(FAILURES), True]
    assert rewards.value.tolist() == [1.0, *[0.0] * len(FAILURES), 1.0]
    node.run()
    assert node.context.metrics == {"raised": 2, "timed_out": 0, "crashed": 1, "unusable": 7}


def test_a_call_that_hangs_ends_after_its_limit(verify):
    verify("by_command", ["warm"])
    started = time.monotonic()
    rewards, node = verify("by_command", ["fine", "hang", "after"], seconds=0.5)
    assert rewards.detail == ["", "timed out after 0.5 s", ""]
    assert rewards.valid.tolist() == [True, False, True]
    assert time.monotonic() - started < 20
    assert node.timed_out == 1


def test_a_function_that_never_gives_a_reward_ends_the_run_after_eight_responses(verify):
    with pytest.raises(
        RunError, match=r"node 'function': \S+rewards.py:raises raised ValueError: no JSON, rewards.py "
    ):
        verify("raises", [str(i) for i in range(100)])
    texts = [f"{i} {i % 3}" for i in range(7)]
    expected = (
        "gave no reward for any of 3 responses, expected a number from 0 to 0.5 for each. Correct the function or the "
        "range"
    )
    with pytest.raises(RunError, match=expected):
        verify("by_command", texts[:3], highest=0.5)


def test_one_bad_prompt_does_not_end_the_run(verify):
    """Responses tried first are spread over the batch, which holds whole groups of a prompt."""
    rewards, _ = verify("by_command", [*["raise"] * 20, *["ok"] * 20])
    assert rewards.valid.tolist() == [False] * 20 + [True] * 20


def test_random_draws_do_not_depend_on_the_worker_or_the_order(verify):
    texts = [str(i) for i in range(12)]
    state = random.getstate()
    first, _ = verify("draws", texts, workers=2)
    second, _ = verify("draws", texts[::-1], workers=1)
    assert first.value.tolist() == second.value.tolist()[::-1]
    assert len(set(first.value.tolist())) == 12
    assert verify("hashes", texts)[0].value.tolist() == verify("hashes", texts)[0].value.tolist()
    assert random.getstate() == state


MISTAKES = {
    "{file}:shares": "has no function 'shares'. Did you mean 'share'?",
    "{file}:number": "expected a function, got 3 (int).",
    "{file}:Reward": "expected a function, got <class",
    "{file}:waits": "expected a plain function, got one with async or yield.",
    "{file}:other_names": "expected the parameters prompt, response and answer (any of them, and metadata), got the "
    "parameter 'completions'. Name them so, or wrap the function.",
    "{file}:positional": "got (response). Name them so",
    "{file}:nothing": "got (). Name them so",
    "{folder}/reward.py:share": "does not exist. Did you mean 'rewards.py'?",
    "no_such_module:share": "module 'no_such_module' cannot be imported; install it, or name it as module:name or "
    "path/to/file.py:name.",
    "share": "function: expected module:name or path/to/file.py:name, got 'share'.",
    "{folder}/broken.py:share": "importing {folder}/broken.py failed (ZeroDivisionError: division by zero, broken.py "
    "line 1); correct it.",
    "{folder}/syntax.py:share": "failed (SyntaxError: ",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_function_that_cannot_be_used_is_one_sentence_before_anything_runs(name, tmp_path):
    (tmp_path / "rewards.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def (:\n")
    place = {"file": tmp_path / "rewards.py", "folder": tmp_path}
    _, problems = build_config(Function.Config, {"function": name.format(**place)}, "verifier")
    assert len(problems) == 1
    assert MISTAKES[name].format(**place) in problems[0]
    assert "\n" not in problems[0]


def test_no_function_is_said_at_the_start():
    node = Function(Function.Config())
    with pytest.raises(ConfigError, match=r"node 'function': no function; set function to module:name or path/to/file"):
        node.setup(Context(node="function"))
    node.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lowest": 1, "highest": 1}, "expected lowest < highest, got 1 and 1."),
        ({"seconds": 0}, "expected seconds > 0 and workers ≥ 0."),
    ],
)
def test_settings_that_make_no_sense(settings, sentence):
    assert build_config(Function.Config, settings, "verifier")[1] == [f"verifier: {sentence}"]


def test_a_function_of_a_module_finds_modules_of_the_run_in_its_workers(tmp_path, monkeypatch, toolbox):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_words.py").write_text("WORD = 'two'\n")
    (tmp_path / "own_reward.py").write_text(
        "from own_words import WORD\n\ndef known(response): return response == WORD\n"
    )
    assert load_function("own_reward:known")[1] == ("response",)
    node = toolbox.start(Function, function="own_reward:known", workers=1)
    prompts = toolbox.prompts(["p", "p"])
    rewards = node.run().verifier.verify(prompts, toolbox.trajectories(["two", "2"], prompt_uid=prompts.uid))
    node.close()
    assert rewards.value.tolist() == [1.0, 0.0]
    assert os.getcwd() == str(tmp_path)


@pytest.mark.slow
def test_replies_belong_to_their_requests_whatever_a_call_leaves_behind(verify, tmp_path, monkeypatch):
    monkeypatch.setenv("DAEMONS", str(tmp_path / "daemons"))
    texts = ["- .5", *(f"{what} .{i}" for i in range(1, 9) for what in ("fork", "lines", "daemon", "-"))]
    rewards, node = verify("hostile", texts, seconds=5)
    assert rewards.value.tolist() == pytest.approx([float(text.split()[1]) for text in texts])
    assert rewards.valid.all()
    begin = time.monotonic()
    rewards, _ = verify("hostile", ["late .1", "- .25"], node=node)
    assert time.monotonic() - begin < 12
    assert rewards.detail == ["timed out after 5 s", "reward 0.25"]
    node.close()
    pids = [int(pid) for pid in (tmp_path / "daemons").read_text().split()]
    assert len(pids) == 9
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}/environ") and alive(pid)] == []


def alive(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_odd_results_cost_their_row_and_no_worker(verify):
    rewards, node = verify("hostile", ["- .5", "interrupt .1", "large .1", "class .1", "- .25"])
    assert rewards.valid.tolist() == [True, False, False, False, True]
    assert rewards.detail[1].startswith("raised KeyboardInterrupt")
    assert rewards.detail[2] == "returned a number beyond the largest float, expected a finite number"
    assert rewards.detail[3] == "returned a Odd, expected a finite number"
    assert node.pool.restarts == 0


DIES_ONCE = """
import json, os, sys
if not os.path.exists({tried!r}):
    open({tried!r}, "w").close()
    os._exit(9)
print(json.dumps(dict(ready=True)), flush=True)
for line in sys.stdin:
    print(json.dumps(dict(number=json.loads(line)["number"], value=7)), flush=True)
"""


def test_a_worker_that_dies_while_it_starts_is_started_once_more(tmp_path):
    script = tmp_path / "worker.py"
    tried = tmp_path / "tried"
    script.write_text(DIES_ONCE.format(tried=str(tried)))
    pool = WorkerPool([sys.executable, str(script)], 1, 5.0)
    assert pool.run([{}, {}]) == [{"value": 7}] * 2
    pool.close()
    always = WorkerPool([sys.executable, "-c", "import os; os._exit(3)"], 1, 5.0)
    with pytest.raises(RunError, match=r"did not start .the worker ended with exit code 3"):
        always.run([{}])
