"""Writes a report as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hexa_fx.inspection.advice import advice
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.inspection.costs import Costs
from hexa_fx.ir import Small


def lines_of(blocks: Sequence[BlockReport]) -> Iterator[str]:
    """The rewritten blocks, with identical ones gathered; then the blocks left as they are, and why."""
    for first, alike in gathered(b for b in blocks if b.status == "rewritten"):
        yield f"  {first.name}: {headline(first)}"
        yield from (f"      {line}" for line in details(first))
        if alike:
            yield f"      the same in {len(alike)} more: {_span(alike)}"
    yield from (f"  {line}" for line in refusal_lines(blocks))


def headline(block: BlockReport) -> str:
    """What was found, in one line."""
    checked = f"{block.check}" if block.check else "not checked"
    return f"{block.idiom}, {block.sizes}, {block.expert}, {block.weights} weights, {checked}"


def details(block: BlockReport) -> Iterator[str]:
    """What a block became, what it costs, and its kernels."""
    if block.rewritten_to:
        written = f"{block.code.code} at {block.code.file}:{block.code.line}" if block.code else "the block"
        yield f"{written} {'was' if block.now else 'is'} {block.state.replace('rewritten', f'rewritten to {block.rewritten_to}')}"
    yield from runs_with(block)
    if str(block.calls):
        yield str(block.calls)
    if block.costs is not None:
        yield cost_text(block)
    if block.collectives:
        yield exchanges(block)
    for kernel in dict.fromkeys(block.kernels):
        built = {True: "built", False: "not built yet", None: "no compiler found"}[kernel.cached]
        yield f"kernel {kernel.name}, {built}" if kernel.spec else f"{kernel.name}: {kernel.fallback}"


def runs_with(block: BlockReport) -> Iterator[str]:
    """What a rewritten block multiplies in, how its weights are packed, which inputs run its own code as they are small."""
    if block.compute:
        yield block.compute
    if block.packed:
        yield f"weights packed as {block.packed}"
    if _small_run_their_own(block):
        yield f"on a CPU, {small_calls(block.small_tokens)} run its own code, which is the quicker there"


def small_calls(tokens: Small) -> str:
    """``calls of up to 83 tokens``; ``calls of up to 2041 tokens with gradients`` where all others run rewritten."""
    without, wanted = (f"up to {limit} token{'s' * (limit != 1)}" for limit in tokens)
    if without == wanted:
        return f"calls of {wanted}"
    said = (
        (f"{without} without gradients", tokens.without_gradients),
        (f"{wanted} with gradients", tokens.with_gradients),
    )
    return f"calls of {' and '.join(words for words, limit in said if limit)}"


def _small_run_their_own(block: BlockReport) -> bool:
    return any(block.small_tokens) and not block.packed


def exchanges(block: BlockReport) -> str:
    """``exchanges: token_counts, 3 times all_gather_v, reduce_scatter_v``; what only waits or converts is left out."""
    counts = Counter(name for name in block.collectives if name not in ("wait", "to_compute_dtype"))
    return f"exchanges: {', '.join(f'{n} times {name}' if n > 1 else name for name, n in counts.items())}"


def measured_on(block: BlockReport) -> str:
    """``forward of 32 tokens``, and what is otherwise where the model runs."""
    costs = block.costs
    assert costs is not None
    small = _small_run_their_own(block) and costs.device == "cpu" and costs.tokens <= max(block.small_tokens)
    unlike = {
        f" (before it was spread over {block.devices} devices)": block.devices > 1,
        " (before its weights were packed)": bool(block.packed),
        " (without compute or batch_invariant of HexaConfig)": bool(block.compute),
        " (if they did not run its own code)": small,
    }
    return f"forward of {costs.tokens} tokens{next((words for words, so in unlike.items() if so), '')}"


def cost_text(block: BlockReport) -> str:
    """``forward of 32 tokens, before -> after: 3.1 -> 3.1 MFLOP, ...``."""
    costs = block.costs
    assert costs is not None
    before, after = costs.before, costs.after
    parts = [
        f"{amount(before.flops, 'FLOP')} -> {amount(after.flops, 'FLOP')}",
        f"{amount(before.moved, 'B')} -> {amount(after.moved, 'B')} moved",
    ]
    if before.saved is not None and after.saved is not None:
        parts.append(f"{amount(before.saved, 'B')} -> {amount(after.saved, 'B')} kept for backward on {costs.device}")
    elif costs.not_saved:
        parts.append(f"what is kept for backward {costs.not_saved}")
    return f"{measured_on(block)}, before -> after: {', '.join(parts)}"


def amount(number: float, unit: str) -> str:
    """``3.1 MB``."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            digits = 0 if number >= 100 or not prefix else 1
            return f"{number:.{digits}f} {prefix}{unit}"
        number /= 1000
    return f"{number:.0f} P{unit}"


def change(before: float, after: float) -> str:
    """``-41 %``; empty if nothing changed."""
    percent = round(100 * (after - before) / before) if before else 0
    return f"{percent:+d} %".replace("-", "\N{MINUS SIGN}") if percent else ""


def cost_rows(costs: Costs | None) -> list[dict[str, Any]]:
    """A row a cost: what, before, after, the change in words, and the share: after in percent of the larger of the two."""
    if costs is None:
        return []
    rows = [
        ("experts' products", "FLOP", costs.before.flops, costs.after.flops),
        ("bytes moved", "B", costs.before.moved, costs.after.moved),
        (f"kept for backward, {costs.device}", "B", costs.before.saved, costs.after.saved),
    ]
    return [
        {
            "name": name,
            "before": amount(old, unit),
            "after": amount(new, unit),
            "change": change(old, new),
            "share": round(100 * new / max(old, new, 1), 1),
        }
        for name, unit, old, new in rows
        if old is not None and new is not None
    ]


def error_text(block: BlockReport) -> str:
    """Largest relative difference from the original, forward and gradients."""
    if block.same_as:
        return f"as {block.same_as}"
    return f"{block.check.forward_error:.1e} / {block.check.gradient_error:.1e}" if block.check else ""


def refusal_lines(blocks: Iterable[BlockReport]) -> Iterator[str]:
    """Why blocks, or some of their calls, run the original code, with equal sentences merged."""
    said: dict[tuple[str, str], list[str]] = {}
    for block in blocks:
        where = f" ({block.location})" if block.location and block.status != "already" else ""
        if block.now:
            said.setdefault((block.does_now, block.now), []).append(block.name)
        for reason in block.calls.own if block.status == "rewritten" else ():
            said.setdefault(("called", reason), []).append(block.name)
        if block.status != "rewritten":
            said.setdefault((block.status, f"{block.reason}{where}"), []).append(block.name)
    for (what, sentence), paths in said.items():
        does = _DOES.get(what, what)
        more = f"; the same for {len(paths) - 1} more: {_span(paths[1:])}" if len(paths) > 1 else ""
        yield f"{paths[0]}: {does}: {sentence}{more}"
        if what != "already" and advice(sentence):
            yield f"    what helps: {advice(sentence)}"


_DOES = {
    "refused": "left as it is",
    "already": "left as it is",
    "called": "ran its own code in some calls",
    "waiting": "not called yet",
}


def _span(blocks: Sequence[BlockReport] | Sequence[str]) -> str:
    paths = [b if isinstance(b, str) else b.name for b in blocks]
    return ", ".join(paths) if len(paths) <= 3 else f"{paths[0]}, {paths[1]}, ... {paths[-1]}"


def gathered(blocks: Iterable[BlockReport]) -> Iterator[tuple[BlockReport, list[BlockReport]]]:
    """Blocks that share an analysis and of which the same is so now: the first, and those alike."""
    groups: dict[tuple[str, ...], tuple[BlockReport, list[BlockReport]]] = {}
    for block in blocks:
        key = (block.same_as or block.path, block.reason, block.now, block.compute, block.packed)
        if key in groups:
            groups[key][1].append(block)
        else:
            groups[key] = (block, [])
    yield from groups.values()
