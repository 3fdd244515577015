"""Prompts for solving, localising and revising, and reading answers back."""

import pytest

from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.tasks import TASKS, chains
from creditgraph.components.text import templates
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import DataError

TASK = TASKS["chains"]


class ChatTokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant>"


class PlainTokenizer:
    chat_template = None


WRONG = ["s1 7 * 4 3 </thought>", "s2 3 + 3 6 </thought>", "s3 6 - 9 10 \\boxed{ 10 } </thought>"]
RIGHT = ["s1 7 * 4 2 </thought>", "s2 2 + 3 5 </thought>", "s3 5 - 9 9 \\boxed{ 9 } </thought>"]
QUESTION = "7 s1 * 4 s2 + 3 s3 - 9"
CHAINS = {"template": "chains"}


def test_chains_prompts_by_hand():
    assert templates.solve_prompt("chains", QUESTION, None) == f"<solve> {QUESTION} </problem>"
    assert (
        templates.localize_prompt(CHAINS, QUESTION, WRONG, None)
        == f"<localize> {QUESTION} </problem> c1 7 * 4 3 c2 3 + 3 6 c3 6 - 9 10 </steps>"
    )
    # The reference's first half, rounded up: two of three values.
    assert (
        templates.revise_prompt(CHAINS, QUESTION, WRONG, RIGHT, None, "thought")
        == f"<revise> {QUESTION} </problem> c1 7 * 4 3 ref 2 c2 3 + 3 6 ref 5 c3 6 - 9 10 </steps>"
    )


def test_malformed_steps_still_make_a_prompt():
    prompt = templates.localize_prompt(CHAINS, QUESTION, ["* * </thought>", "s2 2 \\boxed{ </thought>", ""], None)
    assert prompt == f"<localize> {QUESTION} </problem> c1 * * c2 2 c3 </steps>"


def test_chains_prompts_are_in_the_model_vocabulary():
    tokenizer = load_tokenizer(ModelSpec())
    for index in range(20):
        problem = TASK.generate(0, index, chains.Difficulty(steps=(1, 12), hard_facts=None))
        steps, question = TASK.solution(problem), problem["question"]
        for text in (
            TASKS["chains"].solve_prompt(question),
            templates.localize_prompt(problem, question, steps, tokenizer),
            templates.revise_prompt(problem, question, steps, steps, tokenizer, "thought"),
            f" {' '.join(steps)}",
        ):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
        assert templates.solve_prompt("chains", question, tokenizer) == TASKS["chains"].solve_prompt(question)


def test_thought_prompt_is_raw_text_with_the_instructions():
    text = templates.solve_prompt("thought", "How many?", ChatTokenizer())
    assert "<user>" not in text
    assert all(word in text for word in ("single next step", "</thought>", "\\boxed{}", "Problem: How many?"))


def test_localising_is_one_chat_turn_that_does_not_tell_the_answer():
    text = templates.localize_prompt(
        {"template": "thought"}, "How many?", ["Two. </thought>", "So \\boxed{2}. </thought>"], ChatTokenizer()
    )
    assert text.startswith("<user>")
    assert text.endswith("<assistant>")
    assert "Step 1: Two.\nStep 2: So \\boxed{2}." in text
    assert "final answer of this attempt is wrong" in text
    assert "exactly one number in a box, \\boxed{N}: the number of that step, from 1 to 2. It is not the answer" in text
    assert "</thought>" not in text
    ended = ["Two.<|im_end|>", "So \\boxed{2}. </thought><|im_end|>"]
    assert templates.localize_prompt({"template": "thought"}, "How many?", ended, ChatTokenizer()) == text
    raw = templates.localize_prompt({"template": "plain"}, "How many?", ["Two."], PlainTokenizer())
    assert raw.rstrip().endswith("Step 1: Two.")


def test_revising_shows_both_attempts():
    arguments = ({"template": "thought"}, "How many?", ["Two.</thought>"], ["Three.</thought>"], PlainTokenizer())
    text = templates.revise_prompt(*arguments, "thought")
    assert "Wrong attempt:\nStep 1: Two.\n\nReference attempt:\nStep 1: Three." in text
    assert "Close each step with </thought>." in text


@pytest.mark.parametrize("template", ["chat", "plain", "thought"])
def test_a_plain_attempt_is_revised_in_its_own_form(template):
    wrong = ["Two.\n\nSo \\boxed{2}.<|im_end|>"]
    text = templates.revise_prompt({"template": template}, "How many?", wrong, ["Three."], ChatTokenizer(), "plain")
    assert "Wrong attempt:\nTwo.\n\nSo \\boxed{2}.\n\nReference attempt:\nThree.\n" in text
    for word in ("</thought>", "Step 1", "<|im_end|>"):
        assert word not in text


def test_the_localizer_may_be_shown_the_solution():
    chat = {"template": "chat"}
    blind = templates.localize_prompt(chat, "How many?", ["Two."], ChatTokenizer())
    shown = templates.localize_prompt(chat, "How many?", ["Two."], ChatTokenizer(), ["Three.", "So 3."])
    assert "Reference solution" not in blind
    assert shown.replace("Reference solution:\nThree.\nSo 3.\n\n", "") == blind
    assert shown.index("Reference solution") < shown.index("Two.")


def test_plain_and_chat():
    assert templates.solve_prompt("plain", "How many?", None) == "How many?"
    assert templates.solve_prompt("chat", "How many?", ChatTokenizer()).startswith("<user>How many?")
    with pytest.raises(
        DataError, match=r"template 'chat': the tokenizer has no chat template, .* Set template to 'thought' or 'plain'"
    ):
        templates.solve_prompt("chat", "How many?", PlainTokenizer())
    with pytest.raises(DataError, match=r"expected a template of chains, .*, got 'chian'. Did you mean 'chain"):
        templates.solve_prompt("chian", "How many?", None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{ 7 } </thought>", "7"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{3} and \\boxed{ 4", "3"),  # the last one never closes
        ("\\boxed{}", ""),
        ("nothing", None),
    ],
)
def test_extract_answer(text, answer):
    assert templates.extract_answer(text) == answer


def test_a_conversation_is_what_the_chat_template_writes():
    tokenizer = load_tokenizer(ModelSpec())
    written = "{% for m in messages %}<solve> {{ m.content }} <eos>{% endfor %}"
    tokenizer.chat_template = written + "{% if add_generation_prompt %}<revise>{% endif %}"
    assert templates.first_turn("chat", "7 + 2", tokenizer) == "<solve> 7 + 2 <eos><revise>"
    # The end of the assistant's turn, the user's, and the head of the next one.
    assert templates.later_turn("chat", "ok", tokenizer) == " <eos><solve> ok <eos><revise>"
    assert templates.later_turn("thought", "ok", tokenizer) == "ok"
