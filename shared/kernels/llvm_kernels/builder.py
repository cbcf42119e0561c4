"""A little more comfort than llvmlite's builder: one kernel, its arguments, loops and float32 vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

Value = Any
"""What llvmlite calls a value: it has no types of its own to tell mypy about."""

FLOAT: Final = ir.FloatType()
INT: Final = ir.IntType(64)
INT32: Final = ir.IntType(32)
BOOL: Final = ir.IntType(1)
POINTER: Final = ir.PointerType()
VOID: Final = ir.VoidType()

LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
"""The two parts of ln 2 are exact in float32 when multiplied with a small integer."""
ROUNDING: Final = 1.5 * 2**23
LEAST_EXPONENT, MOST_EXPONENT = -87.0, 88.0
"""exp stays a normal number between them."""


@dataclass(frozen=True)
class Target:
    """What the kernels are shaped for."""

    lanes: int
    """float32 numbers in a vector register"""
    registers: int


Build = Callable[[Any, Target], None]
"""Adds a kernel to an LLVM module."""


def integer(value: int) -> Value:
    return ir.Constant(INT, value)


def number(value: float) -> Value:
    return ir.Constant(FLOAT, value)


class Function:
    """A function that is being written, from its first instruction to `end`."""

    def __init__(self, module: Any, name: str, parameters: dict[str, Any], *, is_private: bool) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(VOID, list(parameters.values())), name)
        if is_private:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.args: dict[str, Value] = dict(zip(parameters, self.function.args, strict=True))
        self._entry = self.function.append_basic_block("entry")
        first = self.function.append_basic_block("body")
        self._variables = ir.IRBuilder(self._entry)
        self.ir = ir.IRBuilder(first)
        self._first = first

    def end(self) -> Any:
        self._variables.branch(self._first)
        self.ir.ret_void()
        return self.function

    def variable(self, kind: Any, value: Value) -> Value:
        """A place for a value that changes, set here; registers once it is optimised."""
        place = self._variables.alloca(kind)
        self.ir.store(value, place)
        return place

    def get(self, place: Value, kind: Any) -> Value:
        return self.ir.load(place, typ=kind)

    @contextlib.contextmanager
    def loop(self, start: Value, stop: Value, step: Value | int = 1) -> Iterator[Value]:
        """The block within, for `start`, `start + step` … below `stop`."""
        with self._loop(start, stop, lambda index: integer(step) if isinstance(step, int) else step) as (index, _):
            yield index

    @contextlib.contextmanager
    def pieces(self, start: Value, stop: Value, sizes: Sequence[int]) -> Iterator[tuple[Value, Value]]:
        """The block within, for pieces of `start` … `stop`, each of the largest of `sizes` that is left: its place and
        its size.  `sizes` are in falling order and end with 1."""

        def size(index: Value) -> Value:
            fitting, left = integer(sizes[-1]), self.ir.sub(stop, index)
            for one in sizes[-2::-1]:
                fitting = self.ir.select(self.ir.icmp_signed(">=", left, integer(one)), integer(one), fitting)
            return fitting

        with self._loop(start, stop, size) as piece:
            yield piece

    @contextlib.contextmanager
    def _loop(self, start: Value, stop: Value, step_at: Callable[[Value], Value]) -> Iterator[tuple[Value, Value]]:
        place = self.variable(INT, start)
        head, body, done = (self.ir.append_basic_block(name) for name in ("head", "body", "done"))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        index = self.get(place, INT)
        self.ir.cbranch(self.ir.icmp_signed("<", index, stop), body, done)
        self.ir.position_at_end(body)
        step = step_at(index)
        yield index, step
        self.ir.store(self.ir.add(index, step), place)
        self.ir.branch(head)
        self.ir.position_at_end(done)

    def call_one(self, functions: dict[int, Any], choice: Value, values: Sequence[Value]) -> None:
        """Calls the function of that key."""
        done = self.ir.append_basic_block("called")
        switch = self.ir.switch(choice, done)
        for key, function in functions.items():
            block = self.ir.append_basic_block("call")
            switch.add_case(integer(key), block)
            with self.ir.goto_block(block):
                self.ir.call(function, values)
                self.ir.branch(done)
        self.ir.position_at_end(done)

    def add(self, *terms: Value) -> Value:
        total = terms[0]
        for term in terms[1:]:
            total = self.ir.add(total, term)
        return total

    def mul(self, *factors: Value) -> Value:
        product = factors[0]
        for factor in factors[1:]:
            product = self.ir.mul(product, factor)
        return product

    def ceil_div(self, value: Value, by: int) -> Value:
        return self.ir.sdiv(self.ir.add(value, integer(by - 1)), integer(by))

    def smallest(self, a: Value, b: Value) -> Value:
        return self.ir.select(self.ir.icmp_signed("<", a, b), a, b)

    def largest(self, a: Value, b: Value) -> Value:
        return self.ir.select(self.ir.icmp_signed(">", a, b), a, b)

    def at(self, pointer: Value, index: Value, kind: Any = FLOAT) -> Value:
        """The address of element `index` of an array of `kind`."""
        return self.ir.gep(pointer, [index], source_etype=kind)

    def load(self, pointer: Value, lanes: int) -> Value:
        """float32 `[lanes]`."""
        return self.ir.load(pointer, align=4, typ=ir.VectorType(FLOAT, lanes))

    def store(self, vector: Value, pointer: Value) -> None:
        self.ir.store(vector, pointer, align=4)

    def splat(self, scalar: Value, lanes: int) -> Value:
        kind = ir.VectorType(FLOAT, lanes)
        first = self.ir.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(INT32, 0))
        zeros = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
        return self.ir.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def constant(self, value: float, lanes: int) -> Value:
        return ir.Constant(ir.VectorType(FLOAT, lanes), [value] * lanes)

    def sum(self, vector: Value) -> Value:
        """The sum of all lanes."""
        return self._in_halves(vector, self.ir.fadd)

    def largest_lane(self, vector: Value) -> Value:
        return self._in_halves(vector, self.larger)

    def _in_halves(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """One lane from all: in an order that is the same for every processor with as many of them."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            low, high = (
                self.ir.shuffle_vector(
                    vector,
                    ir.Constant(vector.type, ir.Undefined),
                    ir.Constant(ir.VectorType(INT32, lanes), list(range(first, first + lanes))),
                )
                for first in (0, lanes)
            )
            vector = combine(low, high)
        return self.ir.extract_element(vector, ir.Constant(INT32, 0))

    def larger(self, a: Value, b: Value) -> Value:
        """The larger; `a` where either is NaN."""
        return self.ir.select(self.ir.fcmp_ordered("<", a, b), b, a)

    def intrinsic(self, name: str, result: Any, *values: Value) -> Value:
        kinds = [value.type for value in values]
        function = self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, kinds), name)
        return self.ir.call(function, values)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """`a * b + c` of every lane, rounded once."""
        return self.intrinsic(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def prefetch(self, pointer: Value) -> None:
        """Asks for the cache line of `pointer`, into the second level: for reading, soon, not now."""
        hints = [ir.Constant(INT32, hint) for hint in (0, 2, 1)]
        self.intrinsic("llvm.prefetch.p0", VOID, pointer, *hints)

    def exp(self, x: Value) -> Value:
        """Of every lane, to two units in the last place; from 1e-38 to 1e38, NaN for NaN."""
        kind, lanes = x.type, x.type.count
        bits = ir.VectorType(INT32, lanes)
        low, high = self.constant(LEAST_EXPONENT, lanes), self.constant(MOST_EXPONENT, lanes)
        x = self.ir.select(self.ir.fcmp_ordered("<", x, low), low, x)
        x = self.ir.select(self.ir.fcmp_ordered(">", x, high), high, x)
        # Beside so large a number there is no room for a fraction: the sum's last bits are the nearest whole number.
        shifted = self.fma(x, self.constant(LOG2_E, lanes), self.constant(ROUNDING, lanes))
        whole = self.ir.fsub(shifted, self.constant(ROUNDING, lanes))
        rest = self.fma(whole, self.constant(-LN2_HIGH, lanes), x)
        rest = self.fma(whole, self.constant(-LN2_LOW, lanes), rest)
        total = self.constant(1 / 5040, lanes)
        for factorial in (720, 120, 24, 6, 2, 1, 1):
            total = self.fma(total, rest, self.constant(1 / factorial, lanes))
        exponent = self.ir.shl(self.ir.bitcast(shifted, bits), ir.Constant(bits, [23] * lanes))
        power = self.ir.bitcast(self.ir.add(self.ir.bitcast(total, bits), exponent), kind)
        return self.ir.select(self.ir.fcmp_unordered("uno", x, x), x, power)


class Kernel(Function):
    """A function that every OpenMP thread of a team runs, on one array of 64-bit arguments.

    `arguments` names them in order; a name that ends in `_ptr` is an address, `_f32` a float32's bits.
    """

    def __init__(self, module: Any, name: str, arguments: Sequence[str]) -> None:
        super().__init__(module, name, {"arguments": POINTER}, is_private=False)
        array = self.args.pop("arguments")
        for index, argument in enumerate(arguments):
            place = self.at(array, integer(index), INT)
            if argument.endswith("_ptr"):
                self.args[argument] = self.get(place, POINTER)
            elif argument.endswith("_f32"):
                self.args[argument] = self.get(place, FLOAT)
            else:
                self.args[argument] = self.get(place, INT)

    def thread(self) -> tuple[Value, Value]:
        """This thread's number in its team, and the size of the team."""
        number, size = (self.intrinsic(name, INT32) for name in ("omp_get_thread_num", "omp_get_num_threads"))
        return self.ir.sext(number, INT), self.ir.sext(size, INT)

    def share(self, count: Value) -> tuple[Value, Value]:
        """The range of `count` things that is this thread's."""
        number, size = self.thread()
        ends = (self.ir.sdiv(self.ir.mul(count, part), size) for part in (number, self.ir.add(number, integer(1))))
        return next(ends), next(ends)
