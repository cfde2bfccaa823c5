"""An MPI program without a compiler: pass checked data around a ring, and measure between two ranks.

Run as ``python3 exchange.py LIBMPI [--measure|--endless]``.
"""

import ctypes
import sys
import time

mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
WORLD, BYTE = (ctypes.byref(ctypes.c_char.in_dll(mpi, name)) for name in ("ompi_mpi_comm_world", "ompi_mpi_byte"))
RING_SIZE = 3_000_017


def address_of(data: bytearray) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(data)))


def send(data: bytearray, target: int) -> None:
    assert mpi.MPI_Send(address_of(data), len(data), BYTE, target, 0, WORLD) == 0


def receive(data: bytearray, source: int) -> None:
    assert mpi.MPI_Recv(address_of(data), len(data), BYTE, source, 0, WORLD, None) == 0


def get_number(name: str) -> int:
    number = ctypes.c_int()
    getattr(mpi, name)(WORLD, ctypes.byref(number))
    return number.value


def measure(rank: int, size: int, first: int, second: int, repetitions: int) -> float:
    """Return the median one-way time of a message in seconds, on the first of two ranks."""
    data = bytearray(size)
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        if rank == first:
            send(data, second)
            receive(data, second)
        elif rank == second:
            receive(data, first)
            send(data, first)
        times.append((time.perf_counter() - start) / 2)
    return sorted(times)[len(times) // 2]


mpi.MPI_Init(None, None)
rank, size = get_number("MPI_Comm_rank"), get_number("MPI_Comm_size")
mpi.MPI_Barrier(WORLD)
content = (bytes(range(256)) * (RING_SIZE // 256 + 1))[:RING_SIZE]
data = bytearray(content if rank == 0 else RING_SIZE)
if rank == 0:
    send(data, 1)
    back = bytearray(RING_SIZE)
    receive(back, size - 1)
    print("ring", "equal" if back == content else "different", flush=True)
else:
    receive(data, rank - 1)
    send(data, (rank + 1) % size)
for first in range(size):
    for second in range(first + 1, size):
        check = measure(rank, 1000, first, second, 2)
mpi.MPI_Barrier(WORLD)
while "--endless" in sys.argv:
    measure(rank, 1000, 0, size - 1, 100)
if "--measure" in sys.argv:
    for second in (1, 2):
        short, long = measure(rank, 8, 0, second, 500), measure(rank, 16 << 20, 0, second, 8)
        if rank == 0:
            print(f"ranks 0-{second}: {short * 1e6:.0f} us, {(16 << 20) / long / 1e6:.0f} MB/s", flush=True)
        mpi.MPI_Barrier(WORLD)
mpi.MPI_Finalize()
if rank == 0:
    print("end", flush=True)
