"""Data, verifier, samplers and model of a configuration fit each other, or one sentence says what does not."""

import re

import pytest

from creditgraph.components.models.load import EMBEDDED, load_tokenizer
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, DataError, GraphError
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.compose.overrides import deep_merge

RECIPES = list(list_choices("recipe", [CONFIG_DIR]))
CODE = ("livecodebench", "livecodebench_v6", "opencodereasoning")


def problems_of(values):
    try:
        build_experiment(values)
    except GraphError as error:
        return error.problems
    return []


def problems(*overrides):
    return problems_of(compose(overrides))


def model_of(section):
    """The small model whose words the section is in; "" for data in plain words."""
    tasks = {entry.get("source") for entry in section.values()}
    return TASKS[tasks.pop()].model if len(tasks) == 1 and tasks <= set(TASKS) else ""


@pytest.fixture(scope="module")
def sections():
    """Data file → its section; those that wait for the user's own file are left out."""
    known = {name: compose([f"data={name}"])["data"] for name in list_choices("data", [CONFIG_DIR])}
    return {name: s for name, s in known.items() if not any(e.get("source") == "file" for e in s.values())}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_with_every_data_set_trains_or_says_why_not(recipe, sections):
    """A recipe is composed once; hydra merges the data file under what the recipe says of data."""
    values = compose([f"recipe={recipe}", "data=[]"])
    said = values.pop("data", None) or {}
    model = values["model"]
    embedded = model["path"] if model["path"] in EMBEDDED else ""
    # Every recipe of a Qwen3 model says whether it thinks.
    assert ("enable_thinking" in model.get("chat_template_kwargs", {})) == ("Qwen3" in model["path"])
    rredcot = "value" in values["nodes"] and values["nodes"]["value"]["use"] == "value.answer_likelihood"
    for name, section in sections.items():
        found = problems_of(values | {"data": deep_merge(section, said)})
        trains = (
            "train" in section
            and embedded == model_of(section)
            and not (rredcot and name in CODE)  # it scores a reference answer, and programs have none
        )
        assert trains == (not found), (name, found)
        for sentence in found:
            assert re.match(r"(data\.\w+|node '\w+'): .*(choose|set) .*\.$", sentence), sentence


@pytest.mark.parametrize(("recipe", "name"), [("srpo_olmo3_7b_instruct", "livecodebench"), ("grpo_qwen3_4b", "gsm8k")])
def test_hydra_merges_data_as_the_test_above(recipe, name, sections):
    said = compose([f"recipe={recipe}", "data=[]"]).get("data") or {}
    assert compose([f"recipe={recipe}", f"data={name}"])["data"] == deep_merge(sections[name], said)


def test_code_brings_its_verifier_and_thoughts_their_template():
    made = build_experiment(compose(["recipe=srpo_olmo3_7b_instruct", "data=livecodebench"]))
    assert made.graph["verifier"].use == "verifier.code"
    assert [made.data[entry]["template"] for entry in ("train", "eval")] == ["thought", "thought"]
    plain = build_experiment(compose(["recipe=gspo_qwen3_30b_a3b", "data=commonsense_qa"]))
    assert (plain.graph["verifier"].use, plain.data["train"]["template"]) == (
        "verifier.math",
        "chat",
    )  # it reads letters


def test_a_verifier_that_was_chosen_stays_and_is_refused_where_it_cannot_read_the_answers():
    chosen = ("recipe=gspo_qwen3_30b_a3b", "data=livecodebench", "verifier.use=verifier.math")
    first, second = problems(*chosen)
    assert first == (
        "data.train: its references are programs' tests, but node 'verifier' (verifier.math) reads boolean, choice, "
        "value; set verifier.use=verifier.code or data.train.answer_kind, or choose other data."
    )
    assert second.startswith("data.eval: its references are programs' tests")
    own = build_experiment(compose([*chosen[:2], "verifier.reward=all"]))
    assert (own.graph["verifier"].use, own.graph["verifier"].config.reward) == ("verifier.code", "all")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["data.train.answer="],
            "data.train: it has no reference answers, but node 'verifier' (verifier.math) reads them; set "
            "data.train.answer=COLUMN.",
        ),
        (
            ["sampler.mode=thought"],
            "data.train: 'sampler' samples thought by thought, but template 'chat' does not ask for steps that "
            "end with </thought>; set data.train.template=thought, or sampler.mode=line (each line of a "
            "response is a thought), sentence or plain.",
        ),
        (
            ["evaluator.mode=thought"],
            "data.eval: 'evaluator' samples thought by thought, but template 'chat' does not ask for steps that "
            "end with </thought>; set data.eval.template=thought, or evaluator.mode=line (each line of "
            "a response is a thought), sentence or plain.",
        ),
        (["data.train.templat=chat"], "data.train.templat: unknown setting. Did you mean 'template'?"),
        (
            ["prompts.split=trian"],
            "node 'prompts': split 'trian' is not in the data section, which has train, eval; set prompts.split.",
        ),
        (
            ["data.train.answer_kind=code"],
            "data.train: answer_kind 'code' has no tests; set tests: livecodebench, or metadata: {tests: COLUMN}.",
        ),
    ],
)
def test_a_misfit_is_one_sentence(overrides, sentence):
    assert problems("recipe=gspo_qwen3_30b_a3b", "data=gsm8k", *overrides) == [sentence]


@pytest.mark.parametrize(
    ("verifier", "fits"),
    [
        (["verifier.use=verifier.external"], True),
        (["verifier.use=verifier.regex", "verifier.compare=false"], True),
        (["verifier.use=verifier.regex"], False),
        (["verifier.use=verifier.choice"], False),
        (["verifier.use=verifier.composite", "verifier.parts=[{use: verifier.code}, {use: verifier.external}]"], True),
        (["verifier.use=verifier.composite", "verifier.parts=[{use: verifier.code}, {use: verifier.math}]"], False),
    ],
)
def test_which_verifiers_read_tests_of_programs(verifier, fits):
    assert (problems("recipe=gspo_qwen3_30b_a3b", "data=livecodebench", *verifier) == []) == fits


COMMANDS = re.findall(r"`creditgraph train ([^`]+)`", (CONFIG_DIR.parents[1] / "docs" / "recipes.md").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_of_recipes_passes_its_check(command):
    assert problems(*command.split()) == []


@pytest.mark.parametrize(
    ("data", "verifier", "fits"),
    [
        ({"answer": "", "metadata": {"tests": "t"}, "answer_kind": "code"}, "verifier.code", True),
        ({"answer": "", "metadata": {"tests": "t"}}, "verifier.code", True),
        ({"metadata": {"choices": "c"}, "answer_kind": "choice"}, "verifier.choice", True),
        ({"answer": ""}, "verifier.external", True),
        ({}, "verifier.choice", False),
        ({"answer_kind": "boolean"}, "verifier.boolean", True),
    ],
)
def test_data_of_ones_own(data, verifier, fits):
    entry = {"source": "file", "path": "rows.jsonl", "template": "chat", **data}
    values = compose(["recipe=grpo_qwen3_4b", f"verifier.use={verifier}"])
    found = problems_of(values | {"data": {"train": entry, "eval": entry}})
    assert (found == []) == fits
    if not fits:
        assert "set verifier.use=verifier.math or data.train.answer_kind" in found[0]


def test_a_setup_needs_no_recipe():
    made = build_experiment(compose(["graph=gspo", "setup=math_ratio", "model=qwen3_1_7b"]))
    assert (made.model.path, made.graph["prompts"].config.batch) == ("Qwen/Qwen3-1.7B", 128)


# --- the thinking switch ---


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A model folder with the embedded model's tokenizer and a chat template that can think."""
    tokenizer = load_tokenizer(ModelSpec())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_switch_reaches_every_prompt(folder):
    from creditgraph.components.text import templates

    for thinking in (True, False):
        tokenizer = load_tokenizer(ModelSpec(path=str(folder), chat_template_kwargs={"enable_thinking": thinking}))
        chat = {"template": "chat"}
        for text in (
            templates.solve_prompt("chat", "Q", tokenizer),
            templates.localize_prompt(chat, "Q", ["a"], tokenizer),
            templates.retry_prompt(chat, "Q", ["a"], tokenizer, "plain"),
            templates.critique_prompt(chat, "Q", ["a"], True, tokenizer, "plain"),
        ):
            assert text.endswith("assistant\n" if thinking else "<think>\n\n</think>\n\n")


def test_a_setting_that_the_chat_template_ignores_is_refused(folder):
    wrong = {"enable_thinkin": False}
    sentence = (
        f"model.chat_template_kwargs.enable_thinkin: the chat template of '{folder}' reads add_generation_prompt, "
        "enable_thinking, messages, and would ignore it. Did you mean 'enable_thinking'? Remove it with "
        "'~model.chat_template_kwargs.enable_thinkin', or choose another model."
    )
    with pytest.raises(DataError) as error:
        load_tokenizer(ModelSpec(path=str(folder), chat_template_kwargs=wrong))
    assert str(error.value) == sentence
    changed = "model.chat_template_kwargs.enable_thinkin=false"
    assert problems("recipe=toy_grpo", f"model.path={folder}", changed) == [sentence]
    with pytest.raises((ConfigError, DataError), match="does not exist, and would ignore it"):
        load_tokenizer(ModelSpec(chat_template_kwargs={"enable_thinking": False}))
