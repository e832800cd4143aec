"""What runs when a partitioned model runs: collectives over unequal shards, the pipeline-shared cache, and their care.

groups       process groups of a plan, the check that all ranks hold the same plan, who is lost after a failure
watch        who of the ranks is still there, where collectives on a device would wait for ever
lost         what a rank does when another is lost
collectives  all-gather, reduce-scatter and all-reduce over unequal shards, and the write into a cache slot
geometry     what slice of which expert weight a rank stores, and the packed rows that travel
shared_cache which layer's gathered weights are in which slot when, and how backward finds them again
slots        one slot, what was gathered into it, and what a saved tensor remembers of it
nodes        the functions that partitioned graphs call
session      one running plan: groups, cache, and the modules bound to it
shards       parameters cut to a rank's slice
gradients    sums, clipping and loss weights that keep the global batch's gradient
data         B_i: sampler and splitter
profile      capacities t_i and bandwidth, measured
checkpoint   torch.distributed.checkpoint across plans and world sizes
"""
