"""What is audited: functions of any library, called by the names of their parameters."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Floats
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean

# What a parameter of a function is given, by the names that it has in the trainers of this field.
COLUMNS: dict[str, tuple[str, ...]] = {
    "rewards": ("rewards", "reward", "scores", "score", "outcome_rewards", "sequence_rewards", "r"),
    "token_rewards": ("token_level_rewards", "token_rewards", "token_level_scores"),
    "groups": (
        "groups", "group", "group_ids", "group_id", "index", "uid", "uids", "prompt_ids", "prompt_uid", "prompt_index",
    ),
    "mask": (
        "mask", "masks", "response_mask", "response_masks", "loss_mask", "loss_masks", "completion_mask", "action_mask",
        "token_mask", "eos_mask",
    ),
    "lengths": ("lengths", "length", "response_lengths", "response_length", "completion_lengths", "seq_lens"),
    "valid": ("valid", "is_valid", "valid_mask", "keep", "row_mask", "accepted"),
    "truncated": ("truncated", "is_truncated", "overlong", "truncations"),
    "turns": ("turns", "turn_ids", "turn_id", "step_ids"),
    "turn_rewards": ("turn_rewards", "step_rewards", "process_rewards"),
    "values": ("values", "value", "critic_values", "token_values", "state_values", "old_values", "value_preds"),
    "next_values": ("next_values", "values_next", "next_value"),
    "last_values": ("last_values", "last_value", "bootstrap_value", "bootstrap_values"),
    "dones": ("dones", "done", "terminals", "terminated", "is_last"),
    "baselines": ("baselines", "baseline", "reward_baselines"),
    "sum_pi_squared": ("sum_pi_squared",),
    "group_size": (
        "group_size", "num_generations", "n_samples", "n_samples_per_prompt", "num_generations_per_prompt", "rollout_n",
    ),
}  # fmt: skip
LOSS_COLUMNS: dict[str, tuple[str, ...]] = {
    "logprobs": ("logprobs", "log_probs", "log_prob", "logp", "new_logprobs", "per_token_logps", "curr_logprobs"),
    "old_logprobs": (
        "old_logprobs", "old_log_probs", "old_log_prob", "old_logp", "old_per_token_logps", "prev_logprobs",
        "behavior_logprobs",
    ),
    "reference_logprobs": (
        "reference_logprobs", "ref_logprobs", "ref_log_probs", "ref_log_prob", "ref_logp", "ref_per_token_logps",
        "reference_policy_logprobs",
    ),
    "advantages": ("advantages", "advantage", "adv", "advs"),
    # slime's losses take the negative log ratio in place of the two log-probs.
    "ppo_kl": ("ppo_kl",),
}  # fmt: skip
CRITIC = frozenset({"values", "next_values", "last_values", "baselines"})
"""columns of a critic, which knows of whatever is added to the rewards"""
GAMMA = ("gamma", "discount", "discount_factor")
LAMBDA = ("lam", "lambd", "lambda_", "lmbda", "gae_lambda", "lam_actor")
GIVEN = {**dict.fromkeys(GAMMA, 1.0), **dict.fromkeys(LAMBDA, 0.95)}
"""values of required settings that have one everybody knows"""
FORMS = {"mask": ("bool", "int64", "float32"), "dones": ("bool", "int64", "float32"), "groups": ("", "numpy", "names")}
"""how a column may be given: the first form that the function takes"""
_KNOWN = {name: column for columns in (COLUMNS, LOSS_COLUMNS) for column, names in columns.items() for name in names}


class AuditError(ConfigError):
    """A target that cannot be audited."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """How a function is called.

    Attributes:
        columns: parameter → column it is given.
        settings: parameter → value, those that have a default or were set.
        arrays: "torch", "numpy" or "list": what arrays it is given.
    """

    columns: Mapping[str, str]
    settings: Mapping[str, Any]
    arrays: str

    @property
    def told(self) -> str:
        """The parameters with their columns, for the reader."""
        named = [f"{p}: {c}" if p != c else p for p, c in self.columns.items()]
        return ", ".join(named + [f"{n}={v}" for n, v in self.settings.items() if n in GIVEN])


@dataclass(frozen=True, kw_only=True)
class AdvantageTarget:
    """A function from rewards to advantages.

    Attributes:
        name: as the user named it.
        call: returns the advantages of a batch, [N] or [N, T], of any array type; may raise.
        reads: columns that it is given.
        settings: its settings with their values.
        with_settings: the same target with other settings, or None if it has none.
        declares: check → why its failure is wanted.
        note: how it was bound, for the reader.
        touched: parameters whose values the function has changed in place so far.
        forms: parameter → the form of `FORMS` that it takes, once it was called.
    """

    name: str
    call: Callable[[Batch], Any]
    reads: frozenset[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    with_settings: Callable[[Mapping[str, Any]], AdvantageTarget] | None = None
    declares: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    touched: set[str] = field(default_factory=set)
    forms: dict[str, str] = field(default_factory=dict)

    @property
    def has_critic(self) -> bool:
        """Whether it is given values, which are its baseline."""
        return bool(self.reads & CRITIC)

    @property
    def undiscounted(self) -> AdvantageTarget:
        """The same target with γ = 1, if it has such a setting."""
        names = [name for name in GAMMA if self.settings.get(name, 1.0) != 1.0]
        return self.with_settings({names[0]: 1.0}) if names and self.with_settings else self

    def advantages(self, batch: Batch) -> Floats:
        """float64 [N, T]; one number per row is spread over the row's chosen tokens.

        Raises AuditError for a result of another shape.
        """
        result = as_numpy(self.call(batch))
        if result.shape == (len(batch),) or result.shape == (len(batch), 1):
            return np.where(batch.mask, result.reshape(-1, 1), 0.0)
        if result.shape != (len(batch), batch.width):
            raise AuditError(
                f"{self.name}: expected advantages of shape [{len(batch)}] (a row each) or [{len(batch)}, "
                f"{batch.width}] (a token each), got {list(result.shape)}."
            )
        return result


def as_numpy(value: Any) -> Floats:
    """float64 array of a tensor, an array or nested lists; of a tuple, its first part (advantages, returns)."""
    if isinstance(value, tuple):
        value = value[0]
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise AuditError(
            f"expected advantages as a tensor, an array or lists of numbers, got {type(value).__name__}: {error}"
        ) from error


def bind(function: Callable[..., Any], name: str, given: Mapping[str, str], settings: Mapping[str, Any]) -> Binding:
    """Decides what each parameter of a function is given.

    Args:
        function: the function.
        name: as the user named it.
        given: parameter → column, from the user (`--bind`).
        settings: parameter → value, from the user (`-s`).

    Raises:
        AuditError: a required parameter is of no known name, or a name given is no parameter.
    """
    parameters = inspect.signature(function).parameters
    plain = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in plain]
    everything = {*COLUMNS, *LOSS_COLUMNS}
    for wanted in [*given, *settings]:
        if wanted not in names:
            raise AuditError(f"{name}: has no parameter '{wanted}'.{did_you_mean(wanted, names)}")
    for parameter, column in given.items():
        if column not in everything:
            raise AuditError(f"--bind {parameter}={column}: no such column.{did_you_mean(column, everything)}")
    columns: dict[str, str] = {}
    values: dict[str, Any] = {}
    unknown = []
    for p in plain:
        column = given.get(p.name, _KNOWN.get(p.name, ""))
        if p.name in settings:
            values[p.name] = settings[p.name]
        elif column and (p.name in given or p.default is p.empty or p.default is None):
            columns[p.name] = column
        elif p.default is not p.empty or p.name in GIVEN:
            values[p.name] = GIVEN.get(p.name) if p.default is p.empty else p.default
        else:
            unknown.append(p.name)
    if unknown:
        known = ", ".join(sorted(_KNOWN))
        raise AuditError(
            f"{name}({', '.join(names)}): nothing is known of {', '.join(unknown)}. Known names are {known}. Say what "
            f"it is with --bind {unknown[0]}=COLUMN (one of {', '.join(sorted(everything))}), or give a value with "
            f"-s {unknown[0]}=VALUE."
        )
    return Binding(columns=columns, settings=values, arrays=_arrays(function, parameters))


def _arrays(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> str:
    """What arrays a function expects, by its annotations, else by what its module has imported."""
    text = " ".join(str(p.annotation) for p in parameters.values() if p.annotation is not p.empty)
    if "Tensor" in text:
        return "torch"
    if "ndarray" in text:
        return "numpy"
    if "list[" in text.lower() or "sequence[" in text.lower():
        return "list"
    own = inspect.unwrap(function)
    return "torch" if "torch" in getattr(own, "__globals__", {}) else "numpy"


def column_of(batch: Batch, column: str, arrays: str, annotation: Any = None, form: str = "") -> Any:
    """A column of a batch as the function expects it, in one of the forms of `FORMS`; its own copy."""
    if column == "group_size":
        return int(batch.group_sizes.max(initial=1))
    value = np.array(getattr(batch, column))
    if column == "groups" and form == "names":  # verl's uid
        return np.array([f"prompt {group}" for group in value], dtype=object)
    if column in FORMS and form not in ("", "numpy", "bool"):
        value = value.astype(form)
    # verl's index is an array of objects in a function of tensors.
    if arrays == "numpy" or form == "numpy" or "ndarray" in str(annotation):
        return value
    if arrays == "list":
        return value.tolist()
    import torch

    tensor = torch.from_numpy(value)
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def call_in_a_form(call: Callable[[Mapping[str, str]], Any], columns: Mapping[str, str], forms: dict[str, str]) -> Any:
    """Calls a function with its arguments in forms that it takes.

    Args:
        call: calls it, given parameter → form.
        columns: parameter → column.
        forms: parameter → form that a call took before; filled by the first call that does not raise.
    """
    options: Mapping[str, Sequence[str]] = {p: FORMS[column] for p, column in columns.items() if column in FORMS}
    if forms or not options:
        return call(forms)
    first: Exception | None = None
    for choice in itertools.product(*options.values()):
        tried = dict(zip(options, choice, strict=True))
        try:
            result = call(tried)
        except AuditError:
            raise
        except Exception as error:  # what a function from outside raises is its refusal
            first = first or error
            continue
        forms.update(tried)
        return result
    assert first is not None
    raise first


def advantage_function(
    function: Callable[..., Any], name: str, given: Mapping[str, str], settings: Mapping[str, Any]
) -> AdvantageTarget:
    """The target of a plain function."""
    binding = bind(function, name, given, settings)
    parameters = inspect.signature(function).parameters
    touched: set[str] = set()
    forms: dict[str, str] = {}

    def given_values(batch: Batch, forms: Mapping[str, str]) -> dict[str, Any]:
        return {
            p: column_of(batch, c, binding.arrays, parameters[p].annotation, forms.get(p, ""))
            for p, c in binding.columns.items()
        }

    def call(batch: Batch) -> Any:
        def once(forms: Mapping[str, str]) -> Any:
            values = given_values(batch, forms)
            result = function(**values, **copy.deepcopy(dict(binding.settings)))
            before = given_values(batch, forms)
            touched.update(p for p in values if not np.array_equal(np.asarray(values[p]), np.asarray(before[p])))
            return result

        return call_in_a_form(once, binding.columns, forms)

    def again(changed: Mapping[str, Any]) -> AdvantageTarget:
        return advantage_function(function, name, given, {**settings, **changed})

    return AdvantageTarget(
        name=name,
        call=call,
        reads=frozenset(binding.columns.values()),
        settings=binding.settings,
        with_settings=again,
        declares=dict(getattr(function, "audit_declares", {})),
        note=f"{binding.told} as {binding.arrays} arrays",
        touched=touched,
        forms=forms,
    )


def instance(cls: type, name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """What an instance of a class is called by: `forward` of a torch module, `__call__` of another.

    Args:
        cls: the class.
        name: as the user named it.
        settings: of its constructor, from the user (`-s`).

    Raises:
        AuditError: it cannot be made of these settings, or is not called.
    """
    try:
        made = cls(**settings)
    except Exception as error:  # a constructor from outside may fail in any way
        raise AuditError(
            f"{name}{inspect.signature(cls)}: making one with {dict(settings) or 'no settings'} raised "
            f"{type(error).__name__}: {error}. Give its settings with -s NAME=VALUE."
        ) from error
    call = getattr(made, "forward", made)
    if not callable(call):
        raise AuditError(f"{name}: has neither forward nor __call__; name a function, or wrap one in a file.")
    function: Callable[..., Any] = call
    return function


def is_loss(function: Callable[..., Any], given: Mapping[str, str]) -> bool:
    """Whether a function takes log-probs and advantages."""
    columns = {given.get(name, _KNOWN.get(name, "")) for name in inspect.signature(function).parameters}
    return "advantages" in columns and bool({"logprobs", "ppo_kl"} & columns)


def load_function(target: str) -> Callable[..., Any]:
    """The function of "package.module:name" or "file.py:name"; raises AuditError with what is there."""
    place, _, name = target.rpartition(":")
    if not place:
        raise AuditError(f"'{target}': expected package.module:function or file.py:function.")
    if place.endswith(".py"):
        file = Path(place)
        if not file.exists():
            raise AuditError(f"{place}: no such file.")
        spec = importlib.util.spec_from_file_location(f"audited_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        load: Callable[[], Any] = lambda: spec.loader.exec_module(module)  # type: ignore[union-attr] # noqa: E731
    else:
        module = None
        load = lambda: importlib.import_module(place)  # noqa: E731
    try:
        module = load() or module
    except Exception as error:  # a module from outside may fail in any way
        raise AuditError(f"{place}: importing it failed with {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    found = found if isinstance(found, type) else getattr(found, "forward", found)  # a torch module
    if not callable(found):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise AuditError(f"{place}: has no function '{name}'.{did_you_mean(name, functions)}")
    function: Callable[..., Any] = found
    return function
