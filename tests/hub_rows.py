"""Rows of the datasets that configs/data names, with the columns that the dataset's card states, made here."""

import base64
import json
import pickle
import zlib

from creditgraph.components.data.sources import parse_source


def packed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def competition(i):
    return {"problem_idx": i, "problem": f"Find {i} + 1.", "answer": i + 1}


def numina(i):
    source = ["olympiads", "amc_aime", "cn_k12"][i % 3]
    solution = f"It is \\boxed{{{i}}}." if i % 6 != 3 else "It is \\boxed{" + "x + " * 20 + "1}."
    return {
        "source": source,
        "problem": f"Prove nothing, find {i}.",
        "solution": solution,
        "messages": [{"content": "c", "role": "user"}],
    }


def hendrycks(i):
    return {
        "problem": f"Find {i}.",
        "level": f"Level {i % 5 + 1}",
        "type": "Algebra",
        "solution": f"So $\\boxed{{\\frac{{{i}}}{{7}}}}$.",
    }


def sciknoweval(i):
    is_open = i // 16 % 2  # every second row of a domain
    choices = {"text": ["iron", "gold", "lead", "tin"], "label": ["A", "B", "C", "D"]}
    details = {"level": f"L{i % 4}", "task": "t", "subtask": "s", "source": "u"}
    prompt = {"default": "Answer the question."}
    return {
        "question": f"Metal {i}?",
        "choices": {"text": [], "label": []} if is_open else choices,
        "answerKey": "" if is_open else "BCD"[i % 3],
        "answer": f"{i} g" if is_open else "",
        "domain": ["Chemistry", "Physics", "Biology", "Material"][i // 4 % 4],
        "type": "open-ended-qa" if is_open else "mcq-4-choices",
        "details": details,
        "prompt": prompt,
    }


def livecode(i):
    public = json.dumps([{"input": f"{i}\n", "output": f"{i}\n", "testtype": "stdin"}])
    private = packed([{"input": f"{i + k}\n", "output": f"{i + k}\n", "testtype": "stdin"} for k in (1, 2, 3)])
    return {
        "question_title": "t",
        "question_content": f"Print the number, {i}.",
        "platform": "atcoder",
        "question_id": str(i),
        "contest_date": "2025-01-01T00:00:00",
        "starter_code": "" if i % 2 else "class Solution:\n    def same(self, n: int) -> int:\n",
        "difficulty": ["easy", "medium", "hard"][i % 3],
        "public_test_cases": public,
        "private_test_cases": private if i % 4 else json.dumps([]),
        "metadata": "{}" if i % 2 else json.dumps({"func_name": "same"}),
    }


def apps(i):
    tests = {"inputs": [f"{i}\n"], "outputs": [f"{i}\n"]} | ({"fn_name": "f"} if i % 2 else {})
    tests["inputs"] = [[i]] if i % 2 else tests["inputs"]
    return {
        "id": i,
        "question": f"Echo {i}.",
        "input_output": json.dumps(tests),
        "difficulty": "interview",
        "url": "u",
        "starter_code": "",
    }


def reasoning(i):
    dataset = "apps" if i % 2 else "taco"
    return {
        "id": str(i),
        "input": "-",
        "output": "r",
        "source": "s",
        "dataset": dataset,
        "split": "train",
        "index": str(i // 2),
    }


def commonsense(i):
    choices = {"label": ["A", "B", "C", "D", "E"], "text": ["sky", "sea", "sun", "sand", "salt"]}
    return {
        "id": str(i),
        "question": f"Where is {i}?",
        "question_concept": "c",
        "choices": choices,
        "answerKey": "ABCDE"[i % 5],
    }


# Dataset → its row number i, with the columns of the card. One that is not here gets rows of `derived`.
SCHEMAS = {
    "HuggingFaceH4/aime_2024": lambda i: {
        "id": i,
        "problem": f"Find {i}.",
        "solution": "s",
        "answer": f"{i:03}",
        "url": "u",
        "year": "2024",
    },
    "MathArena/aime_2025": competition,
    "MathArena/aime_2026": competition,
    "MathArena/hmmt_nov_2025": lambda i: (
        competition(i) | {"answer": f"\\frac{{{i}}}{{3}}", "problem_type": ["Algebra"]}
    ),
    "MathArena/hmmt_feb_2025": lambda i: competition(i) | {"answer": f"\\sqrt{{{i + 2}}}", "problem_type": ["Algebra"]},
    "math-ai/amc23": lambda i: {"id": i, "question": f"Find {i}.", "answer": float(i), "url": "u"},
    "math-ai/minervamath": lambda i: {"question": f"Find {i}.", "answer": f"{i}.5e3"},
    "HuggingFaceH4/MATH-500": lambda i: (
        hendrycks(i) | {"answer": f"\\frac{{{i}}}{{7}}", "subject": "Algebra", "unique_id": str(i)}
    ),
    "Hothan/OlympiadBench": lambda i: {
        "id": i,
        "question": f"Find {i}.",
        "solution": ["s"],
        "final_answer": [f"${i}$"] if i % 2 else [f"{i}", f"{i + 1}"],
        "is_multiple_answer": not i % 2,
        "language": "English",
    },
    "nvidia/AceReason-Math": lambda i: {"problem": f"Find {i}.", "answer": f"{i}"},
    "DigitalLearningGmbH/MATH-lighteval": hendrycks,
    "hicai-zju/SciKnowEval": sciknoweval,
    "ChilleD/StrategyQA": lambda i: {
        "qid": str(i),
        "term": "t",
        "description": "d",
        "question": f"Is {i} even?",
        "answer": i % 2 == 0,
        "facts": "f",
    },
    "tau/commonsense_qa": commonsense,
    "livecodebench/code_generation_lite": livecode,
    "codeparrot/apps": apps,
    "nvidia/OpenCodeReasoning": reasoning,
    "openai/gsm8k": lambda i: {"question": f"Count to {i}.", "answer": f"1 #### 2\nso <<1+1=2>>\n#### {i},000"},
    "zwhe99/DeepMath-103K": lambda i: {
        "question": f"Find {i}.",
        "final_answer": f"{i}\\pi",
        "difficulty": 5.0,
        "topic": "t",
        "r1_solution_1": "s",
    },
    "knoveleng/open-rs": lambda i: {"problem": f"Find {i}.", "solution": "s", "answer": f"{i}", "level": "Hard"},
    "open-r1/DAPO-Math-17k-Processed": lambda i: {
        "prompt": f"Find {i}.",
        "solution": f"{i}",
        "data_source": "math_dapo",
        "ability": "MATH",
    },
    "AI-MO/NuminaMath-CoT": numina,
    "open-r1/OpenR1-Math-220k": lambda i: {
        "problem": f"Find {i}.",
        "solution": "s",
        "answer": f"{i}",
        "problem_type": "Algebra",
    },
}


def derived(settings, i):
    """Row i of a dataset without a schema: the columns that its entry names, with a right answer."""
    source = parse_source(settings, "data.derived")
    if source.join:
        raise NotImplementedError(f"{source.name} is joined with {source.join.name}: add both to tests/hub_rows.py")
    answer = {"value": f"{i}", "choice": "B", "boolean": "yes", "code": ""}[source.answer_kind]
    if source.answer_boxed:
        answer = f"So $\\boxed{{{answer}}}$."
    if source.answer_after:
        answer = f"So {source.answer_after} {answer}"
    tests = json.dumps([{"input": f"{i}\n", "output": f"{i}\n"}])
    columns = {column: tests if name == "tests" else "m" for name, column in source.metadata.items()}
    columns |= {column: value if isinstance(value, str) else value[0] for column, value in source.keep.items()}
    columns |= {source.question: f"Find {i}.", source.answer: answer}
    columns |= {source.open_answer: "7"}
    columns |= {source.choices: ["iron", "gold", "lead"], source.starter_code: ""}
    row = livecode(1) if source.tests else {}
    for column, value in columns.items():
        *outer, last = column.split(".")
        field = row
        for name in outer:
            field = field.setdefault(name, {})
        if last:  # a setting that names no column is empty
            field[last] = value
    return row
