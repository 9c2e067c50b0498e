# ruff: noqa: E501 (quoted code)
"""Plant named faults, one at a time, in a copy of the checkout, and see the tests die: `make mutants`.

A fault is tried by the quickest tests that can notice it: kernels run as plain Python (NUMBA_DISABLE_JIT), grids in
Numba's simulator, and what copies bytes is compiled. A fault that no test notices is a survivor, and fails the run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


class Suite(NamedTuple):
    """Tests, which of them, and the environment that they run in."""

    tests: tuple[str, ...]
    chosen: str  # of pytest's -k
    environment: dict[str, str]


PLAIN = Suite(
    (
        *("tests/test_cases.py", "tests/test_cases_requests.py", "tests/test_elections.py", "tests/test_requests.py"),
        *("tests/test_descriptors.py", "tests/test_layout.py", "tests/test_sort.py", "tests/test_chunks.py"),
        *("tests/test_kinds.py", "tests/test_striping.py", "tests/test_strided.py", "tests/test_bridged_padding.py"),
        "tests/test_bad_requests.py",
    ),
    # These copy real bytes, which plain Python cannot, or count what is compiled.
    "not engine and not moved and not Local and not compile_nothing",
    {"NUMBA_DISABLE_JIT": "1"},
)
SIMULATED = Suite(
    ("tests/test_cuda_sim.py", "tests/test_cuda_sim_pack.py"),
    "faults or nulls or runs or scan or cutting or copies or integer_type",
    {"NUMBA_DISABLE_JIT": "1", "NUMBA_ENABLE_CUDASIM": "1"},
)
COMPILED = Suite(("tests/test_staging.py",), "", {})
SUITES = {"kernels/cuda": SIMULATED, "kernels/known": SIMULATED, "kernels/pack": COMPILED, "": PLAIN}
"""By the beginning of a fault's file: the first that fits."""


class Mutant(NamedTuple):
    """A fault: ``old``, which stands in ``file`` just once, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str

    @property
    def suite(self) -> Suite:
        """The tests that are to notice it."""
        return next(suite for start, suite in SUITES.items() if self.file.startswith(start))


MUTANTS = [
    Mutant("merge where either side touches", "kernels/cpu.py", "(src[k] - src[k - 1] - 1) | (dst[k]",
           "(src[k] - src[k - 1] - 1) * (dst[k]"),
    Mutant("runs look at src alone", "kernels/cpu.py", " | (dst[k] - dst[k - 1] - 1)", ""),
    Mutant("chains merge where either side touches", "kernels/item.py", "return src == src_end + tail and dst",
           "return src == src_end + tail or dst"),
    Mutant("never merge in a chain", "kernels/cpu.py",
           "merges = made > 0 and touches(src_at, dst_at, src_end, dst_end, tail)\n            made",
           "merges = False\n            made"),
    Mutant("first blocks instead of last (alignment)", "kernels/item.py",
           "return OK, src_stop - dst_stop, 0, src_stop, 0, 0, dst_stop", "return OK, 0, 0, src_stop, 0, 0, dst_stop"),
    Mutant("first state block instead of last", "kernels/item.py",
           "return OK, src_stop - 1, src_stop - 1, src_stop, dst_stop", "return OK, 0, 0, 1, dst_stop"),
    Mutant("num_tokens keeps one look-ahead block", "kernels/item.py", "-(-num_tokens // dst_size) - dst_first",
           "num_tokens // dst_size + 1 - dst_first"),
    Mutant("the bound itself is allowed", "kernels/item.py", "block >= bound", "block > bound"),
    Mutant("negative ids are allowed", "kernels/item.py", "(block < 0 or block >= bound)", "(block >= bound)"),
    Mutant("src ids are not checked (bounds)", "kernels/check.py",
           "check_ids(program.src_groups, batch.src_ids, batch.src_at, r, 0, status)", "pass"),
    Mutant("null ids are copied", "kernels/cpu.py", "pairs += not (", "pairs += 1 or ("),
    Mutant("marks of ids are lost", "kernels/check.py", "bits[block & mask] |= bit", "bits[block & mask] = bit"),
    Mutant("a lane repeats one of other strides", "kvcompile/program.py", "item.COUNT, item.DST_STRIDE, item.DST_INNER",
           "item.COUNT"),
    Mutant("ids of a list that grew leave their memory", "kernels/ids.py", "size > len(given) - filled", "False"),
    Mutant("a run ends where the next but one begins", "kernels/cpu.py", "run_blocks[n + 1] if n + 1 < runs",
           "run_blocks[n + 2] if n + 2 < runs"),
    Mutant("a class counts chains as slices apart", "kvcompile/program.py", "(item.APART_SLICES, item.APART,",
           "(item.APART_SLICES, item.CHAIN,"),
    Mutant("nulls of chains are copied", "kernels/cpu.py",
           "if is_null(src_block, src_group[item.HAS_NULL], src_group[item.NULL]):", "if False:"),
    Mutant("nulls do not uncover", "kernels/cpu.py", "covered &= src_ids[i] != src_group[item.NULL]", "covered &= True"),
    Mutant("only the later of two conflicts fails", "kernels/check.py",
           "fail(work.status, other // len(groups), other % len(groups), first - at[other], r)", "pass"),
    Mutant("overlaid groups have id spaces of their own", "kvcompile/program.py", "groups[at, item.OVERLAY] = overlay",
           "groups[at, item.OVERLAY] = at"),
    Mutant("ids are said to ascend", "kernels/check.py", "if block <= before:\n                    return False",
           "if False:\n                    return False"),
    Mutant("an id given twice passes", "kernels/cpu.py", "work.status[r, item.CODE] = item.TWICE", "pass"),
    Mutant("the last descriptor of a cut is whole", "kernels/descriptors.py",
           "nbytes = min(most, length[i] - done)", "nbytes = min(most, length[i])"),
    Mutant("chunk edges of dst are ignored", "kernels/descriptors.py", "if len(dst_edges) > 0:", "if False:"),
    Mutant("signs are lost while decoding", "kernels/item.py", "value -= 256", "value -= 0"),
    Mutant("bools decode as integers", "kernels/item.py", "if head < 0xCC or head > 0xD3:", "if head < 0xC2 or head > 0xD3:"),
    Mutant("sort forgets src", "kernels/order.py", "key = src if turn == 0 else delta", "key = delta"),
    Mutant("a part begins one period late", "kernels/item.py", "return first + part * (last - first) // parts",
           "return first + (part * (last - first) + parts - 1) // parts + (part > 0)"),
    Mutant("all runs are as long as the first", "kernels/columns.py", "different |= blocks[i] != blocks[0]", "pass"),
    Mutant("inner slices all at the first", "kernels/columns.py", "begin + k * row[inner]", "begin"),
    Mutant("the highest holder is elected", "kvcompile/topology.py", "return np.where(any_paired, lowest, first), senders if",
           "return np.where(any_paired, lowest, first + step * (count - 1)), senders if"),
    Mutant("pairs are ignored by the election", "kvcompile/topology.py", "any_paired = both > 0", "any_paired = both > 2**40"),
    Mutant("balanced is not", "kvcompile/topology.py", "first + step * (number * count // consumers)", "first + 0 * number"),
    Mutant("replicas are no neighbours", "kvcompile/topology.py", "start = rank * heads // size\n",
           "start = rank * heads // size if size <= heads else rank % heads\n"),
    Mutant("join looks at src alone", "kvcompile/table.py",
           "alike = np.concatenate([[False], diagonal[1:] == diagonal[:-1]])",
           "alike = np.concatenate([[False], diagonal[1:] == diagonal[1:]])"),
    Mutant("phases are swapped", "kvcompile/lowering.py", 'cells[f"{side}_phase"] = phase',
           'cells[f"{side}_phase"] = cells[f"{side}_phase"]'),
    Mutant("groups share what was walked", "kvcompile/lowering.py", "region.kernel_blocks, region.group)",
           "region.kernel_blocks)"),
    Mutant("clusters of other geometries are taken for equal", "kvcompile/lowering.py", "(walked.number, a.base", "(0, a.base"),
    Mutant("kernel blocks are packed", "kvcompile/lowering.py", "kernel_block * place.region.block_stride", "kernel_block * 0"),
    Mutant("lanes of the next period are apart", "kvcompile/lanes.py",
           "edges = np.concatenate([_meet(end, begin), _meet(end, turn)], axis=1)", "edges = _meet(end, begin)"),
    Mutant("rows may leave their buffer", "kvcompile/program.py", "groups[at, item.BOUND] = min(most, int(limits[at]))",
           "groups[at, item.BOUND] = min(most, 2**62)"),
    Mutant("handshake of any length", "kvcompile/handshake.py", "if len(data) > MAX_NBYTES:", "if False:"),
    Mutant("handshake of any version", "kvcompile/handshake.py", "if frame.version != VERSION:", "if False:"),
    Mutant("touching spans become one buffer", "kvcompile/cache.py", "start < merged[-1][1]", "start <= merged[-1][1]"),
    Mutant("padding with a field in it is bridged", "kvcompile/bridge.py",
           "if near and overlap.meet(here, cache.payload(near, start, stride)):", "if False:"),
    Mutant("scratch memory is a row short", "kernels/arrays.py", "SCRATCH_ROWS = 7", "SCRATCH_ROWS = 6"),
    Mutant("bytes of an id are exchanged", "kernels/ids.py", "(np.int64(packed[place + 1]) << 8) | packed[place + 2]",
           "(np.int64(packed[place + 2]) << 8) | packed[place + 1]"),
    Mutant("packed pieces lie on each other", "kernels/pack.py", "at += length[i]", "at += length[i] - 1"),
    Mutant("the host says that nothing merges", "kernels/known.py", "merges |= lane[item.LANE_KIND] != item.APART", "pass"),
    Mutant("a run ends with its thread block", "kernels/cuda.py",
           "before = max(before, part(work, known.LASTS)[cuda.blockIdx.x])", "pass"),
    Mutant("the grid is one thread short", "kernels/cuda_check.py",
           "    if k >= len(ids):\n        return\n    at, lists", "    if k >= len(ids) - 1:\n        return\n    at, lists"),
    Mutant("only the later of two conflicts fails on a device", "kernels/cuda_check.py",
           "cuda.atomic.min(contested, other, event)", "pass"),
    Mutant("chunk edges of src are ignored on a device", "kernels/cuda_descriptors.py",
           "nbytes = min(nbytes, to_next(src_edges, src_buffer, src + done))", "pass"),
    Mutant("the end of a copied tile is lost", "kernels/cuda_descriptors.py", "if lane < nbytes - head - body:",
           "if lane < nbytes - head - body - 1:"),
    Mutant("a scan forgets all but the last thread block", "kernels/cuda_scan.py",
           "carry = combine(carry, total, largest)", "carry = total"),
    # Of this file only the simulator's half can be tried without a GPU.
    Mutant("half of 16 bytes is read twice", "kernels/cuda_memory.py", "return load(address, 8), load(address + 8, 8)",
           "return load(address, 8), load(address, 8)"),
]  # fmt: skip


def main() -> int:
    """Run all mutants, or those whose names hold an argument; return 1 if one survived."""
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or any(word in mutant.name for word in sys.argv[1:])]
    survived, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for name in files.stdout.split("\0")[:-1]:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        for suite in {id(mutant.suite): mutant.suite for mutant in chosen}.values():
            if not _passes(copy, suite):
                print(f"{' '.join(suite.tests)}: these fail without any fault, nothing can be said of mutants")
                return 1
        for mutant in chosen:
            file = copy / mutant.file
            text = file.read_text()
            if text.count(mutant.old) != 1:
                print(f"STALE     {mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}")
                survived.append(mutant.name)
                continue
            file.write_text(text.replace(mutant.old, mutant.new))
            start = time.monotonic()
            alive = _passes(copy, mutant.suite)
            file.write_text(text)
            print(
                f"{'SURVIVED' if alive else 'killed  '}  {mutant.name} ({mutant.file}, {time.monotonic() - start:.0f} s)",
                flush=True,
            )
            if alive:
                survived.append(mutant.name)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutants killed in {time.monotonic() - begun:.0f} s")
    return 1 if survived else 0


def _passes(copy: Path, suite: Suite) -> bool:
    environment = {**os.environ, **suite.environment, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["NUMBA_CACHE_DIR"] = str(copy.parent / "cache")  # faults are compiled for nobody else
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore::RuntimeWarning", "-n", "2"]
    command = [sys.executable, "-m", "pytest", *options, "-k", suite.chosen, *suite.tests]
    try:
        return (
            subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False  # a fault that makes the tests run for ever is noticed


if __name__ == "__main__":
    sys.exit(main())
