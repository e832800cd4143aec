"""Makes a model and example inputs from a name on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.integrations.published import PUBLISHED
from hexa_fx.integrations.tiny_models import LARGEST_WHOLE, auto_class, built, default_config, tiny_config

EXPECTED = (
    "expected MODULE:FACTORY or FILE.py:FACTORY (a function that returns a model and example inputs), the model type of a "
    "transformers architecture such as mixtral, or a folder with a config.json"
)


def load(target: str) -> tuple[nn.Module, Any]:
    """The model and example inputs behind a target.

    Args:
        target: ``module:factory``, ``file.py:factory``, a transformers model type, or a folder with a config.json. A model type
            or configuration is built with random weights and tiny widths; a folder's keeps its number of layers and experts.

    Raises:
        InputError: there is no such target; the message says what is expected.
    """
    if ":" in target:
        return _from_factory(target)
    if _is_folder(target):
        return built(tiny_config(_config(target), whole=True), target, largest=LARGEST_WHOLE)
    return built(tiny_config(_default_config(target)), target)


def load_whole(target: str) -> tuple[nn.Module, Any]:
    """As `load`, but a model type keeps all layers and experts of its default configuration too."""
    if ":" in target or _is_folder(target):
        return load(target)
    return built(tiny_config(_default_config(target), whole=True), target, largest=LARGEST_WHOLE)


def full_size(target: str) -> nn.Module | None:
    """The model at its configured widths on the meta device, which takes no memory; None for a factory.

    A model type has transformers' default configuration.

    Raises:
        InputError: as `load`.
    """
    if ":" in target:
        return None
    config = _config(target) if _is_folder(target) else _default_config(target)
    with torch.device("meta"):
        made: nn.Module = auto_class(config, target).from_config(config)
    return made


def default_sizes(target: str) -> str:
    """Layers and sizes of transformers' default configuration of a model type, in words; empty for any other target."""
    if ":" in target or _is_folder(target):
        return ""
    text = _default_config(target).get_text_config()
    names = {
        "layers": ("num_hidden_layers",),
        "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
        "hidden size": ("hidden_size",),
        "expert size": ("moe_intermediate_size", "intermediate_size"),
    }
    found = {
        what: next((getattr(text, key) for key in keys if hasattr(text, key)), None) for what, keys in names.items()
    }
    return ", ".join(f"{what} {value}" for what, value in found.items() if isinstance(value, int))


def name_of(target: str) -> str:
    """A short name for headings."""
    return Path(target).resolve().name if _is_folder(target) else target


# -- factories ---------------------------------------------------------------------------------------------------------


def _from_factory(target: str) -> tuple[nn.Module, Any]:
    module_name, _, name = target.rpartition(":")
    if not (module_name and name):
        raise InputError(f"{target!r} names no function of a file or module; {EXPECTED}")
    try:
        made = _made(target, module_name, name)
    except SystemExit as error:
        raise InputError(
            f"{target!r} ended the program (exit status {error.code}); have nothing but definitions where it is imported, and "
            "parse arguments under `if __name__ == '__main__':`"
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        parts = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else ""
        what = f"({parts})" if parts else f"a {type(made).__name__}"
        raise InputError(
            f"{target!r} returned {what}; expected (model, example_inputs), with several inputs in a tuple or dict of their own"
        )
    model, inputs = made
    return model, dict(inputs) if isinstance(inputs, Mapping) else inputs


def _made(target: str, module_name: str, name: str) -> Any:
    """What the factory returns. Errors of the user's own code are not caught."""
    module = _module(module_name, target)
    if not hasattr(module, name):
        raise InputError(f"{target!r}: {module_name} has no attribute {name!r}; {EXPECTED}")
    factory = getattr(module, name)
    if not callable(factory):
        raise InputError(
            f"{target!r} is of type {type(factory).__name__}; expected a function that returns (model, example_inputs)"
        )
    if not _takes_nothing(factory):
        raise InputError(f"{target!r} is called without arguments; give them defaults")
    return factory()


def _takes_nothing(factory: Any) -> bool:
    try:
        inspect.signature(factory).bind()
    except ValueError:  # of C code
        return True
    except TypeError:
        return False
    return True


def _module(name: str, target: str) -> Any:
    """The module of this name, or in this file, which finds others as it does under ``python``."""
    folder = str(Path(name).resolve().parent) if name.endswith(".py") else ""
    if folder not in sys.path:  # a console script does not search the working folder
        sys.path.insert(0, folder)
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # else the module is there, and imports another
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise InputError(f"{target!r}: {error}; {EXPECTED}") from error
            raise
    stem = Path(name).stem
    # A file may be called as a module is that others use, such as types.py: theirs stays.
    spec = importlib.util.spec_from_file_location(f"{stem} (a file)" if stem in sys.modules else stem, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise InputError(f"{target!r}: there is no file {name}; {EXPECTED}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- configurations ----------------------------------------------------------------------------------------------------


def _is_folder(target: str) -> bool:
    if target.endswith(".py"):
        raise InputError(
            f"{target!r} is a file: name a function of it that returns (model, example_inputs), {target}:FACTORY"
        )
    return Path(target).is_dir() or "/" in target or target.endswith(".json")


def _config(target: str) -> Any:
    path = Path(target)
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.is_file():
        raise InputError(
            f"{target!r}: there is no {file}. hexa-fx downloads nothing: give a folder that holds the model's config.json, "
            "or its model type, such as mixtral"
        )
    config_class = _transformers().AutoConfig
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: {_first_sentence(error)}; expected JSON") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(f"{file} has no 'model_type'; expected the config.json of a transformers model")
    try:
        return config_class.for_model(values.pop("model_type"), **values)
    except Exception as error:  # of the library's own checks
        raise InputError(f"{file}: {_first_sentence(error)}") from error


def _default_config(model_type: str) -> Any:
    try:
        return default_config(model_type)
    except InputError as error:
        if isinstance(error.__cause__, ImportError):
            raise
        published = {name.lower(): (name, kind) for name, (kind, _) in PUBLISHED.items()}.get(model_type.lower())
        if published is not None:
            raise InputError(
                f"{model_type!r} is a model of the type {published[1]}: name that, or a folder with its config.json. "
                f"`hexa-fx bench --like {published[0]}` times layers of its sizes"
            ) from error
        raise InputError(f"{error} {EXPECTED[0].upper()}{EXPECTED[1:]}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError("transformers is not installed; pip install '.[hf]'") from error
    return transformers


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split(". ")[0].split())[:300]
