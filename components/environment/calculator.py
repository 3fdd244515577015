"""A calculator: calls in a response are answered, and a response without one is the answer."""

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.components.text.templates import extract_answer
from creditgraph.pipeline.core.handles import Step

_CALL = re.compile("<calculator>(.*?)</calculator>", re.DOTALL)
_LONGEST = 200  # characters of an expression
_LARGEST = 1e15  # beyond it, floats are no longer whole numbers
_OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % and brackets, or "error: …".

    >>> calculate("(7 + 5) * 3"), calculate("1 / 0"), calculate("2 ** 9")
    ('36', 'error: division by zero', 'error: expected numbers, + - * / // % and brackets')
    """
    try:
        if len(expression) > _LONGEST:
            raise ValueError(f"longer than {_LONGEST} characters")
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):.15g}"
    except SyntaxError:
        return "error: this is no expression"
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.AST) -> float:
    value: float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("expected numbers, + - * / // % and brackets")
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise ValueError(f"a number beyond {_LARGEST:g}")
    return value


class CalculatorEpisode:
    """One episode; see `Calculator`."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def reset(self, problem: dict[str, Any]) -> str:
        """The prompt as the data section made it, or with instructions."""
        self._answer = str(problem["answer"])
        return self._prompt.format(prompt=problem["prompt"], question=problem["question"])

    def step(self, text: str) -> Step:
        """Answers the last call of a response; without one the episode ends with the verdict on its boxed answer."""
        calls = _CALL.findall(text)
        if calls:
            return Step(observation=f"\n<result>{calculate(calls[-1])}</result>\n", reward=0.0, done=False)
        given = extract_answer(text)
        return Step(observation="", reward=float(given is not None and _equal(given, self._answer)), done=True)

    def close(self) -> None:
        """Nothing to release."""


def _equal(given: str, answer: str) -> bool:
    try:
        return given == answer or float(given.replace(",", "")) == float(answer.replace(",", ""))
    except ValueError:
        return False


class Calculator(EnvironmentComponent):
    """A calculator: a response with a call is answered by its value; one without ends the episode, 1 if it is right.

    A call is written <calculator>…</calculator>, and its value <result>…</result>. Add </calculator> to the sampler's
    `stop`, so that a response ends with its call.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The first observation."""

        prompt: str = "{prompt}"
        """first observation; {question} is the problem without the words of its template"""

    config: Config

    def make(self) -> CalculatorEpisode:
        """A new episode."""
        return CalculatorEpisode(self.config.prompt)
