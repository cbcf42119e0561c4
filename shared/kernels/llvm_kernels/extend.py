"""Causal attention of prompts: blocks of one request's new tokens against its keys and values, as matrix products.

Keys are laid out in panels first, as the weights of the linear layer are, and values next to each other; both are
used by a block of tokens and by all query heads that share them.
"""

from __future__ import annotations

import math
from typing import Any, Final

from llvmlite import ir

from shared.kernels.base import AttentionShape
from shared.kernels.llvm_kernels.attention import pad, prefetch_row, rounded_up, weigh
from shared.kernels.llvm_kernels.builder import FLOAT, INT, INT32, Build, Kernel, Target, Value, integer, number
from shared.kernels.llvm_kernels.linear import build_tile, panel_width, tile_of

BLOCK_TOKENS: Final = 64
"""New tokens for which keys and values are laid out once."""

ARGUMENTS: Final = (
    "q_ptr", "q_stride", "pool_ptr", "slots_ptr", "requests_ptr", "window", "out_ptr",
    "scratch_ptr", "scratch_stride", "blocks_ptr", "parts_ptr", "num_parts",
)  # fmt: skip
"""q and out: float32 `[T, heads, D]`, strides in elements; slots: int32; requests: int64 `[m, 4]`: where a request's
slots begin, how many there are, its first new token and how many of them; blocks: int64 `[b, 2]`, each a request and
the first of its new tokens; parts: int64 `[num_parts + 1]`, where each part of the blocks begins; scratch: room for
`scratch_stride` numbers a part.  A token sees itself and the `window - 1` tokens before it."""


def can_attend(shape: AttentionShape, target: Target) -> bool:
    return shape.head_dim % target.lanes == 0


def scratch_room(shape: AttentionShape, longest: int, target: Target) -> int:
    """The `scratch_stride` for contexts of up to `longest` tokens."""
    return sum(_rooms(shape, longest, target))


def _rooms(shape: AttentionShape, longest: int, target: Target) -> tuple[int, int, int, int]:
    """For keys, values, scores of a tile of rows, and zeros."""
    width = panel_width(target)
    padded = rounded_up(longest, width)
    scores = tile_of(target)[0] * (padded + target.lanes)
    return padded * shape.head_dim, padded * shape.head_dim, scores, max(width, shape.head_dim)


def builder_of(shape: AttentionShape) -> Build:
    """What adds the kernel `extend_attention` for heads of this shape."""
    return lambda module, target: _Builder(module, target, shape).build()


class _Builder:
    def __init__(self, module: Any, target: Target, shape: AttentionShape) -> None:
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.group = shape.query_heads // shape.kv_heads
        self.lanes = target.lanes
        self.kind = ir.VectorType(FLOAT, target.lanes)
        self.tile_rows, key_vectors = tile_of(target)
        self.sizes = (self.tile_rows, 4, 2, 1)
        """Rows of the tiles that a block is cut into, as many of each as fit."""
        self.width = panel_width(target)
        self.value_vectors = math.gcd(self.head_dim // self.lanes, 2)
        self.key_tiles, self.value_tiles = (
            {rows: build_tile(module, f"{name}_{rows}", rows, vectors, self.lanes) for rows in self.sizes}
            for name, vectors in (("keys", key_vectors), ("values", self.value_vectors))
        )
        self.k = Kernel(module, "extend_attention", ARGUMENTS)

    def build(self) -> None:
        k, a = self.k, self.k.args
        first_part, team = k.thread()
        with k.loop(first_part, a["num_parts"], team) as part:
            scratch = k.at(a["scratch_ptr"], k.mul(part, a["scratch_stride"]))
            first, last = (k.get(k.at(a["parts_ptr"], k.add(part, integer(more)), INT), INT) for more in (0, 1))
            with k.loop(first, last) as block, k.loop(integer(0), integer(self.kv_heads)) as kv_head:
                self._attend(block, kv_head, scratch)
        k.end()

    def _attend(self, block: Value, kv_head: Value, scratch: Value) -> None:
        k, a = self.k, self.k.args

        def entry(name: str, row: Value, columns: int, column: int) -> Value:
            return k.get(k.at(a[name], k.add(k.mul(row, integer(columns)), integer(column)), INT), INT)

        request, first = entry("blocks_ptr", block, 2, 0), entry("blocks_ptr", block, 2, 1)
        begin, length, first_token, count = (entry("requests_ptr", request, 4, column) for column in range(4))
        last = k.smallest(k.add(first, integer(BLOCK_TOKENS)), count)
        before = k.ir.sub(length, count)
        seen = k.add(before, last)  # the block's last token sees so many
        padded = k.mul(k.ceil_div(seen, self.width), integer(self.width))
        keys = scratch
        values = k.at(keys, k.mul(padded, integer(self.head_dim)))
        scores = k.at(values, k.mul(padded, integer(self.head_dim)))
        stride = k.add(padded, integer(self.lanes))
        zeros = k.at(scores, k.mul(stride, integer(self.tile_rows)))
        panel = self.width * self.head_dim
        # What the last panel has beside keys is computed with and not looked at: left as it is it may be slow to.
        last_panel = k.at(keys, k.ir.sub(k.mul(padded, integer(self.head_dim)), integer(panel)))
        for pointer, count in ((zeros, max(self.width, self.head_dim)), (last_panel, panel)):
            with k.loop(integer(0), integer(count), self.lanes) as at:
                k.store(k.constant(0.0, self.lanes), k.at(pointer, at))
        self._lay_out(kv_head, begin, seen, keys, values)
        first_head = k.mul(kv_head, integer(self.group * self.head_dim))
        row_width = integer(self.kv_heads * self.group * self.head_dim)
        with k.loop(integer(0), integer(self.group)) as head:
            head_at = k.add(first_head, k.mul(head, integer(self.head_dim)))

            with k.pieces(first, last, self.sizes) as (token, rows):
                row, position = k.add(first_token, token), k.add(before, token)
                q = k.at(a["q_ptr"], k.add(k.mul(row, a["q_stride"]), head_at))
                out = k.at(a["out_ptr"], k.add(k.mul(row, row_width), head_at))
                self._score(rows, q, keys, k.add(position, rows), scores, stride, zeros)
                self._weigh(rows, position, scores, stride)
                self._add_up(rows, values, k.add(position, rows), scores, stride, zeros, out, row_width)
                self._divide(rows, scores, stride, out, row_width)

    def _lay_out(self, kv_head: Value, begin: Value, seen: Value, keys: Value, values: Value) -> None:
        """Copies keys to panels `[D, width]`, one after the other, and values to rows."""
        k, a = self.k, self.k.args
        pool_row, head_at = integer(2 * self.kv_heads * self.head_dim), k.mul(kv_head, integer(self.head_dim))

        def row(index: Value) -> Value:
            slot = k.ir.sext(k.get(k.at(a["slots_ptr"], k.add(begin, index), INT32), INT32), INT)
            return k.at(a["pool_ptr"], k.add(k.mul(slot, pool_row), head_at))

        with k.loop(integer(0), seen) as index:
            key = row(index)
            value = k.at(key, integer(self.kv_heads * self.head_dim))
            ahead = row(k.smallest(k.add(index, integer(4)), k.ir.sub(seen, integer(1))))
            for start in (ahead, k.at(ahead, integer(self.kv_heads * self.head_dim))):
                prefetch_row(k, start, self.head_dim)
            panel, column = k.ir.sdiv(index, integer(self.width)), k.ir.srem(index, integer(self.width))
            to_key = k.at(keys, k.add(k.mul(panel, integer(self.width * self.head_dim)), column))
            to_value = k.at(values, k.mul(index, integer(self.head_dim)))
            for at in range(0, self.head_dim, self.lanes):
                k.store(k.load(k.at(value, integer(at)), self.lanes), k.at(to_value, integer(at)))
            for at in range(self.head_dim):
                k.ir.store(k.get(k.at(key, integer(at)), FLOAT), k.at(to_key, integer(at * self.width)))

    def _score(
        self, rows: Value, q: Value, keys: Value, seen: Value, scores: Value, stride: Value, zeros: Value
    ) -> None:
        """Products of the rows' queries with all keys that the last of them sees."""
        k = self.k
        with k.loop(integer(0), seen, self.width) as column:
            panel = k.at(keys, k.mul(column, integer(self.head_dim)))
            k.call_one(
                self.key_tiles,
                rows,
                [q, k.args["q_stride"], panel, integer(self.width), integer(self.head_dim), zeros, integer(0),
                 k.at(scores, column), stride, panel, integer(0)],
            )  # fmt: skip

    def _weigh(self, rows: Value, position: Value, scores: Value, stride: Value) -> None:
        """Turns each row's scores into `exp(score - largest)`, zero for what its token does not see."""
        k, a, lanes = self.k, self.k.args, self.lanes
        scale = k.constant(self.head_dim**-0.5, lanes)
        with k.loop(integer(0), rows) as row:
            line = k.at(scores, k.mul(row, stride))
            stop = k.add(position, row, integer(1))
            start = k.largest(k.ir.sub(stop, a["window"]), integer(0))
            padded = k.add(start, k.mul(k.ceil_div(k.ir.sub(stop, start), lanes), integer(lanes)))
            pad(k, line, stop, padded)
            most = k.variable(self.kind, k.constant(-math.inf, lanes))
            with k.loop(start, padded, lanes) as at:
                scaled = k.ir.fmul(k.load(k.at(line, at), lanes), scale)
                k.store(scaled, k.at(line, at))
                k.ir.store(k.larger(k.get(most, self.kind), scaled), most)
            largest = k.splat(k.largest_lane(k.get(most, self.kind)), lanes)
            total = weigh(k, line, start, padded, largest)
            for first, last in ((integer(0), start), (stop, k.add(position, rows))):
                with k.loop(first, last) as at:
                    k.ir.store(number(0.0), k.at(line, at))
            # At the end of the line, which the values' tile does not read.
            k.ir.store(total, k.at(line, k.ir.sub(stride, integer(1))))

    def _add_up(
        self, rows: Value, values: Value, seen: Value, scores: Value, stride: Value, zeros: Value, out: Value,
        row_width: Value,
    ) -> None:  # fmt: skip
        k = self.k
        for at in range(0, self.head_dim, self.value_vectors * self.lanes):
            part = k.at(values, integer(at))
            k.call_one(
                self.value_tiles,
                rows,
                [scores, stride, part, integer(self.head_dim), seen, zeros, integer(0), k.at(out, integer(at)),
                 row_width, part, integer(0)],
            )  # fmt: skip

    def _divide(self, rows: Value, scores: Value, stride: Value, out: Value, row_width: Value) -> None:
        """By each row's sum of weights."""
        k = self.k
        with k.loop(integer(0), rows) as row:
            total = k.get(k.at(scores, k.ir.sub(k.mul(k.add(row, integer(1)), stride), integer(1))), FLOAT)
            share = k.splat(k.ir.fdiv(number(1.0), total), self.lanes)
            line = k.at(out, k.mul(row, row_width))
            for at in range(0, self.head_dim, self.lanes):
                place = k.at(line, integer(at))
                k.store(k.ir.fmul(k.load(place, self.lanes), share), place)
