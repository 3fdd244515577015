"""Chat messages as prompts, and system and user prompts from the data section, in the formats of known models."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from creditgraph.components.data.loading import load_data
from creditgraph.components.data.sources import parse_source
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.text.templates import solve_prompt
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.run.compose.experiment import compose

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1 + 1?"}


@pytest.fixture
def load(tmp_path, format_folders):
    def run(rows, name="qwen", **entry):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"answer": "2", **row}) + "\n" for row in rows))
        spec = ModelSpec(path=str(format_folders[name]))
        settings = {"source": "file", "path": str(path), "question": "prompt", "template": "chat", **entry}
        return load_data(settings, Context(model=spec), load_tokenizer(spec))

    return run


def qwen(*turns):
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + "<|im_start|>assistant\n"


ASSISTED = ("system", "You are a helpful assistant.")


def test_messages_are_written_as_they_are(load):
    turns = [USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
    one, many = load([{"prompt": [SYSTEM, USER]}, {"prompt": turns}]).rows
    assert one.text == qwen(("system", "Be brief."), ("user", "1 + 1?"))
    assert one.metadata["question"] == "1 + 1?"
    assert one.metadata["messages"] == [SYSTEM, USER]
    assert many.text == qwen(ASSISTED, ("user", "1 + 1?"), ("assistant", "3"), ("user", "Sure?"))
    assert many.metadata["question"].startswith("user: 1 + 1?\n\nassistant: 3")


def test_system_and_user_prompts(load):
    words = {"system_prompt": "Count.", "user_prompt": "Q: {question}\nBox it: \\boxed{}"}
    text, messages, own_system = load(
        [{"prompt": "1 + 1?"}, {"prompt": [USER]}, {"prompt": [SYSTEM, USER]}], **words
    ).rows
    assert text.text == qwen(("system", "Count."), ("user", "Q: 1 + 1?\nBox it: \\boxed{}"))
    assert messages.text == text.text
    assert own_system.text == qwen(("system", "Be brief."), ("user", "Q: 1 + 1?\nBox it: \\boxed{}"))
    assert text.metadata["question"] == "1 + 1?"
    (plain,) = load([{"prompt": "1 + 1?"}], template="plain", user_prompt="Q: {question} A:").rows
    assert plain.text == "Q: 1 + 1? A:"
    (neither,) = load([{"prompt": "1 + 1?"}], user_prompt="{question}").rows
    assert neither.text == qwen(ASSISTED, ("user", "1 + 1?"))


def test_choices_are_listed_in_the_last_message(load):
    rows = [{"prompt": [SYSTEM, USER], "options": ["1", "2"], "answer": "B"}]
    (row,) = load(rows, choices="options").rows
    assert row.text == qwen(("system", "Be brief."), ("user", "1 + 1?\n\nA. 1\nB. 2"))


def test_rows_that_are_no_conversation_are_rejected_and_counted(load):
    good, bad = (
        {"prompt": [USER]},
        [{"prompt": []}, {"prompt": [SYSTEM]}, {"prompt": [{"role": "bot", "content": "x"}]}],
    )
    loaded = load([good, *bad])
    assert len(loaded.rows) == 1
    assert loaded.counts.rejected == {
        "prompt is an empty list of messages": 1,
        "prompt has no message of role 'user'": 1,
        "prompt: a message of role 'bot', expected system, user, assistant": 1,
    }


def test_messages_need_the_chat_template(load):
    reason = "the prompt is a list of messages, which template 'plain' cannot write; expected chat"
    with pytest.raises(DataError, match=f"all 1 rows were rejected .1 × {reason}"):
        load([{"prompt": [USER]}], template="plain")


def test_a_chat_template_that_refuses_a_role_says_so(format_folders):
    tokenizer = load_tokenizer(ModelSpec(path=str(format_folders["qwen"])))
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    with pytest.raises(ValueError, match=r"refuses messages of the roles system, user \(no system role\)"):
        solve_prompt("chat", "1 + 1?", tokenizer, system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"template": "chat", "user_prompt": "Solve {problem}"},
            "data.train: user_prompt: expected a text with {question} where the problem goes, and template chat or "
            "plain, got 'Solve {problem}' and template 'chat'.",
        ),
        ({"template": "thought", "user_prompt": "{question}"}, "got '{question}' and template 'thought'."),
        (
            {"template": "plain", "system_prompt": "Be brief."},
            "data.train: system_prompt: expected template chat, got 'plain'; set template: chat.",
        ),
    ],
)
def test_words_that_the_template_has_no_place_for_are_refused(settings, sentence):
    with pytest.raises(ConfigError) as error:
        parse_source({"source": "file", "path": "x.jsonl", **settings}, "data.train")
    assert str(error.value).endswith(sentence)


def test_a_file_without_the_column_names_those_it_has(load):
    with pytest.raises(DataError, match=r"has no column 'prompt'; it has answer, promt, level\. Did you mean 'promt'"):
        load([{"promt": "1 + 1?", "level": 1}])


def test_a_file_too_short_to_hold_out_a_tenth_names_the_part(load):
    with pytest.raises(DataError, match=r"rows.jsonl, split train\[90%:\]: it has no rows\."):
        load([{"prompt": str(i)} for i in range(4)], split="train[90%:]")


def test_the_columns_of_verl(tmp_path, format_folders):
    """`data=file` with one more setting, on a Parquet file as verl's examples write them."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"content": f"{i} + 1?", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(20)
    ]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    chosen = ["data=file", f"data.train.path={path}", "data.train.answer=reward_model.ground_truth"]
    sections = compose(chosen)["data"]
    spec = ModelSpec(path=str(format_folders["qwen"]))
    train, held_out = (load_data(sections[s], Context(model=spec), load_tokenizer(spec)).rows for s in sections)
    assert [row.answer for row in train] == [str(i + 1) for i in range(18)]
    assert [row.metadata["question"] for row in held_out] == ["18 + 1?", "19 + 1?"]
    assert train[0].text == qwen(ASSISTED, ("user", "0 + 1?"))
