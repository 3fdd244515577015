"""The table of docs/scaling.md: for each full-size recipe, the smallest number of GPUs on which it fits on paper."""

from collections.abc import Iterator
from pathlib import Path

from creditgraph.components.models.gpus import DEVICES
from creditgraph.pipeline.app.cluster.recipe_plan import RecipePlan, nearest
from creditgraph.pipeline.run.compose.choices import list_choices
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

DEVICE = DEVICES["h100"]
GPUS = 8  # that the search begins with


def recipe_plans(configs: Path) -> Iterator[tuple[str, RecipePlan | None]]:
    """Each full-size recipe with its plan; None where no layout of up to 512 GPUs fits."""
    for name in list_choices("recipe", [configs]):
        if not name.startswith("toy_"):
            experiment = build_experiment(compose([f"recipe={name}"]), name)
            if experiment.model.path != "tiny":
                yield name, nearest(experiment, DEVICE, GPUS)


def plan_table(configs: Path) -> str:
    """Markdown rows; recipes with the same plan share one."""
    rows: dict[str, list[str]] = {}
    for name, plan in recipe_plans(configs):
        rows.setdefault(row(plan), []).append(f"`{name}`")
    head = "| recipe | learner | GPUs | GB per GPU | s per iteration | settings |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(f"| {', '.join(names)} | {text} |" for text, names in rows.items())])


def row(plan: RecipePlan | None) -> str:
    """All columns but the first."""
    if plan is None:
        return "no learner shards it as it must, or it trains a second model | – | – | – | –"
    gpus = f"{plan.learner.layout.world} + {plan.engine_gpus}" if plan.engine_gpus else str(plan.gpus)
    learner = f"`{plan.training.kind}`{' LoRA' if plan.training.lora else ''}, {plan.learner.layout}"
    return f"{learner} | {gpus} | {plan.memory / 1e9:.0f} | {plan.seconds:.0f} | `{' '.join(plan.overrides)}`"
