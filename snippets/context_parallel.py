"""torch's own ring attention, `context_parallel`. A prototype; needs CUDA."""

import torch.nn.functional as F


# --8<-- [start:context_parallel]
def context_parallel_attention(query, key, value, d_output, mesh):
    """Causal attention and its gradients, by torch's `context_parallel`.

    query, key, value, d_output (the output's gradient): [batch, heads, seq,
        head_dim], the whole of it on each rank.
    mesh: a `DeviceMesh` of one dimension, such as `DeviceMesh.from_group(group,
        "cuda")`. `seq` is a multiple of twice its size.

    Returns the output and the gradients of query, key and value, whole.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import (
        context_parallel_unshard,
    )

    buffers = [x.clone() for x in (query, key, value, d_output)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        # In here the buffers hold this rank's slices, zigzag, and
        # `F.scaled_dot_product_attention` is another function.
        q, k, v = (x.clone().requires_grad_() for x in buffers[:3])
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output.backward(buffers[3])
        slices = [output.detach(), q.grad, k.grad, v.grad]
        return context_parallel_unshard(mesh, slices, [2] * 4)


# --8<-- [end:context_parallel]
