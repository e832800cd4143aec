"""What torch's operations do, by name: the one table of the analysis, asked through predicates of recorded calls.

A row holds operations by one name for all their forms: ``add`` stands for ``add_``, ``iadd``, ``__radd__`` and ``__iadd__`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch.fx

Asked = Callable[[torch.fx.Node], bool]


def operation(node: torch.fx.Node) -> str:
    """The bare name of what a node calls: ``linear``, ``topk``, ``getitem``."""
    if node.op in ("call_method", "placeholder", "get_attr"):
        return str(node.target)
    name = getattr(node.target, "__name__", None) or str(node.target)
    return str(getattr(node.target, "_opname", name)).split(".")[0]


@cache
def canonical(name: str) -> str:
    """The name under which the table has an operation, of any of its forms."""
    bare = name.strip("_") if name.startswith("__") else name.removeprefix("_").removesuffix("_")
    if name in _TO_PLAIN:
        return name
    return _FORMS.get(bare, bare)


def kind(node: torch.fx.Node) -> str:
    """The name under which the table has what a node calls; empty if it calls nothing."""
    return canonical(operation(node)) if node.op.startswith("call") else ""


_TO_PLAIN = frozenset("item tolist numpy __array__ __int__ __index__ __float__ __bool__".split())
_FORMS = {
    form: name
    for name, forms in {
        "add": "radd iadd",
        "sub": "isub subtract",
        "mul": "rmul imul multiply",
        "div": "truediv itruediv divide true_divide",
        "rdiv": "rtruediv",
        "matmul": "rmatmul",
        "remainder": "mod rmod fmod divmod",
        "floor_divide": "floordiv",
        "and": "bitwise_and iand rand_",
        "or": "bitwise_or ior",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
        "clamp": "clip",
        "cat": "concat concatenate",
        "transpose": "swapaxes swapdims",
        "getitem": "__getitem__",
    }.items()
    for form in forms.split()
}


def _row(names: str, *rows: frozenset[str]) -> frozenset[str]:
    return frozenset(names.split()).union(*rows)


def _predicate(row: frozenset[str]) -> Asked:
    return lambda node: kind(node) in row


# -- where numbers lie -------------------------------------------------------------------------------------------------

CASTS = _row("to float double half bfloat16 type type_as long int cpu cuda")
VIEWS = _row(
    "view reshape flatten unflatten ravel squeeze unsqueeze contiguous clone transpose t permute movedim expand expand_as "
    "view_as reshape_as broadcast_to after detach requires_grad getattr rearrange"
)
CUTS = _row("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk hsplit vsplit dsplit unbind")
PARTS = _row("getitem select narrow", CUTS)
LOOK_UPS = _row("getitem index_select gather take take_along_dim embedding")
SCATTERS = _row(
    "scatter scatter_add scatter_reduce index_add index_copy index_put copy masked_scatter fill zero set_item"
)
JOINS = _row("cat stack hstack vstack")
MOVES = _row(
    "repeat repeat_interleave tile masked_select pad pad_sequence roll flip reindex",
    *(CASTS, VIEWS, PARTS, LOOK_UPS, SCATTERS, JOINS),
)

casts, views, moves = map(_predicate, (CASTS, VIEWS, MOVES))
keeps_numbers = _predicate(CASTS | VIEWS)
cuts, takes_part = map(_predicate, (CUTS, PARTS))
scatters = _predicate(SCATTERS)

# -- arithmetic --------------------------------------------------------------------------------------------------------

SUMS = _row("add sum cumsum sub reduce segment_reduce")
SCALINGS = _row("mul div")
CONTRACTIONS = _row("linear matmul mm bmm baddbmm addmm einsum addmv tensordot grouped_mm grouped_mm_fallback")
EQUALITIES = _row("eq ne")
ORDERS = _row("lt le gt ge")
FINITE_CHECKS = _row("isfinite isnan isinf")
COMPARISONS = EQUALITIES | ORDERS | FINITE_CHECKS
SELECTIONS = _row("where masked_fill")
BOUNDS = _row("clamp clamp_min clamp_max minimum maximum min max")
ARITHMETIC = _row("add sub rsub mul div rdiv pow rpow lerp")
NORMS = _row("layer_norm rms_norm")
BROADCASTING = _row("maximum minimum where addcmul addcdiv", ARITHMETIC)
UNARY = _row(
    "nan_to_num relu relu6 hardtanh tanh sigmoid abs neg sqrt rsqrt exp log log1p expm1 square reciprocal sign logical_not invert "
    "gelu silu softplus threshold leaky_relu elu softsign erf round floor ceil trunc sin cos clamp clamp_min clamp_max"
)
EACH = _row("set_item logical_and logical_or and or", *(UNARY, COMPARISONS, SELECTIONS, BOUNDS, ARITHMETIC))

adds, scales, contracts = map(_predicate, (SUMS, SCALINGS, CONTRACTIONS))
compares, compares_for_equality, orders, checks_finite = map(
    _predicate, (COMPARISONS, EQUALITIES, ORDERS, FINITE_CHECKS)
)
selects, bounds, broadcasts, works_on_one = map(_predicate, (SELECTIONS, BOUNDS, BROADCASTING, UNARY | CASTS))
works_on_each, normalizes = map(_predicate, (EACH, NORMS))

# -- choices, counts and sizes -----------------------------------------------------------------------------------------

BEST = _row("topk argmax sort argsort multinomial")
CHOICES = BEST | {"argmin"}
BY_INDEX = _row(
    "msort one_hot gumbel_softmax kthvalue max min cummax median mode nonzero argwhere bucketize searchsorted randint randperm "
    "remainder",
    CHOICES,
)
FINDS = _row("nonzero where unique unique_consecutive masked_select argwhere")
COUNTS = _row("sum mean cumsum bincount count_nonzero histc scatter_add index_add")
SIZES = _row("size numel nelement dim stride")
NUMBERS = _TO_PLAIN - {"__bool__"}

picks_best, chooses, finds, adds_up_counts = map(_predicate, (BEST, CHOICES, FINDS, COUNTS))
gives_numbers = _predicate(NUMBERS)

# -- made without operands ---------------------------------------------------------------------------------------------

UNINITIALISED = _row("empty empty_like new_empty empty_strided")
MADE_LIKE = _row("zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty")
MADE = _row(
    "zeros ones full new_tensor arange tensor eye one_hot scalar_tensor as_tensor",
    UNINITIALISED - {"empty_strided"},
    MADE_LIKE,
)
RANDOM = _row(
    "dropout alpha_dropout feature_dropout dropout1d dropout2d dropout3d feature_alpha_dropout bernoulli rand rand_like randn "
    "randn_like uniform normal multinomial rrelu randint randint_like randperm random exponential geometric cauchy log_normal "
    "poisson gumbel_softmax"
)

makes, makes_like, is_uninitialised, is_random = map(_predicate, (MADE, MADE_LIKE, UNINITIALISED, RANDOM))


def of(names: str) -> Asked:
    """A predicate of a few operations by name, where one place alone asks for just these."""
    return _predicate(_row(names))
