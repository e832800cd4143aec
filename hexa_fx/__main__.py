"""``python -m hexa_fx``."""

from hexa_fx.cli import app

app(prog_name="hexa-fx")
