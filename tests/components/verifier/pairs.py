"""Labelled pairs: the table pairs.txt by kind, and pairs made by sympy, the same on every call."""

import json
import random
from pathlib import Path

import sympy


def hand_made():
    """{kind: [(reference, answer, equal)]} of the table."""
    kinds = {}
    for line in (Path(__file__).parent / "pairs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kind = kinds.setdefault(line[2:], [])
        if line[:2] in ("= ", "! "):
            gold, _, answer = line[2:].partition(" ;; ")
            kind.append((gold, answer, line[0] == "="))
    return kinds


def generated(count=25, seed=0):
    """count pairs of each of eight kinds; every other one unequal by one changed coefficient, sign or bound."""
    draw = random.Random(seed)
    x, n = sympy.symbols("x n")
    out = []
    for i in range(count):
        wrong = i % 2
        a, b, c, d = (draw.randint(1, 12) for _ in range(4))
        expression = (a * x - b) * (x + c) ** (1 + i % 2)
        out.append((sympy.latex(expression), sympy.latex(sympy.expand(expression + wrong * d * x)), not wrong))
        p, q = draw.randint(1, 60), draw.randint(2, 40)
        value = sympy.Rational(p, q)
        out.append((f"\\frac{{{p * a}}}{{{q * a}}}", sympy.latex(value + wrong * sympy.Rational(1, q)), not wrong))
        k, m = draw.choice([2, 3, 5, 6, 7]), draw.randint(2, 9)
        out.append((f"\\sqrt{{{k * m * m}}}", f"{m + wrong}\\sqrt{{{k}}}", not wrong))
        angle = sympy.pi * draw.randint(1, 11) / draw.choice([3, 4, 6])
        value = sympy.cos(angle) + a
        out.append((f"{a}+\\cos\\left({sympy.latex(angle)}\\right)", sympy.latex(value + wrong), not wrong))
        roots = sorted(draw.sample(range(-9, 10), 3))
        shuffled = draw.sample(roots, 3)
        if wrong:
            shuffled[0] = 11
        out.append((", ".join(map(str, roots)), ", ".join(f"x={r}" for r in shuffled), not wrong))
        low, high = sorted(draw.sample(range(-20, 20), 2))
        out.append((f"({low},{high}]", f"\\left({low},{high + wrong}\\right]", not wrong))
        value = sympy.Integer(a) + sympy.Rational(b, 100)
        out.append((sympy.latex(value), f"{float(value) + wrong / 10:.2f}", not wrong))
        total = sympy.factor(sympy.summation(a * n, (n, 1, n)) + b)
        out.append((sympy.latex(total), sympy.latex(sympy.expand(total) - wrong * n), not wrong))
    return out


def all_pairs():
    """Both, by kind."""
    return {**hand_made(), "made by sympy": generated()}


def frozen():
    """Pairs by somebody who has not read the verifier, over the answer forms of five datasets; rules are never changed
    for the sake of one of them, and no tool lists those with a wrong verdict."""
    lines = (Path(__file__).parent / "frozen_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["reference"], row["answer"], row["right"]) for row in map(json.loads, lines)]


def score(pairs, verdicts):
    """(precision, recall, pairs with another verdict than their label)"""
    both = sum(verdict and equal for verdict, (*_, equal) in zip(verdicts, pairs, strict=True))
    missed = [pair for verdict, pair in zip(verdicts, pairs, strict=True) if verdict != pair[2]]
    return both / max(sum(verdicts), 1), both / sum(equal for *_, equal in pairs), missed
