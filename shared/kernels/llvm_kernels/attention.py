"""Attention of one new token per request, over keys and values where they lie in the pool.

Query heads that share a KV head are worked on together, so each row of the pool is read once.  A request's sums are
made by one thread in the order of its tokens: they do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from typing import Any, Final

from llvmlite import ir

from shared.kernels.base import AttentionShape
from shared.kernels.llvm_kernels.builder import FLOAT, INT, INT32, Build, Kernel, Target, Value, integer, number

AHEAD: Final = 12
"""Tokens between the row that is worked on and the one that is asked for."""
CACHE_LINE_FLOATS: Final = 16

ARGUMENTS: Final = (
    "q_ptr", "q_stride", "pool_ptr", "slots_ptr", "begins_ptr", "ends_ptr", "out_ptr",
    "scores_ptr", "scores_stride", "parts_ptr", "num_parts",
)  # fmt: skip
"""q and out: float32 `[n, heads, D]`, strides in elements; slots: int32, those of request i at places `begins[i]` to
`ends[i]` (int64); scores: room for `scores_stride` numbers a part; parts: int64 `[num_parts + 1]`, where each part of
the `n * kv_heads` pieces of work begins."""


def scores_room(shape: AttentionShape, longest: int, target: Target) -> int:
    """The `scores_stride` for contexts of up to `longest` tokens."""
    return shape.query_heads // shape.kv_heads * rounded_up(longest, target.lanes)


def rounded_up(length: int, lanes: int) -> int:
    return -(-length // lanes) * lanes


def builder_of(shape: AttentionShape) -> Build:
    """What adds the kernel `decode_attention` for heads of this shape."""
    return lambda module, target: _Builder(module, target, shape).build()


def prefetch_row(k: Kernel, row: Value, width: int) -> None:
    """Asks for all cache lines of a row."""
    for start in range(0, width, CACHE_LINE_FLOATS):
        k.prefetch(k.at(row, integer(start)))


def pad(k: Kernel, line: Value, stop: Value, padded: Value) -> None:
    """Scores from `stop` to `padded` that `weigh` makes zeros."""
    with k.loop(stop, padded) as at:
        k.ir.store(number(-math.inf), k.at(line, at))


def weigh(k: Kernel, line: Value, start: Value, padded: Value, largest: Value) -> Value:
    """Turns the scores from `start` to `padded`, whole vectors, into `exp(score - largest)`; returns their sum.

    `largest` is a vector of the same number.
    """
    kind, lanes = largest.type, largest.type.count
    total = k.variable(kind, k.constant(0.0, lanes))
    with k.loop(start, padded, lanes) as at:
        score = k.load(k.at(line, at), lanes)
        is_padding = k.ir.fcmp_ordered("==", score, k.constant(-math.inf, lanes))
        weight = k.ir.select(is_padding, k.constant(0.0, lanes), k.exp(k.ir.fsub(score, largest)))
        k.store(weight, k.at(line, at))
        k.ir.store(k.ir.fadd(k.get(total, kind), weight), total)
    return k.sum(k.get(total, kind))


class _Builder:
    def __init__(self, module: Any, target: Target, shape: AttentionShape) -> None:
        self.k = Kernel(module, "decode_attention", ARGUMENTS)
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.group = shape.query_heads // shape.kv_heads
        self.lanes = target.lanes
        self.width = math.gcd(shape.head_dim, target.lanes)
        """Lanes of the vectors that a head is cut into."""

    def build(self) -> None:
        k, a = self.k, self.k.args
        first_part, team = k.thread()
        # A team may be smaller than asked for: its threads take further parts.
        with k.loop(first_part, a["num_parts"], team) as part:
            scores = k.at(a["scores_ptr"], k.mul(part, a["scores_stride"]))
            begin, end = (k.get(k.at(a["parts_ptr"], k.add(part, integer(more)), INT), INT) for more in (0, 1))
            with k.loop(begin, end) as piece:
                self._attend(piece, scores)
        k.end()

    def _attend(self, piece: Value, scores: Value) -> None:
        k, a = self.k, self.k.args
        request, kv_head = k.ir.sdiv(piece, integer(self.kv_heads)), k.ir.srem(piece, integer(self.kv_heads))
        begin, end = (k.get(k.at(a[name], request, INT), INT) for name in ("begins_ptr", "ends_ptr"))
        length = k.ir.sub(end, begin)
        room = k.mul(k.ceil_div(length, self.lanes), integer(self.lanes))
        heads = [k.at(scores, k.mul(room, integer(head))) for head in range(self.group)]
        first_head = k.mul(kv_head, integer(self.group * self.head_dim))
        q = k.at(a["q_ptr"], k.add(k.mul(request, a["q_stride"]), first_head))
        keys = k.at(a["pool_ptr"], k.mul(kv_head, integer(self.head_dim)))
        values = k.at(keys, integer(self.kv_heads * self.head_dim))
        largest = self._score(q, keys, begin, end, heads)
        sums = []
        for head, most in zip(heads, largest, strict=True):
            pad(k, head, length, room)
            sums.append(weigh(k, head, integer(0), room, k.splat(most, self.lanes)))
        row = integer(self.kv_heads * self.group * self.head_dim)
        out = k.at(a["out_ptr"], k.add(k.mul(request, row), first_head))
        self._add_up(values, begin, end, heads, sums, out)

    def _rows(self, first: Value, index: Value, end: Value) -> Value:
        """The row of the token at place `index` among the slots; the one `AHEAD` is asked for."""
        k = self.k
        pool_row = integer(2 * self.kv_heads * self.head_dim)

        def row(place: Value) -> Value:
            slot = k.ir.sext(k.get(k.at(k.args["slots_ptr"], place, INT32), INT32), INT)
            return k.at(first, k.mul(slot, pool_row))

        ahead = row(k.smallest(k.add(index, integer(AHEAD)), k.ir.sub(end, integer(1))))
        prefetch_row(k, ahead, self.head_dim)
        return row(index)

    def _vectors(self, row: Value) -> list[Value]:
        starts = range(0, self.head_dim, self.width)
        return [self.k.load(self.k.at(row, integer(start)), self.width) for start in starts]

    def _score(self, q: Value, keys: Value, begin: Value, end: Value, heads: list[Value]) -> list[Value]:
        """Writes every head's scores; returns their largest."""
        k = self.k
        queries = [self._vectors(k.at(q, integer(head * self.head_dim))) for head in range(self.group)]
        scale = number(self.head_dim**-0.5)
        largest = [k.variable(FLOAT, number(-math.inf)) for _ in heads]
        with k.loop(begin, end) as index:
            key = self._vectors(self._rows(keys, index, end))
            for head, query, most in zip(heads, queries, largest, strict=True):
                total = k.ir.fmul(query[0], key[0])
                for one, other in zip(query[1:], key[1:], strict=True):
                    total = k.fma(one, other, total)
                score = k.ir.fmul(k.sum(total), scale)
                k.ir.store(score, k.at(head, k.ir.sub(index, begin)))
                k.ir.store(k.larger(k.get(most, FLOAT), score), most)
        return [k.get(most, FLOAT) for most in largest]

    def _add_up(
        self, values: Value, begin: Value, end: Value, heads: list[Value], sums: list[Value], out: Value
    ) -> None:
        """Writes every head's sum of values, weighted."""
        k = self.k
        kind = ir.VectorType(FLOAT, self.width)
        parts = range(self.head_dim // self.width)
        totals = [[k.variable(kind, k.constant(0.0, self.width)) for _ in parts] for _ in heads]
        with k.loop(begin, end) as index:
            value = self._vectors(self._rows(values, index, end))
            for head, places in zip(heads, totals, strict=True):
                weight = k.splat(k.get(k.at(head, k.ir.sub(index, begin)), FLOAT), self.width)
                for place, part in zip(places, value, strict=True):
                    k.ir.store(k.fma(weight, part, k.get(place, kind)), place)
        for head, (total, places) in enumerate(zip(sums, totals, strict=True)):
            share = k.splat(k.ir.fdiv(number(1.0), total), self.width)
            for part, place in enumerate(places):
                to = k.at(out, integer(head * self.head_dim + part * self.width))
                k.store(k.ir.fmul(k.get(place, kind), share), to)
