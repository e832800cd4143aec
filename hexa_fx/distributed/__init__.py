"""The runtime of a partitioned model: collectives over unequal shards, the pipeline-shared cache, and what looks after them.

session           one running plan: groups, cache, and the modules bound to it
nodes             the functions that partitioned graphs call
collectives       all-gather, reduce-scatter and all-reduce over unequal shards, and the write into a cache slot
geometry          which slice of which expert weight a rank stores, and the packed rows that travel
shards            parameters cut to a rank's slice
shared_cache      which layer's gathered weights are in which slot when, and what autograd saves of them
reductions        gradients of gathered weights on their way to their owners
gradients         sums, clipping and loss weights that keep the gradient that of the global batch
data              B_i: sampler and splitter
checkpoint        torch.distributed.checkpoint across plans and world sizes
slice_states      state dicts of the model and of optimizers, which hold slices
profile           measured capacities t_i, bandwidth, and times of a layer in each mode
groups            process groups over the ranks of a mesh, and over the data-parallel axes beside it
plan_agreement    the check that all ranks hold the same plan
lockstep          the check that all ranks are at the same place of a step, and what a failed collective is reported as
"""
