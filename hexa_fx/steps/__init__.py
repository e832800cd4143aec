"""Training steps as CUDA graphs: `hexa_fx.graphed`, and of partitioned models `PartitionSession.graphed`.

graphed    which way each call goes, recording and replaying
context    what it has to know of where its model runs
signature  what a recorded step depends on beside the values in its tensors
recorder   how a step is recorded
fully_sharded   FSDP2 around a step whose recording failed
"""
