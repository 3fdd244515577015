"""Settings: what is converted, what is refused, and the text of each refusal."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from creditgraph.pipeline.core.settings import build_config, setting_docs, type_text


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Nested."""

    lr: float = 0.1
    """step size"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay"""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Attributes:
    plain: told in the class docstring
    """

    count: int = 1
    """how many
    of them"""
    name: str = "x"
    flag: bool = False
    kind: Literal["std", "mean", 3] = "std"
    """which"""
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    stop: tuple[str, ...] = ()
    rates: list[float] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)
    several: list[Inner] = field(default_factory=lambda: [Inner()])
    either: float | Literal["auto"] = "auto"
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    plain: int = 0


@dataclass(frozen=True, kw_only=True)
class Needs:
    model: str
    size: Literal["s", "m"]
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected at least 1.")


class NoDataclass:
    pass


def one(values: Any, config_class: type = Outer) -> str:
    config, problems = build_config(config_class, values, "node")
    assert config is None
    assert len(problems) == 1, problems
    return problems[0]


def built(values: Any) -> Outer:
    config, problems = build_config(Outer, values, "node")
    assert problems == []
    return config


@pytest.mark.parametrize("values", [None, {}])
def test_defaults(values: Any) -> None:
    assert built(values) == Outer()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 3, 3),
        ("count", "3", 3),
        ("count", 3.0, 3),
        ("flag", True, True),
        ("flag", "yes", True),
        ("kind", "mean", "mean"),
        ("kind", 3, 3),
        ("limit", None, None),
        ("limit", 5, 5),
        ("inner", {"lr": "1e-4"}, Inner(lr=1e-4)),
        ("inner", {"betas": [0, 1]}, Inner(betas=(0.0, 1.0))),
        ("inner", Inner(lr=2.0), Inner(lr=2.0)),
        ("maybe", {"lr": 3}, Inner(lr=3.0)),
        ("maybe", None, None),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("rates", [1, "2e-1"], [1.0, 0.2]),
        ("table", {"a": 1}, {"a": 1}),
        ("several", [{"lr": 1}, {}], [Inner(lr=1.0), Inner()]),
        ("either", "auto", "auto"),
        ("either", "0.5", 0.5),
        ("share", 1, 1.0),
    ],
)
def test_converted(name: str, value: Any, expected: Any) -> None:
    actual = getattr(built({name: value}), name)
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"count": True}, "node.count: expected int, got True (bool)."),
        ({"count": 1.5}, "node.count: expected int, got 1.5 (float)."),
        ({"count": "many"}, "node.count: expected int, got 'many' (str)."),
        ({"count": None}, "node.count: expected int, got None (NoneType)."),
        ({"count": [1]}, "node.count: expected int, got [1] (list)."),
        ({"name": 5}, "node.name: expected str, got 5 (int)."),
        ({"flag": "maybe"}, "node.flag: expected bool, got 'maybe' (str)."),
        ({"kind": "men"}, "node.kind: expected 'std' or 'mean' or 3, got 'men' (str). Did you mean 'mean'?"),
        ({"kind": True}, "node.kind: expected 'std' or 'mean' or 3, got True (bool)."),
        ({"limit": "no"}, "node.limit: expected int or None, got 'no' (str)."),
        ({"limit": False}, "node.limit: expected int or None, got False (bool)."),
        ({"inner": 3}, "node.inner: expected settings as 'name: value' pairs, got 3 (int)."),
        ({"inner": {"lr": "fast"}}, "node.inner.lr: expected float, got 'fast' (str)."),
        ({"inner": {"lr": True}}, "node.inner.lr: expected float, got True (bool)."),
        ({"inner": {"lrr": 1}}, "node.inner.lrr: unknown setting. Did you mean 'lr'?"),
        ({"inner": {"betas": [1]}}, "node.inner.betas: expected 2 values (tuple[float, float]), got 1."),
        ({"inner": {"betas": [1, "b"]}}, "node.inner.betas[1]: expected float, got 'b' (str)."),
        ({"maybe": {"momentum": 1}}, "node.maybe.momentum: unknown setting. Known: betas, lr."),
        ({"stop": "x"}, "node.stop: expected tuple[str, ...], got 'x' (str)."),
        ({"rates": [1, "b"]}, "node.rates[1]: expected float, got 'b' (str)."),
        ({"table": {"a": "b"}}, "node.table.a: expected int, got 'b' (str)."),
        ({"several": [{}, {"lrr": 1}]}, "node.several[1].lrr: unknown setting. Did you mean 'lr'?"),
        ({"either": "aut"}, "node.either: expected float or 'auto', got 'aut' (str). Did you mean 'auto'?"),
        ({"either": True}, "node.either: expected float or 'auto', got True (bool)."),
        ({"share": 2}, "node.share: expected float, got 2 (int) (input should be less than or equal to 1)."),
        ({"cuont": 1}, "node.cuont: unknown setting. Did you mean 'count'?"),
        ({3: 1}, "node.3: unknown setting. Known: count, either, flag"),
        ("abc", "node: expected settings as 'name: value' pairs, got 'abc' (str)."),
        ([1], "node: expected settings as 'name: value' pairs, got [1] (list)."),
    ],
)
def test_refused(values: Any, text: str) -> None:
    assert one(values).startswith(text)


def test_long_values_are_cut() -> None:
    text = one({"count": "a" * 500})
    assert len(text) < 120
    assert "…" in text


def test_every_problem_is_reported_at_once() -> None:
    _, problems = build_config(Needs, {"size": "l", "stepz": 2}, "node")
    assert problems == [
        "node.stepz: unknown setting. Did you mean 'steps'?",
        "node.model: missing; expected str.",
        "node.size: expected 's' or 'm', got 'l' (str).",
    ]


def test_post_init_speaks_for_the_whole() -> None:
    assert one({"model": "m", "size": "s", "steps": 0}, Needs) == "node: steps is 0; expected at least 1."


def test_broken_config_classes_are_problems_not_crashes() -> None:
    assert one({}, NoDataclass).startswith("node: the component's Config is not a dataclass; write @dataclass")

    @dataclass(frozen=True, kw_only=True)
    class Unreadable:
        x: "Missing" = None  # type: ignore[name-defined]  # noqa: F821

    assert "the types of" in one({"x": 1}, Unreadable)
    assert "define them at module level" in one({"x": 1}, Unreadable)


def test_type_text() -> None:
    assert type_text(dict[str, int | None]) == "dict[str, int or None]"
    assert type_text(Annotated[int, "x"]) == "int"
    assert type_text(tuple[str, ...]) == "tuple[str, ...]"


def test_documented_in_the_source() -> None:
    docs = setting_docs(Outer)
    assert docs["count"] == "how many of them"
    assert "name" not in docs
    assert docs["plain"] == "told in the class docstring"
