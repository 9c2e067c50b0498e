"""Hand descriptors to Mooncake's C++ engine and wait for them, without the GIL: its methods are called by address.

Which methods, of which engine, and whether that is safe is not known here: see `engines/native.py`. A call answers in
memory of ours, as the C++ ABI of x86-64 has it for objects that are returned or taken by reference.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvcompile._jit import entry, jit

__all__ = ["BATCH", "COMPLETED", "RECORD", "STATES", "carry", "opened", "poll"]

# Methods, as they stand in an array of addresses.
OPEN, ALLOCATE, SUBMIT, BATCH_STATUS, TASK_STATUS, FREE, DELETE, SLEEP, CLOCK = range(9)

# A batch's memory in words of 8 bytes: what the methods are given and where they answer, the state of each row, and
# then the requests: opcode, source, segment, target, length, retry and hint, task group.
STATUS = 0  # a `Status`: code (16 bits), message
VECTOR = 2  # of requests, a `std::vector`: begin, end, end of the capacity
STATE = 5  # a `TransferStatus`: state (32 bits), bytes
NAME = 7  # of the peer, a `std::string`: characters, length, capacity, 8 bytes
BATCH = 11  # the batch, 0 once it is freed
TIME = 12  # a `timespec`: seconds, nanoseconds
STATES = 14
RECORD = 7

# States of a row.
WAITING, COMPLETED, FAILED = 0, 4, 6

PAUSE_US, MOST_PAUSE_US = 20, 2000
CLOCK_MONOTONIC = 1


@entry
def opened(functions, engine, name, memory):
    """Return the segment of a peer that the engine has met; what an unknown one says might raise a C++ exception.

    Parameters
    ----------
    functions, engine
        As for `carry`.
    name : uint8 array
        The peer's session, and a zero.
    memory : int64 array [STATES]
    """
    memory[NAME], memory[NAME + 1], memory[NAME + 2] = name.ctypes.data, len(name) - 1, len(name) - 1
    return call2(functions[OPEN], (engine, memory.ctypes.data + 8 * NAME))


@entry
def carry(functions, engine, segment, here, there, length, opcode, memory, most_us, settle_us):
    """Hand over one batch and wait until it is over, or for ``most_us``; return how many rows have not arrived.

    ``memory[BATCH]`` is 0 afterwards unless something is still under way: then ``memory`` has to stay until `poll`
    says 0. The state of row i is ``memory[STATES + i]``.

    Parameters
    ----------
    functions : int64 array
        Addresses of the methods, and of ``operator delete[]``, ``usleep`` and ``clock_gettime``.
    engine : int
        Address of the engine.
    segment : int
        The peer's.
    here, there, length : uint64 arrays [n]
        Addresses in this process and the peer's, bytes.
    opcode : int
        1 to write, 0 to read.
    memory : int64 array [STATES + (1 + RECORD) * n]
    most_us, settle_us : int
        Microseconds to wait at most, a second more for each GiB, as in Mooncake's own calls; and once a row has failed,
        for the next of the others to arrive.
    """
    n = len(here)
    if n == 0:
        return 0
    words = memory.ctypes.data
    memory[: STATES + n] = 0
    nbytes = 0
    for i in range(n):
        at = STATES + n + RECORD * i
        memory[at], memory[at + 1], memory[at + 2], memory[at + 3] = opcode, here[i], segment, there[i]
        memory[at + 4], memory[at + 5], memory[at + 6] = length[i], 0, 0
        nbytes += memory[at + 4]
    batch = call2(functions[ALLOCATE], (engine, n))
    if batch in (0, -1):
        return n
    memory[BATCH] = batch
    memory[VECTOR] = words + 8 * (STATES + n)
    memory[VECTOR + 1] = memory[VECTOR + 2] = memory[VECTOR] + 8 * RECORD * n
    if answer(functions, memory, call4(functions[SUBMIT], (words, engine, batch, words + 8 * VECTOR))) != 0:
        free(functions, engine, memory)
        return n
    most_us += nbytes // 1000
    began, waited = now_us(functions, memory), 0
    # The state of the whole batch first: asked one by one, each row that has arrived asks for that again.
    while True:
        answer(functions, memory, call4(functions[BATCH_STATUS], (words, engine, batch, words + 8 * STATE)))
        state = memory[STATE] & 0xFFFFFFFF
        if state == COMPLETED:
            free(functions, engine, memory)
            return 0
        if state > COMPLETED or waited >= most_us:
            break
        pause(functions, waited)
        waited = now_us(functions, memory) - began
    missing, last = n, waited
    while True:
        waiting, before = poll(functions, engine, memory, n), missing
        missing = 0
        for i in range(n):
            missing += memory[STATES + i] != COMPLETED
        if missing < before:
            last = waited
        if waiting == 0 or waited - last >= settle_us or waited >= most_us:
            return missing
        pause(functions, waited)
        waited = now_us(functions, memory) - began


@entry
def poll(functions, engine, memory, n):
    """Ask for the state of each row that was not over yet; return how many still are not. The last one frees all."""
    words, waiting = memory.ctypes.data, 0
    for i in range(n):
        if memory[STATES + i] != COMPLETED and memory[STATES + i] != FAILED:
            arguments = (words, engine, memory[BATCH], i, words + 8 * STATE)
            code = answer(functions, memory, call5(functions[TASK_STATUS], arguments))
            memory[STATES + i] = memory[STATE] & 0xFFFFFFFF if code == 0 else WAITING
            waiting += memory[STATES + i] != COMPLETED and memory[STATES + i] != FAILED
    if waiting == 0:
        free(functions, engine, memory)
    return waiting


@jit
def free(functions, engine, memory):
    """Free a batch, which the engine refuses as long as something of it is under way."""
    words = memory.ctypes.data
    if memory[BATCH] != 0 and answer(functions, memory, call3(functions[FREE], (words, engine, memory[BATCH]))) == 0:
        memory[BATCH] = 0


@jit
def answer(functions, memory, _):
    """Return the code of the status that a method left, 0 for success, and delete its message."""
    if memory[STATUS + 1] != 0:
        call1(functions[DELETE], (memory[STATUS + 1],))
        memory[STATUS + 1] = 0
    return memory[STATUS] & 0xFFFF


@jit
def pause(functions, waited):
    """Sleep for a sixteenth of what was waited so far."""
    call1(functions[SLEEP], (min(PAUSE_US + waited // 16, MOST_PAUSE_US),))


@jit
def now_us(functions, memory):
    """Return the time in microseconds."""
    call2(functions[CLOCK], (CLOCK_MONOTONIC, memory.ctypes.data + 8 * TIME))
    return memory[TIME] * 1_000_000 + memory[TIME + 1] // 1000


def _caller(count):
    """Make the call of a C function by address: ``count`` integers or pointers in, one out."""

    @intrinsic
    def call(typing_context, address, arguments):
        def codegen(context, builder, signature, args):
            word = ir.IntType(64)
            target = builder.inttoptr(args[0], ir.FunctionType(word, [word] * count).as_pointer())
            return builder.call(target, [builder.extract_value(args[1], k) for k in range(count)])

        return types.int64(types.int64, types.UniTuple(types.int64, count)), codegen

    return call


call1, call2, call3, call4, call5 = (_caller(count) for count in range(1, 6))
