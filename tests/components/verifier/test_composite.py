"""Weighted sums of verifiers, with formats."""

import pytest

from creditgraph.components.verifier.composite import Composite
from creditgraph.components.verifier.exact import Exact
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.settings import build_config


class NoVerifier(Exact):
    """A component that is no verifier."""

    def run(self):
        return None


def format_part(pattern, weight):
    return {
        "use": "verifier.regex",
        "weight": weight,
        "decides": False,
        "config": {"pattern": pattern, "compare": False},
    }


def start(toolbox, **values):
    config, problems = build_config(Composite.Config, values, "verifier")
    assert problems == []
    return toolbox.start(Composite, **{name: getattr(config, name) for name in values})


def test_terms_add_up(toolbox):
    node = start(
        toolbox,
        parts=[
            {"use": "verifier.exact", "weight": 1.0},
            format_part("because", 0.5),
            format_part(r"\A<t>.*</t>", 0.25),
        ],
    )
    texts = ["<t>because</t> \\boxed{7}", "\\boxed{7}", "\\boxed{8}", "x" * 30, "\\boxed{7}"]
    prompts = toolbox.prompts(["p"] * 5, answers=["7", "7", "7", "7", ""])
    rewards = node.run().verifier.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid))
    assert rewards.value.tolist() == pytest.approx([1 + 0.5 + 0.25, 1, 0, 0, 0])
    assert rewards.correct.tolist() == [True, True, False, False, False]
    assert rewards.valid.tolist() == [True] * 4 + [False]
    unmatched = "regex: the pattern does not match the response"
    assert rewards.detail[2] == f"exact: answered '8'; {unmatched}; {unmatched}"
    assert rewards.detail[4].startswith("exact: the prompt has no reference answer")
    node.close()


def test_mistakes_are_reported(toolbox):
    _, problems = build_config(Composite.Config, {"parts": [{"use": "verifier.exact", "decides": False}]}, "verifier")
    assert problems == ["verifier: parts: expected at least one part with decides: true, got none."]
    with pytest.raises(ConfigError, match=r"parts\[0\]\.config\.compar: unknown setting\. Did you mean 'compare'"):
        start(toolbox, parts=[{"use": "verifier.regex", "config": {"compar": True}}])
    with pytest.raises(ConfigError, match="returns no verifier; choose one"):
        start(toolbox, parts=[{"use": "tests.components.verifier.test_composite:NoVerifier"}]).run()
