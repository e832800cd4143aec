"""The command line of scripts that make a page of docs."""

import argparse
import pathlib
from collections.abc import Callable


def print_or_write(description: str | None, make: Callable[[], str]) -> None:
    """Prints the page that ``make`` gives, or writes it where ``--write`` says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    text = make()
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
