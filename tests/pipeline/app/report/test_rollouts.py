"""Columns of rollouts: numbers by hand from the runs of conftest, through packing and back."""

import numpy as np
import pytest

from creditgraph.pipeline.app.report.pack import pack_rollouts, unpack
from creditgraph.pipeline.app.report.rollouts import HAS_RATIO, SEGMENT_END, THOUGHT_END, TRAINED, Texts, collect
from creditgraph.pipeline.app.report.source import read_run


@pytest.fixture
def packed(make_run):
    return unpack(pack_rollouts(collect([read_run(make_run())])))


def test_every_trajectory_once_under_the_node_that_made_it(packed):
    header, columns = packed
    nodes = [header["texts"][i] for i in columns["node"]]
    assert nodes[:4] == ["sampler", "sampler", "sampler", "expander"]  # the buffer's rows are known by then
    assert header["uid"][:4] == ["10", "11", "12", "13"]
    assert columns["parent"].tolist() == [-1, -1, -1, 2, -1, -1, -1, 6]
    assert columns["step"].tolist()[:4] == [0, 0, 2, 0]
    assert columns["correct"].tolist()[:4] == [1, 0, 4, 0]  # 4: a failed chain that is reset has no reward of its own


def test_token_columns_survive_their_quantisation(packed):
    header, columns = packed
    start, end = columns["offset"][0], columns["offset"][1]
    assert (start, end) == (0, 4)
    credit = columns["credit"].astype(float) / 32767 * header["scales"]["credit"]
    assert np.allclose(credit[start:end], 1.0, atol=1e-4)
    row3 = slice(columns["offset"][3], columns["offset"][4])
    assert np.allclose(credit[row3], -2.0, atol=1e-4)
    assert [bool(f & TRAINED) for f in columns["flags"][row3]] == [False, False, True]
    assert [bool(f & THOUGHT_END) for f in columns["flags"][0:4]] == [False, True, False, True]
    assert [bool(f & SEGMENT_END) for f in columns["flags"][0:4]] == [False, True, False, True]
    ratio = columns["ratio"].astype(float) / 32767 * header["scales"]["ratio"]
    assert bool(columns["flags"][0] & HAS_RATIO)
    assert ratio[0] == pytest.approx(0.5, abs=1e-4)  # the learner's own, not the 0.25 of the credit's column
    assert not any(f & HAS_RATIO for f in columns["flags"][4:7])  # the learner computed none
    assert ratio[4:7].tolist() == [0, 0, 0]
    # log-probs 0, −0.1, −0.2, −0.3: the largest is the scale, so 0.2 is sqrt(2/3) of 255 steps.
    logprob = (columns["logprob"].astype(float) / 255) ** 2 * header["scales"]["logprob"]
    assert np.allclose(logprob[0:4], [0, 0.1, 0.2, 0.3], atol=2e-3)


def test_without_logprobs_of_the_learner_those_of_the_credit_count(make_run):
    run = make_run()
    for file in (run / "record" / "learner.logprobs").iterdir():
        file.unlink()
    header, columns = unpack(pack_rollouts(collect([read_run(run)])))
    ratio = columns["ratio"].astype(float) / 32767 * header["scales"]["ratio"]
    assert ratio[:7] == pytest.approx([0.25] * 7, abs=1e-4)


def test_values_at_segment_boundaries(packed):
    _, columns = packed
    first = slice(columns["value_offset"][0], columns["value_offset"][1])
    assert np.allclose(columns["value"][first], [0.2, 0.6, 1.0])
    assert columns["value_offset"][3] - columns["value_offset"][2] == 0  # the failed chain


def test_mean_credit_counts_trained_tokens_alone(packed):
    _, columns = packed
    assert columns["mean_credit"].tolist()[:2] == [1.0, -0.5]
    assert columns["mean_credit"][3] == -2.0


def test_token_texts_of_different_tokenizers_do_not_mix(make_run):
    tiny, other = read_run(make_run("a")), read_run(make_run("b", "recipe=toy_srpo", "model.path=/nowhere/at/all"))
    result = collect([tiny, other])
    header, columns = unpack(pack_rollouts(result))
    first = header["pieces"][columns["piece"][0]]
    second = header["pieces"][columns["piece"][columns["offset"][8]]]
    assert first == " 2"  # id 5 of the embedded model's tokenizer
    assert second == "⟨5⟩"
    assert header["texts"][columns["text"][8]] == "text 10"
    assert "its tokenizer is not on this machine: tokens are shown as ids" in other.notes
    assert tiny.notes == []


def test_too_much_for_one_file_takes_spaced_iterations_and_says_so(make_run):
    run = read_run(make_run(iterations=6))
    size = sum(
        f.stat().st_size for (n, _), f in run.files.items() if n.endswith(("trajectories", "failures", "credit"))
    )
    result = collect([run], max_bytes=size / 2)
    assert sorted(set(result.rows["iteration"])) == [0, 2, 5]
    assert run.notes == ["rollouts of 3 of 6 recorded iterations are shown, evenly spaced, to keep the file small"]


def test_long_texts_are_cut_and_counted():
    texts = Texts(5)
    assert texts.add("abcdefgh") == texts.add("abcdefgh") == 0
    assert texts.items == ["abcde… (8 characters)"]


def test_turns_name_their_episode(make_run, put_turns):
    run = make_run()
    for i in range(2):
        put_turns(run, i)
    header, columns = unpack(pack_rollouts(collect([read_run(run)])))
    # Rows 0, 1, 2, 3 are both chains, the failed one, which is no turn, and the suffix.
    assert columns["episode"].tolist() == [0, 0, -1, 3, 4, 4, -1, 7]
    assert columns["turn"].tolist()[:4] == [0, 1, -1, 0]
    assert columns["turn_reward"].tolist()[:4] == [0.25, 0.5, 0, 0]
    assert columns["turn_done"].tolist()[:4] == [0, 1, 0, 0]
    assert [header["texts"][i] for i in columns["turn_state"][:4]] == ["start", "later", "", ""]
    assert [header["texts"][i] for i in columns["turn_fault"][:4]] == ["", "", "", "raised: KeyError"]
