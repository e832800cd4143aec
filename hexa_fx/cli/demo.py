"""``hexa-fx demo``"""

from __future__ import annotations

from hexa_fx.cli.common import errors_shown


@errors_shown
def demo() -> None:
    """Rewrite a small transformers Mixtral on the CPU and compare it with the original."""
    from hexa_fx.demo import run

    run()
