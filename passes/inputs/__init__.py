"""Inputs that a block is probed and compared on, in place of the example or beside it."""
