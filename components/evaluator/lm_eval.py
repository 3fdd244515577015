"""Results in the files of lm-evaluation-harness: results_DATE.json and samples_TASK_DATE.jsonl in a folder of the model's name.

The layout is that of its `EvaluationTracker` (lm_eval/loggers/evaluation_tracker.py): metrics as "name,filter" beside
"name_stderr,filter", one line per problem and filter. Our filters are the two passes, "greedy" and "sampled".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from components.evaluator.measure import Work
from components.evaluator.scores import GREEDY, TaskScores
from pipeline.run_directory import write_aside, writing

FILTERS = {"greedy": "greedy", "sampled": "sampled"}


def sanitize_model(name: str) -> str:
    """A model's name as the harness writes it in paths.

    >>> sanitize_model("Qwen/Qwen3-4B")
    'Qwen__Qwen3-4B'
    """
    return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", name)


def metric_key(metric: str, stderr: bool = False) -> str:
    """Our metric's name as the harness has it.

    >>> metric_key("greedy pass@1"), metric_key("avg@8", stderr=True)
    ('exact_match,greedy', 'avg@8_stderr,sampled')
    """
    greedy = metric.startswith("greedy")
    name = "exact_match" if metric == GREEDY else metric.removeprefix("greedy ").replace(" ", "_")
    return f"{name}{'_stderr' if stderr else ''},{FILTERS['greedy' if greedy else 'sampled']}"


def write_lm_eval(
    folder: Path, results: Mapping[str, Any], works: Sequence[Work], scores: Mapping[str, TaskScores], seconds: float, now: datetime
) -> list[Path]:
    """Writes both kinds of files below `folder`; returns their paths, the results first.

    Args:
        folder: what the harness calls output_path.
        results: as in results.json.
        works: the tasks, complete on disk.
        scores: task → numbers per problem.
        seconds: this evaluation took.
        now: date in the names.
    """
    model = str(results["model"]["path"])
    place = folder / sanitize_model(model)
    date = now.isoformat().replace(":", "-")
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    paths, hashes = [], {}
    for work in works:
        task = re.sub(r"\W", "_", work.problems.name)
        path = place / f"samples_{task}_{date}.jsonl"
        digest = sha256()
        with writing(path), path.open("w", encoding="utf-8") as lines:
            for sample in _samples(work):
                digest.update((sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"]).encode())
                lines.write(json.dumps(sample, ensure_ascii=False) + "\n")
        hashes[work.problems.name] = digest.hexdigest()
        paths.append(path)
    page = _results(results, works, scores) | {
        "date": now.timestamp(),
        "task_hashes": hashes,
        "model_source": "creditgraph",
        "model_name": model,
        "model_name_sanitized": sanitize_model(model),
        "system_instruction": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": None,
        "chat_template": None,
        "chat_template_sha": None,
        "start_time": 0.0,
        "end_time": seconds,
        "total_evaluation_time_seconds": str(seconds),
    }
    target = place / f"results_{date}.json"
    write_aside(target, json.dumps(page, indent=2, ensure_ascii=False) + "\n")
    return [target, *paths]


def _results(results: Mapping[str, Any], works: Sequence[Work], scores: Mapping[str, TaskScores]) -> dict[str, Any]:
    tasks: dict[str, dict[str, Any]] = {}
    for name, found in scores.items():
        tasks[name] = {"alias": name}
        for metric, values in found.metrics.items():
            tasks[name][metric_key(metric)] = float(values.mean())
            # As the harness has it: the standard error of the mean over problems.
            spread = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else "N/A"
            tasks[name][metric_key(metric, stderr=True)] = spread
    names = list(scores)
    counts = {w.problems.name: len(w.problems.ids) for w in works}
    rejected = {w.problems.name: w.problems.num_rejected for w in works}
    return {
        "results": tasks,
        "group_subtasks": {n: [] for n in names},
        "configs": {w.problems.name: _config(w, results["version"]) for w in works},
        "versions": dict.fromkeys(names, results["version"]),
        "n-shot": dict.fromkeys(names, 0),
        "higher_is_better": {n: {metric_key(m).partition(",")[0]: True for m in scores[n].metrics} for n in names},
        "n-samples": {n: {"original": counts[n] + rejected[n], "effective": counts[n]} for n in names},
        "config": {
            "model": results["engine"],
            "model_args": f"pretrained={results['model']['path']},dtype={results['model']['dtype']},checkpoint={results['checkpoint']}",
            "model_dtype": results["model"]["dtype"],
            "batch_size": None,
            "device": results["device"],
            "limit": None,
            "bootstrap_iters": results["resamples"],
            "gen_kwargs": None,
            "random_seed": results["seed"],
        },
    }


def _config(work: Work, version: int) -> dict[str, Any]:
    task, source = work.problems.task, work.problems.source
    kwargs = {"temperature": task.temperature, "top_p": task.top_p, "max_gen_toks": task.max_tokens, "until": list(task.stop)}
    return {
        "task": work.problems.name,
        "dataset_path": source.get("path") or source.get("name") or source.get("source", ""),
        "dataset_name": source.get("subset") or None,
        "test_split": source.get("split", "train"),
        "output_type": "generate_until",
        "repeats": max(task.samples, 1),
        "num_fewshot": 0,
        "generation_kwargs": {**kwargs, "do_sample": task.samples > 0},
        "metadata": {"version": version},
    }


def _samples(work: Work) -> Iterator[dict[str, Any]]:
    prompts = work.problems.prompts
    for chunk, table in zip(work.chunks, work.store.tables(work.chunks), strict=True):
        rows = table.to_pydict()
        sampling = {
            "temperature": 0.0 if chunk.part == "greedy" else work.problems.task.temperature,
            "max_gen_toks": work.problems.task.max_tokens,
        }
        for at in range(0, chunk.rows, chunk.samples):
            one = slice(at, at + chunk.samples)
            i = rows["problem"][at]
            doc = {"question": work.problems.questions[i], "answer": prompts.answer[i], "problem_id": rows["problem_id"][at]}
            correct = rows["correct"][one]
            value = sum(correct) / len(correct)
            metric = metric_key(GREEDY if chunk.part == "greedy" else f"avg@{chunk.samples}").partition(",")[0]
            yield {
                "doc_id": i,
                "doc": doc,
                "target": prompts.answer[i],
                "arguments": {"gen_args_0": {"arg_0": prompts.text[i], "arg_1": sampling}},
                "resps": [rows["text"][one]],
                "filtered_resps": [a if a is not None else "" for a in rows["answer"][one]],
                "filter": FILTERS[chunk.part],
                "metrics": [metric],
                "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
                "prompt_hash": _hash(prompts.text[i]),
                "target_hash": _hash(prompts.answer[i]),
                metric: value,
            }


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
