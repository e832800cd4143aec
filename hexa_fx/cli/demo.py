"""``hexa-fx demo``"""

from __future__ import annotations

from hexa_fx.cli.common import Json, errors_shown


@errors_shown
def demo(as_json: Json = False) -> None:
    """Rewrite a small transformers Mixtral on the CPU and compare it with the original."""
    from hexa_fx.demo import run

    run(as_json)
