"""Loads tokenizers and models, with errors that name the next step; transformers is imported when first needed."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import DataError, did_you_mean

# Name → folder of the models that come with the project; each belongs to a task family.
EMBEDDED = {folder.name: folder for folder in sorted(Path(__file__).parent.glob("tiny*"))}
LOCAL_ALTERNATIVE = "Use a local folder in Hugging Face layout, or the embedded model with model.path=tiny."
_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
HUB_SECONDS = 10.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def resolve_model_path(path: str) -> str:
    """Returns the embedded model's folder for "tiny"; existing folders, and hub names that exist, are unchanged.

    A job whose nodes have a copy of the model (`cluster.scratch`) says so in CREDITGRAPH_MODEL_COPY, as PATH=COPY.
    """
    original, _, copy = os.environ.get("CREDITGRAPH_MODEL_COPY", "").rpartition("=")
    if copy and path == original:
        return copy
    resolved = _named(path)
    if not Path(resolved).is_dir():
        _check_hub(path)
    return resolved


def _named(path: str) -> str:
    """`resolve_model_path` without a question to the hub."""
    folder = EMBEDDED[path] if path in EMBEDDED else Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.exists():
        raise DataError(f"model.path '{path}': expected a folder in Hugging Face layout, got a file.")
    # A hub name has at most one slash; anything else must be a folder.
    if path in EMBEDDED or path.startswith((".", "/", "~")) or path.count("/") > 1 or path == "":
        raise DataError(
            f"model.path '{path}': expected an existing folder, a hub name 'owner/name', or 'tiny', but {folder} does "
            "not exist."
        )
    return path


def cached_file(model: str, name: str) -> Path | None:
    """A file of a hub model in the local cache; None where it is not there, or no hub client is installed."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        file = try_to_load_from_cache(model, name)
    except ValueError:  # no name of a hub model
        return None
    return Path(file) if isinstance(file, str) else None


def check_folder(path: str) -> None:
    """Raises DataError for a model that is not embedded, no folder with its files, and no name of a hub's form."""
    folder = Path(_named(path))
    if folder.is_dir():
        _check_config(folder)
        _check_tokenizer(folder)


def _check_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise DataError(
            f"model folder {folder}: no config.json; expected a folder written by save_pretrained. Correct model.path."
        )


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(
            f"model folder {folder}: expected the tokenizer that the model was trained with, but there is none of "
            f"{', '.join(_TOKENIZER_FILES[:3])}, …. Copy its files into the folder or run tokenizer.save_pretrained."
        )


@cache
def _check_hub(name: str) -> None:
    """Asks the hub once for a model that is not in the local cache.

    transformers would ask for each of its files, each several times, and log every attempt.

    Raises:
        DataError: there is no such model, it may not be read, or the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE or cached_file(name, "config.json"):
        return
    retries = logging.getLogger("huggingface_hub.utils._http")
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except Exception as error:  # the hub client and its HTTP library each raise their own types
        raise _failure("description", name, error) from None
    finally:
        retries.setLevel(level)


def load_config(spec: ModelSpec) -> Any:
    """The model's transformers configuration."""
    from transformers import AutoConfig

    path = resolve_model_path(spec.path)
    if Path(path).is_dir():
        _check_config(Path(path))
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _failure("configuration", spec.path, error) from error


def load_tokenizer(spec: ModelSpec) -> Any:
    """The model's fast tokenizer."""
    from transformers import AutoTokenizer

    path = resolve_model_path(spec.path)
    if Path(path).is_dir():
        _check_tokenizer(Path(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=spec.trust_remote_code, use_fast=True)
    except Exception as error:  # the hub client, tokenizers and transformers each raise their own types
        raise _failure("tokenizer", spec.path, error) from error
    unknown = unknown_chat_settings(spec, tokenizer.chat_template)
    if unknown:
        raise DataError(unknown)
    tokenizer.chat_template_kwargs = dict(spec.chat_template_kwargs)  # read where prompts are made
    if not tokenizer.is_fast:
        raise DataError(f"model '{spec.path}': expected a fast tokenizer (tokenizer.json), got a slow one. Convert it.")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model '{spec.path}': the tokenizer has no end-of-text token. Set eos_token in tokenizer_config.json."
        )
    return tokenizer


def chat_template_at_hand(spec: ModelSpec) -> str | None:
    """The chat template of a model folder, or of a hub model in the local cache; None where neither has one."""
    folder = Path(_named(spec.path))
    for name in _TEMPLATE_FILES:
        file = folder / name if folder.is_dir() else cached_file(spec.path, name)
        if file is None or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if name.endswith(".jinja"):
            return text
        with suppress(ValueError, AttributeError):
            template = json.loads(text).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def unknown_chat_settings(spec: ModelSpec, template: Any) -> str:
    """A sentence on the first of `chat_template_kwargs` that the chat template never reads; "" if there is none.

    Chat templates ignore such a setting without a word. Named templates (a dictionary) are not looked into.
    """
    if not spec.chat_template_kwargs or not isinstance(template, str | None):
        return ""
    known: set[str] = set()
    if template:
        from jinja2 import Environment, meta

        try:
            known = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
        except Exception:  # a template with an extension of its own
            return ""
    for name in spec.chat_template_kwargs:
        if name not in known:
            found = f"reads {', '.join(sorted(known))}" if template else "does not exist"
            return (
                f"model.chat_template_kwargs.{name}: the chat template of '{spec.path}' {found}, and would ignore it."
                f"{did_you_mean(name, known)} Remove it with '~model.chat_template_kwargs.{name}', or choose another "
                "model."
            )
    return ""


def load_causal_lm(spec: ModelSpec, device: str | torch.device = "cpu") -> Any:
    """The model in evaluation mode, parameters in `spec.dtype`, on `device`."""
    from transformers import AutoModelForCausalLM

    config = _causal_config(spec)
    path = check_weight_files(spec)
    try:
        with _quiet_unless_watched():
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, spec.dtype),
                trust_remote_code=spec.trust_remote_code,
                use_safetensors=True,  # other files are pickles, which can run code
            )
    except Exception as error:  # safetensors, the hub client and remote code each raise their own types
        raise _failure("weights", spec.path, error) from error
    return model.to(device).eval()


def load_token_classifier(spec: ModelSpec, device: str | torch.device = "cpu") -> Any:
    """A token classifier in evaluation mode, such as a process reward model; DataError for a model without its head."""
    from transformers import AutoModelForTokenClassification

    path = check_weight_files(spec)
    try:
        with _quiet_unless_watched():
            model, info = AutoModelForTokenClassification.from_pretrained(
                path,
                dtype=getattr(torch, spec.dtype),
                trust_remote_code=spec.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # safetensors, the hub client and remote code each raise their own types
        raise _failure("token classifier", spec.path, error) from error
    if info["missing_keys"]:
        raise DataError(
            f"model '{spec.path}': expected a token classifier, but {len(info['missing_keys'])} of its weights are "
            f"missing, first '{min(info['missing_keys'])}'. Train one (TRL's PRMTrainer makes them), or name another."
        )
    return model.to(device).eval()


def empty_causal_lm(spec: ModelSpec) -> Any:
    """The model without weights: parameters in `spec.dtype` on the meta device, buffers on the CPU."""
    from transformers import AutoModelForCausalLM

    config = _causal_config(spec)
    check_weight_files(spec)
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    # Not `torch.device("meta")`, which would leave buffers without their values too.
    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, spec.dtype), trust_remote_code=spec.trust_remote_code
        )
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return model.eval()


def _causal_config(spec: ModelSpec) -> Any:
    """The configuration of a model that can be trained and sampled; DataError for any other."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(spec)
    # `in MODEL_FOR_CAUSAL_LM_MAPPING.keys()` would load the configurations of all families, for a second.
    if not spec.trust_remote_code and MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None:
        kind = getattr(config, "model_type", "unknown")
        raise DataError(f"model '{spec.path}': expected a causal language model of transformers, got type '{kind}'.")
    check_context(spec, config)
    return config


def check_weight_files(spec: ModelSpec) -> str:
    """Returns the resolved path; raises DataError for a folder without safetensors files, pickles among others."""
    path = resolve_model_path(spec.path)
    if not Path(path).is_dir() or any(Path(path).glob("*.safetensors")):
        return path
    pickles = sorted(file.name for pattern in _PICKLES for file in Path(path).glob(pattern))
    if pickles:
        raise DataError(
            f"model folder {path}: expected weights as *.safetensors, got {pickles[0]}, a pickle, which can run code "
            "when it is read. Convert it where you trust it, with save_pretrained."
        )
    raise DataError(
        f"model folder {path}: expected a complete model, but it has no weights (*.safetensors). Copy them there or "
        "correct model.path."
    )


@contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """Disables transformers' progress bars without a terminal, where they only fill log files."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def context_length(spec: ModelSpec) -> int:
    """Most tokens in prompt plus response: `spec.max_context`, or when that is 0 what the graph and the model allow."""
    return check_context(spec, load_config(spec))


def check_context(spec: ModelSpec, config: Any) -> int:
    """Returns the context length; raises DataError when the model cannot hold `spec.max_context` tokens."""
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    own = next((limit for limit in limits if limit), spec.max_context or 1 << 30)
    if spec.max_context > own:
        raise DataError(
            f"model '{spec.path}': expected model.max_context ≤ {own}, the context of the model, got "
            f"{spec.max_context}. Lower it or use a model with a longer context."
        )
    return int(spec.max_context or min(own, spec.longest_row or own))


def _failure(what: str, path: str, error: Exception) -> DataError:
    folder = EMBEDDED.get(path) or Path(path).expanduser()
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if folder.is_dir():
        return DataError(
            f"model folder {folder}: its {what} cannot be loaded ({first}). Expected a folder in Hugging Face layout."
        )
    return DataError(
        f"model '{path}': its {what} cannot be loaded from the Hugging Face hub ({first}). Check the name, the network "
        f"and access rights. {LOCAL_ALTERNATIVE}"
    )
