"""Which modules hold what may be experts, by their parameters and names alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable

from torch import nn

from hexa_fx.torch_private import _ConvNd

CONVOLUTIONS = (_ConvNd,)


def may_hold_experts(path: str, module: nn.Module) -> bool:
    """Whether stacked or listed matrices of the module, or its name, suggest experts."""
    own = list(module.parameters(recurse=False))
    frozen = [b for b in module.buffers(recurse=False) if b.is_floating_point() and b.dim() == 3 and min(b.shape) > 1]
    stacked = any(p.dim() >= 3 and sum(size > 1 for size in p.shape) > 1 for p in own)
    if (len(frozen) > 1 or stacked) and not isinstance(module, CONVOLUTIONS):
        return True
    if "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower():
        return any(True for _ in module.parameters())
    if sum(p.dim() == 2 for p in own) >= 2 and not type(module).__module__.startswith("torch."):
        return True  # bare matrices, each possibly of all experts
    several = isinstance(module, (nn.ParameterList, nn.ParameterDict)) and len(module) > 1
    return several or _is_list_of_alikes(module)


def holds_numbered(module: nn.Module) -> bool:
    """Whether some children have names that differ in one number and matrices of the same shapes, as ``ffn_0``, ``ffn_1``, ..."""
    alike: Counter[Hashable] = Counter()
    numbered = [(name, child) for name, child in module.named_children() if any(map(str.isdigit, name))]
    for name, child in numbered if len(numbered) > 2 else ():
        shapes = tuple((n, tuple(p.shape)) for n, p in child.named_parameters())
        if any(len(shape) == 2 for _, shape in shapes) and not isinstance(child, nn.Embedding):
            alike.update((name[: at.start()], name[at.end() :], shapes) for at in re.finditer(r"\d+", name))
    return max(alike.values(), default=0) > 2  # two may be layers


def _is_list_of_alikes(module: nn.Module) -> bool:
    """Whether the children are numbered (or in a dictionary) and have the same parameters, as experts do, but layers too."""
    children = list(module.named_children())
    numbered = all(name.isdigit() or name.rpartition("_")[2].isdigit() for name, _ in children)
    if len(children) < 2 or not (numbered or isinstance(module, nn.ModuleDict)):
        return False
    shapes = {tuple((n, tuple(p.shape)) for n, p in child.named_parameters()) for _, child in children}
    tables = all(isinstance(child, nn.Embedding) for _, child in children)  # codebooks, or one for each feature
    return len(shapes) == 1 and shapes != {()} and not tables


def is_one_stack(module: nn.Module) -> bool:
    """Whether the module is one stacked weight, such as a projection of all experts."""
    return not any(True for _ in module.children()) and sum(p.dim() >= 3 for p in module.parameters()) == 1
