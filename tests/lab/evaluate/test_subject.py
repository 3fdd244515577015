"""Which model and engine an evaluation gets."""

import pytest
import yaml

from creditgraph.lab.evaluate.request import Request
from creditgraph.lab.evaluate.subject import open_model_subject, open_run_subject
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.choices import search_dirs
from creditgraph.pipeline.run.compose.experiment import compose

LORA = ["learner.lora.publish=adapter", "learner.lora.rank=4"]


def test_what_an_engine_file_says_of_the_learner_has_its_default_without_one():
    subject = open_model_subject("tiny", Request(suite="toy", model="tiny", engine="vllm"), search_dirs())
    assert subject.engine.use == "engine.vllm"
    assert subject.engine.settings == {"lora": {"publish": "merged", "rank": 0}}


@pytest.mark.parametrize(
    ("overrides", "lora"), [([], {"publish": "merged", "rank": 0}), (LORA, {"publish": "adapter", "rank": 4})]
)
def test_another_engine_than_the_run_had_reads_the_learner_of_the_run(tmp_path, overrides, lora):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(compose(["recipe=toy_grpo", *overrides])))
    changes = {"engine": {"kv_cache_gb": 0.5}}
    request = Request(suite="toy", run=str(tmp_path), checkpoint="initial", engine="vllm", changes=changes)
    subject = open_run_subject(tmp_path, request, search_dirs())
    assert subject.engine.settings == {"lora": lora, "kv_cache_gb": 0.5}


def test_an_engine_file_that_refers_to_nothing_is_a_sentence(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine.yaml").write_text("use: engine.local\nseed: ${no.such.thing}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*no\.such\.thing"):
        open_model_subject("tiny", Request(suite="toy", model="tiny", engine="mine"), search_dirs([tmp_path]))
