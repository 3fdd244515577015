"""value.process_reward: a classifier trained on true step labels against the oracle, a judge that is slow or gone."""

import json
import math
import re
import time

import pytest
import torch
from http_server import serving

from creditgraph.components.advantage.process import ProcessAdvantage
from creditgraph.components.http import ServerSettings
from creditgraph.components.models.load import resolve_model_path
from creditgraph.components.rollouts.thoughts import thought_texts, true_first_errors
from creditgraph.components.sampler.chains import Chains
from creditgraph.components.segmenter.thought import Thoughts
from creditgraph.components.tasks import TASKS
from creditgraph.components.value.process_reward import ProcessReward
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments

CHAINS = TASKS["chains"]


def judge(how, path, body):
    """Scores a step by its last digit; misbehaves as the script of the server says."""
    if how == "hang":
        time.sleep(1.0)
    results = [{"scores": [int(s[-1]) / 10 for s in item["steps"]]} for item in body["items"]]
    if how == "odd":
        results[0] = {"scores": [None]}
    return 503 if how == "busy" else 200, json.dumps({"results": results})


@pytest.fixture
def server():
    with serving(judge) as http:
        yield http


@pytest.fixture
def judged(toolbox, server, monkeypatch):
    """judged(settings of the server) → the node and its values for two rows of steps "a5 b3" and "c9"."""
    monkeypatch.setattr("creditgraph.components.value.process_reward.load_tokenizer", lambda model: toolbox.tokenizer())
    prompts = toolbox.prompts(["p", "q"])
    trajectories = toolbox.trajectories(["a5b3", "c9"], prompt_uid=prompts.uid)
    segments = Segments(uid=trajectories.uid, ends=Jagged.from_rows([[2, 4], [2]], torch.int32))

    def run(**settings):
        requests = ServerSettings(**{"batch": 1, "concurrency": 1, "wait": 0.01, **settings})
        node = toolbox.start(ProcessReward, url=f"{server.url}/score", server=requests)
        values = node.run(prompts=prompts, trajectories=trajectories, segments=segments).values
        node.close()
        return node, values, {"trajectories": trajectories, "segments": segments, "values": values}

    return run


def test_a_judge_scores_every_step(judged, server):
    node, values, _ = judged()
    assert values.values.to_lists() == [pytest.approx([0.0, 0.5, 0.3]), pytest.approx([0.0, 0.9])]
    sent = [item for _, body, _ in server.requests for item in body["items"]]
    assert sent == [{"prompt": "p", "steps": ["a5", "b3"]}, {"prompt": "q", "steps": ["c9"]}]
    assert node.context.metrics == {"mean": pytest.approx(1.7 / 3), "steps": 3, "failures": 0}


@pytest.mark.parametrize(
    ("script", "settings", "reason"),
    [
        (["busy"] * 3, {"retries": 2}, "HTTP 503"),
        (["hang"] * 2, {"retries": 1, "seconds": 0.2}, "no response from http://127.0.0.1:.* in 0.2 s"),
        (["odd"], {}, "the judge's result has no 2 finite numbers as scores: {'scores': .None.}"),
    ],
)
def test_a_row_without_scores_is_counted_and_gets_no_credit(toolbox, judged, server, script, settings, reason):
    server.script = list(script)
    node, values, inputs = judged(**settings)
    assert len(server.requests) == len(script) + 1  # tried again as often as the settings say, then the other row
    assert all(math.isnan(v) for v in values.values.to_lists()[0])
    assert values.values.to_lists()[1] == pytest.approx([0.0, 0.9])
    assert node.context.metrics["failures"] == 1
    (rejected,) = node.context.rejected
    assert rejected["row"] == {"uid": 1000}
    assert re.search(reason, rejected["reason"])
    credit = toolbox.start(ProcessAdvantage, baseline="none", form="sum").run(**inputs).credit
    assert credit.advantage.to_lists() == [[0.0] * 4, pytest.approx([0.9] * 2)]


def test_failures_that_pass_are_tried_again(judged, server):
    server.script = ["busy", "hang"]
    node, values, _ = judged(seconds=0.5)
    assert values.values.to_lists()[0] == pytest.approx([0.0, 0.5, 0.3])
    assert node.context.metrics["failures"] == 0


@pytest.fixture(scope="module")
def rollouts(tiny):
    """Trajectories of the embedded model, their segments, and whether each step is before the first error."""
    out = tiny.start(Chains, group_size=6, max_tokens=64, mode="thought").run(prompts=tiny.prompts, policy=tiny.policy)
    rows = out.trajectories
    segments = tiny.start(Thoughts).run(trajectories=rows).segments
    index = tiny.prompts.index_of(rows.prompt_uid).tolist()
    steps = thought_texts(rows, tiny.policy.tokenizer)
    errors = [CHAINS.first_error(tiny.prompts.metadata[i], own) or 99 for i, own in zip(index, steps, strict=True)]
    labels = [[k + 1 < error for k in range(len(own))] for own, error in zip(steps, errors, strict=True)]
    return rows, segments, labels, steps, index


@pytest.fixture(scope="module")
def classifier(tiny, rollouts, tmp_path_factory):
    """A token classifier from the embedded model, trained on the step labels of these rollouts."""
    from transformers import AutoModelForTokenClassification

    _, _, labels, steps, index = rollouts
    path = resolve_model_path("tiny")
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=2)
    tokenizer = tiny.policy.tokenizer
    ids, targets = [], []
    for own, right, prompt in zip(steps, labels, index, strict=True):
        row = list(tokenizer(tiny.prompts.text[prompt])["input_ids"])
        target = [-100] * len(row)
        for step, good in zip(own, right, strict=True):
            tokens = tokenizer(step, add_special_tokens=False)["input_ids"]
            row += tokens
            target += [-100] * (len(tokens) - 1) + [int(good)]
        ids.append(row)
        targets.append(target)
    padded = Jagged.from_rows(ids, torch.int64).to_padded(0)
    wanted = Jagged.from_rows(targets, torch.int64).to_padded(-100)
    mask = Jagged.from_rows([[1] * len(row) for row in ids], torch.int64).to_padded(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(50):
        logits = model(input_ids=padded, attention_mask=mask).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_trained_classifier_names_the_oracles_first_error(tiny, rollouts, classifier):
    rows, segments, labels, _, _ = rollouts
    node = tiny.start(ProcessReward, path=classifier, separator="", server=ServerSettings(batch=7))
    inputs = {"prompts": tiny.prompts, "trajectories": rows, "segments": segments}
    values = node.run(**inputs).values.values
    scores = values.slice_rows(torch.ones_like(values.lengths), values.lengths)
    assert values.lengths.tolist() == [len(row) + 1 for row in labels]
    flat = torch.tensor([good for row in labels for good in row])
    assert 0.1 < flat.float().mean() < 0.9
    assert ((scores.values > 0.5) == flat).float().mean() > 0.97
    # The first step below .5 is the oracle's first error in nearly every failure.
    failed = torch.tensor([not all(row) for row in labels])
    named = [next((k for k, s in enumerate(row, 1) if s < 0.5), 0) for row in scores.to_lists()]
    true = true_first_errors(tiny.prompts, rows, tiny.policy.tokenizer)
    assert (torch.tensor(named) == true)[failed].float().mean() > 0.9
    # One row at a time gives the same: padding changes nothing.
    alone = tiny.start(ProcessReward, path=classifier, separator="", server=ServerSettings(batch=1), score="difference")
    torch.testing.assert_close(
        alone.run(**inputs).values.values.values[1:5], 2 * values.values[1:5] - 1, atol=1e-5, rtol=0
    )
    # In the minimum form the credit of a failure falls at its first error.
    credit = (
        tiny.start(ProcessAdvantage, baseline="none")
        .run(trajectories=rows, segments=segments, values=node.run(**inputs).values)
        .credit
    )
    assert float(credit.advantage.values.mean()) < float(scores.values.mean())


def test_a_row_beyond_the_classifiers_context_is_counted(tiny, rollouts, classifier):
    rows, segments, _, _, _ = rollouts
    node = tiny.start(ProcessReward, path=classifier, separator="")
    node._classifier._room = 30
    values = node.run(prompts=tiny.prompts, trajectories=rows, segments=segments).values.values
    missing = values.with_values(values.values.isnan()).sum() > 0
    assert 0 < int(missing.sum()) == node.context.metrics["failures"]
    assert "tokens, but the classifier's context is 30" in node.context.rejected[0]["reason"]


def test_impossible_settings_are_reported(tiny, classifier):
    for settings in ({}, {"path": "a", "url": "http://b"}):
        with pytest.raises(ValueError, match=r"expected either path \(a token classifier\) or url \(a judge\)"):
            ProcessReward.Config(**settings)
    with pytest.raises(ValueError, match="url: expected http"):
        ProcessReward.Config(url="ftp://b")
    with pytest.raises(DataError, match="expected a token classifier, but 2 of its weights are missing"):
        tiny.start(ProcessReward, path="tiny")
    with pytest.raises(DataError, match="label 5: expected one of the 2 classes"):
        tiny.start(ProcessReward, path=classifier, label=5)
