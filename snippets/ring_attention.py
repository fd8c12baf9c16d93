"""Ring attention: queries stay, keys and values go round the ranks."""

import torch
import torch.distributed as dist


# --8<-- [start:ring]
def ring_attention(query, key, value, group, *, is_causal=True):
    """Attention over a sequence of which each rank of `group` has a slice.

    query: [batch, seq/sp, heads, head_dim], slices of equal length in the order
        of the ranks.
    key, value: the same; fewer heads are allowed, for value another head_dim.

    Returns this rank's slice, [batch, seq/sp, heads, head_dim of value]. It
    computes in fp32, under autocast too, or fp64 where that comes in. It takes
    the sequence for one document. First derivatives only.
    Source: Liu et al., Ring Attention, arXiv 2310.01889.
    """
    _check(query, key, value, group)
    with torch.autocast(query.device.type, enabled=False):
        return _Ring.apply(query, key, value, group, is_causal)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, group, is_causal):
        rank, sp_size = dist.get_rank(group), dist.get_world_size(group)
        q = by_kv_head(query, key) * query.shape[-1] ** -0.5
        block = torch.cat([key, value], dim=-1)  # one message for both
        output, lse = q.new_zeros(()), q.new_full((), -torch.inf)
        for step in range(sp_size):  # the block is that of `rank - step`
            last = step == sp_size - 1
            arrive = pass_on([] if last else [block], group)
            if step <= rank or not is_causal:  # else all its tokens are later
                k, v = key_and_value(block, key)
                scores = scores_of(q, k, is_causal and step == 0)
                new_lse = torch.logaddexp(lse, scores.logsumexp(-1, True))
                output = output * (lse - new_lse).exp()
                output = output + (scores - new_lse).exp() @ v
                lse = new_lse
            if not last:
                (block,) = arrive()
        output = by_token(output).to(value.dtype)
        ctx.group, ctx.is_causal = group, is_causal
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_output):
        query, key, value, output, lse = ctx.saved_tensors
        group, is_causal = ctx.group, ctx.is_causal
        rank, sp_size = dist.get_rank(group), dist.get_world_size(group)
        scale = query.shape[-1] ** -0.5
        q, d_out = by_kv_head(query, key) * scale, by_kv_head(d_output, key)
        mean = (d_out * by_kv_head(output, key)).sum(-1, keepdim=True)
        block = torch.cat([key, value], dim=-1)
        d_q, sums = torch.zeros_like(q), []
        for step in range(sp_size):
            # A block goes round with the sum of its gradients so far. What its
            # owner adds waits at home, so that the sum need not start there.
            last = step == sp_size - 1
            arrive = pass_on(sums + [block] * (not last), group)
            part = q.new_zeros(block.shape)
            if step <= rank or not is_causal:
                k, v = key_and_value(block, key)
                weight = (scores_of(q, k, is_causal and step == 0) - lse).exp()
                d_scores = weight * (d_out @ v.mT - mean)
                d_q += d_scores @ k * scale
                d_k = (d_scores.mT @ q).sum(2, keepdim=True)
                d_v = (weight.mT @ d_out).sum(2, keepdim=True)
                part += by_token(torch.cat([d_k, d_v], dim=-1))
            arrived = arrive()
            if not last:
                block = arrived.pop()
            if step == 0:
                own = part
            else:
                sums = [sum(arrived, part)]
        own = sum(pass_on(sums, group)(), own)  # the sum has come home
        d_key, d_value = own.split([key.shape[-1], value.shape[-1]], dim=-1)
        d_query = by_token(d_q).to(query.dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None


# --8<-- [end:ring]
# --8<-- [start:pass_on]
def pass_on(tensors, group):
    """Begins to send each to the next rank, to be called by all of the group.

    Returns a function that waits, and returns what the previous rank sent.
    """
    group = group or dist.group.WORLD
    rank, sp_size = dist.get_rank(group), dist.get_world_size(group)
    following, previous = (  # send and receive take ranks of the world
        dist.get_global_rank(group, (rank + step) % sp_size) for step in (1, -1)
    )
    received = [torch.empty_like(x) for x in tensors]
    operations = []  # in one batch, so that no rank waits with its receive
    for x, space in zip(tensors, received, strict=True):
        operations.append(dist.P2POp(dist.isend, x, following, group))
        operations.append(dist.P2POp(dist.irecv, space, previous, group))
    requests = dist.batch_isend_irecv(operations) if operations else []

    def arrive():
        for request in requests:
            request.wait()
        return received

    return arrive


# --8<-- [end:pass_on]
# --8<-- [start:blocks]
def scores_of(q, k, is_diagonal):
    """[..., queries, keys]. On the diagonal, no token sees a later one."""
    scores = q @ k.mT
    if is_diagonal:
        later = torch.ones(scores.shape[-2:], device=q.device).triu(1).bool()
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def by_kv_head(x, key):
    """[batch, seq, heads, dim] -> [batch, kv_heads, heads/kv_heads, seq, dim].

    In at least fp32, since sums over many blocks lose digits in bf16.
    """
    x = x.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_token(x):
    """The way back: [batch, seq, heads, dim]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def key_and_value(block, key):
    """A block's two parts, each [batch, kv_heads, 1, seq, dim]."""
    widths = [key.shape[3], block.shape[3] - key.shape[3]]
    return (by_kv_head(x, key) for x in block.split(widths, dim=-1))


# --8<-- [end:blocks]
# --8<-- [start:check]
def _check(query, key, value, group):
    """`ValueError` on every rank that sees the shapes."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in this group: pass the "
            "group that it belongs to"
        )
    shapes = [list(x.shape) for x in (query, key, value)]
    if (
        any(len(shape) != 4 for shape in shapes)
        or not shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
        or shapes[1][2] != shapes[2][2]
        or shapes[0][3] != shapes[1][3]
    ):
        raise ValueError(
            f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: each is "
            "[batch, seq/sp, heads, head_dim]; key and value have equally many "
            "heads, query and key the same head_dim"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "key and value travel together, so cast them to one dtype first"
        )
    if shapes[0][2] % shapes[1][2]:
        raise ValueError(
            f"{shapes[0][2]} query heads cannot share {shapes[1][2]} KV heads "
            "evenly: the number of KV heads must divide that of query heads"
        )


# --8<-- [end:check]
