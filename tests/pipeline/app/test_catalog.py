"""The catalogue agrees with the classes it describes, and imports none of them."""

import dataclasses
import subprocess
import sys

import pytest

from pipeline.app.catalog import describe
from pipeline.core.errors import ConfigError
from pipeline.core.registry import known_components, load_class, target_of
from pipeline.core.sockets import sockets_of


def test_sockets_paper_and_settings() -> None:
    entry = describe("graph_toys:Sampler")
    assert entry.summary == "Samples a group per prompt <&>."
    assert entry.takes == {"prompts": "Prompts", "policy": "Policy", "verifier": "Verifier, optional"}
    assert entry.makes == {"trajectories": "Trajectories", "failures": "Trajectories"}
    assert (entry.paper, entry.placement) == ("2402.03300", "replica")
    assert [(s.name, s.type, s.default, s.doc) for s in entry.settings] == [
        ("group_size", "int", "8", "responses per prompt")
    ]


def test_rows_lists_and_nested_settings() -> None:
    assert describe("graph_toys:Merge").takes == {"trajectories": "list[Trajectories]"}
    assert describe("graph_toys:Advantage").takes["rewards"] == "Rewards (rows of trajectories)"
    assert describe("graph_toys:Advantage").makes == {"credit": "Credit (rows of trajectories)"}
    learner = describe("graph_toys:Learner")
    assert learner.placement == "collective"
    assert [s.name for s in learner.settings] == ["objective", "optimizer.lr", "optimizer.betas", "kl"]
    assert learner.settings[0].type == "'reinforce' | 'token'"
    assert learner.settings[1].doc == "step size, per update"


def test_no_inputs_no_outputs_no_settings() -> None:
    source, watch = describe("graph_toys:Source"), describe("graph_toys:Watch")
    assert (source.takes, source.settings) == ({}, [])
    assert watch.makes == {}
    assert watch.takes["errors"] == "StepErrors, optional"


def test_inherited_run_is_found_in_another_module() -> None:
    mine, parent = describe("heavy_toys:Heavy"), describe(target_of("advantage.group"))
    assert mine.summary == "Loads colorsys at import."
    assert (mine.takes, mine.makes, mine.settings) == (parent.takes, parent.makes, parent.settings)
    assert mine.makes == {"credit": "Credit (rows of trajectories)"}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            "graph_toys:Samplr",
            r"component 'graph_toys:Samplr': no class 'Samplr' in .*graph_toys\.py\. Did you mean 'Sampler'\?",
        ),
        (
            "no_such:X",
            "component module 'no_such': no such file; install the package that holds it or correct the name",
        ),
        ("components.sampler.nothing:X", r"component module 'components\.sampler\.nothing': no such file"),
    ],
)
def test_unknown_targets(target: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        describe(target)


@pytest.mark.parametrize("use", sorted(known_components()))
def test_shipped_entries_agree_with_their_classes(use: str) -> None:
    entry, cls = describe(target_of(use)), load_class(use)
    sockets = sockets_of(cls)
    assert list(entry.takes) == list(sockets.inputs)
    assert list(entry.makes) == list(sockets.outputs)
    assert [name for name, text in entry.takes.items() if not text.endswith(", optional")] == [
        s.name for s in sockets.inputs.values() if s.required
    ]
    assert entry.placement == cls.placement
    assert entry.paper == cls.paper
    assert list(dict.fromkeys(s.name.partition(".")[0] for s in entry.settings)) == [
        f.name for f in dataclasses.fields(cls.Config)
    ]
    assert entry.summary
    assert all(s.doc for s in entry.settings)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from pipeline.app.catalog import describe; from pipeline.core.registry import known_components\n"
        "for target in known_components().values(): describe(target)\n"
        "print(*[m for m in ('torch', 'numpy', 'transformers', 'components') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
