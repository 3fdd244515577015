"""Prompts stored as chat messages, as TRL and verl store them: [{"role": "user", "content": "…"}, …]."""

from typing import Any

Messages = list[dict[str, str]]

ROLES = ("system", "user", "assistant")


def read_messages(value: list[Any], column: str) -> Messages:
    """Checks a list of messages; only role and content are kept.

    Args:
        value: the list in the data.
        column: its column, for error texts.

    Raises:
        ValueError: it is no conversation that a policy can answer.
    """
    messages: Messages = []
    for place, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
            raise ValueError(f"{column}: message {place} is not {{role, content}} with text in both")
        if role not in ROLES:
            raise ValueError(f"{column}: a message of role '{role}', expected {', '.join(ROLES)}")
        if role == "system" and place:
            raise ValueError(f"{column}: a system message after the first message")
        messages.append({"role": role, "content": content})
    if not messages:
        raise ValueError(f"{column} is an empty list of messages")
    if all(message["role"] != "user" for message in messages):
        raise ValueError(f"{column} has no message of role 'user'")
    if messages[-1]["role"] != "user":
        raise ValueError(f"{column}: the last message is of role '{messages[-1]['role']}', expected 'user'")
    return messages


def conversation(messages: Messages) -> str:
    """The problem as text: the user's words, or all turns with their roles if there are several.

    >>> conversation([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}])
    '1 + 1?'
    """
    turns = [message for message in messages if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
