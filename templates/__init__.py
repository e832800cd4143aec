"""CUDA sources: ``*.cu.j2`` choose types and tiles and instantiate, ``include/hexa_fx/*.cuh`` are the algorithms."""

from __future__ import annotations

from pathlib import Path

TEMPLATE_DIR = Path(__file__).resolve().parent
INCLUDE_DIR = TEMPLATE_DIR / "include"
