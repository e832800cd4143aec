"""CUDA templates; the algorithms are plain headers in ``include/hexa_fx``."""
