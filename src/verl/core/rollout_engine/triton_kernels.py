"""Triton kernels of the decoder's layers. `triton_backend.py` launches them; `torch_backend.py` is what each has to equal.

The KV cache is reached through a table of five int64 numbers in device memory: addresses of keys and of values, and their
strides by layer, slot and head, in elements. So a CUDA graph stays valid when the cache is freed and made anew elsewhere.
"""

# Arguments of kernels are untyped: Triton gives them their types at launch.
import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, x_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Row r: residual += x if ADD; out = weight * sum / rms(sum). Sums are rounded to the dtype first, as in torch."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    scaled = value * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out[r, c] = silu(gate_up[r, c]) * gate_up[r, SIZE + c]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def cache_address(table, which: tl.constexpr, layer, slot, head, dtype: tl.constexpr, DIM: tl.constexpr):
    """Where the positions of (layer, slot, head) begin in keys (which=0) or values (which=1)."""
    # Numbers from memory carry no alignment, and without it every element would be a load of its own.
    ALIGNED: tl.constexpr = 16 if DIM % 16 == 0 else 1
    base = tl.multiple_of(tl.load(table + which).to(tl.pointer_type(dtype)), ALIGNED)
    layer_stride = tl.multiple_of(tl.load(table + 2), ALIGNED)
    slot_stride = tl.multiple_of(tl.load(table + 3), ALIGNED)
    head_stride = tl.multiple_of(tl.load(table + 4), ALIGNED)
    return base + layer * layer_stride + slot * slot_stride + head * head_stride


@triton.jit(do_not_specialize=["layer"])
def rope_store_kernel(
    qkv, cos, sin, positions, slots, q_norm, k_norm, table, layer, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HAS_SLOTS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm (if NORM) and rotate q and k in place, and store k and v in the cache: program (token, block of heads).

    qkv: [n, (HEADS + 2 KV_HEADS) * DIM]. slots: of each token, or its row if not HAS_SLOTS.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    inside = (head < HEADS + 2 * KV_HEADS) & (half < DIM // 2)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64) if HAS_SLOTS else token
    source = qkv + token * (HEADS + 2 * KV_HEADS) * DIM + head * DIM + half
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    turns = head < HEADS + KV_HEADS
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / DIM + eps)[:, None]
        is_q, is_k = inside & (head < HEADS), inside & turns & (head >= HEADS)
        w_first = tl.load(q_norm + half + 0 * head, mask=is_q, other=0.0) + tl.load(
            k_norm + half + 0 * head, mask=is_k, other=0.0
        )
        w_second = tl.load(q_norm + DIM // 2 + half + 0 * head, mask=is_q, other=0.0) + tl.load(
            k_norm + DIM // 2 + half + 0 * head, mask=is_k, other=0.0
        )
        first = tl.where(turns, first * scale * w_first.to(tl.float32), first)
        second = tl.where(turns, second * scale * w_second.to(tl.float32), second)
    c = tl.load(cos + position * (DIM // 2) + half, mask=half < DIM // 2, other=1.0)
    s = tl.load(sin + position * (DIM // 2) + half, mask=half < DIM // 2, other=0.0)
    new_first = tl.where(turns, first * c - second * s, first).to(dtype)
    new_second = tl.where(turns, second * c + first * s, second).to(dtype)
    tl.store(source, new_first, mask=inside & turns)
    tl.store(source + DIM // 2, new_second, mask=inside & turns)
    keys = cache_address(table, 0, layer, slot, head - HEADS, dtype, DIM) + position * DIM + half
    values = cache_address(table, 1, layer, slot, head - HEADS - KV_HEADS, dtype, DIM) + position * DIM + half
    is_key = inside & (head >= HEADS) & turns
    is_value = inside & (head >= HEADS + KV_HEADS)
    tl.store(keys, new_first, mask=is_key)
    tl.store(keys + DIM // 2, new_second, mask=is_key)
    tl.store(values, new_first, mask=is_value)
    tl.store(values + DIM // 2, new_second, mask=is_value)


@triton.jit(do_not_specialize=["layer"])
def decode_attention_kernel(
    qkv, positions, done, table, layer, out, partial, partial_peak, partial_total, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one token over its slot's cache: program (row, kv head, split of the context).

    The query heads of one kv head are the rows of the matrix products, padded to GROUP_BLOCK. With SPLITS > 1 each
    program leaves its part unscaled in `partial`, with peak and total, for `combine_splits_kernel`. scale: of scores, times
    log2(e).
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    # Rows that are done may hold any position; one token is enough for what nobody reads.
    context = tl.where(tl.load(done + row) != 0, 1, tl.load(positions + row) + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(context, SPLITS), TOKENS) * TOKENS
    begin, end = split * share, tl.minimum(context, split * share + share)
    member, dim = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    in_dim = dim < DIM
    q_mask = (member < GROUP)[:, None] & in_dim[None, :]
    q_at = row * (HEADS + 2 * KV_HEADS) * DIM + (kv_head * GROUP + member)[:, None] * DIM + dim[None, :]
    q = tl.load(qkv + q_at, mask=q_mask, other=0.0)
    keys = cache_address(table, 0, layer, row, kv_head, dtype, DIM)
    values = cache_address(table, 1, layer, row, kv_head, dtype, DIM)
    peak = tl.full([GROUP_BLOCK], -1e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = token < end
        at = token[:, None] * DIM + dim[None, :]
        mask = seen[:, None] & in_dim[None, :]
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(dtype), v, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, axis=1)
        peak = new_peak
    head = kv_head * GROUP + member
    if SPLITS == 1:
        out_at = (row * HEADS + head)[:, None] * DIM + dim[None, :]
        tl.store(out + out_at, (mixed / total[:, None]).to(dtype), mask=q_mask)
    else:
        at = (row * HEADS + head) * SPLITS + split
        tl.store(partial + at[:, None] * DIM + dim[None, :], mixed, mask=q_mask)
        tl.store(partial_peak + at, peak, mask=member < GROUP)
        tl.store(partial_total + at, total, mask=member < GROUP)


@triton.jit
def combine_splits_kernel(
    partial, partial_peak, partial_total, out, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr
):
    """Program (row x head): the splits of `decode_attention_kernel` as one softmax."""
    head = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM_BLOCK)
    peaks = tl.load(partial_peak + head * SPLITS + split)
    weight = tl.exp2(peaks - tl.max(peaks, axis=0))
    total = tl.sum(weight * tl.load(partial_total + head * SPLITS + split), axis=0)
    at = (head * SPLITS + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(partial + at, mask=(dim < DIM)[None, :], other=0.0)
    mixed = tl.sum(parts * weight[:, None], axis=0) / total
    tl.store(out + head * DIM + dim, mixed.to(out.dtype.element_ty), mask=dim < DIM)
