"""For SkyRL on Python 3.11, in every process of Ray: pydantic refuses the TypedDict that skyrl.tinker.types takes from
typing. SkyRL's users have Python 3.12."""

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict
