"""Runs the operators on NVIDIA GPUs: plans what a call launches, once for all calls of its kind, and runs the plan."""
