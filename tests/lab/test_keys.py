"""`creditgraph keys`: a user's own verifier is searched for master keys."""

import json

import pytest

from creditgraph.pipeline.app.cli import main

MINE = '''
from creditgraph import Item, Verdict, VerifierComponent


class Mine(VerifierComponent):
    """Right when the reference is in the box."""

    def verdict(self, item: Item) -> Verdict:
        correct = item.answer in (item.extracted() or "")
        return Verdict(value=float(correct), correct=correct)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(1, 31)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data").mkdir()
    entry = f"{{source: file, path: {tmp_path / 'rows.jsonl'}, answer: answer, template: plain}}"
    (tmp_path / "data" / "mine.yaml").write_text(f"train: {entry}\n")
    (tmp_path / "my_verifier.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def search(folder, *arguments):
    return main(["keys", "mine", "--config-dir", str(folder), *arguments])


def test_a_master_key_is_printed_and_fails_the_check(folder, capsys):
    assert search(folder, "--verifier", "my_verifier:Mine", "--seconds", "20") == 1
    out = capsys.readouterr().out
    assert "right for '2', '4', '42': The answer is \\boxed{42=42}." in out


def test_a_sound_verifier_passes(folder, capsys):
    assert search(folder, "--verifier", "verifier.exact", "--seconds", "20") == 0
    assert "search     no master key: 3,000 odd answers" in capsys.readouterr().out


def test_mistakes_get_one_sentence(folder, capsys):
    assert search(folder) == 2
    assert "data.train: it names no verifier; add --verifier USE." in capsys.readouterr().err
    assert search(folder, "--seconds", "nan") == 2
    assert "expected 0 < --seconds ≤ 3600, got nan" in capsys.readouterr().err
