"""Memory at raw addresses on a device: ids in their caller's arrays, and the bytes that `pack` and `unpack` copy.

Addresses are int64, as wrapped around from unsigned, and aligned to what is read or written there. In the simulator the
"device" is this process.
"""

import ctypes
from typing import Any

import numpy as np
from numba import config, cuda, types

__all__ = ["begin", "get", "line", "load", "load16", "part", "size_of", "store", "store16", "stream", "words"]

if config.ENABLE_CUDASIM:
    WORDS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_int64}

    def load(address, nbytes):
        """Return the 1, 2, 4 or 8 bytes at an address, as int64 with zeros above."""
        return np.int64(WORDS[int(nbytes)].from_address(int(address) % 2**64).value)

    def store(address, value, nbytes):
        """Write the low 1, 2, 4 or 8 bytes of an int64."""
        WORDS[int(nbytes)].from_address(int(address) % 2**64).value = int(value)

    def load16(address):
        """Return the 16 bytes at an address as two int64."""
        return load(address, 8), load(address + 8, 8)

    def store16(address, low, high):
        """Write 16 bytes."""
        store(address, low, 8)
        store(address + 8, high, 8)

    def words(address, size):
        """Return ``size`` int64 words at an address as an array."""
        return np.ctypeslib.as_array((ctypes.c_int64 * int(size)).from_address(int(address) % 2**64))

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    WORD = ir.IntType(64)
    PAIR = ir.VectorType(WORD, 2)

    def pointer(builder, address, kind):
        """Return an address of global memory (which pinned host memory is too) as a pointer."""
        return builder.inttoptr(address, ir.PointerType(kind, addrspace=1))

    def loader(bits):
        """Make the load of one word of a size."""

        @intrinsic
        def load_word(context, address):
            def codegen(context, builder, signature, args):
                kind = ir.IntType(bits)
                word = builder.load(pointer(builder, args[0], kind), align=bits // 8)
                return builder.zext(word, WORD) if bits < 64 else word

            return types.int64(types.int64), codegen

        return load_word

    def storer(bits):
        """Make the store of one word of a size."""

        @intrinsic
        def store_word(context, address, value):
            def codegen(context, builder, signature, args):
                kind = ir.IntType(bits)
                word = builder.trunc(args[1], kind) if bits < 64 else args[1]
                builder.store(word, pointer(builder, args[0], kind), align=bits // 8)
                return context.get_dummy_value()

            return types.void(types.int64, types.int64), codegen

        return store_word

    load1, load2, load4, load8 = loader(8), loader(16), loader(32), loader(64)
    store1, store2, store4, store8 = storer(8), storer(16), storer(32), storer(64)

    @intrinsic
    def load16(context, address):
        """Return the 16 bytes at an address as two int64."""

        def codegen(context, builder, signature, args):
            pair = builder.load(pointer(builder, args[0], PAIR), align=16)
            words = [builder.extract_element(pair, ir.Constant(ir.IntType(32), k)) for k in (0, 1)]
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.int64, 2)(types.int64), codegen

    @intrinsic
    def store16(context, address, low, high):
        """Write 16 bytes."""

        def codegen(context, builder, signature, args):
            pair = ir.Constant(PAIR, ir.Undefined)
            for k in (0, 1):
                pair = builder.insert_element(pair, args[k + 1], ir.Constant(ir.IntType(32), k))
            builder.store(pair, pointer(builder, args[0], PAIR), align=16)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    @intrinsic
    def words(context, address, size):
        """Return ``size`` int64 words at an address as an array."""
        kind = types.Array(types.int64, 1, "C")

        def codegen(context, builder, signature, args):
            array = context.make_array(kind)(context, builder)
            # Known to be global memory, it is loaded from and stored to as that.
            data = builder.addrspacecast(pointer(builder, args[0], WORD), ir.PointerType(WORD))
            eight = ir.Constant(WORD, 8)
            context.populate_array(array, data=data, shape=[args[1]], strides=[eight], itemsize=eight, meminfo=None)
            return array._getvalue()

        return kind(types.int64, types.int64), codegen

    @cuda.jit(device=True)
    def load(address, nbytes):
        """Return the 1, 2, 4 or 8 bytes at an address, as int64 with zeros above."""
        if nbytes == 8:
            return load8(address)
        if nbytes == 4:
            return load4(address)
        if nbytes == 2:
            return load2(address)
        return load1(address)

    @cuda.jit(device=True)
    def store(address, value, nbytes):
        """Write the low 1, 2, 4 or 8 bytes of an int64."""
        if nbytes == 8:
            store8(address, value)
        elif nbytes == 4:
            store4(address, value)
        elif nbytes == 2:
            store2(address, value)
        else:
            store1(address, value)


def device_function(function):
    """Compile a function for the device; in the simulator it is one of Python already."""
    return function if config.ENABLE_CUDASIM else cuda.jit(device=True, inline="always")(function)


@device_function
def get(base, k):
    """Return the ``k``-th int64 word at an address."""
    return load(base + 8 * k, 8)


@device_function
def line(base, columns, number):
    """Return the address of a line of a table of so many columns."""
    return base + 8 * columns * number


@device_function
def begin(base, number):
    """Return the address of a part of the words at an address, of which word k says where part k begins."""
    return base + 8 * load(base + 8 * number, 8)


@device_function
def size_of(base, number):
    """Return how many words a part has."""
    return load(base + 8 * number + 8, 8) - load(base + 8 * number, 8)


@device_function
def part(base, number):
    """Return a part as an array."""
    return words(begin(base, number), size_of(base, number))


def stream(handle: int) -> Any:
    """Return a ``cudaStream_t`` as launches take it."""
    return cuda.external_stream(handle) if handle and not config.ENABLE_CUDASIM else 0
