"""Settings of Hypothesis; at the end of the run the shares of generated examples, and the faults tried."""

from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest

from kvcompile.engines import MooncakeEngine
from tests.peer import Peer, peer

# They need packages and a process of their own: `make sim` and `make ptx` name them.
collect_ignore_glob = ["test_cuda_sim*.py", "test_ptx.py"]

# Derandomized: a run in CI tries what every other run tried, and the shares of test_property.py are fixed figures.
COMMON = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
# Shrinking a deployment takes minutes: `pytest --hypothesis-profile=shrink -k NAME` does it for one failure.
hypothesis.settings.register_profile("shrink", **COMMON)
hypothesis.settings.register_profile("kvcompile", phases=[hypothesis.Phase.generate], **COMMON)
hypothesis.settings.load_profile("kvcompile")


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A peer of a module's own, with one buffer of the module's NBYTES."""
    with peer(request.module.NBYTES) as started:
        yield started


@pytest.fixture(scope="module")
def memory(request: pytest.FixtureRequest) -> np.ndarray:
    """Memory of the module's NBYTES."""
    return np.random.default_rng(1).integers(0, 250, request.module.NBYTES, np.uint8)


@pytest.fixture(scope="module", params=["off", "require"])
def native(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have every test of a module run twice: the engines of this process hand over one way, then the other."""
    with pytest.MonkeyPatch.context() as patch:
        for make in (MooncakeEngine.__init__, MooncakeEngine.wrap.__func__):  # type: ignore[attr-defined]
            patch.setitem(make.__kwdefaults__, "native", request.param)
        yield request.param


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``shares``: of the generated examples, how many showed what; and each ``fault``."""
    faults = {}
    for report in [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]:
        for name, value in getattr(report, "user_properties", []):
            if name == "shares":
                terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {value}")
        properties = dict(getattr(report, "user_properties", []))
        if "fault" in properties:
            faults[properties["fault"]] = properties.get("outcome")
    if faults:
        survived = [name for name, outcome in faults.items() if outcome]
        terminalreporter.write_line(f"faults: {len(faults)} tried, {len(survived)} survived")
        for name, outcome in sorted(faults.items()):
            terminalreporter.write_line(f"  {name:<44}{outcome or 'NOT SURVIVED'}")
