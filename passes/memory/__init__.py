"""Keeps the analysis of a block within its memory."""
