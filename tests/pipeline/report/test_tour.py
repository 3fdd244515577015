"""`creditgraph tour` on the embedded model."""

from types import SimpleNamespace

from pipeline.cli import main
from pipeline.commands import tour


def test_the_tour_goes_through_without_a_person(capsys):
    assert main(["tour", "--yes"]) == 0
    out = capsys.readouterr().out
    titles = ["1. Sample", "2. Verify", "3. Localise", "4. Reset", "5. Credit", "6. Go on"]
    assert [t for t in titles if t in out] == titles
    assert "The same policy is asked which step went wrong. It says: thought" in out
    assert "suffix 4" in out
    assert "creditgraph report runs/toy_srpo-s0" in out


def test_credit_has_a_sign_without_colour():
    story = SimpleNamespace(chains=[("chain 1", 3, 3, 1.0, "", 0.5, [])], suffixes=[("suffix 1", 1, 3, 0.0, "", -0.5, [])])
    table = tour.credit(story)[-1]
    assert [str(c) for c in table.columns[3].cells] == ["+0.50", "-0.50"]
    assert [str(c) for c in table.columns[1].cells] == ["3 of 3", "1 of 3"]
