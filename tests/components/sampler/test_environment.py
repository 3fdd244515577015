"""Episodes: exact tokens, one row per turn, and faults that cost only their episode."""

import asyncio
import dataclasses
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from creditgraph.components.rollouts.replies import state_of
from creditgraph.components.rollouts.timed_calls import Fault, TimedCalls
from creditgraph.components.sampler.environment import EnvironmentSampler
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Environments, Step

SECONDS = 1.5  # where something hangs; elsewhere a busy machine must not matter


class Count:
    """Counts to three; the problem's `fault` names what goes wrong, and in which turn."""

    closed: list = []

    def reset(self, problem):
        self.problem, self.turn = problem, 0
        self.fault, self.at = problem.get("fault", ""), problem.get("at", 1)
        if self.fault == "reset":
            return Step(observation="over", reward=0.0, done=True)
        if self.fault == "no text" and not self.at:
            return ""
        self.fail(0)
        return problem["prompt"]

    def fail(self, turn):
        if turn == self.at and self.fault == "hang":
            time.sleep(30)
        if turn == self.at and self.fault == "raise":
            raise KeyError("lost")

    @property
    def state(self):
        if self.fault == "state" and self.turn == self.at:
            raise KeyError("state")
        return f"{self.problem['prompt']}{self.turn}"

    def step(self, text):
        self.turn += 1
        self.fail(self.turn)
        odd = {"nan": ("x", math.nan, False), "huge": ("x", 10**400, False), "half": ("\ud800", 0.0, False)}
        odd["done"] = ("x", 0.0, None)
        if self.turn == self.at and self.fault in odd:
            return odd[self.fault]
        if self.turn == self.at and self.fault == "no text":
            return None, 0.0, False
        if self.turn == self.at and self.fault == "gym":
            return "x", 0.0, False, False, {}
        done = self.turn == 3 and self.fault != "endless"
        return f"[{self.turn}]", float(len(text)), done

    def close(self):
        self.closed.append(self.problem["prompt"])
        if self.fault == "close":
            raise OSError("busy")


class AsyncCount(Count):
    async def reset(self, problem):
        await asyncio.sleep(0)
        return super().reset(problem)

    async def step(self, text):
        await asyncio.sleep(30 if self.fault == "hang" and self.turn == 1 else 0)
        return super().step(text)

    async def close(self):
        super().close()


class Made(Environments):
    def __init__(self, kind, limit=None):
        self.kind = kind
        self.at_once = limit

    def make(self):
        return self.kind()


class Streaming:
    """Of a policy that takes a request at any time: a thread for each row."""

    def converse(self, rows, answer):
        def go(row):
            going, requests = answer([row], None)
            while going:
                assert going == [row]
                going, requests = answer([row], self.generate(requests))

        with ThreadPoolExecutor(rows) as threads:
            list(threads.map(go, range(rows)))


def play(
    toolbox, metadata, kind=Count, script=lambda context, n: "ab", texts=None, limit=None, streaming=False, **settings
):
    texts = texts or [chr(ord("P") + i) for i in range(len(metadata))]
    prompts = toolbox.prompts(texts, metadata=[{"template": "plain", **row} for row in metadata])
    hangs = any(row.get("fault") == "hang" for row in metadata)
    settings = {"group_size": 1, "seconds": SECONDS if hangs else 60.0, "max_tokens": 4, **settings}
    sampler = toolbox.start(EnvironmentSampler, **settings)
    Count.closed = []
    policy = type("Own", (Streaming, toolbox.policy), {})(script) if streaming else toolbox.policy(script)
    try:
        out = sampler.run(prompts=prompts, policy=policy, environments=Made(kind, limit))
    finally:
        sampler.close()
    return SimpleNamespace(out=out, t=out.trajectories, turns=out.turns, context=sampler.context, policy=policy)


def test_a_slow_episode_holds_up_no_other(toolbox):
    class Waits(Count):
        """The first episode's first step ends only when all others have ended."""

        others = threading.Semaphore(0)

        def step(self, text):
            if self.problem["prompt"] == "P" and not self.turn:
                for _ in range(3):
                    self.others.acquire()
            return super().step(text)

        def close(self):
            super().close()
            self.others.release()

    metadata = [{}, {}, {"fault": "raise", "at": 2}, {"fault": "endless"}]
    got = play(toolbox, metadata, Waits, streaming=True, max_turns=5)
    assert Count.closed[-1] == "P"
    # Nothing depends on which one ended first.
    rounds = play(toolbox, metadata, max_turns=5)
    assert [len(call.seed) for call in rounds.policy.calls] == [4, 4, 3, 1, 1]
    assert [len(call.seed) for call in got.policy.calls] == [1] * 13
    columns = ("uid", "prompt_uid", "prompt_tokens", "response_tokens", "engine_logprobs", "entropies", "text")
    for column in columns:
        assert equal(getattr(got.t, column), getattr(rounds.t, column)), column
    for column in ("episode", "turn", "state", "reward", "done", "fault"):
        assert equal(getattr(got.turns, column), getattr(rounds.turns, column)), column
    assert [r["row"]["prompt"] for r in got.context.rejected] == [102, 103]
    assert got.context.rejected == rounds.context.rejected
    assert got.context.metrics == rounds.context.metrics


def equal(a, b):
    return a == b if isinstance(a, list) else torch.equal(a, b) if isinstance(a, torch.Tensor) else a.equal(b)


def text_of(row):
    return "".join(chr(i) for i in row)


@pytest.mark.parametrize("kind", [Count, AsyncCount])
def test_each_turn_is_a_row_prompted_by_the_exact_tokens_before_it(toolbox, kind):
    got = play(toolbox, [{}, {}], kind)
    assert [text_of(r) for r in got.t.prompt_tokens.to_lists()] == [
        "P", "Pab[1]", "Pab[1]ab[2]", "Q", "Qab[1]", "Qab[1]ab[2]",
    ]  # fmt: skip
    assert got.t.text == ["ab"] * 6
    assert got.turns.turn.tolist() == [0, 1, 2, 0, 1, 2]
    uid = got.t.uid.tolist()
    assert got.turns.episode.tolist() == [uid[0]] * 3 + [uid[3]] * 3
    assert got.turns.uid.tolist() == uid
    assert got.turns.state == ["P0", "P1", "P2", "Q0", "Q1", "Q2"]
    assert got.turns.reward.tolist() == [2.0] * 6
    assert got.turns.done.tolist() == [False, False, True] * 2
    assert got.turns.fault == [""] * 6
    assert got.t.group.tolist() == [100] * 3 + [101] * 3
    assert sorted(Count.closed) == ["P", "Q"]
    # All episodes' turns are one request batch.
    assert [len(call.seed) for call in got.policy.calls] == [2, 2, 2]
    assert got.context.metrics["episodes"] == 2
    assert got.context.metrics["turns"] == 3
    assert got.context.metrics["return"] == 6


FAULTS = [
    ({"fault": "raise", "at": 0}, 0, "raised: KeyError: 'lost', test_environment.py"),
    ({"fault": "raise", "at": 2}, 2, "raised: KeyError: 'lost', test_environment.py"),
    ({"fault": "hang", "at": 2}, 2, "time: no reply in 1.5 s"),
    ({"fault": "hang", "at": 0}, 0, "time: no reply in 1.5 s"),
    ({"fault": "nan"}, 1, "reward: step returned nan (float) as reward, expected a finite number"),
    ({"fault": "huge"}, 1, "reward: step returned 1000"),
    ({"fault": "half"}, 1, "reply: step returned '\\ud800' (str) as observation, expected a text"),
    ({"fault": "done"}, 1, "reply: step returned None as done, expected true or false"),
    ({"fault": "state", "at": 0}, 0, "raised: KeyError: 'state'"),
    ({"fault": "state", "at": 1}, 1, "raised: KeyError: 'state'"),
    ({"fault": "no text"}, 1, "reply: step returned None as observation, expected a text"),
    ({"fault": "no text", "at": 0}, 0, "reply: reset returned '' (str), expected a text"),
    ({"fault": "gym"}, 1, "reply: step returned ('x', 0.0, False, False, {}) (tuple), expected (observation, "),
    ({"fault": "reset"}, 0, "reset: reset returned a step, expected the first observation alone"),
    ({"fault": "endless"}, 5, "turns: no end within 5 turns (max_turns)"),
]


@pytest.mark.parametrize(("row", "rows", "reason"), FAULTS)
def test_a_fault_costs_only_its_episode(toolbox, row, rows, reason):
    whole = play(toolbox, [{}, {}, {}], max_turns=5)
    got = play(toolbox, [{}, row, {}], max_turns=5)
    mine = got.t.prompt_uid == 101
    assert int(mine.sum()) == rows
    assert all(f.startswith(reason) for f, m in zip(got.turns.fault, mine.tolist(), strict=True) if m)
    for column in ("response_tokens", "prompt_tokens", "engine_logprobs"):
        others = getattr(got.t.select(~mine), column)
        assert others.equal(getattr(whole.t.select(whole.t.prompt_uid != 101), column))
    assert got.turns.select(~mine).fault == [""] * 6
    assert got.turns.select(~mine).done.tolist() == [False, False, True] * 2
    kind = reason.partition(":")[0]
    assert got.context.metrics["faults"] == got.context.metrics[f"faults_{kind}"] == 1
    (rejected,) = got.context.rejected
    assert rejected["reason"].startswith(reason)
    assert rejected["row"]["prompt"] == 101
    # An environment that hangs is left alone; all others are closed.
    assert ("Q" in Count.closed) == (kind != "time")


def test_no_state_is_an_unknown_one():
    assert state_of(SimpleNamespace(state=None)) == state_of(object()) == ""
    assert state_of(SimpleNamespace(state=3)) == "3"


def test_an_async_step_that_hangs_is_cancelled(toolbox):
    begin = time.monotonic()
    got = play(toolbox, [{}, {"fault": "hang", "at": 2}], AsyncCount)
    assert got.turns.fault == [""] * 3 + ["time: no reply in 1.5 s"] * 2
    assert time.monotonic() - begin < 20


def test_an_environment_that_cannot_close_costs_no_episode(toolbox):
    got = play(toolbox, [{"fault": "close"}])
    assert got.turns.fault == [""] * 3
    assert got.context.metrics["faults"] == 0
    assert got.context.metrics["faults_close"] == 1


def test_no_episode_at_all_ends_the_run(toolbox):
    with pytest.raises(RunError, match=r"none of 2 episodes got as far as a turn; most often: raised: KeyError"):
        play(toolbox, [{"fault": "raise", "at": 0}] * 2)


def test_a_full_conversation_says_which_turn_and_how_many_tokens(toolbox):
    # P, ab, [1] and ab, [2] are 11 tokens: of 11 the second turn has room for 2 of 4, the third has none.
    got = play(toolbox, [{}], episode_tokens=11)
    assert len(got.t) == 2
    assert got.turns.fault == ["context: turn 3 would begin after 11 tokens, all that 11 hold"] * 2
    assert got.policy.calls[1].max_tokens.tolist() == [4]
    got = play(toolbox, [{}], episode_tokens=8)
    assert got.policy.calls[1].max_tokens.tolist() == [2]


def test_a_policy_that_never_stops_ends_by_length(toolbox):
    got = play(toolbox, [{}], script=lambda context, n: "z" * 100)
    assert got.t.finish_reason == ["length"] * 3
    assert got.t.text == ["zzzz"] * 3
    assert got.turns.fault == [""] * 3


def test_without_history_a_turn_is_prompted_by_its_observation(toolbox):
    got = play(toolbox, [{}], history="none")
    assert [text_of(r) for r in got.t.prompt_tokens.to_lists()] == ["P", "[1]", "[2]"]


def test_earlier_thoughts_are_dropped_from_later_prompts_only(toolbox):
    got = play(toolbox, [{}], script=lambda context, n: "q</t>a", max_tokens=9, drop_until="</t>")
    assert [text_of(r) for r in got.t.prompt_tokens.to_lists()] == ["P", "Pa[1]", "Pa[1]a[2]"]
    assert got.t.text == ["q</t>a"] * 3


def test_calls_wait_for_what_can_run_at_once(toolbox):
    class Slow(Count):
        running = most = 0

        def step(self, text):
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
            time.sleep(0.05)
            Slow.running -= 1
            return super().step(text)

    for limit, streaming in ((1, False), (2, False), (1, True), (2, True)):
        Slow.most = 0
        play(toolbox, [{}] * 4, Slow, limit=limit, streaming=streaming)
        assert Slow.most == limit


def test_random_numbers_depend_on_the_episode_and_turn_alone(toolbox):
    both = play(toolbox, [{}, {}], group_size=3)
    one = play(toolbox, [{}], group_size=3)
    assert both.policy.calls[1].seed[:3].tolist() == one.policy.calls[1].seed.tolist()
    seeds = torch.cat([call.seed for call in both.policy.calls])
    assert len(set(seeds.tolist())) == 18


def test_every_episode_has_a_problem_and_a_seed_of_its_own(toolbox):
    seen = []

    class Sees(Count):
        def reset(self, problem):
            seen.append(problem)
            problem["tests"].append(1)
            return super().reset(problem)

    play(toolbox, [{"tests": []}], Sees, group_size=4)
    assert [p["tests"] for p in seen] == [[1]] * 4
    assert len({p["seed"] for p in seen}) == 4
    assert {(p["prompt"], p["answer"], p["question"]) for p in seen} == {("P", "1", "P")}


def test_a_replica_without_a_prompt_has_no_episode(toolbox):
    sampler = toolbox.start(EnvironmentSampler)
    prompts = toolbox.prompts(["P"]).select(torch.zeros(0, dtype=torch.int64))
    out = sampler.run(prompts=prompts, policy=toolbox.policy(lambda context, n: "ab"), environments=Made(Count))
    sampler.close()
    assert len(out.trajectories) == len(out.turns) == len(out.turns.state) == 0
    assert sampler.context.metrics["episodes"] == sampler.context.metrics["return"] == 0


@dataclasses.dataclass
class Blocks:
    seconds: float

    async def step(self):
        time.sleep(self.seconds)


def test_an_async_method_that_blocks_the_loop_is_found(monkeypatch):
    monkeypatch.setattr("creditgraph.components.rollouts.timed_calls._GRACE", 0.1)
    calls = TimedCalls(1.0, 4)
    (found,) = calls.run([Blocks(6).step])
    assert found == Fault("time", "the event loop was blocked by an async method that does not await")
    assert calls.run([lambda: 7]) == [7]  # on another loop
    calls.close()


def test_what_a_call_raises_stays_its_own():
    def stop():
        raise SystemExit(3)

    async def cancelled():
        raise asyncio.CancelledError

    calls = TimedCalls(5, 2)
    got = calls.run([stop, cancelled, lambda: next(iter(())), lambda: threading.current_thread().daemon])
    calls.close()
    assert [x.kind for x in got[:3]] == ["raised"] * 3
    assert got[0].reason.startswith("SystemExit: 3")
    assert got[3] is True


def test_wrong_limits_are_a_sentence():
    with pytest.raises(ValueError, match=r"expected max_turns and at_once ≥ 1, seconds > 0"):
        EnvironmentSampler.Config(max_turns=0)


class Chat(Count):
    def reset(self, problem):
        super().reset(problem)
        return "1 + 2"

    def step(self, text):
        return dataclasses.replace(made_step(super().step(text)), observation="ok")


def made_step(parts):
    return Step(observation=parts[0], reward=parts[1], done=parts[2])


TEMPLATE = (
    "{% for m in messages %}<solve> {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<revise>{% endif %}"
)


def test_a_chat_keeps_sampled_tokens_and_closes_each_turn_once(tiny):
    tokenizer = tiny.policy.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = TEMPLATE
    try:
        sampler = tiny.start(EnvironmentSampler, group_size=2, max_tokens=3)
        prompts = tiny.prompts.replace(metadata=[{"template": "chat"}] * len(tiny.prompts))
        got = sampler.run(prompts=prompts, policy=tiny.policy, environments=Made(Chat))
        between = tokenizer.encode("<eos><solve> ok<eos><revise>", add_special_tokens=False)
        eos, turns, t = tokenizer.eos_token_id, got.turns, got.trajectories
        first = tokenizer.encode("<solve> 1 + 2<eos><revise>", add_special_tokens=False)
        ended = 0
        expected: list[int] = []
        for i in range(len(t)):
            if turns.turn[i] == 0:
                expected = first
            assert t.prompt_tokens.row(i).tolist() == expected
            response = t.response_tokens.row(i).tolist()
            closed = response[-1] == eos
            ended += closed
            expected = [*expected, *response, *between[closed:]]
        assert 0 < ended < len(t)
    finally:
        tokenizer.chat_template = before
        sampler.close()
