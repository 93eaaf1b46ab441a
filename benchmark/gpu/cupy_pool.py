"""CuPy's pool of managed memory on the workloads of `gpu` that it can run; JSON on standard output.

The pool may hold at most 1 GiB. Times are of Python calls, as a user of CuPy pays them.
"""

import json
import random
import statistics
import threading
import time

import cupy

KIB, MIB = 1 << 10, 1 << 20


def pool():
    made = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
    made.set_limit(size=1024 * MIB)
    return made


def nanoseconds(work, calls, rounds=9):
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            work()
        times.append((time.perf_counter_ns() - start) / calls)
    return statistics.median(times)


def pairs():
    rows = {}
    for size in [256, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]:
        malloc = pool().malloc

        def pair():
            block = malloc(size)
            del block

        pair()
        rows[size] = nanoseconds(pair, 5000)
    return rows


def replace_random():
    live, pairs = 1000, 2000
    sizes, at = random.Random(42), random.Random(7)
    made = pool()
    malloc = made.malloc
    blocks = [malloc(sizes.randint(KIB, MIB)) for _ in range(live)]
    drawn = [(at.randrange(live), sizes.randint(KIB, MIB)) for _ in range(pairs)]
    times = []
    for _ in range(5):
        start = time.perf_counter_ns()
        for slot, size in drawn:
            blocks[slot] = None
            blocks[slot] = malloc(size)
        times.append((time.perf_counter_ns() - start) / pairs)
    held = made.total_bytes()
    del blocks
    made.free_all_blocks()
    return {"ns": statistics.median(times), "held_bytes": held}


def threads(count):
    """Pairs of 4 KiB per microsecond by all threads together."""
    made, done = pool(), [0] * count
    barrier = threading.Barrier(count)

    def work(index):
        malloc = made.malloc
        block = malloc(4 * KIB)
        del block
        barrier.wait()
        end = time.perf_counter() + 0.2
        calls = 0
        while time.perf_counter() < end:
            for _ in range(100):
                block = malloc(4 * KIB)
                del block
            calls += 100
        done[index] = calls

    workers = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / 0.2 / 1e6


def launches():
    made = pool()
    kernel = cupy.RawKernel(
        'extern "C" __global__ void fill(float* p, unsigned long long n, float v)'
        "{ unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) p[i] = v; }",
        "fill",
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    value, floats = cupy.float32(1), cupy.uint64(1024)
    rows = {}
    with stream:
        for size in [4 * KIB, 256 * KIB, MIB]:

            def temporary():
                block = made.malloc(size)
                kernel((4,), (256,), (block.ptr, floats, value))
                del block

            kept = made.malloc(size)

            def on_kept():
                kernel((4,), (256,), (kept.ptr, floats, value))

            for work in (temporary, on_kept):
                work()
            stream.synchronize()
            row = {"temporary": nanoseconds(temporary, 1000, 7) / 1e3}
            stream.synchronize()
            row["kept"] = nanoseconds(on_kept, 1000, 7) / 1e3
            stream.synchronize()
            rows[size] = row
            del kept
    return rows


def main():
    results = {
        "cupy": cupy.__version__,
        "pair_ns": pairs(),
        "random": replace_random(),
        "threads": {count: threads(count) for count in [1, 2, 4, 8, 16]},
        "launch_us": launches(),
    }
    print(json.dumps(results, indent=2))


main()
