"""Coroutines of functions that are none."""

import asyncio

run = asyncio.run
