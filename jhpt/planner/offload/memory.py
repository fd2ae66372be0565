"""Bytes of a step whose blocks live on the host: on the device, by cause, and on the host.

R is what one float32 number for each parameter of a block takes, a data rank's share of it R / d.  Blocks hold a row of R
each of weights, gradient and every moment; which of them come from the host says `HOMES`.  What XLA makes of the step was
read off programs compiled for an H100 (jax 0.10.2): whatever lives throughout, and the largest of three moments.

    throughout  12 bytes a parameter of the ends, weights and moments; rows that stay; what blocks keep for the backward
                pass, of all the batch; the table in the compute dtype; inputs of a pass
    forward     f rows that come and as many of the block at work, or, beside its working set, f and the 3 that its
                update makes; with resident blocks the 3 of their update as well, before those of the streamed one have
                gone
    head        logits in float32 and their gradient in the compute dtype, and the first row of weights on its way
    backward    rows of weights at work and on their way, of the gradient and of the one before; the working set, and
                the logits' gradient, for the table's gradient is computed last

Several data ranks gather a whole row of weights for use, and make a whole row of a gradient before it is summed.

The working set is in terms of what a block keeps without recomputation, A: what XLA's schedule keeps beside
each other was counted in those programs (`FORWARD_WORK`, `BACKWARD_WORK`); that is the one part that is fitted.
Left out: fragmentation, at most 4 % of the programs that the tests compile.
"""
