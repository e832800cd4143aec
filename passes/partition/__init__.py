"""Plans how a model's MoE layers are spread over ranks, applies a plan, and exchanges it for another while the job runs.

`partition_model` (plan.py) decides and returns a `Plan` that is equal on all ranks. `install_plan` (install.py)
cuts the parameters, rewrites the blocks' graphs and returns the session that runs them. `apply_partition` (apply.py) does both.
"""
