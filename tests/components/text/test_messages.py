"""Prompts stored as chat messages: what is accepted, what is refused, and the problem in them."""

import pytest

from creditgraph.components.text.messages import conversation, read_messages

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1 + 1?"}
ASSISTANT = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER]])
def test_conversations_that_end_with_the_user_are_kept(messages):
    assert read_messages([{**m, "name": "further keys"} for m in messages], "prompt") == messages


REFUSED = [
    ([], "prompt is an empty list of messages"),
    ([SYSTEM], "prompt has no message of role 'user'"),
    ([SYSTEM, ASSISTANT], "prompt has no message of role 'user'"),
    ([USER, ASSISTANT], "prompt: the last message is of role 'assistant', expected 'user'"),
    ([{"role": "human", "content": "x"}], "prompt: a message of role 'human', expected system, user, assistant"),
    ([USER, {"role": "tool", "content": "x"}], "prompt: a message of role 'tool', expected system, user, assistant"),
    ([USER, SYSTEM, USER], "prompt: a system message after the first message"),
    (["1 + 1?"], "prompt: message 0 is not {role, content} with text in both"),
    ([USER, {"content": "x"}], "prompt: message 1 is not {role, content} with text in both"),
    ([{"role": "user", "content": " "}], "prompt: message 0 is not {role, content} with text in both"),
    ([{"role": "user", "content": [{"type": "image"}]}], "prompt: message 0 is not {role, content} with text in both"),
]


@pytest.mark.parametrize(("messages", "reason"), REFUSED)
def test_what_no_policy_can_answer_is_refused(messages, reason):
    with pytest.raises(ValueError) as error:
        read_messages(messages, "prompt")
    assert str(error.value) == reason


def test_the_problem_of_several_turns_has_their_roles():
    assert conversation([SYSTEM, USER]) == "1 + 1?"
    assert conversation([SYSTEM, USER, ASSISTANT, USER]) == "user: 1 + 1?\n\nassistant: 3\n\nuser: 1 + 1?"
