"""Proof of the cache kernels: order, barriers, alignment, bytes, addresses, launches."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels import kernels
from spec_kernels.kernels.cache import select_config
from spec_kernels.testing import (
    TARGETS,
    CompiledLaunch,
    Launch,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    dry_run,
    emulate,
    interpreted,
    measure,
    watch,
)
from spec_kernels.types import CacheTensors
from tests.test_cache import Case, assert_same, compact, copy_of, ints, make_case

UNORDERED = [[5, 3, 1, 0], [2, 1, 0]]


def call(case: Case, caches: CacheTensors) -> None:
    kernels.compact_cache(
        caches, case.block_table, case.context_lens, case.path, case.accepted_lens
    )


def watched(case: Case, **options: Any) -> Launch:
    copies = [copy_of(tensor) for tensor in case.tensors]
    with watch(reachable=copies, **options) as seen:
        call(case, CacheTensors.make(copies))
    assert_same(copies, compact("reference", case))
    (launch,) = seen.launches
    return launch


# --------------------------------------------------------------------------- bytes


def payload(case: Case) -> int:
    """Bytes of the rows that change place."""
    moved = sum(
        int(node) not in (-1, i)
        for row, last in zip(case.path, case.accepted_lens, strict=True)
        for i, node in enumerate(row[: int(last) + 1])
    )
    return moved * sum(tensor[0, 0].numel() * tensor.element_size() for tensor in case.tensors)


@pytest.mark.parametrize("order", ["natural", "reverse", "shuffle"])
def test_every_row_that_moves_is_read_and_written_once(order: str) -> None:
    case = make_case([[0, 2, 5, 9], [0], [3, 2, 1, 0]], 4, forms=("nhd", "latent", "scales"))
    launch = watched(case, order=order)
    assert launch.bytes("load", "?") == launch.bytes("store", "?") == payload(case)
    assert launch.store_bytes == payload(case)


def test_indices_take_at_most_twelve_bytes_a_row_and_block_of_columns() -> None:
    case = make_case([[0, 2, 5, 9, 11]], 4, forms=("nhd",))
    launch = watched(case)
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    rows = 5
    indices = launch.bytes("load", "path_ptr") + launch.bytes("load", "block_table_ptr")
    assert indices <= (12 * rows + 4) * programs  # the first entry once more: is it absent?
    fixed = launch.load_bytes - payload(case) - indices
    assert fixed == (4 + 4 + 80) * programs  # length, context, and the row of the table


def test_a_step_where_nothing_moves_reads_paths_and_lengths_only() -> None:
    case = make_case([[0, 1, 2], [0], [], [0, 1]], 4, forms=("nhd", "hnd"))
    launch = watched(case)
    assert {name for (_, _, name), use in launch.lines.items() if use.bytes} == {
        "accepted_ptr",
        "path_ptr",
    }
    programs = launch.grid[1] * launch.grid[2]
    assert launch.load_bytes == sum(4 + 4 + 4 * kept for kept in (3, 1, 0, 2)) * programs


# --------------------------------------------------------------------------- order


@triton.jit
def move_row_by_row(cache_ptr, path_ptr, size, BLOCK: tl.constexpr):  # noqa: N803
    """Fault: one program per entry of the path, so that one may overwrite what another reads."""
    entry = tl.program_id(0)
    node = tl.load(path_ptr + entry)
    offs = tl.arange(0, BLOCK)
    row = tl.load(cache_ptr + node * size + offs, mask=offs < size)
    tl.store(cache_ptr + entry * size + offs, row, mask=offs < size)


def test_moving_row_by_row_is_caught_as_a_race() -> None:
    cache, path = torch.arange(24.0).view(6, 4), ints([5, 3, 1, 0])
    with watch(), pytest.raises(RaceError):
        move_row_by_row[(4,)](cache, path, 4, BLOCK=4)
    assert cache[3].tolist() == cache[0].tolist() == [20.0, 21.0, 22.0, 23.0]  # not row 0


def test_memory_that_nobody_named_is_out_of_bounds() -> None:
    case = make_case(UNORDERED, 4, forms=("nhd",))
    copies = [copy_of(tensor) for tensor in case.tensors]
    with watch(), pytest.raises(OutOfBoundsError):
        call(case, CacheTensors.make(copies))


def compiled(case: Case, caches: CacheTensors, target: str = "sm_80") -> CompiledLaunch:
    with dry_run(target) as launches:
        call(case, caches)
    (launch,) = launches
    return launch


def run_ptx(launch: CompiledLaunch, ptx: str, copies: list[Tensor], seed: int) -> None:
    signature = launch.compiled.src.signature
    arguments = [launch.arguments[n] for n, kind in signature.items() if kind != "constexpr"]
    emulate(
        ptx,
        launch.grid,
        arguments,
        shared_bytes=launch.compiled.metadata.shared,
        schedule="warps",
        order="shuffle",
        seed=seed,
        reachable=copies,
    )


def test_without_its_barriers_the_compiled_kernel_is_wrong() -> None:
    case = make_case(UNORDERED, 4, forms=("nhd",))
    expected = compact("reference", case)
    right = []
    for keeps in (True, False):
        for seed in range(3):
            copies = [copy_of(tensor) for tensor in case.tensors]
            launch = compiled(case, CacheTensors.make(copies))
            ptx = launch.compiled.asm["ptx"]
            assert "bar.sync" in ptx
            run_ptx(launch, ptx if keeps else ptx.replace("bar.sync", "// bar.sync"), copies, seed)
            right.append(torch.equal(copies[0].view(torch.int16), expected[0].view(torch.int16)))
    assert right[:3] == [True] * 3
    assert not all(right[3:])


def test_barriers_of_amd_wait_for_the_loads() -> None:
    """Its barrier alone does not: a store could overtake the load of another wave."""
    case = make_case(UNORDERED, 4, forms=("nhd",))
    launch = compiled(case, CacheTensors.make(case.tensors), "gfx942")
    lines = [line.split() for line in launch.compiled.asm["amdgcn"].splitlines() if line.split()]
    names = [line[0] for line in lines]
    stores = [n for n, name in enumerate(names) if name == "global_store_dwordx4"]
    loads = [n for n, name in enumerate(names) if name == "global_load_dwordx4" and n < stores[0]]
    barrier = max(n for n in range(stores[0]) if names[n] == "s_barrier")
    waits = [n for n in range(max(loads), barrier) if lines[n][:2] == ["s_waitcnt", "vmcnt(0)"]]
    assert max(loads) < barrier
    assert waits


# --------------------------------------------------------------------------- alignment


def shifted(form: str, by: int) -> Case:
    """A case whose only tensor starts `by` bytes behind an aligned address."""
    case = make_case(UNORDERED, 4, forms=(form,))
    tensor = case.tensors[0]
    room = torch.zeros(tensor.numel() * 2 + 32, dtype=torch.uint8)
    base = -room.data_ptr() % 16 + by
    view = room[base : base + tensor.numel() * 2].view(torch.int16).view(tensor.shape)
    return case._replace(tensors=[view.copy_(tensor.view(torch.int16))])


def test_each_tensor_moves_as_wide_as_it_is_aligned() -> None:
    case = make_case(UNORDERED, 4, forms=("nhd", "scales", "odd", "latent"))
    table = CacheTensors.make([*case.tensors, *shifted("nhd", 2).tensors]).table
    assert table[:, 6].tolist() == [16, 1, 1, 16, 1]


def test_a_table_that_lies_about_alignment_is_caught() -> None:
    for lies in (False, True):
        case = shifted("nhd", 2)
        caches = CacheTensors.make(case.tensors)
        expected = compact("reference", case)
        launch = compiled(case, caches)
        if lies:
            caches.table[0, 6] = 16
            with pytest.raises(MisalignedError):
                run_ptx(launch, launch.compiled.asm["ptx"], case.tensors, 0)
        else:
            run_ptx(launch, launch.compiled.asm["ptx"], case.tensors, 0)
            assert torch.equal(case.tensors[0], expected[0])


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.slow) for t in TARGETS]
)
def test_aligned_rows_move_in_128_bits_without_spills(target: str) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = CacheTensors.make([meta(64, 16, 8, 128, dtype=torch.bfloat16)] * 64)
    for width, clears in ((6, False), (33, True)):
        with dry_run(target) as launches:
            lens = meta(4)
            num_nodes = lens if clears else None
            kernels.compact_cache(
                caches, meta(4, 16), lens, meta(4, width), lens, num_nodes=num_nodes
            )
        (launch,) = launches  # one launch for 32 layers
        used = measure(launch.compiled, target)
        assert used.spill_bytes == 0
        assert any(128 in widths for widths in used.load_bits_by_line().values())


# --------------------------------------------------------------------------- addresses, grids


def test_rows_lie_more_than_two_to_the_thirty_one_elements_apart() -> None:
    """Blocks 2^31 elements apart, in memory that exists only where it is touched."""
    step = 2**31 + 64
    memory = mmap.mmap(-1, 3 * step * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    cache = flat.as_strided((3, 2, 1, 16), (step, 16, 16, 1))
    cache.copy_(torch.randn(3, 2, 1, 16))
    near, before = cache.clone(), cache.clone()
    case = Case([], ints([[2, 1, 0]]), ints([1]), ints([[0, 4, 2]]), ints([2]))
    rows = torch.randn(2, 1, 16)
    for tensor in (cache, near):
        with watch(bounds=False):  # the extent has too many gaps for a map of them
            call(case, CacheTensors.make([tensor]))
            kernels.append_cache(tensor, None, rows, None, ints([4, 5]).long())
    assert torch.equal(cache, near)
    assert torch.equal(near[1], torch.stack([before[0, 1], before[1, 1]]))  # row 2 was row 5


def test_more_requests_than_a_grid_has_rows() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = 70_000
    cache, lens = meta(2**18, 16, 2, 8, dtype=torch.float16), meta(batch)
    caches, path = CacheTensors.make([cache]), meta(batch, 5)
    states = CacheTensors.make([meta(batch, 1, 8, dtype=torch.float32)])
    after = CacheTensors.make([meta(batch, 5, 8, dtype=torch.float32)])
    new = meta(batch, 2, 8, dtype=torch.float16)
    with dry_run("sm_90") as launches:
        kernels.compact_cache(caches, meta(batch, 2), lens, path, lens)
        kernels.append_cache(cache, cache, new, new, meta(batch, dtype=torch.int64))
        kernels.select_state(states, after, path, lens)
        kernels.compact_hidden(meta(batch, 64), path, path, lens)
    assert [launch.grid[0] for launch in launches] == [batch] * 4
    assert all(max(launch.grid[1:]) < 65_536 for launch in launches)


def test_a_tensor_that_was_replaced_is_refused() -> None:
    case = make_case(UNORDERED, 4, forms=("nhd",))
    caches = CacheTensors.make(case.tensors)
    with interpreted(), pytest.raises(ValueError, match="must lie where"):
        call(case, caches._replace(tensors=(case.tensors[0].clone(),)))


def test_wider_paths_take_narrower_blocks() -> None:
    for width in range(1, 400):
        config = select_config(width)
        assert config.group >= min(width, 128)
        assert config.group * config.block_bytes <= 128 * config.num_warps * 32
