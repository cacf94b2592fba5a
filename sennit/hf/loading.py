"""Loads a model and its tokenizer from a folder, from the Hugging Face hub, or the default one."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sennit.device import resolve_device
from sennit.errors import InvalidInput, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
CHOICES = "give a folder that transformers' save_pretrained wrote, or no model for SmolLM2-135M-Instruct"


def load(
    model: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a causal language model, ready for inference, and its tokenizer.

    Whether Sennit can run the model's architecture is not asked here: see :func:`sennit.hf.check_supported`.

    Args:
        model: a folder with ``config.json``, weights (``*.safetensors`` or ``pytorch_model*.bin``) and a tokenizer,
            read without any network; or the id of a model on the Hugging Face hub (``"org/name"``), fetched by
            transformers; None for SmolLM2-135M-Instruct (:func:`sennit.hf.smollm2.ensure`). A folder of that name
            goes before a hub id.
        dtype: of the weights; None for the one that they are stored in.
        device: where the weights go; the current CUDA device if there is one, otherwise the CPU.

    Raises:
        InvalidInput: ``dtype`` or ``device`` is not one, or the device is not there.
        ModelNotFound: there is no such folder or hub model, or a file of it is missing or damaged.
        UnsupportedModel: transformers itself does not know the architecture, or it is not a causal language model.
        FetchFailed: the default model could not be fetched.
    """
    target = resolve_device(device)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidInput("dtype", expected="a torch.dtype or None", got=repr(dtype))
    source, local = _resolve(model)
    with _quiet(bars=not local):
        config, tokenizer = _config_and_tokenizer(source, local)
        loaded = _model(source, local, config, dtype)
    return loaded.to(target), tokenizer


def _resolve(model: str | Path | None) -> tuple[str, bool]:
    """Return what to give to transformers, and whether it is a local folder."""
    if model is None:
        from sennit.hf import smollm2

        return str(smollm2.ensure()), True
    if not str(model).strip():
        raise InvalidInput("model", expected="a folder, a hub id or None", got=repr(model))
    folder = Path(os.path.expanduser(model))
    if os.path.exists(folder):  # unlike Path.exists, False for a name that no file system takes
        _check_folder(folder)
        return str(folder), True
    if isinstance(model, Path) or not HUB_ID.fullmatch(model):
        raise ModelNotFound(f"model: expected an existing folder, got {str(folder)!r}, which does not exist; {CHOICES}")
    return model, False


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelNotFound(f"model: expected a folder, got the file {str(folder)!r}; {CHOICES}")
    missing = [
        what
        for what, patterns in (
            ("config.json", ("config.json",)),
            (f"weights ({' or '.join(WEIGHTS)})", WEIGHTS),
            (f"tokenizer ({' or '.join(VOCABULARIES)})", VOCABULARIES),
        )
        if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern))
    ]
    if missing:
        has = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ModelNotFound(
            f"model: the folder {str(folder)!r} has no {' and no '.join(missing)} (it has {has}); save both parts into "
            "it with model.save_pretrained(folder) and tokenizer.save_pretrained(folder), or name another folder"
        )


def _config_and_tokenizer(source: str, local: bool) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    options = {"local_files_only": local, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except OSError as error:
        raise _not_found(source, local, error) from error
    except Exception as error:  # a wrong value in it raises whatever first trips over it
        raise UnsupportedModel(f"{source}: transformers cannot read its configuration: {_reason(error)}") from error
    if local and (Path(source) / "generation_config.json").is_file():
        try:  # the model's own loader would leave a damaged one out, and its stop tokens with it
            GenerationConfig.from_pretrained(source)
        except Exception as error:
            raise _not_found(source, local, error, what="its generation_config.json cannot be read: ") from error
    try:
        return config, AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise _not_found(source, local, error, what="its tokenizer cannot be read: ") from error


def _model(source: str, local: bool, config: Any, dtype: torch.dtype | None) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype or "auto",
            local_files_only=local,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise _not_found(source, local, error, what="its weights cannot be read: ") from error
    except RuntimeError as error:
        raise ModelNotFound(f"{source}: its weights do not fit its configuration: {_reason(error)}") from error
    except Exception as error:  # a wrong value in the configuration raises whatever first trips over it
        raise UnsupportedModel(f"{source}: transformers cannot load it: {_reason(error)}") from error
    # transformers fills these with random numbers and only logs it.
    if absent := sorted(info["missing_keys"]):
        raise ModelNotFound(
            f"{source}: {len(absent)} of its weights are in no file, {absent[0]} first; save or fetch the model again"
        )
    if unused := sorted(info["unexpected_keys"]):
        warnings.warn(
            f"{source}: {len(unused)} of its weights are not used by its configuration, {unused[0]} first", stacklevel=3
        )
    return loaded


def _not_found(source: str, local: bool, error: Exception, what: str = "") -> ModelNotFound:
    if local:
        return ModelNotFound(f"{source}: {what}{_reason(error)}; delete the folder and save or fetch the model again")
    return ModelNotFound(f"{source} is not a folder here, and not from the hub: {what}{_reason(error)}; {CHOICES}")


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".;")


@contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    """Silence transformers' log and, unless ``bars``, its progress bars; put both back afterwards."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
