"""Triton kernels that end a decode step: from logits to the slots' next token, without a look from the host.

The same two-level draw as `sampling.py`. What changes from call to call is read from device memory, so that one CUDA graph
serves every temperature, top_k, top_p and set of stop tokens.
"""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-2147483648)


@triton.jit
def _shift(z, bits: tl.constexpr):
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def uniforms(key, position):
    """`sampling.uniforms` of int64 numbers."""
    # The constants as signed 64-bit numbers.
    z = key + (position + 1) * -7046029254386353131
    z = (z ^ _shift(z, 30)) * -4658895280553007687
    z = (z ^ _shift(z, 27)) * -7723592293110705685
    z = z ^ _shift(z, 31)
    scale = 1.0 / 16777216.0
    return _shift(z, 40).to(tl.float32) * scale, (_shift(z, 16) & 0xFFFFFF).to(tl.float32) * scale


@triton.jit
def ordered(x):
    """float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def draw_index(mass, uniform, SIZE: tl.constexpr):
    """An index in proportion to mass [SIZE]."""
    index = tl.arange(0, SIZE)
    running = tl.cumsum(mass, axis=0)
    count = tl.sum((running <= uniform * tl.max(running, axis=0)).to(tl.int32), axis=0)
    # Rounding must not lead past the last index that has any mass.
    return tl.minimum(count, tl.max(tl.where(mass > 0, index, 0), axis=0))


@triton.jit
def block_sums_kernel(
    logits, numbers, thresholds, peaks, totals, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Program (row, block): peak and sum of exp(x - peak) over the block; with CUT, of what the row's threshold keeps.

    numbers: float32 [2], 1 / temperature and top_p. peaks, totals: float32 [n, BLOCKS]; with CUT the peaks are those of
    the call before, of the whole block, and stay.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")) * tl.load(numbers)
    if CUT:
        peak = tl.load(peaks + row * BLOCKS + block)
        x = tl.where(ordered(x) >= tl.load(thresholds + row), x, float("-inf"))
    else:
        # A block may have no finite logit; its peak must stay a number.
        peak = tl.maximum(tl.max(x, axis=0), -1e30)
        tl.store(peaks + row * BLOCKS + block, peak)
    tl.store(totals + row * BLOCKS + block, tl.sum(tl.exp(x - peak), axis=0))


@triton.jit
def count_and_mass(logits, scale, peak, at_least, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Of one row: how many logits, and what mass of those not below `floor`, reach each of at_least [WAYS]."""
    count = tl.zeros([WAYS], tl.int32)
    mass = tl.zeros([WAYS], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < VOCAB, other=float("-inf")) * scale
        key = tl.where(at < VOCAB, ordered(x), NO_KEY)
        reaches = key[None, :] >= at_least[:, None]
        count += tl.sum(reaches.to(tl.int32), axis=1)
        kept = tl.where(key >= floor, tl.exp(x - peak), 0.0)
        mass += tl.sum(tl.where(reaches, kept[None, :], 0.0), axis=1)
    return count, mass


@triton.jit
def thresholds_kernel(
    logits, numbers, top_k, peaks, thresholds, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Program (row): the smallest ordered logit that top_k and then top_p keep, found by a search with WAYS questions a pass.

    top_k: int64 [1], VOCAB or more keeps all.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    scale, share, k = tl.load(numbers), tl.load(numbers + 1), tl.load(top_k)
    block = tl.arange(0, BLOCKS_PAD)
    peak = tl.max(tl.load(peaks + row * BLOCKS + block, mask=block < BLOCKS, other=-1e30), axis=0)
    floor = tl.full([], NO_KEY + 1, tl.int32)
    way = tl.arange(0, WAYS).to(tl.int64)
    for by_mass in tl.static_range(2):
        wanted = 0.0
        if by_mass:
            # Asked in the same shape as below, so that the answer is rounded alike and the floor itself always passes.
            lowest = tl.zeros([WAYS], tl.int32) + floor
            _, all_mass = count_and_mass(logits, scale, peak, lowest, floor, VOCAB, BLOCK, WAYS)
            wanted = share * tl.max(all_mass, axis=0)
        # The answer is the largest threshold that keeps enough: `low` does, `high` is the largest still possible.
        low = floor.to(tl.int64)
        high = ordered(peak).to(tl.int64)
        idle = (share >= 1.0) if by_mass else (k >= VOCAB)
        high = tl.where(idle, low, high)
        while low < high:
            step = (high - low + WAYS - 1) // WAYS
            asked = tl.minimum(low + (way + 1) * step, high)
            count, mass = count_and_mass(logits, scale, peak, asked.to(tl.int32), floor, VOCAB, BLOCK, WAYS)
            enough = (mass >= wanted) if by_mass else (count >= k)
            best = tl.max(tl.where(enough, asked, low), axis=0)
            high = tl.min(tl.where(enough, high, asked - 1), axis=0)
            low = best
            high = tl.maximum(high, low)
        floor = low.to(tl.int32)
    tl.store(thresholds + row, floor)


@triton.jit
def pick_kernel(
    logits, numbers, thresholds, peaks, totals, cut_totals, stop, token, position, start, limit, key, done,
    out_tokens, out_log_probs, out_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, STOPS: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Program (row): draw from the block sums, record the token, and say whether the row is done.

    totals: of all logits, for the log-prob; cut_totals: of what may be drawn (the same without CUT). numbers[0] = 1 /
    temperature; numbers[2] not 0: greedy. stop: int64 [STOPS], -1 where unused.
    """
    row = tl.program_id(0).to(tl.int64)
    scale, greedy = tl.load(numbers), tl.load(numbers + 2) != 0
    block = tl.arange(0, BLOCKS_PAD)
    in_row = row * BLOCKS + block
    block_peaks = tl.load(peaks + in_row, mask=block < BLOCKS, other=-1e30)
    peak = tl.max(block_peaks, axis=0)
    rescale = tl.where(block < BLOCKS, tl.exp(block_peaks - peak), 0.0)
    log_total = tl.log(tl.sum(rescale * tl.load(totals + in_row, mask=block < BLOCKS, other=0.0), axis=0))
    at_position = tl.load(position + row)
    first, second = uniforms(tl.load(key + row), at_position)
    mass = rescale * tl.load(cut_totals + in_row, mask=block < BLOCKS, other=0.0)
    chosen = tl.where(greedy, tl.argmax(block_peaks, axis=0), draw_index(mass, first, BLOCKS_PAD))
    at = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")) * scale
    may_come = tl.exp(x - peak)
    if CUT:
        may_come = tl.where(ordered(x) >= tl.load(thresholds + row), may_come, 0.0)
    inside = tl.where(greedy, tl.argmax(x, axis=0), draw_index(may_come, second, BLOCK))
    drawn = (chosen * BLOCK + inside).to(tl.int64)
    drawn_x = tl.load(logits + row * VOCAB + drawn) * scale
    if tl.load(done + row) == 0:
        column = row * out_stride + at_position - tl.load(start + row)
        tl.store(out_tokens + column, drawn)
        tl.store(out_log_probs + column, drawn_x - peak - log_total)
        tl.store(token + row, drawn)
        tl.store(position + row, at_position + 1)
        stops = tl.load(stop + tl.arange(0, STOPS))
        ended = (tl.sum((stops == drawn).to(tl.int32), axis=0) > 0) | (at_position >= tl.load(limit + row))
        tl.store(done + row, ended.to(tl.uint8))
