"""What `hexa-fx explain TYPE` gives for every type of the installed `transformers` that has experts, each in a process of its own.

`python -m tests.zoo.explained` prints the page, `--write docs/model_types.md` puts it there.
"""

import logging
import multiprocessing
import resource
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import transformers

import hexa_fx
from hexa_fx.errors import InputError
from tests.integrations.test_tiny_models import types_with_experts
from tests.zoo.agree import own_code_runs
from tests.zoo.pages import print_or_write

MOST = 2**30
"""Bytes that a process may take for a type, Python's and torch's included."""


@dataclass(frozen=True)
class Explained:
    """One type: blocks found and rewritten, of which all ran their operators, why the others were not or did not, why no model was
    built, and the most memory, in bytes."""

    model_type: str
    found: int = 0
    rewritten: int = 0
    reasons: tuple[str, ...] = ()
    not_built: str = ""
    peak: int = 0


def explained(model_type: str) -> Explained:
    """Of one type, as the command does it; and what a call of it runs."""
    from hexa_fx.targets import load

    try:
        model, inputs = load(model_type)
    except InputError as error:
        return Explained(model_type, not_built=str(error))
    model = hexa_fx.optimize(model, inputs, hexa_fx.HexaConfig(own_code_when_small=False))
    report, args = model.report, () if isinstance(inputs, dict) else inputs
    own = own_code_runs(model, *args, **(inputs if isinstance(inputs, dict) else {}))
    reasons = {*(b.reason for b in report.refused), *(f"{where} runs its own code" for where in own)}
    return Explained(model_type, len(report.blocks), len(report.rewritten) - len(own), tuple(sorted(reasons)))


def apart(model_type: str) -> Explained:
    """The same in a process of its own, with the most memory that it took; what this one holds counts in it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, model_type))
    process.start()
    theirs.close()
    found: Explained = ours.recv()
    process.join()
    return found


def _send(pipe: Connection, model_type: str) -> None:
    logging.disable(logging.WARNING)
    found = explained(model_type)
    pipe.send(replace(found, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


HEAD = """# Types of transformers

What `hexa-fx explain TYPE` gives for the {count} model types of transformers {version} with experts, at tiny widths, made by
`python -m tests.zoo.explained --write docs/model_types.md`, each within 1 GiB. Experts run as transformers runs them by default;
where that cannot be read, the loop that their class spells is (inkling2, muse_spark). Errors of whole models are in
[families.md](families.md).

"""


def page(rows: list[Explained]) -> str:
    """Markdown."""
    whole = [row for row in rows if row.found and row.rewritten == row.found]
    none = [row for row in rows if not row.found and not row.not_built]
    lines = [f"**All blocks rewritten ({len(whole)}):** {_names(whole)}.", ""]
    lines += [f"**No experts in the default configuration ({len(none)}):** {_names(none)}.", ""]
    lines += ["| other types | what it says |", "|---|---|"]
    said: dict[str, list[Explained]] = {}
    for row in rows:
        if row not in whole and row not in none:
            said.setdefault(_sentence(row), []).append(row)
    lines += [f"| {_names(alike)} | {sentence} |" for sentence, alike in said.items()]
    return "\n".join(lines) + "\n"


def _names(rows: list[Explained]) -> str:
    return ", ".join(row.model_type for row in rows)


def _sentence(row: Explained) -> str:
    if not row.not_built:
        return f"{row.rewritten} of {row.found} rewritten; {'; '.join(row.reasons)}".replace("|", "\\|")
    return row.not_built.removeprefix(f"{row.model_type!r} ").replace("|", "\\|")


def whole_page() -> str:
    """Of all types. Ends the process if one took too much memory."""
    rows = [apart(name) for name in types_with_experts()]
    if large := [f"{row.model_type} ({row.peak / 2**20:.0f} MiB)" for row in rows if row.peak > MOST]:
        raise SystemExit(f"these took more than {MOST / 2**20:.0f} MiB: {', '.join(large)}")
    return HEAD.format(count=len(rows), version=transformers.__version__) + page(rows)


if __name__ == "__main__":
    print_or_write(__doc__, whole_page)
