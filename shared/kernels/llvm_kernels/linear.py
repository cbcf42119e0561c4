"""`x W^T + bias` for weights laid out in panels: all inputs of some outputs, next to each other.

A tile of rows and outputs is summed up in registers.  While its rows are worked through, the block of weights that
comes next is fetched from memory: for few rows that is what takes the time, and a library that fetches first and
computes then takes as long as both.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from shared.kernels.llvm_kernels.builder import FLOAT, INT, POINTER, Function, Kernel, Target, Value, integer

BLOCK_DEPTH: Final = 192
"""Inputs worked through at a time: a panel's block of them stays in the first level of the cache."""
BLOCK_ROWS: Final = 96
"""Rows worked through before the next panel; all tiles divide it."""
CACHE_LINE: Final = 64
FLOAT_BYTES: Final = 4

ARGUMENTS: Final = ("x_ptr", "x_stride", "weight_ptr", "bias_ptr", "out_ptr", "rows", "inputs", "outputs")
"""Float32, strides in elements: x `[rows, inputs]`, bias `[outputs]`, out `[rows, outputs]`, which is at least a
panel wide."""


def tile_of(target: Target) -> tuple[int, int]:
    """Rows and vectors of outputs that the registers hold the sums of."""
    return (8, 3) if target.registers >= 32 else (6, 2)


def panel_width(target: Target) -> int:
    """Outputs of a panel of weights, `[inputs, panel_width]`; the last begins where it still ends within them."""
    return tile_of(target)[1] * target.lanes


def build(module: Any, target: Target) -> None:
    """Adds the kernel `linear`."""
    tile_rows, vectors = tile_of(target)
    width = panel_width(target)
    tiles = {
        rows: build_tile(module, f"linear_{rows}", rows, vectors, target.lanes) for rows in range(1, tile_rows + 1)
    }
    k = Kernel(module, "linear", ARGUMENTS)
    a = k.args
    full = k.ir.sdiv(a["outputs"], integer(width))
    first, last = k.share(full)
    # A last panel that overlaps the one before is the same thread's, after that one: it writes those outputs again.
    is_end = k.ir.icmp_signed("==", last, full)
    last = k.ir.select(is_end, k.ceil_div(a["outputs"], width), last)
    last_column = k.ir.sub(a["outputs"], integer(width))
    with k.loop(integer(0), a["rows"], BLOCK_ROWS) as first_row:
        end_row = k.smallest(k.add(first_row, integer(BLOCK_ROWS)), a["rows"])
        num_tiles = k.ceil_div(k.ir.sub(end_row, first_row), tile_rows)
        # What one tile fetches per input, so that all tiles together fetch the next block.
        bytes_ahead = k.ir.sdiv(k.ir.add(k.ir.sub(num_tiles, integer(1)), integer(width * FLOAT_BYTES)), num_tiles)
        bytes_ahead = k.smallest(bytes_ahead, integer(CACHE_LINE))
        with k.loop(first, last) as panel:
            column = k.smallest(k.mul(panel, integer(width)), last_column)
            weight = k.at(a["weight_ptr"], k.mul(panel, a["inputs"], integer(width)))
            with k.loop(integer(0), a["inputs"], BLOCK_DEPTH) as first_input:
                depth = k.smallest(k.ir.sub(a["inputs"], first_input), integer(BLOCK_DEPTH))
                block = k.at(weight, k.mul(first_input, integer(width)))
                next_block = k.at(block, k.mul(depth, integer(width)))
                is_first = k.ir.icmp_signed("==", first_input, integer(0))
                with k.loop(first_row, end_row, tile_rows) as row:
                    rows = k.smallest(k.ir.sub(end_row, row), integer(tile_rows))
                    tile = k.ir.sdiv(k.ir.sub(row, first_row), integer(tile_rows))
                    ahead = k.at(next_block, k.mul(tile, depth, bytes_ahead), ir.IntType(8))
                    out = k.at(a["out_ptr"], k.add(k.mul(row, a["outputs"]), column))
                    sums = k.ir.select(is_first, k.at(a["bias_ptr"], column), out)
                    sums_stride = k.ir.select(is_first, integer(0), a["outputs"])
                    x = k.at(a["x_ptr"], k.add(k.mul(row, a["x_stride"]), first_input))
                    inputs = (x, a["x_stride"], block, integer(width), depth)
                    to = (sums, sums_stride, out, a["outputs"])
                    k.call_one(tiles, rows, [*inputs, *to, ahead, bytes_ahead])
    k.end()


def build_tile(module: Any, name: str, rows: int, vectors: int, lanes: int) -> Any:
    """`out = sums + x W^T` for `rows` rows, `depth` inputs and as many outputs as the vectors have lanes.

    The outputs of one input lie next to each other, those of the next `weight_stride` further.
    """
    parameters = {
        "x": POINTER, "x_stride": INT, "weight": POINTER, "weight_stride": INT, "depth": INT,
        "sums": POINTER, "sums_stride": INT, "out": POINTER, "out_stride": INT, "ahead": POINTER, "bytes_ahead": INT,
    }  # fmt: skip
    f = Function(module, name, parameters, is_private=True)
    a = f.args
    kind = ir.VectorType(FLOAT, lanes)

    def place(pointer: Value, stride: Value, row: int, vector: int) -> Value:
        return f.at(pointer, f.add(f.mul(stride, integer(row)), integer(vector * lanes)))

    def cells() -> list[tuple[int, int]]:
        return [(row, vector) for row in range(rows) for vector in range(vectors)]

    sums = {cell: f.variable(kind, f.load(place(a["sums"], a["sums_stride"], *cell), lanes)) for cell in cells()}
    with f.loop(integer(0), a["depth"]) as index:
        f.prefetch(f.at(a["ahead"], f.mul(index, a["bytes_ahead"]), ir.IntType(8)))
        line = f.at(a["weight"], f.mul(index, a["weight_stride"]))
        weights = [f.load(f.at(line, integer(vector * lanes)), lanes) for vector in range(vectors)]
        for row in range(rows):
            x = f.splat(f.get(f.at(a["x"], f.add(f.mul(a["x_stride"], integer(row)), index)), FLOAT), lanes)
            for vector in range(vectors):
                total = sums[row, vector]
                f.ir.store(f.fma(x, weights[vector], f.get(total, kind)), total)
    for cell in cells():
        f.store(f.get(sums[cell], kind), place(a["out"], a["out_stride"], *cell))
    return f.end()
