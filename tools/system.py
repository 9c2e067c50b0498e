"""Check what .venv cannot hold: the Python version, venv itself, and the engine's system libraries.

Run by the Makefile before it makes .venv.  Installs what is missing where it may (root, apt-get), and
otherwise says in one sentence what to type.  Standard library only.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys

OLDEST, NEWEST = (3, 10), (3, 13)  # numba and kvcompile need the one, the engine's wheels end at the other
LIBRARIES = {
    "libibverbs.so.1": ("libibverbs1", "ibverbs-providers"),
    "libnuma.so.1": ("libnuma1",),
    "libcurl.so.4": ("libcurl4",),
}


def main() -> int:
    """Return 0 when all is there, else print one sentence and return 1."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        print(
            f"kvcompile needs Python 3.{OLDEST[1]} to 3.{NEWEST[1]} (the Mooncake wheel has no other) and"
            f" {sys.executable} is {version}: name another one, as in `make demo PYTHON=python3.12`.",
            file=sys.stderr,
        )
        return 1
    packages = missing()
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing system packages:", *packages, flush=True)
        install(packages)
        packages = missing()
    if packages:
        print(
            f"{', '.join(packages)} missing: run `sudo apt-get install -y --no-install-recommends"
            f" {' '.join(packages)}` (or your distribution's packages of those libraries), then this again.",
            file=sys.stderr,
        )
        return 1
    return 0


def missing() -> list[str]:
    """List the Debian packages whose library cannot be loaded."""
    packages = []
    if importlib.util.find_spec("ensurepip") is None:
        packages.append("python3-venv")
    for library, names in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            packages += names
    return packages


def install(packages: list[str]) -> None:
    """Install Debian packages; a failure shows in the check that follows."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *words], env=environment, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    raise SystemExit(main())
