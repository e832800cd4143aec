"""Runs the operators on NVIDIA GPUs: chooses kernels, launches them, and replays calls that were seen before."""
