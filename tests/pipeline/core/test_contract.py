"""The contract checker: one toy per clause, and every shipped component against all of them."""

import subprocess
import sys

import contract_toys
import graph_toys
import pytest

from creditgraph.pipeline.core import contract
from creditgraph.pipeline.core.contract import LATE_IMPORTS, check_component
from creditgraph.pipeline.core.registry import known_components, load_class


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the import in a fresh interpreter, which takes seconds and has tests of its own."""
    monkeypatch.setattr(contract, "_imports", lambda cls: iter(()))


def test_a_good_component_has_no_findings_fresh_interpreter_included() -> None:
    assert check_component(contract_toys.Good) == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "findings"),
    [
        ("Silent", ["Silent has no docstring; its first line is shown by 'creditgraph components'."]),
        (
            "Settings",
            [
                "Settings.Config is not frozen, but settings never change; write @dataclass(frozen=True, "
                "kw_only=True).",
                "Settings.Config takes quiet, nested by position; write @dataclass(frozen=True, kw_only=True).",
                "Settings.Config.quiet has no docstring; write a string below it that says its unit and what it "
                "changes.",
                "Settings.Config.nested.depth has no docstring; write a string below it that says its unit and what "
                "it changes.",
            ],
        ),
        ("Plain", ["Plain.Config is not a dataclass; write @dataclass(frozen=True, kw_only=True) above it."]),
        ("Melted", ["Melted.run returns MeltedOut, which is not frozen; write @dataclass(frozen=True, kw_only=True)."]),
        ("NoRun", ["NoRun: no method 'run'; a component defines run(self, *, …) -> Outputs."]),
        ("Unannotated", ["Unannotated.run: input 'prompts' has no annotation; write its payload type."]),
        ("ReturnsNumber", ["ReturnsNumber.run: returns int; expected a frozen dataclass with one field per output."]),
        (
            "Rows",
            [
                "Rows.run: input 'rewards' has same_rows('promt'), but there is no such input. Did you mean 'prompt'?",
                "Rows.run: output 'rewards' has same_rows('prompts'), but there is no such input. Did you mean "
                "'prompt'?",
            ],
        ),
        (
            "Number",
            [
                "Number.run: input 'size' is int; expected a payload, subclass creditgraph.Payload.",
                "Number.run: input 'size' defaults to 3; an optional input is 'T | None = None'.",
            ],
        ),
        ("HalfState", ["HalfState defines state_dict but not load_state_dict; a restart needs both."]),
        (
            "Forgets",
            [
                "Forgets.state_dict after load_state_dict differs from what was loaded; a restart would not continue "
                "the run."
            ],
        ),
        (
            "Unstorable",
            [
                "Unstorable.state_dict: 'made' is object; expected a nested dict of tensors, numbers, strings, lists.",
                "Unstorable.state_dict: key 3 in by_row is int, not str; expected a nested dict of tensors, numbers, "
                "strings, lists.",
            ],
        ),
        ("Crashes", ["Crashes(Config()) raises OSError: no model at /models; the default settings must build."]),
        (
            "Initial",
            [
                "Initial.placement is 'somewhere'; expected 'replica' or 'collective'.",
                "Initial.initial returns 'wieghts', which is not an output. Did you mean 'weights'?",
                "Initial.initial: 'policy' is int; expected Policy.",
            ],
        ),
    ],
)
def test_each_clause(name: str, findings: list[str]) -> None:
    assert check_component(getattr(contract_toys, name)) == findings


@pytest.mark.usefixtures("here")
def test_slow_init() -> None:
    (finding,) = check_component(contract_toys.Slow)
    assert finding.startswith("Slow.__init__ took 0.")
    assert finding.endswith("load models and files in setup(context).")


def test_late_imports_are_seen_in_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "LATE_IMPORTS", ("colorsys", "megatron"))
    assert check_component(load_class("heavy_toys:Heavy")) == [
        "Heavy: importing heavy_toys loads colorsys; import them inside setup or where they are used."
    ]


def test_a_class_nobody_can_name() -> None:
    class Local(graph_toys.Source):
        """Lives in a function."""

    assert check_component(Local) == [
        "Local is defined in a function; move it to a module so that a graph can name it."
    ]


def test_what_is_no_component() -> None:
    assert check_component(graph_toys.NotAComponent) == [
        "NotAComponent is not a component; derive it from creditgraph.Component."
    ]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("use", sorted(known_components()))
def test_shipped_components_follow_the_contract(use: str) -> None:
    assert check_component(load_class(use)) == []


def test_shipped_components_import_nothing_heavy() -> None:
    modules = sorted({target.partition(":")[0] for target in known_components().values()})
    code = f"import sys, {', '.join(modules)}; print(*[m for m in {LATE_IMPORTS!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
