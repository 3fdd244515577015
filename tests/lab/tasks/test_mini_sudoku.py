"""The family mini_sudoku: cells judged by hand, and uniqueness by a slow search."""

from itertools import product

from creditgraph.components.tasks import TASKS
from creditgraph.lab.tasks.mini_sudoku import PEERS, Difficulty, misconceptions
from tests.lab.tasks.streams import uniform

TASK = TASKS["mini_sudoku"]
PROBLEM = {"task": "mini_sudoku", "question": "", "puzzle": "2143431212340001", "solved": "2143431212343421"}
BOX = "\\boxed{ 2 1 4 3 4 3 1 2 1 2 3 4 3 4 2 1 }"


def judged(*cells):
    return TASK.first_error(PROBLEM, [f"{cell} </thought>" for cell in cells])


def fits(grid):
    groups = [range(4 * i, 4 * i + 4) for i in range(4)] + [range(i, 16, 4) for i in range(4)]
    groups += [[a + b for b in (0, 1, 4, 5)] for a in (0, 2, 8, 10)]
    return all(sorted(grid[i] for i in group) == list("1234") for group in groups)


def test_cells_may_come_in_any_order():
    assert judged("d1 3", "d2 4", f"d3 2 {BOX}") == 0
    assert judged("d3 2", "d1 3", f"d2 4 {BOX}") == 0


def test_the_first_wrong_cell_is_the_error():
    assert judged("d1 3", "d2 2", f"d3 4 {BOX}") == 2  # another digit
    assert judged("d1 3", "d1 3", f"d3 2 {BOX}") == 2  # filled before
    assert judged("a1 2", "d1 3") == 1  # given
    assert judged("d1 3", "d2 4", "d3 2") == 3  # no box
    assert judged(f"d1 3 {BOX}", "d2 4", "d3 2") == 1  # boxed too early
    assert judged("d1 3", "d2 4", f"d3 2 {BOX.replace('2 1 }', '1 2 }')}") == 3
    assert judged("d1 3") == 2
    assert judged("d1", "e5 3") == 1


def test_solutions_fit_and_are_the_only_ones():
    for i in range(0, 60, 6):
        problem = TASK.generate(0, i, Difficulty(empty=(4, 6)))
        assert fits(problem["solved"])
        empty = [k for k, digit in enumerate(problem["puzzle"]) if digit == "0"]
        found = []
        for digits in product("1234", repeat=len(empty)):
            grid = list(problem["puzzle"])
            for k, digit in zip(empty, digits, strict=True):
                grid[k] = digit
            found += [grid] if fits(grid) else []
        assert found == [list(problem["solved"])]


def test_peers_are_those_of_row_column_and_block():
    assert PEERS[0] == [1, 2, 3, 4, 5, 8, 12]
    assert PEERS[11] == [3, 7, 8, 9, 10, 14, 15]


def test_varied_puzzles_still_fit():
    draw = uniform("sudoku")
    assert all(fits(TASK.draw(draw, Difficulty())["solved"]) for _ in range(50))


def test_difficulty_bounds_empty_and_hard_cells():
    problems = TASK.problems(Difficulty(empty=(5, 8), hard_cells=(1, 2)))
    assert problems
    for problem in problems:
        empty = [i for i, digit in enumerate(problem["puzzle"]) if digit == "0"]
        assert 5 <= len(empty) <= 8
        assert 1 <= sum(i in misconceptions() for i in empty) <= 2
