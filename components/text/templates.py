"""Prompts: how a problem becomes model input, by the template named in a prompt's metadata.

| template | for | solving |
|---|---|---|
| a task's name | a task family (`components/tasks`) and its small model | words of that model's vocabulary |
| thought | instruction-tuned or base models, by thoughts | raw text with instructions (after 2605.25507, appendix) |
| plain | models that continue a text | only the question |
| chat | chat models | one user turn, or the data's own messages, through the tokenizer's chat template |

A data section may replace the words of "plain" and "chat" (`user_prompt`) and add a system turn (`system_prompt`).
Localising and revising are requests to the same policy. For "thought", "plain" and "chat" they are one chat turn where
the tokenizer has a chat template, and the same words as raw text where it has none. Chat templates get the model's
`chat_template_kwargs`, which `load_tokenizer` keeps on the tokenizer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

from jinja2 import TemplateError

from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import bare_step
from creditgraph.components.text.messages import Messages
from creditgraph.pipeline.core.errors import DataError, did_you_mean

_BRACES = re.compile(r"\\boxed\{|[{}]")
# Special tokens that engines leave at the end of a text, such as <|im_end|>; DeepSeek writes <｜end▁of▁sentence｜>.
_ENDING = re.compile(r"(?:<\|[A-Za-z_]+\|>|<｜[^｜<>]{1,40}｜>|</s>|<eos>|<end_of_turn>|<pad>)\Z")
_MAX_ENDINGS = 16
_PROBE = "Two, says Zyx."  # a text that no chat template contains

# Reasoning models think between these.
THINK = "<think>"
THINK_END = "</think>"
TEMPLATES = (*TASKS, "thought", "plain", "chat")
BY_THOUGHTS = (*TASKS, "thought")  # templates whose prompt says that a step ends with </thought>
PLACEHOLDER = "{question}"  # of `user_prompt`

Mode = Literal["plain", "thought", "line", "sentence"]
AnswerKind = Literal["value", "choice", "boolean", "code", "steps"]

# In the prompts below, a line of the source that ends with \ continues in the next one, without a line break.
THOUGHT_INSTRUCTIONS = """\
Solve the problem below one reasoning step at a time.

Each step must
- be the single next step, complete in itself and understandable without what comes later;
- follow from the problem and the steps before it, and bring the solution forward;
- contain no filler, no repetition and no announcement of what you will do;
- end with </thought>.

In the last step, {answer} before you close the step with </thought>.
"""

FINAL_ANSWERS: dict[AnswerKind, str] = {
    "value": "put the final answer in \\boxed{}",
    "choice": "put the letter of the right choice in \\boxed{}",
    "boolean": "put yes or no in \\boxed{}",
    "code": "give the whole Python program in one ```python block",
    "steps": "put what the solution ends with in \\boxed{}",
}

# A chain of thoughts ends with the one that holds \\boxed{, so a program is followed by one.
THOUGHT_ANSWERS = FINAL_ANSWERS | {"code": f"{FINAL_ANSWERS['code']} and write \\boxed{{done}} under it"}

CHAT_INSTRUCTIONS: dict[AnswerKind, str] = {
    "value": "Reason step by step and put the final answer in \\boxed{}.",
    "choice": "Reason step by step and put the letter of the right choice in \\boxed{}.",
    "boolean": "Reason step by step and put yes or no in \\boxed{}.",
    "code": "Reason step by step, then give the whole Python program in one ```python block.",
    "steps": "Reason step by step and put what the solution ends with in \\boxed{}.",
}

LOCALIZE_INSTRUCTIONS = """\
Below are a problem and a solution attempt cut into numbered steps. The final answer of this attempt is wrong.

Find the step where it goes wrong for the first time: the earliest step that cannot be justified by the problem \
statement and the steps
before it. A later step that only carries that mistake along is not the one. Check the steps in order and say briefly \
what each rests on.
Do not solve the problem again and do not write a corrected solution.

End with exactly one number in a box, \\boxed{N}: the number of that step, from 1 to <count>. It is not the answer to \
the problem.
"""

REVISE_INSTRUCTIONS = """\
Below are a problem, a solution attempt whose final answer is wrong, and another attempt for reference, which may be \
incomplete.

Write a corrected version of the wrong attempt. Keep every step that is right as it stands, change only what has to \
change, and {answer}.
"""


RETRY_INSTRUCTIONS = """\
There may be a mistake in the solution above, for example because the problem was misread. If there is one, correct \
it. Write the whole
solution again and {answer}.
"""

CRITIQUE_INSTRUCTIONS = """\
Use this verdict to write a better solution: keep what holds, repair what does not. Write the whole solution and \
{answer}.
"""

HINT_INSTRUCTIONS = """\
Below are a problem and a correct solution of it, for reference. Solve the problem: write the whole solution and \
{answer}.
"""

_CLOSING: dict[Mode, str] = {
    "plain": "",
    "thought": "Close each step with </thought>.\n",
    "line": "Write each step on a line of its own.\n",
    "sentence": "",
}

VERDICTS = {True: "The final answer of this attempt is correct.", False: "The final answer of this attempt is wrong."}


def check_template(template: str) -> str:
    """Returns the name; raises DataError for one that does not exist."""
    if template not in TEMPLATES:
        raise DataError(
            f"expected a template of {', '.join(TEMPLATES)}, got '{template}'.{did_you_mean(template, TEMPLATES)}"
        )
    return template


def solve_prompt(
    template: str,
    question: str,
    tokenizer: Any,
    kind: AnswerKind = "value",
    *,
    system_prompt: str = "",
    user_prompt: str = "",
    messages: Messages | None = None,
) -> str:
    """The text a policy continues to solve the problem; the same for training and evaluation.

    Args:
        template: one of `TEMPLATES`.
        question: the problem, with choices or starter code where it has them.
        tokenizer: its chat template serves "chat".
        kind: what the answer is, for templates with instructions.
        system_prompt: system turn of "chat"; messages that begin with one keep theirs.
        user_prompt: replaces the words of "plain" and "chat"; the problem goes to `PLACEHOLDER`.
        messages: the problem as chat messages. They are used as they are, without instructions; `user_prompt` is put
            around the last one.

    Raises:
        ValueError: the messages or the system turn do not go with the template.
    """
    check_template(template)
    if template != "chat":
        if messages is not None:
            raise ValueError(
                f"the prompt is a list of messages, which template '{template}' cannot write; expected chat"
            )
        if template in TASKS:
            return TASKS[template].solve_prompt(question)
        if template == "thought":
            return (
                f"{THOUGHT_INSTRUCTIONS.replace('{answer}', THOUGHT_ANSWERS[kind])}\nProblem: {question}\n\nSolution:\n"
            )
        return (user_prompt or PLACEHOLDER).replace(PLACEHOLDER, question)
    if messages is None:
        wording = user_prompt or f"{PLACEHOLDER}\n\n{CHAT_INSTRUCTIONS[kind]}"
        turns = [{"role": "user", "content": wording.replace(PLACEHOLDER, question)}]
    else:
        last = (user_prompt or PLACEHOLDER).replace(PLACEHOLDER, messages[-1]["content"])
        turns = [*messages[:-1], {"role": "user", "content": last}]
    if system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system_prompt}, *turns]
    return _chat(turns, tokenizer, required=True)


def first_turn(template: str, observation: str, tokenizer: Any) -> str:
    """A text of an environment as a prompt: one user turn for "chat", as it is for other templates."""
    return _chat(observation, tokenizer, required=True) if template == "chat" else observation


def later_turn(template: str, observation: str, tokenizer: Any) -> str:
    """What follows a response in a conversation: for "chat" the end of its turn, a user turn, and the next one's head.

    Templates that rewrite earlier turns, as some do without their thoughts, are not followed: a response stays as it
    was sampled.
    """
    if template != "chat":
        return observation
    roles = ("user", "assistant", "user")
    words = ("1+1?", _PROBE, observation)
    turns = [{"role": role, "content": content} for role, content in zip(roles, words, strict=True)]
    return _chat(turns, tokenizer, required=True).partition(_PROBE)[2]


def localize_prompt(
    metadata: dict[str, Any], question: str, steps: Sequence[str], tokenizer: Any, reference: Sequence[str] = ()
) -> str:
    """Prompt for the first wrong step of a failed attempt; the response ends in \\boxed{N}, N from 1 to len(steps).

    `reference` are the steps of a solution that is shown too; the prompts of task families have no place for it.
    """
    template = check_template(metadata.get("template", "plain"))
    if template in TASKS:
        return TASKS[template].localize_prompt(question, steps)
    return _chat(localize_request(question, steps, reference), tokenizer)


def localize_request(question: str, steps: Sequence[str], reference: Sequence[str] = ()) -> str:
    """The request for the first wrong step of a failed attempt, as text without a chat template."""
    instructions = LOCALIZE_INSTRUCTIONS.replace("<count>", str(len(steps)))
    solution = "Reference solution:\n" + "\n".join(reference) + "\n\n" if reference else ""
    return f"{instructions}\nProblem: {question}\n\n{solution}{_numbered(steps)}\n"


def revise_prompt(
    metadata: dict[str, Any],
    question: str,
    wrong_steps: Sequence[str],
    reference_steps: Sequence[str],
    tokenizer: Any,
    mode: Mode,
) -> str:
    """Prompt for a repaired version of a failed attempt, given a reference attempt.

    `mode` is the attempts' own, in which the response is sampled too: only thoughts are numbered and closed by
    </thought>, so that what the repair keeps can be the same tokens.
    """
    template = check_template(metadata.get("template", "plain"))
    if template in TASKS:
        return TASKS[template].revise_prompt(question, wrong_steps, reference_steps)
    text = (
        f"{_asking(REVISE_INSTRUCTIONS, metadata, mode)}\nProblem: {question}\n\n"
        f"Wrong attempt:\n{_shown(wrong_steps, mode)}\n\nReference attempt:\n{_shown(reference_steps, mode)}\n"
    )
    return _chat(text, tokenizer)


def extract_answer(text: str) -> str | None:
    """The content of the last \\boxed{…} with balanced braces, stripped; None when there is none."""
    if "\\boxed{" not in text:
        return None
    # One pass, however many boxes are left open: a stack of the opening braces, −1 for those of no box.
    stack: list[int] = []
    begin = end = -1
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            stack.append(brace.end() if brace.group() != "{" else -1)
        elif stack:
            opened = stack.pop()
            if opened > begin:
                begin = opened
                end = brace.start()
    return text[begin:end].strip() if begin >= 0 else None


def response_text(text: str) -> str:
    """A response without the special tokens that end it, so that an answer at its very end can be read.

    >>> response_text("The answer is B<|im_end|>\\n"), response_text("x</s><|endoftext|>")
    ('The answer is B', 'x')
    """
    for _ in range(_MAX_ENDINGS):
        bare = text.rstrip()
        ending = _ENDING.search(bare[-64:])
        if not ending:
            break
        text = bare[: -len(ending.group())]
    return text


def tokens_before_end(pieces: Sequence[str]) -> int:
    """Number of tokens of a response, given as one string each, before the special tokens that end it.

    >>> tokens_before_end(["B", "<|im_end|>", "\\n"]), tokens_before_end(["B", "\\n"])
    (1, 2)
    """
    text = "".join(pieces)
    kept = len(response_text(text))
    return len(pieces) if kept == len(text) else bisect_left([0, *accumulate(map(len, pieces))], kept)


def exit_after(state: str, exit_text: str) -> str:
    """An exit text as it continues a state: where thinking is over, it does not close it once more.

    >>> exit_after("<think>\\n2 + 2", "</think>\\n\\nSo "), exit_after("<think>\\n4</think>\\n", "</think>\\n\\nSo ")
    ('</think>\\n\\nSo ', 'So ')
    """
    if not exit_text.startswith(THINK_END) or state.rfind(THINK_END) <= state.rfind(THINK):
        return exit_text
    rest = exit_text.removeprefix(THINK_END)
    return rest.lstrip() if state[-1:].isspace() else rest


def turn_end_ids(tokenizer: Any) -> list[int]:
    """The special token that closes a turn in a tokenizer's chat template, such as <|im_end|>; [] without one.

    Base models often have another end-of-text token, and would continue after their turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        return []
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": _PROBE}]
    try:
        closing = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(_PROBE)[2]
        first = tokenizer(closing, add_special_tokens=False)["input_ids"][:1]
    except Exception:  # templates raise any type for conversations that they do not support
        return []
    return [i for i in first if i in special_ids(tokenizer)]


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens, those that were added to the tokenizer included."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def _chat(content: str | Messages, tokenizer: Any, required: bool = False) -> str:
    """One user turn, or several turns, through the tokenizer's chat template."""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
        settings = getattr(tokenizer, "chat_template_kwargs", {})
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **settings))
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ValueError(
                f"the tokenizer's chat template refuses messages of the roles {roles} ({error})"
            ) from error
    if required:
        raise DataError(
            "template 'chat': the tokenizer has no chat template, expected that of an instruction-tuned model. Set "
            "template to 'thought' or 'plain'."
        )
    return f"{content}\n"


def retry_prompt(metadata: dict[str, Any], question: str, steps: Sequence[str], tokenizer: Any, mode: Mode) -> str:
    """Prompt for a second attempt; the wording leaves open whether the first one is wrong (SCoRe, 2409.12917).

    The small models of task families have no such mode: their revise mode gets the attempt both as the wrong one and
    as the reference.
    """
    return _again(metadata, question, steps, RETRY_INSTRUCTIONS, tokenizer, mode)


def critique_prompt(
    metadata: dict[str, Any], question: str, steps: Sequence[str], correct: bool, tokenizer: Any, mode: Mode
) -> str:
    """Prompt for a refinement of an attempt after a binary critique, right or wrong (Critique-GRPO).

    For task families as in `retry_prompt`: the revise mode itself says that the attempt is wrong.
    """
    return _again(metadata, question, steps, f"{VERDICTS[correct]}\n\n{CRITIQUE_INSTRUCTIONS}", tokenizer, mode)


def hint_prompt(metadata: dict[str, Any], question: str, hint: Sequence[str], tokenizer: Any, mode: Mode) -> str:
    """Prompt for a solution by a policy that is shown a correct one, `hint` (self-teachers).

    The embedded model has no such mode: for "chains" its revise mode gets the hint both as the attempt and as the
    reference.
    """
    if check_template(metadata.get("template", "plain")) == "chains":
        return revise_prompt(metadata, question, hint, hint, tokenizer, mode)
    shown = f"Problem: {question}\n\nCorrect solution:\n{_shown(hint, mode)}"
    return _chat(f"{_asking(HINT_INSTRUCTIONS, metadata, mode)}\n{shown}\n", tokenizer)


def _again(
    metadata: dict[str, Any], question: str, steps: Sequence[str], instructions: str, tokenizer: Any, mode: Mode
) -> str:
    if check_template(metadata.get("template", "plain")) in TASKS:
        return revise_prompt(metadata, question, steps, steps, tokenizer, mode)
    attempt = f"Problem: {question}\n\nSolution attempt:\n{_shown(steps, mode)}"
    return _chat(f"{attempt}\n\n{_asking(instructions, metadata, mode)}", tokenizer)


def _asking(instructions: str, metadata: dict[str, Any], mode: Mode) -> str:
    """The instructions with the form of answer that the problem has, and how a response of this mode is written."""
    answers = THOUGHT_ANSWERS if mode == "thought" else FINAL_ANSWERS
    return instructions.replace("{answer}", answers[metadata.get("answer_kind", "value")]) + _CLOSING[mode]


def _shown(steps: Sequence[str], mode: Mode) -> str:
    """An attempt as a policy is shown it: thoughts as numbered steps, a plain response as it was written."""
    return _numbered(steps) if mode != "plain" else response_text("".join(steps)).strip()


def _numbered(steps: Sequence[str]) -> str:
    # A special token in the middle of a chat turn would end it.
    return "\n".join(f"Step {i}: {bare_step(response_text(step))}" for i, step in enumerate(steps, 1))
