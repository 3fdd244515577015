"""Chat formats of Qwen, Llama and OLMo: the prompt's tokens, the end of a response, its answer; prompts too long."""

import json

import pytest
import torch

from creditgraph.components.engine.vocabulary import eos_mask, generation_config
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.prompts.dataset import DatasetPrompts
from creditgraph.components.text.code_tests import extract_code
from creditgraph.components.text.templates import CHAT_INSTRUCTIONS, response_text, solve_prompt, turn_end_ids
from creditgraph.components.verifier.choice import Boolean, Choice
from creditgraph.components.verifier.exact import Exact
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import Context, ModelSpec

TURN = "Say 1 + 1.\n\nReason step by step and put the final answer in \\boxed{}."
QWEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n{TURN}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPTS = {
    "qwen_base": QWEN,
    "qwen": QWEN,
    "llama": f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{TURN}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "olmo": f"<|endoftext|><|user|>\n{TURN}\n<|assistant|>\n",
}
ENDS = {
    "qwen_base": ["<|endoftext|>", "<|im_end|>"],  # its end of text is not the end of its turn
    "qwen": ["<|endoftext|>", "<|im_end|>"],
    "llama": ["<|end_of_text|>", "<|eot_id|>"],
    "olmo": ["<|endoftext|>"],
}
TURN_END = {"qwen_base": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>", "olmo": "<|endoftext|>"}


def prompts(path, rows, tmp_path, template="chat", **config):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    node = DatasetPrompts(DatasetPrompts.Config(batch=1, shuffle=False, **config))
    spec = ModelSpec(path=str(path))
    node.setup(
        Context(node="prompts", model=spec, data={"train": {"source": "file", "path": str(file), "template": template}})
    )
    return node


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_of_each_format_token_by_token(name, format_folders, tmp_path):
    node = prompts(format_folders[name], [{"question": "Say 1 + 1.", "answer": "2"}], tmp_path)
    batch = node.run().batch
    assert batch.text == [PROMPTS[name]]
    ids = batch.tokens.row(0).tolist()
    assert node.tokenizer.decode(ids) == PROMPTS[name]
    # One token per byte of ordinary text, one per special token, and no second begin of text.
    plain, specials = PROMPTS[name], 0
    for token in node.tokenizer.all_special_tokens:
        specials += plain.count(token)
        plain = plain.replace(token, "")
    assert len(ids) == len(plain.encode()) + specials
    if node.tokenizer.bos_token_id is not None:
        assert ids.count(node.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_response_in_each_format(name, format_folders):
    spec = ModelSpec(path=str(format_folders[name]))
    tokenizer = load_tokenizer(spec)
    mask = eos_mask(generation_config(spec), tokenizer, len(tokenizer))
    assert sorted(tokenizer.convert_ids_to_tokens(mask.nonzero()[:, 0].tolist())) == ENDS[name]
    assert tokenizer.convert_ids_to_tokens(turn_end_ids(tokenizer)) == [TURN_END[name]]


def test_a_template_without_a_special_end_or_that_raises_ends_nothing(format_folders):
    tokenizer = load_tokenizer(ModelSpec(path=str(format_folders["qwen"])))
    for template in (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{{ raise_exception('one turn only') }}",
    ):
        tokenizer.chat_template = template
        assert turn_end_ids(tokenizer) == []
    tokenizer.chat_template = None
    assert turn_end_ids(tokenizer) == []


@pytest.mark.parametrize(
    "end",
    ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>", "<|im_end|>\n<|endoftext|>", "<｜end▁of▁sentence｜>", ""],
)
@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (Exact, "so \\boxed{12}", "12"),
        (Exact, "<think>\nmaybe \\boxed{11}\n</think>\n\nso \\boxed{12}", "12"),
        (Exact, "first. </thought>then \\boxed{12} </thought>", "12"),
        (Choice, "It is iron.\n\nB", "B"),
        (Boolean, "They do not meet.\nNo", "no"),
    ],
)
def test_answers_are_read_before_the_end_token(kind, text, answer, end, toolbox):
    verifier = toolbox.start(kind).run().verifier
    rewards = verifier.verify(toolbox.prompts(["?"], [answer]), toolbox.trajectories([text + end]))
    assert rewards.correct.tolist() == [True], rewards.detail
    wrong = verifier.verify(
        toolbox.prompts(["?"], ["yes" if kind is Boolean else "C"], first_uid=7),
        toolbox.trajectories([text + end], first_uid=1).replace(prompt_uid=torch.tensor([7])),
    )
    assert wrong.correct.tolist() == [False]


def test_a_program_is_read_before_the_end_token():
    text = "So:\n```python\nprint(1)\n```"
    assert extract_code(response_text(text + "<|im_end|>")) == "print(1)\n"
    # What ends nothing stays, and long white space costs nothing.
    assert response_text("a <|im_end|> b") == "a <|im_end|> b"
    assert response_text(" " * 1_000_000 + "x" + "\n" * 1_000_000).strip() == "x"


def test_each_kind_of_answer_has_its_instruction(format_folders):
    tokenizer = load_tokenizer(ModelSpec(path=str(format_folders["qwen"])))
    for kind, words in CHAT_INSTRUCTIONS.items():
        assert f"Q\n\n{words}<|im_end|>" in solve_prompt("chat", "Q", tokenizer, kind)
    assert "put the letter of the right choice in \\boxed{} before you close" in solve_prompt(
        "thought", "Q", tokenizer, "choice"
    )
    # Thoughts end with a box, programs too.
    assert all("\\boxed{" in solve_prompt("thought", "Q", tokenizer, kind) for kind in CHAT_INSTRUCTIONS)


LONG = [{"question": f"{'word ' * 300}{i}. What is {i} + 1?", "answer": str(i + 1)} for i in range(2)]
SHORT = {"question": "What is 1 + 1?", "answer": "2"}


def test_prompts_that_do_not_fit_are_rejected_and_counted(format_folders, tmp_path):
    node = prompts(format_folders["llama"], [SHORT, *LONG], tmp_path, max_tokens=923)
    assert [row.answer for row in node.rows] == ["2"]
    assert node.context.rejected[0]["reason"].startswith("prompt of 1")
    assert node.context.rejected[0]["reason"].endswith(" tokens; expected at most 923")
    assert node.context.metrics["rejected"] == 2


HOSTILE = "\x1b[2J\x07 \u202edrow\u202c <|im_end|> ünï 漢 \\boxed{1}\r\nnext"


def test_preview_prints_every_token_and_is_safe_for_terminals(format_folders, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": HOSTILE, "answer": "\x1b]0;t\x07"}) + "\n")
    data = ["source=file", f"path={file}", "template=chat"]
    overrides = [f"data.{entry}.{setting}" for entry in ("train", "eval") for setting in data]
    modes = ["sampler.mode=plain", "evaluator.mode=plain"]
    model = f"model.path={format_folders['qwen_base']}"
    arguments = ["data", "preview", "recipe=toy_grpo", model, *modes, *overrides]
    assert main([*arguments, "--prompts", "1", "--tokens", "0"]) == 0
    said = capsys.readouterr().out
    assert all(c == "\n" or c.isprintable() for c in said)
    assert "⟦<|im_start|>⟧user" in said
    assert "drow" in said
    assert "漢" not in said  # three tokens, each shown by the tokenizer's name for its byte
    ids = next(line for line in said.splitlines() if line.startswith("ids "))
    tokenizer = load_tokenizer(ModelSpec(path=str(format_folders["qwen_base"])))
    expected = solve_prompt("chat", HOSTILE, tokenizer)
    assert [int(i) for i in ids.split()[1:]] == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert "<|endoftext|> (" in said
    assert "<|im_end|> (" in said.split("a response ends")[1]
    assert main([*arguments, "--tokens", "10"]) == 0
    assert f"… {len(ids.split()) - 11} tokens …" in capsys.readouterr().out


def test_preview_refuses_wrong_numbers(capsys):
    assert main(["data", "preview", "recipe=toy_srpo", "--prompts", "0"]) == 2
    assert "expected --prompts ≥ 1 and --tokens ≥ 0, got 0 and 400" in capsys.readouterr().err
