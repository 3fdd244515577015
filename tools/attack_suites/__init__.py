"""Suites of tools/attack, one module each.

A module has `cases()`, a sequence of things whose `str` names an attack, and `run(case)`, which carries one out and
returns whether the project held and a sentence about it. `quick()`, if there, has the cases of a quick run; without it
about ten of all are taken, and a suite may have none. `use(folder)`, if there, is called first with an empty folder,
which is removed at the end.
The first line of the docstring describes the suite.
"""
