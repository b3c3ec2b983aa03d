"""Which request holds which block of a cache: counted on the host, never read from the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spec_kernels.types import OutOfBlocks


class BlockPool:
    """Blocks that are free, or held by one or more requests.

    Args:
        num_blocks: how many there are.

    Example:
        >>> pool = BlockPool(3)
        >>> blocks = pool.take(2)
        >>> pool.share(blocks[:1])
        >>> pool.release(blocks)
        >>> pool.num_free, pool.holders(blocks[0]), pool.holders(blocks[1])
        (2, 1, 0)
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def add(self, count: int) -> None:
        """Add free blocks, numbered behind the present ones."""
        first = len(self._holders)
        self._free[:0] = range(first + count - 1, first - 1, -1)
        self._holders += [0] * count

    def holders(self, block: int) -> int:
        """Requests that hold a block."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """Return `count` free blocks, each held once from now on.

        Raises:
            OutOfBlocks: there are fewer; nothing changed.
        """
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Let one request more hold each block."""
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let one request less hold each block; a block without holders becomes free."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)


class Growth(NamedTuple):
    """What `BlockLists.grow` changed.

    Attributes:
        copies: pairs (old block, new block): rows to copy before anything is written.
        changed: requests whose lists changed.
    """

    copies: list[tuple[int, int]]
    changed: set[int]


class BlockLists:
    """The blocks of every request, in the order of its rows.

    Args:
        batch: requests.
        num_blocks: blocks for all of them.
        block_size: rows per block.

    Example:
        >>> lists = BlockLists(2, num_blocks=4, block_size=16)
        >>> growth = lists.grow([0, 0], [20, 3])
        >>> [len(blocks) for blocks in lists.blocks], lists.pool.num_free
        ([2, 1], 1)
        >>> lists.shrink([16, 0])
        {0, 1}
        >>> lists.pool.num_free
        3
    """

    def __init__(self, batch: int, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.blocks: list[list[int]] = [[] for _ in range(batch)]
        self._block_size = block_size

    def grow(self, lens: Sequence[int], ends: Sequence[int]) -> Growth:
        """Give every request blocks of its own for the rows [lens[b], ends[b]) that it will write.

        A shared block among them, the last partial one of a fork, is replaced by a copy; the last
        holder writes in place.

        Raises:
            OutOfBlocks: more blocks are needed than are free; nothing changed.
        """
        size = self._block_size
        missing = [
            max(-(-end // size) - len(own), 0) if end > start else 0
            for own, start, end in zip(self.blocks, lens, ends, strict=True)
        ]
        shared = self._shared(lens, ends)
        fresh = self.pool.take(sum(missing) + len(shared))
        copies = []
        for request, index in shared:
            old, new = self.blocks[request][index], fresh.pop()
            self.blocks[request][index] = new
            self.pool.release([old])
            copies.append((old, new))
        for own, count in zip(self.blocks, missing, strict=True):
            own.extend(fresh.pop() for _ in range(count))
        changed = {request for request, _ in shared}
        return Growth(copies, changed | {b for b, count in enumerate(missing) if count})

    def _shared(self, lens: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
        """Return request and index of the blocks to copy: all holders but the last one."""
        left: dict[int, int] = {}
        found = []
        for request, own in enumerate(self.blocks):
            first, last = lens[request] // self._block_size, -(-ends[request] // self._block_size)
            for index in range(first, min(last, len(own)) if ends[request] > lens[request] else 0):
                block = own[index]
                holders = left.setdefault(block, self.pool.holders(block))
                if holders > 1:
                    left[block] = holders - 1
                    found.append((request, index))
        return found

    def shrink(self, lens: Sequence[int]) -> set[int]:
        """Release what lies behind `lens[b]` rows; return the requests whose lists changed."""
        changed = set()
        for request, (own, length) in enumerate(zip(self.blocks, lens, strict=True)):
            kept = -(-length // self._block_size)
            if kept < len(own):
                self.pool.release(own[kept:])
                del own[kept:]
                changed.add(request)
        return changed

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target`, which holds nothing, hold the blocks of the first rows of `source`."""
        own = self.blocks[source][: -(-length // self._block_size)]
        self.pool.share(own)
        self.blocks[target] = list(own)
