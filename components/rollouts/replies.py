"""What environments return, read: text, reward, end and state, or the fault that they are."""

import numbers
from typing import Any

import numpy as np

from creditgraph.components.rollouts.timed_calls import Fault
from creditgraph.pipeline.core.errors import raised_text
from creditgraph.pipeline.core.handles import Step

LARGEST_REWARD = 1e30  # float32 can hold the sum of an episode's


def read_step(reply: Any) -> Step | Fault:
    """What `step` returned as a `Step` with plain values, or the fault that it is."""
    if isinstance(reply, Fault):
        return reply
    parts: Any = (reply.observation, reply.reward, reply.done) if isinstance(reply, Step) else reply
    if not isinstance(parts, tuple) or len(parts) != 3:
        return Fault("reply", f"step returned {shown(reply)}, expected (observation, reward, done)")
    observation, reward, done = parts
    if not is_text(observation):
        return Fault("reply", f"step returned {shown(observation)} as observation, expected a text")
    number: Any = reward
    # NaN compares as false, and an int of any length compares without an overflow.
    if not isinstance(reward, numbers.Real) or not abs(number) <= LARGEST_REWARD:
        return Fault("reward", f"step returned {shown(reward)} as reward, expected a finite number")
    if not isinstance(done, bool | int | np.bool_):
        return Fault("reply", f"step returned {shown(done)} as done, expected true or false")
    return Step(observation=observation, reward=float(reward), done=bool(done))


def is_text(value: Any) -> bool:
    """Whether it is a text that can be tokenised and written: one without halves of surrogate pairs."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def state_of(environment: Any) -> str | Fault:
    """The key of an environment's state, "" without one; a fault where reading it raises."""
    try:
        state = getattr(environment, "state", None)
        key = "" if state is None else str(state)
    except Exception as error:
        return Fault("raised", raised_text(error))
    return key if is_text(key) else Fault("reply", f"the state is {shown(key)}, expected a text")


def shown(value: Any) -> str:
    """A value in a sentence, with its type."""
    return "None" if value is None else f"{repr(value)[:60]} ({type(value).__name__})"
