"""Tests against the real vLLM: collected only where it is installed (``make test-vllm``)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

if importlib.util.find_spec("vllm"):
    import tests.vllm.stand_in  # noqa: F401  before vLLM itself
