"""Makes the small model of any task family but chains: a supervised warm start on its teacher's flawed attempts.

What a model of a family learns, each from `Task.attempt` and the truth about it:

- to solve, as the flawed teacher does, so that reinforcement learning has something to correct;
- to name the first wrong step of a failed attempt: "c1 ok c2 ok c3 bad", then the step in a box; families may put a
  remark before each verdict (`Task.remark`). With chance 1 − skill the named step is another one, drawn uniformly, so
  that the accuracy of localisation is a setting;
- to revise: the solution in a share of `skill` of the examples, else another attempt.

With --start it begins with the weights of another model, whose words it shares, and so learns in fewer steps.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from creditgraph.components.models.load import EMBEDDED, load_causal_lm, load_tokenizer
from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import COMMON_WORDS, SPECIAL_WORDS, Draw, Problem, Task, split_thoughts
from creditgraph.components.text.templates import extract_answer
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.streams import key_of

TRAINED = "\n## Reinforcement learning\n"  # heading of the part of a card that is written by hand
KINDS = 3  # of examples, each with the same weight
TRIES = 8  # attempts drawn until one is wrong


def make_tokenizer(words: list[str]) -> Any:
    """One token per word. A word includes the space before it, so that decoded pieces of a text join to the text.

    transformers reads every Qwen2 tokenizer as byte-level BPE, whatever its class; so the words are added tokens of
    one.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    specials = words[:3]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(specials)}, merges=[],
        pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False, model_max_length=512, padding_side="left",
    )  # fmt: skip
    first = ("<solve>", "<localize>", "<revise>")
    spaced = [word if word in first else f" {word}" for word in words[3:]]
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in spaced])
    return tokenizer


def make_model(size: int, args: argparse.Namespace) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=size, hidden_size=args.width, intermediate_size=args.width * 3, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32, num_key_value_heads=args.width // 32, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.06,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def batch_of(examples: list[tuple[str, str]], ids: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Token ids [N, L] right-padded, and labels with −100 on prompts and padding."""
    rows = [([ids[w] for w in prompt.split()], [ids[w] for w in response.split()]) for prompt, response in examples]
    length = max(len(p) + len(r) for p, r in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    for i, (p, r) in enumerate(rows):
        tokens[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return tokens, labels


@torch.no_grad()
def respond(model: Any, tokenizer: Any, prompts: list[str], temperature: float, seed: int) -> list[str]:
    torch.manual_seed(seed)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    out = model.generate(**inputs, **how, max_new_tokens=160, pad_token_id=0, eos_token_id=1)
    return [tokenizer.decode(row[inputs["input_ids"].shape[1] :]) for row in out]


@torch.no_grad()
def take_over(model: Any, words: list[str], path: str) -> None:
    """Copies the weights of another model of the same shape; of its embeddings, those of shared words."""
    spec = ModelSpec(path=path)
    other, known = load_causal_lm(spec), load_tokenizer(spec).get_vocab()
    own, weights = model.get_input_embeddings().weight, dict(other.named_parameters())
    for name, weight in model.named_parameters():
        if weight is not own:
            weight.copy_(weights[name])
    places = {i: known.get(word, known.get(f" {word}")) for i, word in enumerate(words)}
    shared = {i: place for i, place in places.items() if place is not None}
    own[list(shared)] = other.get_input_embeddings().weight[list(shared.values())]
    print(f"{len(shared)} of {len(words)} words from {path}", flush=True)


def share(values: list[bool] | list[float]) -> float:
    return sum(values) / max(len(values), 1)


def vocabulary(task: Task) -> list[str]:
    return [*SPECIAL_WORDS, *dict.fromkeys([*task.words(), *COMMON_WORDS])]


class Teacher:
    """Writes the three kinds of examples of a family as (prompt, response) texts."""

    def __init__(self, task: Task, draw: Draw, skill: float) -> None:
        self.task, self.draw, self.skill = task, draw, skill

    def failed(self, problem: Problem) -> tuple[list[str], int] | None:
        """A wrong attempt and its first wrong thought; None if `TRIES` attempts were right."""
        for _ in range(TRIES):
            thoughts = self.task.attempt(problem, self.draw)
            error = self.task.first_error(problem, thoughts)
            if error:
                return thoughts, min(error, len(thoughts))
        return None

    def solve(self, problem: Problem) -> tuple[str, str]:
        return self.task.solve_prompt(problem["question"]), f"{' '.join(self.task.attempt(problem, self.draw))} <eos>"

    def localize(self, problem: Problem) -> tuple[str, str] | None:
        failed = self.failed(problem)
        if failed is None:
            return None
        thoughts, named = failed
        if self.draw() >= self.skill and len(thoughts) > 1:
            named = 1 + (named + int(self.draw() * (len(thoughts) - 1))) % len(thoughts)
        remarks = (self.task.remark(problem, thoughts[:i]) for i in range(1, named + 1))
        verdicts = " ".join(
            f"c{i} {remark} {'bad' if i == named else 'ok'}" for i, remark in enumerate(remarks, 1)
        ).replace("  ", " ")
        prompt = self.task.localize_prompt(problem["question"], thoughts)
        return prompt, f"{verdicts} \\boxed{{ {named} }} <eos>"

    def revise(self, problem: Problem) -> tuple[str, str] | None:
        failed = self.failed(problem)
        if failed is None:
            return None
        reference = self.task.solution(problem)
        revised = reference if self.draw() < self.skill else self.task.attempt(problem, self.draw)
        prompt = self.task.revise_prompt(problem["question"], failed[0], reference)
        return prompt, f"{' '.join(revised)} <eos>"


def train(
    model: nn.Module, lessons: Callable[[float], Iterator[list[tuple[str, str]]]], words: list[str], args: Any
) -> None:
    """Trains on `args.steps` batches; `lessons(progress in [0, 1))` yields the examples of each kind, as texts."""
    ids = {word: i for i, word in enumerate(words)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * max(0.02, 1 - step / args.steps)
    )
    started = time.process_time()
    for step in range(args.steps):
        losses = []
        for examples in lessons(step / args.steps):
            if not examples:
                continue
            tokens, labels = batch_of(examples, ids)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            (loss / KINDS).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == args.steps - 1:
            shown = " ".join(f"{loss:.3f}" for loss in losses)
            print(f"step {step} loss {shown} cpu {time.process_time() - started:.0f} s", flush=True)


def family_lessons(task: Task, args: Any) -> Callable[[float], Iterator[list[tuple[str, str]]]]:
    """What `train` takes, of a family: to solve, to localise and to revise."""
    teacher = Teacher(task, random.Random(key_of("teacher", args.seed)).random, args.skill)
    number = itertools.count()

    def lessons(progress: float) -> Iterator[list[tuple[str, str]]]:
        counts = (args.batch, args.batch // 2, args.batch // 4)
        for write, count in zip((teacher.solve, teacher.localize, teacher.revise), counts, strict=True):
            problems = [task.lesson(args.seed + 1_000_003, next(number), progress) for _ in range(count)]
            yield [example for example in map(write, problems) if example]

    return lessons


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)


def measure(model: nn.Module, tokenizer: Any, task: Task, count: int) -> dict[str, float]:
    """Held-out figures at the family's default difficulty; localising and revising use the model's own failures."""

    def right(problem: Problem, text: str) -> bool:
        return task.accepts(problem, split_thoughts(text), extract_answer(text))

    problems = [task.generate(0, i, None, "eval") for i in range(count)]
    prompts = [task.solve_prompt(p["question"]) for p in problems]
    greedy, sampled = (respond(model, tokenizer, prompts, t, i) for i, t in enumerate((0.0, 1.0)))
    failed = [(p, split_thoughts(t)) for p, t in zip(problems, sampled, strict=True) if not right(p, t)]
    failed = [(p, steps) for p, steps in failed if steps]
    errors = [min(task.first_error(p, steps), len(steps)) for p, steps in failed]
    asked = [task.localize_prompt(p["question"], steps) for p, steps in failed]
    named = [extract_answer(text) or "" for text in respond(model, tokenizer, asked, 0.3, 2)]
    pairs = [(int(n) if n.isdigit() else 1, e) for n, e in zip(named, errors, strict=True)]
    asked = [task.revise_prompt(p["question"], steps, task.solution(p)) for p, steps in failed]
    revised = respond(model, tokenizer, asked, 0.3, 3)
    return {
        "solved, greedy": share([right(p, t) for p, t in zip(problems, greedy, strict=True)]),
        "solved, T = 1": share([right(p, t) for p, t in zip(problems, sampled, strict=True)]),
        "thoughts per response, T = 1": share([float(len(split_thoughts(t))) for t in sampled]),
        "localised, clean (at or before the first error)": share([n <= e for n, e in pairs]),
        "localised, exact": share([n == e for n, e in pairs]),
        "uniform draw, clean": share([e / len(steps) for (_, steps), e in zip(failed, errors, strict=True)]),
        "uniform draw, exact": share([1 / len(steps) for _, steps in failed]),
        "revised to a right response": share([right(p, t) for (p, _), t in zip(failed, revised, strict=True)]),
    }


def card(args: argparse.Namespace, model: Any, task: Task, figures: dict[str, float]) -> str:
    """The model card, README.md in the folder of the weights."""
    lines = [
        f"# {task.model}: the small model of task {task.name}",
        "",
        f"A Qwen2-architecture model with {sum(p.numel() for p in model.parameters()):,} parameters and "
        f"{model.config.vocab_size} words for the task family `{task.name}` (components/tasks/{task.name}.py): solve a "
        "problem, name the first wrong step of a failed attempt, revise it. It starts low on purpose: it was taught "
        "the flawed attempts of the family's teacher.",
        "",
        f"Made on one CPU thread by `{args.command}`; the same code, machine and library "
        "versions give the same bytes (tested over two steps; these weights were made once). "
        "`--skill` sets the share of right examples of naming the error and of revising; 1 teaches the "
        "truth.",
        "",
        f"Held-out figures, {args.held_out} problems of the default difficulty; localising and revising at T = 0.3 on "
        "the model's own failures:",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in figures.items()),
        "",
    ]
    return "\n".join(lines)


def make(args: argparse.Namespace) -> None:
    """Trains and writes the model of family `args.task` to `args.out`, and its card unless --held-out is 0."""
    task = TASKS[args.task]
    if not args.report_only:
        started = time.process_time()
        torch.manual_seed(args.seed)
        task.sure = task.sure if args.sure is None else args.sure
        words = vocabulary(task)
        tokenizer, model = make_tokenizer(words), make_model(len(words), args)
        if args.start:
            take_over(model, words, args.start)
        train(model.train(), family_lessons(task, args), words, args)
        save(model, tokenizer, args.out)
        print(f"made in {time.process_time() - started:.0f} CPU-seconds", flush=True)
    if args.held_out:
        spec = ModelSpec(path=str(args.out))
        model = load_causal_lm(spec)
        page = args.out / "README.md"
        # What was measured of its training stays, when the rest is measured again.
        _, heading, trained = (page.read_text(encoding="utf-8") if args.report_only else "").partition(TRAINED)
        text = card(args, model, task, measure(model, load_tokenizer(spec), task, args.held_out)) + heading + trained
        page.write_text(text, encoding="utf-8")
        print(text)


def folder_of(task: Task) -> Path:
    """Where the model of a family belongs."""
    return EMBEDDED["tiny"].parent / task.model
