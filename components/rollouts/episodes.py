"""Episodes: a policy and an environment take turns, all episodes of a batch at once."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.models.load import context_length
from creditgraph.components.rollouts.played import Played
from creditgraph.components.rollouts.replies import is_text, read_step, shown, state_of
from creditgraph.components.rollouts.requests import SamplingSettings, completed, unsampled
from creditgraph.components.rollouts.second_turn import encoded, problem_of
from creditgraph.components.rollouts.timed_calls import Fault, TimedCalls
from creditgraph.components.rollouts.turn_rows import RecordedTurn
from creditgraph.components.text.stops import ends_of_stop, token_texts
from creditgraph.components.text.templates import first_turn, later_turn, response_text
from creditgraph.pipeline.core.component import Component, Context
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Completions, Environments, Policy, Requests, Sampling, Step
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Trajectories, Turns
from creditgraph.pipeline.core.streams import Stream


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings(SamplingSettings):
    """Settings of nodes that play episodes; `max_tokens` is the budget of one turn."""

    max_turns: int = 16
    """turns of an episode; one that has not ended then is a fault of kind 'turns'"""
    episode_tokens: int = 0
    """most tokens of a conversation, observations included; 0 is the model's context"""
    seconds: float = 30.0
    """limit of wall time of one call of the environment"""
    at_once: int = 32
    """calls of environments that run at a time"""
    history: Literal["all", "none"] = "all"
    """all: a turn is prompted by the exact tokens of the conversation so far; none: by its observation alone"""
    drop_until: str = ""
    """later prompts lose each earlier response up to the last of this string, such as </think>; "" keeps all of it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.max_turns, self.at_once) < 1 or self.seconds <= 0 or self.episode_tokens < 0:
            raise ValueError(
                f"expected max_turns and at_once ≥ 1, seconds > 0 and episode_tokens ≥ 0, got {self.max_turns}, "
                f"{self.at_once}, {self.seconds:g} and {self.episode_tokens}."
            )


@dataclass(eq=False)
class _Episode:
    """An episode in play.

    Attributes:
        place: among all episodes.
        row: of its prompt.
        seed: of its random numbers.
        prompt: tokens of the conversation so far; of `last` not yet what is dropped of it.
        last: tokens of its last response.
        number: turns that it has had, repeated ones too.
        turns: place of the sampled row, state before it, reward and done of each sampled turn.
        recorded: turns to repeat, and the one that is sampled again.
    """

    place: int
    row: int
    seed: int
    recorded: Sequence[RecordedTurn] = ()
    environment: Any = None
    observation: str = ""
    state: str = ""
    prompt: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    number: int = 0
    turns: list[tuple[int, str, float, bool]] = field(default_factory=list)
    done: bool = False
    fault: Fault | None = None

    @property
    def begin(self) -> int:
        """Turns that are repeated, not sampled."""
        return max(len(self.recorded) - 1, 0)

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return not self.done and self.fault is None


@dataclass(kw_only=True)
class Table:
    """Plays episodes turn by turn. Each goes on as the policy converses: in rounds, or as soon as it was answered.

    A turn's random numbers depend on (its episode's seed, its place) and on nothing else in the batch. A fault ends its
    episode alone; it is counted, and written to rejected.jsonl.

    Where episodes go on by themselves, their turns come from several threads. One at a time is at work here; the lock
    is free while an environment answers.

    Attributes:
        context: of the node; gives ids, and receives what is rejected.
        policy: policy that samples.
        environments: makes one environment per episode.
        prompts: the problems.
        settings: limits.
        sampling: how tokens are drawn.
        room: most tokens of prompt plus response.
        calls: runs the environments' methods.
    """

    context: Context
    policy: Policy
    environments: Environments
    prompts: Prompts
    settings: EpisodeSettings
    sampling: Sampling
    room: int
    calls: TimedCalls
    episodes: list[_Episode] = field(default_factory=list)
    parts: list[Trajectories] = field(default_factory=list)
    sampled: int = 0
    faults: list[tuple[_Episode, Fault]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.room = min(self.room, self.settings.episode_tokens or self.room)

    def play(self, rows: Tensor, seed: Tensor, recorded: Sequence[Sequence[RecordedTurn]] = ()) -> Played:
        """Plays one episode per entry of `rows` [N] (rows of the prompts), with one keyed seed each, int64 [N].

        With `recorded` [N] an episode repeats its recorded turns but the last, and goes on from there. Where another
        prompt or state is reached than was recorded, the environment does not depend on the turns alone: a fault.

        Raises:
            RunError: no episode got as far as its first turn.
        """
        self.episodes = [
            _Episode(place=place, row=r, seed=s, recorded=again)
            for place, (r, s, again) in enumerate(
                zip(rows.tolist(), seed.tolist(), recorded or [()] * len(rows), strict=True)
            )
        ]
        try:
            self.policy.converse(len(self.episodes), self._answer)
        finally:
            with self.lock:
                self._close(self.episodes)
            # Not in the order in which they came, which may be another next time.
            for episode, fault in sorted(self.faults, key=lambda found: found[0].place):
                prompt = int(self.prompts.uid[episode.row])
                self.context.reject({"prompt": prompt, "seed": episode.seed, "turns": len(episode.turns)}, str(fault))
        return self._played()

    def _answer(self, places: list[int], done: Completions | None) -> tuple[list[int], Requests]:
        """Has the environments answer what these episodes have sampled; returns those that go on, and their requests.

        `Policy.converse` calls it.
        """
        episodes = [self.episodes[place] for place in places]
        with self.lock:
            if done is None:
                self._reset(episodes)
            else:
                self._step(episodes, done)
            self._advance(episodes)
            self._close([episode for episode in episodes if not episode.live])
            live = [episode for episode in episodes if episode.live]
            return [episode.place for episode in live], self._requests(live)

    def _call(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        self.lock.release()
        try:
            return self.calls.run(calls, self.environments.at_once) if calls else []
        finally:
            self.lock.acquire()

    def _end(self, episode: _Episode, fault: Fault) -> None:
        episode.fault = fault
        self.faults.append((episode, fault))

    def _reset(self, episodes: Sequence[_Episode]) -> None:
        def begun(episode: _Episode) -> Any:
            episode.environment = self.environments.make()
            return episode.environment.reset(self._problem(episode))

        replies = self._call([partial(begun, episode) for episode in episodes])
        for episode, reply in zip(episodes, replies, strict=True):
            if isinstance(reply, Fault):
                self._end(episode, reply)
            elif isinstance(reply, Step | tuple):
                self._end(episode, Fault("reset", "reset returned a step, expected the first observation alone"))
            elif not is_text(reply) or not reply:
                self._end(episode, Fault("reply", f"reset returned {shown(reply)}, expected a text"))
            else:
                self._observed(episode, reply)

    def _problem(self, episode: _Episode) -> dict[str, Any]:
        metadata, question = problem_of(self.prompts, episode.row)
        prompt, answer = self.prompts.text[episode.row], self.prompts.answer[episode.row]
        # Another draw than those of the turns, so that an environment cannot repeat the policy's numbers.
        seed = int(Stream("environment").seeds(torch.tensor([episode.seed]))[0])
        # A copy for each, since episodes must not meet in what they change.
        return {**copy.deepcopy(metadata), "question": question, "prompt": prompt, "answer": answer, "seed": seed}

    def _requests(self, episodes: Sequence[_Episode]) -> Requests:
        """Requests for the next turn of each."""
        tokens = Jagged.from_rows([episode.prompt for episode in episodes], torch.int32)
        seeds = [Stream("turn", e.number).seeds(torch.tensor([e.seed])) for e in episodes]
        return Requests(
            tokens=tokens,
            seed=torch.cat([torch.zeros(0, dtype=torch.int64), *seeds]),
            sampling=self.sampling,
            max_tokens=(self.room - tokens.lengths).clamp(max=self.sampling.max_tokens),
            prompt_uid=self.prompts.uid[[episode.row for episode in episodes]],
        )

    def _step(self, episodes: Sequence[_Episode], done: Completions) -> None:
        """Keeps the sampled turns of these episodes, and has them answered."""
        tokens = Jagged.from_rows([episode.prompt for episode in episodes], torch.int32)
        # One prompt may have many episodes: rows of the batch that is sampled from are the episodes.
        prompts = self.prompts.select(torch.tensor([episode.row for episode in episodes])).replace(tokens=tokens)
        rows, first = torch.arange(len(episodes)), self.sampled
        empty = unsampled(prompts, rows, rows + first, self.policy.version, self.sampling.temperature)
        self.parts.append(completed(empty, done))
        self.sampled += len(episodes)
        calls = [partial(e.environment.step, response_text(t)) for e, t in zip(episodes, done.text, strict=True)]
        responses = done.tokens.to_lists()
        for i, (episode, reply) in enumerate(zip(episodes, self._call(calls), strict=True)):
            episode.last = responses[i]
            self._answered(episode, first + i, reply)

    def _advance(self, episodes: Sequence[_Episode]) -> None:
        """Brings the prompts of live episodes to their next turn, and has recorded turns answered again."""
        while episodes := [episode for episode in episodes if episode.live]:
            for episode in episodes:
                self._extend(episode)
            episodes = [episode for episode in episodes if episode.live and episode.number < episode.begin]
            calls = [partial(e.environment.step, response_text(e.recorded[e.number].text)) for e in episodes]
            for episode, reply in zip(episodes, self._call(calls), strict=True):
                episode.last = episode.recorded[episode.number].response
                self._answered(episode, None, reply)
                if episode.done:
                    reason = f"repeated turns ended the episode in turn {episode.number}"
                    self._end(episode, Fault("replay", reason))

    def _extend(self, episode: _Episode) -> None:
        """Brings the prompt to the observation; a fault where there is no room for a turn, or another was recorded."""
        number = episode.number
        if number == self.settings.max_turns:
            self._end(episode, Fault("turns", f"no end within {number} turns (max_turns)"))
            return
        self._prompt(episode)
        if len(episode.prompt) >= self.room:
            text = f"turn {number + 1} would begin after {len(episode.prompt)} tokens, all that {self.room} hold"
            self._end(episode, Fault("context", text))
        elif not episode.prompt:
            self._end(episode, Fault("reply", f"the observation {shown(episode.observation)} has no tokens"))
        elif number < len(episode.recorded):
            self._check_recorded(episode, episode.recorded[number])

    def _check_recorded(self, episode: _Episode, turn: RecordedTurn) -> None:
        if turn.prompt != episode.prompt or turn.state != episode.state:
            what = f"state {episode.state!r}, recorded was {turn.state!r}" if turn.state != episode.state else "prompt"
            self._end(episode, Fault("replay", f"repeated turns led to another {what}, in turn {episode.number + 1}"))

    def _answered(self, episode: _Episode, place: int | None, reply: Any) -> None:
        """Takes the reply to a turn in; `place` is that of its row, None for a repeated turn, which has none."""
        step = read_step(reply)
        reward, done = (0.0, False) if isinstance(step, Fault) else (step.reward, step.done)
        episode.number += 1
        if place is not None:
            episode.turns.append((place, episode.state, reward, done))
        if isinstance(step, Fault):
            self._end(episode, step)
            return
        episode.done = step.done
        self._observed(episode, step.observation)

    def _observed(self, episode: _Episode, observation: str) -> None:
        state = state_of(episode.environment)
        if isinstance(state, Fault):
            self._end(episode, state)
        else:
            episode.observation, episode.state = observation, state

    def _prompt(self, episode: _Episode) -> None:
        """Brings the prompt to the observation; sampled tokens stay as they are."""
        template = self.prompts.metadata[episode.row].get("template", "plain")
        tokenizer = self.policy.tokenizer
        if episode.number and self.settings.history == "all":
            between = encoded(tokenizer, [later_turn(template, episode.observation, tokenizer)]).row(0).tolist()
            if template == "chat" and between[:1] == episode.last[-1:]:
                between = between[1:]  # the policy has closed its turn itself
            episode.prompt = episode.prompt + self._kept(episode.last) + between
        elif episode.number == 0 and episode.observation == self.prompts.text[episode.row]:
            episode.prompt = self.prompts.tokens.row(episode.row).tolist()
        else:
            text = first_turn(template, episode.observation, tokenizer)
            episode.prompt = encoded(tokenizer, [text]).row(0).tolist()

    def _kept(self, response: list[int]) -> list[int]:
        stop = self.settings.drop_until
        if not stop:
            return response
        pieces = token_texts(self.policy.tokenizer, Jagged.from_rows([response], torch.int32))[0]
        return response[(ends_of_stop(pieces, stop) or [0])[-1] :]

    def _close(self, episodes: Sequence[_Episode]) -> None:
        """Closes environments that are open, but those that hang."""
        ended = [e for e in episodes if e.environment is not None and not (e.fault and e.fault.kind == "time")]
        calls = [episode.environment.close for episode in ended]
        for episode in ended:
            episode.environment = None
        for episode, reply in zip(ended, self._call(calls), strict=True):
            if isinstance(reply, Fault):
                self.faults.append((episode, Fault("close", reply.reason)))

    def _played(self) -> Played:
        # Episodes that repeat turns may all be lost: training goes on with those that were repeated.
        if not self.parts and any(not episode.recorded for episode in self.episodes):
            ((reason, _),) = Counter(str(episode.fault) for episode in self.episodes).most_common(1)
            raise RunError(
                f"node '{self.context.node}': none of {len(self.episodes)} episodes got as far as a turn; most often: "
                f"{reason}. Correct the environment (creditgraph check)."
            )
        played = [episode for episode in self.episodes if episode.turns]
        lengths = torch.tensor([len(episode.turns) for episode in played], dtype=torch.int64)
        rows = [turn for episode in played for turn in episode.turns]
        uid = self.context.uids(len(rows))
        # A replica without a prompt has no part.
        nothing = torch.zeros(0, dtype=torch.int64)
        empty = unsampled(self.prompts, nothing, nothing, self.policy.version, self.sampling.temperature)
        place = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        trajectories = Trajectories.concat([*self.parts, empty]).select(place).replace(uid=uid)
        first = lengths.cumsum(0) - lengths
        begin = torch.tensor([episode.begin for episode in played], dtype=torch.int64)
        turns = Turns(
            uid=uid,
            episode=uid[first].repeat_interleave(lengths),
            turn=torch.arange(len(rows)) - (first - begin).repeat_interleave(lengths),
            state=[row[1] for row in rows],
            reward=torch.tensor([row[2] for row in rows], dtype=torch.float32),
            done=torch.tensor([row[3] for row in rows], dtype=torch.bool),
            fault=[str(episode.fault or "") for episode in played for _ in episode.turns],
        )
        entry = torch.tensor([e for e, episode in enumerate(self.episodes) if episode.turns], dtype=torch.int64)
        entry = entry.repeat_interleave(lengths)
        faults = Counter(fault.kind for _, fault in self.faults)
        return Played(trajectories=trajectories, turns=turns, faults=faults, entry=entry)


class EpisodePlayer(Component):
    """Base of components that play episodes, whose settings are `EpisodeSettings`."""

    config: Any

    def setup(self, context: Context) -> None:
        """Reads how long rows may be."""
        super().setup(context)
        self._room = context_length(context.model)
        self._calls = TimedCalls(self.config.seconds, self.config.at_once)

    def close(self) -> None:
        """Ends the event loop of async environments."""
        if hasattr(self, "_calls"):
            self._calls.close()

    def table(
        self, prompts: Prompts, policy: Policy, environments: Environments, sampling: Sampling | None = None
    ) -> Table:
        """Where episodes of these prompts are played, by default with the node's sampling."""
        return Table(
            context=self.context,
            policy=policy,
            environments=environments,
            prompts=prompts,
            settings=self.config,
            sampling=sampling or self.config.sampling(),
            room=self._room,
            calls=self._calls,
        )
