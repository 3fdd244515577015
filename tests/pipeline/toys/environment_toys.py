"""Environments for the checker, each with one fault."""

import itertools
import random
import time


class Fine:
    def reset(self, problem):
        self.random, self.turn = random.Random(problem["seed"]), 0
        return problem["prompt"]

    def step(self, text):
        self.turn += 1
        return f"{self.random.random()} {len(text)}", 0.5, self.turn == 3

    def close(self):
        pass


class Unseeded(Fine):
    def reset(self, problem):
        self.random, self.turn = random.Random(), 0
        return problem["prompt"]


class Leaks(Fine):
    shared: list = []

    def reset(self, problem):
        self.shared.clear()
        return super().reset(problem)

    def step(self, text):
        self.shared.append(text)
        _, reward, done = super().step(text)
        return str(len(self.shared)), reward, done


class NaN(Fine):
    def step(self, text):
        return "x", float("nan"), False


class Raises(Fine):
    def step(self, text):
        return "x", 1 / len(text), False


class Hangs(Fine):
    async def reset(self, problem):
        import asyncio

        await asyncio.sleep(100)


class OverAtReset(Fine):
    def reset(self, problem):
        return "x", 0.0, True


class Changes(Fine):
    def reset(self, problem):
        problem["seen"] = True
        return super().reset(problem)


class Slow(Fine):
    def step(self, text):
        time.sleep(0.3)
        return super().step(text)


class Endless(Fine):
    def reset(self, problem):
        self.numbers = itertools.count()
        return "x"

    def step(self, text):
        return str(next(self.numbers)), 0, False


class NoClose:
    def reset(self, problem):
        return "x"

    def step(self, text):
        return "x", 0, True
