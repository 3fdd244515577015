"""`creditgraph data preview` shows what every node asks the policy, without a model."""

import pytest

from creditgraph.pipeline.app.cli import main


@pytest.mark.parametrize(
    ("recipe", "node", "words"),
    [
        ("toy_srpo", "localizer", "<localize>"),
        ("toy_srpo", "expander", "<solve>"),  # the problem with the thoughts that a reset keeps
        ("toy_critique_grpo", "sampler", "<revise>"),
        ("toy_vineppo", "value", "<solve>"),
    ],
)
def test_the_prompt_of_every_node_that_asks(recipe, node, words, capsys) -> None:
    assert main(["data", "preview", f"recipe={recipe}", "--prompts", "1"]) == 0
    said = capsys.readouterr().out
    asked = said.split(f"'{node}' asks, about a wrong answer made up for this preview, ")[1]
    assert asked.splitlines()[1].startswith(words)
