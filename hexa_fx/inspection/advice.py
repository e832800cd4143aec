"""Says what a user can do about a refusal. Detection says what it saw; this says what would be rewritten instead."""

from __future__ import annotations

import re

from hexa_fx.ops.activations import ACTIVATIONS

_SAFE = "The block runs its own code, which is always right."

_ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("rounds to fewer bits",),
        "Run the whole block in the precision that it rounds to, by a cast of the model or under torch.autocast.",
    ),
    (("casts between the dtypes",), "Hold the experts' parameters in the dtype that they multiply and add in."),
    (
        ("hexa_fx itself failed", "differs from the original", "gives other numbers than hexa_fx reads"),
        f"{_SAFE} Please report it with what HEXA_FX_DUMP_DIR=folder writes.",
    ),
    (
        ("could not record",),
        "Call the block on the example outside hexa_fx first: it has to run there, in eval and in train mode.",
    ),
    (
        ("with per-expert weights was seen", "with per-expert parameters was seen"),
        "If this is no mixture of experts, nothing is to be done. Else hold the experts as an nn.ModuleList "
        "of modules of one class, or "
        "as one parameter (experts, out, in).",
    ),
    (
        (
            "every row that the experts are given is zero",
            "are not used",
            "depends on the expert outputs",
        ),
        "Give a larger or more varied example, in which at least two experts get tokens.",
    ),
    (
        ("rows of different tokens", "keep their rows apart"),
        "Normalise and reduce over the last dimension only: what an expert computes for a token may not "
        "depend on the other tokens it gets.",
    ),
    (
        ("dropout is active", "is active inside the experts"),
        "Use F.dropout (not in place) in experts that the code runs in order, put it behind the weighted sum over experts, or "
        "set its probability to 0. In eval mode the block is rewritten as it is.",
    ),
    (
        ("is applied to parameters of the experts before these are read",),
        "Keep the parameters as they are to be used: limit them after each optimizer step, not in every forward.",
    ),
    (
        ("soft) mixture",),
        "Only top-k routing is rewritten: where every expert works on every token there is nothing to leave out.",
    ),
    (
        ("fixed number of ids", "reach no expert", "same expert twice in one pass"),
        "Choose with topk or argmax, the same number of experts for every token, and keep the ids in one "
        "tensor (tokens, k). Thresholds and "
        "experts that choose tokens are not supported.",
    ),
    (
        ("routing weights are not", "no routing weight", "does not say with which weight", "not the router's"),
        "Compute the routing weights before the experts run, and multiply each expert's output with its "
        "token's weight once.",
    ),
    (
        ("rows that experts read are not", "given their rows in different ways", "one token tensor"),
        "Give every expert rows of one tensor of tokens, e.g. x[token] with token from torch.where(chosen == expert).",
    ),
    (
        ("not combined", "do not come together", "collects the expert outputs", "host loop or branch on data is left"),
        "Sum every token's weighted expert outputs into one tensor with a row a token, e.g. out.index_add_(0,"
        " token, weight * y), and do the rest on that tensor; for each of several gates, run the experts on the tokens that it "
        "gives them.",
    ),
    (
        ("keeps a result on ", "compute on the module"),
        "Return the value, or keep what the router computes instead of what the experts do; do not assign it "
        "to self in forward. A counter that the router alone reads can be one of the router's module.",
    ),
    (
        ("would add to it last",),
        "Add to the list at the end of forward, or give the two modules a list each.",
    ),
    (
        (" in place, which",),
        "Append to a list of a module or a global, set a key of a dict or an attribute in forward (self.loss = loss), return the "
        "loss, or keep it in the router module, which stays a call.",
    ),
    (
        ("after the block was rewritten",),
        "Call hexa_fx.undo_ and hexa_fx.optimize_ on the model to have it rewritten as it is now.",
    ),
    (("which only its own code calls",), "Remove the hooks: the next call runs rewritten."),
    (
        ("are a router's scores",),
        "Give the experts matrices of their own: modules in a list, or parameters (experts, in, out).",
    ),
    (
        ("goes on with them in numpy", "an array of numpy"),
        "Compute the ids with torch's operations, or keep a table of them as a buffer that ids of tokens index.",
    ),
    (("draws random numbers from",), "Draw with torch.rand and without generator=."),
    (("given inside an object, or a dict by a key",), "Give the block the tensor as an argument of its own."),
    (
        ("a backward of its own, is applied",),
        "Apply the function to the tokens, to the routing weights or to the sum over experts.",
    ),
    (
        ("there is no work to leave out", "so there is nothing to choose"),
        "Nothing is to be done, unless it is meant to choose: then take the topk of the scores and run these experts only.",
    ),
    (("some experts share a parameter",), "Give every expert a parameter of its own, or one to all of them."),
    (("exchanges tensors with other processes",), "Put the router, with what it exchanges, into a module of its own."),
    (
        ("the code writes to a parameter",),
        "Change weights of experts where the block is called.",
    ),
    (("neither a parameter nor a buffer",), "self.register_buffer(name, tensor, persistent=False) in __init__."),
    (
        ("takes a decision", "host decision"),
        "Replace the `if`, loop or .item() on data by tensor operations such as torch.where, or move it out "
        "of the block's forward.",
    ),
    (
        ("no known activation", "one expert at a time", "code runs one at a time", "single projection", "in a row"),
        f"Batched experts may use {', '.join(sorted(ACTIVATIONS))} between two projections. Experts that run "
        "one at a time, as modules in a loop, may be any function of a row.",
    ),
    (
        (
            "in different ways",
            "different numbers",
            "computed alike",
            "only some of the experts",
        ),
        "Give all experts one class, the same shapes and the same arguments; experts of two kinds want a mixture each.",
    ),
    (
        ("as a weighted sum for each token",),
        "Add every expert's output, times its routing weight, to its token's row. Experts that choose their tokens, and outputs "
        "that are compared or normalised together, stay as they are.",
    ),
    (
        ("parameter", "bias", "weight", "expert product", "projection", "operand", "neither their tokens'"),
        "Give every expert matrices and biases of its own that forward only multiplies with and adds; combine"
        " parameters outside forward (parametrize.remove_parametrizations, prune.remove and the like do so).",
    ),
)

DEFAULT = f"{_SAFE} docs/patterns.md lists the ways of writing that are rewritten."


_SAYS_IT_ITSELF = re.compile(
    r"left out by HexaConfig|not enough memory to analyse|: give an example|; leave what|"
    r"; .*(rewritten|undo_|register|multiply|give more|has to be)"
)


def advice(reason: str) -> str:
    """What to do about a refusal, found by its sentence; empty if the sentence says so itself."""
    if _SAYS_IT_ITSELF.search(reason) and "differs from the original" not in reason:
        return ""
    return next((said for parts, said in _ADVICE if any(part in reason for part in parts)), DEFAULT)
