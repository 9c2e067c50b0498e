"""Run the long parts of the tests, one after another, and print their figures: `make soak`, or `make soak ARGS=faults`.

A part is a module with `soak(say) -> dict`: it prints lines through `say`, returns figures, and raises where it fails.
"""

import importlib
import sys
import time
import traceback
from pathlib import Path

PARTS = {
    "proof": "tests.soak_proof",
    "hostile": "tests.soak_hostile",
    "faults": "tests.soak_faults",
    "threads": "tests.soak_threads",
}


def main(names: list[str]) -> int:
    """Run the parts named, all by default; return 1 if one failed."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no part is called {unknown[0]!r}, expected some of {', '.join(PARTS)}")
        return 2
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    figures: dict[str, object] = {}
    failed = []
    for name in names or PARTS:
        print(f"== {name}", flush=True)
        started = time.monotonic()
        try:
            figures |= importlib.import_module(PARTS[name]).soak(lambda line: print(f"   {line}", flush=True))
        except Exception:
            traceback.print_exc()
            failed.append(name)
        figures[f"minutes of {name}"] = round((time.monotonic() - started) / 60, 1)
    print("== soak")
    for name, value in figures.items():
        print(f"   {name:<44}{value:>16,}" if isinstance(value, (int, float)) else f"   {name:<44}{value:>16}")
    print(f"   FAILED: {', '.join(failed)}" if failed else "   all parts passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
