"""Each fault of tests/faults.py that needs no minute: the right error, the right lists, no byte astray, a safe end."""

from collections.abc import Callable

import pytest

from tests.faults import FAULTS

pytest.importorskip("mooncake.engine", reason="needs the extra mooncake", exc_type=ImportError)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, native: str, record_property: Callable[[str, object], None]) -> None:
    record_property("fault", name if native == "off" else f"{name}, native")
    record_property("outcome", FAULTS[name]())
