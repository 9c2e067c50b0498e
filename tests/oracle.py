"""The data model and the pairing rules once more: plain Python, byte by byte, slow and obvious.

Written from design.md sections 3 and 5 alone. It shares nothing with the lowering: no lcm, no slices, no lanes, no
merging, and it does not know which of several holders sends a head.
"""

import itertools
from collections import Counter, defaultdict
from typing import NamedTuple

from kvcompile import Cache, Field, Region, Request


def shard(field: Field, cache: Cache) -> range:
    """Heads of the model that the rank of ``cache`` holds."""
    if field.replicated:
        return range(field.heads)
    if cache.tp_size <= field.heads:
        first = cache.tp_rank * field.heads // cache.tp_size
        return range(first, (cache.tp_rank + 1) * field.heads // cache.tp_size)
    return range(only := cache.tp_rank * field.heads // cache.tp_size, only + 1)


def held(cache: Cache, field: Field, token: int) -> bool:
    """Whether the rank has a token of a block: context parallelism deals them out, ``dcp_interleave`` at a time."""
    places = cache.dcp_size if field.dcp_sharded else 1
    return token // cache.dcp_interleave % places == cache.tp_rank % places


def address(cache: Cache, region: Region, field: Field, block: int, head: int, token: int, byte: int) -> int:
    """Address of a byte. ``head`` counts over the model, ``token`` from the first of the block (or a row of state)."""
    if field.dcp_sharded:
        width = cache.dcp_interleave
        token = token // (width * cache.dcp_size) * width + token % width
    kernel_block = block * region.kernel_blocks + token // field.tokens
    local_head = head - shard(field, cache).start
    return (
        region.base
        + kernel_block * region.block_stride
        + field.offset
        + local_head * field.head_stride
        + token % field.tokens // field.tokens_per_cell * field.token_stride
        + byte
    )


def first_tokens(cache: Cache, region: Region, field: Field) -> list[int]:
    """First token in the block (or row of state) of each cell of a head that the rank has."""
    group = cache.groups[region.group]
    if group.state:
        return list(range(field.tokens))
    return [token for token in range(0, group.block_size, field.tokens_per_cell) if held(cache, field, token)]


def tensors(cache: Cache) -> dict[tuple[str, str], tuple[Region, Field]]:
    """Every (layer, field) that a cache holds."""
    return {(region.layer, field.name): (region, field) for region in cache.regions for field in region.fields}


def group_pairs(src: Cache, dst: Cache) -> list[tuple[int, int]]:
    """(src group, dst group) of all that both hold."""
    theirs = tensors(dst)
    return sorted({(region.group, theirs[key][0].group) for key, (region, _) in tensors(src).items() if key in theirs})


def bound(cache: Cache, group: int) -> int | None:
    """What ids of a group stay below."""
    return min((r.num_blocks // r.kernel_blocks for r in cache.regions if r.group == group), default=None)


def block_addresses(cache: Cache, group: int, block: int) -> set[int]:
    """Every byte of a block."""
    return {
        address(cache, region, field, block, head, token, byte)
        for region, field in tensors(cache).values()
        if region.group == group
        for head in shard(field, cache)
        for token in first_tokens(cache, region, field)
        for byte in range(field.cell_nbytes)
    }


def overlaid(cache: Cache, a: int, b: int) -> bool:
    """Whether two groups share bytes (then they share them at equal ids)."""
    return bool(block_addresses(cache, a, 0) & block_addresses(cache, b, 0))


class Placed(NamedTuple):
    """A block of a list and where it stands: positions are what pairs."""

    position: int
    block: int


def place(request: Request, src: Cache, dst: Cache, pair: tuple[int, int]) -> tuple[list[Placed], list[Placed], bool]:
    """Give each block of two lists a position, such that equal tokens (or equal units of state) pair.

    Returns
    -------
    (src blocks, dst blocks, whole)
        ``whole``: a block pairs as one unit with the block at its own position. What ``num_tokens`` takes off is
        absent.
    """
    src_group, dst_group = src.groups[pair[0]], dst.groups[pair[1]]
    src_blocks = [int(block) for block in request.src_blocks[pair[0]]]
    dst_blocks = [int(block) for block in request.dst_blocks[pair[1]]]
    equal = src_group.block_size == dst_group.block_size
    if request.src_first is None:
        excess = len(src_blocks) - len(dst_blocks)
        left = [Placed(index - excess, block) for index, block in enumerate(src_blocks)]
        right = [Placed(index, block) for index, block in enumerate(dst_blocks)]
    else:
        left = [Placed(request.src_first[pair[0]] + index, block) for index, block in enumerate(src_blocks)]
        right = [Placed(request.dst_first[pair[1]] + index, block) for index, block in enumerate(dst_blocks)]
    if request.num_tokens is not None:
        left = [item for item in left if item.position * src_group.block_size < request.num_tokens]
        right = [item for item in right if item.position * dst_group.block_size < request.num_tokens]
    if dst_group.state and not equal:
        # The last of each pairs: give it the position of the other side's last.
        left = [Placed(right[-1].position, left[-1].block)] if left and right else []
    return left, right, dst_group.state


def token_pairs(request: Request, src: Cache, dst: Cache, pair: tuple[int, int]) -> list[tuple[Placed, Placed]]:
    """(block, token in it) of either side, for every token (or, in a state group, block) that is to be copied."""
    left, right, whole = place(request, src, dst, pair)
    src_size, dst_size = (1, 1) if whole else (src.groups[pair[0]].block_size, dst.groups[pair[1]].block_size)
    held = {item.position * src_size + token: (item.block, token) for item in left for token in range(src_size)}
    found = []
    for item in right:
        for token in range(dst_size):
            source = held.get(item.position * dst_size + token)
            if source is None:
                continue
            if source[0] == src.groups[pair[0]].null_block or item.block == dst.groups[pair[1]].null_block:
                continue
            found.append((source, (item.block, token)))
    return found


def copies(request: Request, src: Cache, dst: Cache) -> list[tuple[int, int]]:
    """(src address, dst address) of every byte of the request that src holds and dst wants."""
    theirs, found = tensors(dst), []
    for pair in group_pairs(src, dst):
        matches = token_pairs(request, src, dst, pair)
        for key, (region, field) in tensors(src).items():
            if key not in theirs or (region.group, theirs[key][0].group) != pair:
                continue
            dst_region, dst_field = theirs[key]
            heads = [head for head in shard(field, src) if head in shard(dst_field, dst)]
            for (src_block, src_token), (dst_block, dst_token) in matches:
                if dst.groups[pair[1]].state:
                    rows = [(row, row) for row in range(field.tokens)]
                elif held(src, field, src_token) and held(dst, dst_field, dst_token):
                    # A cell of several tokens is copied once, with its first.
                    rows = [] if src_token % field.tokens_per_cell else [(src_token, dst_token)]
                else:
                    rows = []
                for head, (a, b), byte in itertools.product(heads, rows, range(field.cell_nbytes)):
                    found.append(
                        (
                            address(src, region, field, src_block, head, a, byte),
                            address(dst, dst_region, dst_field, dst_block, head, b, byte),
                        )
                    )
    return found


def uncovered(request: Request, src: Cache, dst: Cache) -> list[tuple[int, int]]:
    """(dst group, position) of the blocks that the request leaves without all their bytes."""
    missing = set()
    for pair in group_pairs(src, dst):
        left, right, whole = place(request, src, dst, pair)
        src_size, dst_size = (1, 1) if whole else (src.groups[pair[0]].block_size, dst.groups[pair[1]].block_size)
        held = {item.position * src_size + token: item.block for item in left for token in range(src_size)}
        for item in right:
            if item.block == dst.groups[pair[1]].null_block:
                continue
            for token in range(item.position * dst_size, (item.position + 1) * dst_size):
                beyond = not whole and request.num_tokens is not None and token >= request.num_tokens
                if not beyond and held.get(token, src.groups[pair[0]].null_block) == src.groups[pair[0]].null_block:
                    missing.add((pair[1], item.position))
    return sorted(missing)


class Fault(NamedTuple):
    """Why a request fails. ``stage`` is 0 for kinds, 1 for lists, 2 for ids, 3 for what it shares with others."""

    stage: int
    side: str | None = None
    group: int | None = None
    position: int | None = None
    value: object = None
    bound: int | None = None


def fault(request: Request, src: Cache, dst: Cache) -> Fault | None:
    """Return the first fault of a request by itself: kinds, then lists, then ids (src before dst, group, index)."""
    sides = (("src", request.src_blocks, src), ("dst", request.dst_blocks, dst))
    for side, lists, _ in sides:
        for group, blocks in enumerate(lists):
            if any(isinstance(block, (bool, float, str)) or block is None for block in blocks):
                return Fault(0, side, group)
    for side, lists, cache in sides:
        if len(lists) != len(cache.groups):
            return Fault(1, side)
    if (request.src_first is None) != (request.dst_first is None) or (
        request.num_tokens is not None and request.src_first is None
    ):
        return Fault(1)
    for pair in group_pairs(src, dst):
        left, right, _ = place(request, src, dst, pair)
        equal = src.groups[pair[0]].block_size == dst.groups[pair[1]].block_size
        state = dst.groups[pair[1]].state
        if not right:
            continue
        if not equal and state and not left:
            return Fault(1)
        if request.src_first is None and not equal and not state:
            return Fault(1)
        if request.src_first is None and equal and len(left) < len(right):
            return Fault(1)
    for side, lists, cache in sides:
        for group, blocks in enumerate(lists):
            limit = bound(cache, group)
            for index, block in enumerate(blocks):
                if block != cache.groups[group].null_block and (block < 0 or (limit is not None and block >= limit)):
                    return Fault(2, side, group, index, block, limit)
    return None


def faults(requests: list[Request], src: Cache, dst: Cache) -> dict[object, Fault]:
    """Return the fault of every request of a batch that fails, by its id."""
    failed = {request.id: found for request in requests if (found := fault(request, src, dst)) is not None}
    sharing = {(a, b) for a, b in itertools.combinations(range(len(dst.groups)), 2) if overlaid(dst, a, b)}
    givers = defaultdict(list)  # block -> who gives it in which group
    for request in requests:
        if request.id not in failed:
            for group, blocks in enumerate(request.dst_blocks):
                for block in blocks:
                    if block != dst.groups[group].null_block:
                        givers[block].append((request.id, group))
    for block, users in givers.items():
        for (one, a), (other, b) in itertools.combinations(users, 2):
            if a == b or (a, b) in sharing or (b, a) in sharing:
                failed[one] = failed[other] = Fault(3, "dst", value=block)
    for name, count in Counter(request.id for request in requests).items():
        if count > 1:
            failed[name] = Fault(3)
    return failed
