"""The values that stages hand to each other: frozen dataclasses without behaviour.

capture -> `CapturedBlock` -> detect -> `MoEMatch` | `Refusal` -> rewrite -> `RewrittenBlock` -> runtime.

Sizes: T tokens, k experts per token, n = T*k routed rows, E experts, D model size, I expert intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.fx

Layout = Literal["nk", "kn"]
"""How a stacked weight lies in memory: ``nk`` is (E, out, in) as in nn.Linear, ``kn`` is (E, in, out)."""

Glu = Literal["none", "concat", "interleaved", "split"]
"""How gate and up are stored: as the two halves of one weight, as its even and odd rows, or as two weights."""


@dataclass(frozen=True)
class SourceLocation:
    """A place in the user's code."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return f"{text} `{self.code}`" if self.code else text


@dataclass(frozen=True)
class Refusal:
    """Why a block was left as it is: one sentence, and the line of the user's code behind it.

    ``settled``: whether it holds whatever the inputs are, and of the modules around the block too. ``elsewhere``: whether it only
    says that tokens are given to experts by code around the block.
    """

    path: str
    reason: str
    location: SourceLocation | None = None
    settled: bool = False
    elsewhere: bool = False

    def __str__(self) -> str:
        where = f" ({self.location})" if self.location else ""
        return f"{self.path}: {self.reason}{where}"


@dataclass(frozen=True)
class FfnSpec:
    """Everything static about a two-projection expert: ``y = act(x W1 + b1) W2 + b2``.

    Args:
        activation: a name of `hexa_fx.ops.activations.ACTIVATIONS`.
        glu: how gate and up are stored, ``none`` for an ungated expert.
        layout1: memory layout of W1 (and of W3 where ``glu == "split"``).
        layout2: memory layout of W2.
        params: the activation's own constants, e.g. (alpha, limit) of gpt-oss's clamped swiglu.
        recompute_h: keep only x for backward and compute h again there.
    """

    activation: str
    glu: Glu = "none"
    layout1: Layout = "nk"
    layout2: Layout = "nk"
    params: tuple[float, ...] = ()
    recompute_h: bool = False


@dataclass(frozen=True)
class PackedWeight:
    """Per-expert parameters that are read as one stacked weight.

    Args:
        name: attribute of the block under which the weight is reached.
        parts: for each part (one, or gate and up) the parameter path of every expert, relative to the block.
            Parts are concatenated along the first dimension of each expert's matrix or bias.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class InputGuard:
    """What the recording assumed about one input of the block. Anything else runs the original forward.

    Args:
        name: the argument.
        kind: a tensor, of which ``dtype`` and ``ndim`` count, or a constant, of which ``value`` counts.
        exact_dtype: the recorded code names this very dtype, so another floating-point one will not do.
        device: kind of device, if the recorded code asks for it.
        contiguous: whether the tensor was, if the recorded code asks how tensors lie in memory.
        requires_grad: whether the tensor did, if the recorded code asks which tensors do.
        last: size of the last dimension, if the rewritten block reads rows of that many numbers.
        filled: whether there has to be something in the tensor: of no tokens the recorded code gives something else.
    """

    name: str
    kind: Literal["tensor", "constant"]
    value: Any = None
    dtype: torch.dtype | None = None
    ndim: int | None = None
    exact_dtype: bool = False
    device: str | None = None
    contiguous: bool | None = None
    requires_grad: bool | None = None
    last: int | None = None
    filled: bool = False


@dataclass(frozen=True)
class PythonRead:
    """Something that the code of a recorded run read from Python, such as ``top_k`` of a config.

    Args:
        root: the module that it starts from, relative to the block; or the name of a Python module.
        steps: attributes, keys and places, up to the value.
        value: what was read, as `hexa_fx.isolation.read_values.snapshot` gives it.
        is_global: whether ``root`` is a Python module.
        scopes: paths of the modules whose code read it.
        location: where, of a value that cannot be checked.
    """

    root: str
    steps: tuple[Any, ...]
    value: Any
    is_global: bool = False
    scopes: frozenset[str] = frozenset({""})
    location: SourceLocation | None = None

    def __str__(self) -> str:
        return ".".join(map(str, (*([self.root] if self.root else []), *self.steps)))


@dataclass(frozen=True)
class ModuleAttribute:
    """An attribute that every run sets.

    Args:
        path: the module, relative to the block.
        name: of the attribute.
    """

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path or 'self'}.{self.name}"


@dataclass(frozen=True)
class Container:
    """A list, deque, dict or object, by the way in which code reaches it; another one may lie there in the next call.

    Args:
        root: a module, relative to the block; or, of a global, the name of the Python module that it belongs to.
        steps: the attribute or global, then attributes or keys of what lies in between.
        kind: its class.
        is_global: whether ``root`` is a Python module.
    """

    root: str
    steps: tuple[Any, ...]
    kind: type
    is_global: bool = False

    def __str__(self) -> str:
        return ".".join(map(str, (*([] if self.is_global else [self.root or "self"]), *self.steps)))


@dataclass(frozen=True)
class ContainerItem:
    """The end of a list or deque, or a key of a dict, where every run puts a result."""

    container: Container
    key: Any = None

    def __str__(self) -> str:
        return f"{self.container}[{self.key!r}]" if self.container.kind is dict else str(self.container)


@dataclass(frozen=True)
class ObjectAttribute:
    """An attribute of an object that is no module, such as a dispatcher, which every run sets.

    Args:
        way: in which the recorded code comes to the object.
        name: of the attribute.
    """

    way: Container
    name: str

    def __str__(self) -> str:
        return f"{self.way}.{self.name}"


Destination: TypeAlias = ModuleAttribute | ObjectAttribute | ContainerItem


@dataclass(frozen=True)
class AutocastDtypes:
    """Under which autocast a block was recorded, as dtypes of its results there.

    Args:
        results: by the autocast dtype and the dtypes of the inputs and of ``parameters``.
        parameters: paths of those that code does more with than multiply matrices.
        off: whether it holds without autocast, too.
    """

    results: Mapping[tuple[torch.dtype, ...], tuple[torch.dtype, ...]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    off: bool = True


@dataclass(frozen=True)
class Choice:
    """A call by which code chooses experts, or groups of them, e.g. the second top-k of 8 among 64 that a module makes in a run.

    Args:
        name: of the function, such as ``topk``.
        size: number of candidates.
        width: how many of them it gives for a token.
        number: which of the calls of this name, size and width in one run of the module, from 0.
    """

    name: str
    size: int
    width: int
    number: int


@dataclass(frozen=True)
class RoutingSite:
    """Where the experts of a block's tokens are chosen.

    Args:
        above: 0 if the block's own code chooses, 1 if it is that of the module around it, and so on.
        columns: the calls that choose, each entry one that gives the next of the k ids (or all of them). Calls of one entry give
            the same ids.
        groups: calls that choose among equal groups of experts before, which have to follow the ids.
        top_k, num_experts: k and E; ids of E and above belong to experts without weights.
    """

    above: int
    columns: tuple[tuple[Choice, ...], ...]
    groups: tuple[Choice, ...]
    top_k: int
    num_experts: int


class Small(NamedTuple):
    """Up to how many elements of the first tensor argument a block's own code is faster on a CPU, by what the call wants."""

    without_gradients: int = 0
    with_gradients: int = 0


NEVER_SMALL = Small()

RUNS_ALREADY = "its experts run on hexa_fx's operators already"
"""Why a block is left as it is though its operators are what is wanted."""


@dataclass(frozen=True)
class RewrittenBlock:
    """A block's new forward, before it is bound to the module.

    Args:
        graph: a `torch.fx.Graph` whose ``get_attr`` / ``call_module`` targets are relative to the original block
            (or name a `PackedWeight`).
        packed: weights that the graph reads through packed storage.
        guards: one per input, in signature order.
        stored: where every run leaves results beside its output. If there are any, the graph returns the block's output and a
            tuple of these results.
        small: inputs for which the block's own code is faster on a CPU.
        num_experts: expert ids lie below it; None if it is not known.
        reads: what the recorded run read from Python, without what modules read that the graph calls.
        autocast: dtypes of the original's results under autocast. It does not hold for calls of a kind that is not there. None: it
            holds whatever autocast does.
        training: the mode that it was recorded in, if its code asks for it; None if it holds in both.
        in_trace: what counts besides ``reads`` where a compiler traces the graph.
        changed: names of parameters that the graph, or submodules which it calls, write to.
        dtypes: of parameters and buffers at the end of the recorded run, which may convert a router in its forward.
        path: the block's path in the model.
    """

    path: str
    graph: torch.fx.Graph
    packed: tuple[PackedWeight, ...] = ()
    guards: tuple[InputGuard, ...] = ()
    stored: tuple[Destination, ...] = ()
    small: Small = NEVER_SMALL
    num_experts: int | None = None
    reads: tuple[PythonRead, ...] = ()
    autocast: AutocastDtypes | None = None
    in_trace: tuple[PythonRead, ...] = ()
    changed: tuple[str, ...] = ()
    training: bool | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
