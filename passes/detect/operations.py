"""What recorded operations do to rows, by name: move them, add them up, multiply them, or change each on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.fx

from hexa_fx.capture import record_of
from hexa_fx.passes.detect.graph import operation

VIEWS = frozenset(
    "view reshape flatten unflatten ravel squeeze unsqueeze squeeze_ unsqueeze_ contiguous clone transpose t permute movedim "
    "swapaxes swapdims expand expand_as view_as reshape_as broadcast_to after detach requires_grad_ getattr rearrange".split()
)
"""Operations that keep the numbers and change how they lie."""

CASTS = frozenset("to float double half bfloat16 type type_as long int cpu cuda".split())

MOVES = (
    VIEWS
    | CASTS
    | frozenset(
        "repeat repeat_interleave tile getitem select narrow index_select gather take take_along_dim cat concat concatenate stack "
        "hstack vstack split split_with_sizes chunk unbind tensor_split masked_select scatter scatter_ scatter_add scatter_add_ "
        "scatter_reduce scatter_reduce_ index_add index_add_ index_copy index_copy_ index_put index_put_ set_item copy_ "
        "masked_scatter masked_scatter_ pad pad_sequence roll flip reindex fill_ zero_ embedding".split()
    )
)
"""Operations that move values, or add what they move."""

SUMS = frozenset("add add_ iadd __radd__ sum cumsum sub sub_ isub reduce segment_reduce".split())
CONTRACTED = frozenset("einsum matmul bmm mm baddbmm addmm linear tensordot".split())
MULTIPLIED = frozenset("mul mul_ imul multiply __rmul__ div div_ itruediv truediv divide true_divide".split())
PRODUCTS = MULTIPLIED | CONTRACTED

MADE = frozenset(
    "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full empty empty_like new_empty new_tensor arange "
    "tensor eye one_hot scalar_tensor as_tensor".split()
)
"""Operations that make tensors of sizes, numbers and ids."""

SELECTING = frozenset(("where", "masked_fill", "masked_fill_"))
"""Operations that replace values where a condition holds."""

COMPARED = frozenset("lt le gt ge ne eq __lt__ __le__ __gt__ __ge__ __ne__ __eq__ isnan isfinite isinf".split())

EACH = COMPARED | frozenset(
    "nan_to_num nan_to_num_ clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ minimum maximum min max relu relu_ "
    "relu6 hardtanh tanh sigmoid abs neg sqrt rsqrt exp log log1p expm1 square pow reciprocal sign where masked_fill "
    "masked_fill_ add sub mul div truediv mul_ div_ add_ sub_ imul iadd isub itruediv multiply divide true_divide rsub rdiv "
    "__rpow__ __rtruediv__ __rdiv__ __rsub__ __rmul__ __radd__ set_item logical_not logical_and logical_or invert and_ or_ gelu "
    "silu softplus threshold threshold_ leaky_relu elu softsign erf round floor ceil trunc lerp".split()
)
"""Operations that change every number on its own."""

BROADCASTING = frozenset(
    "add sub mul div truediv true_divide multiply divide subtract pow rsub maximum minimum where lerp addcmul addcdiv "
    "iadd isub imul itruediv add_ sub_ mul_ div_ __radd__ __rmul__ __rsub__ __rtruediv__ __rpow__".split()
)
"""Element-wise operations that broadcast, so that a parameter of the row's expert may be an operand."""

ELEMENTWISE = frozenset(
    "exp expm1 log log1p sqrt rsqrt square abs neg reciprocal sigmoid tanh softplus relu silu gelu elu sin cos clamp clamp_min "
    "clamp_max to float double __neg__".split()
)
"""What may be done to a parameter of the row's expert before its rows meet it."""

_BY_ROW = frozenset(
    "norm vector_norm sum mean amax amin softmax log_softmax normalize any all var std linalg_norm".split()
)


def adds_dimension(node: torch.fx.Node) -> bool:
    """``m[:, None]``: an index of full slices and None."""
    index = node.args[1] if operation(node) == "getitem" and len(node.args) > 1 else None
    return isinstance(index, tuple) and all(item is None or item is Ellipsis or item == slice(None) for item in index)


def keeps_rows_apart(node: torch.fx.Node) -> bool:
    """Whether an operation computes every row (all but the last dimension) from that row alone."""
    name = operation(node)
    if name in ("min", "max", "where") and len(node.args) + len(node.kwargs) < 2:
        return False
    if name in EACH or name in ("layer_norm", "rms_norm") or name in CASTS:
        return True
    return name in _BY_ROW and _reduces_last(node)


def _reduces_last(node: torch.fx.Node) -> bool:
    given: Mapping[str, Any] = node.kwargs
    place = {"norm": 2, "vector_norm": 2, "linalg_norm": 2, "normalize": 2}.get(operation(node), 1)
    dim = given.get("dim", node.args[place] if len(node.args) > place else None)
    first = node.args[0] if node.args else None
    dims = record_of(first).value.dim() if isinstance(first, torch.fx.Node) else 0
    last = (-1, [-1], (-1,), dims - 1 if dims == 2 else -1)
    return dim in last
