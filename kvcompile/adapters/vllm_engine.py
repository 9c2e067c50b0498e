"""Hand descriptors over through the engine that a vLLM worker owns, and say exactly which requests failed.

Imports no vLLM. It builds nothing and answers nobody.
"""

import logging
import time
from typing import Any

from kvcompile.adapters.vllm_state import State, count
from kvcompile.descriptors import Descriptors
from kvcompile.engines import MooncakeEngine
from kvcompile.errors import TransferError

__all__ = ["hand_over"]

logger = logging.getLogger("vllm.kvcompile")


def hand_over(worker: Any, state: State, session: str, descriptors: Descriptors) -> None:
    """Write descriptors through the worker's own engine, in batches that the transport takes; keep vLLM's statistics.

    Raises
    ------
    TransferError
        With the exact ids of the requests whose bytes may be incomplete.
    """
    if state.engine is None:
        state.engine = MooncakeEngine.wrap(worker.engine, f"{worker.hostname}:{worker.rpc_port}")
    started = time.perf_counter()
    try:
        state.engine.write(session, descriptors)
    except TransferError as error:
        # vLLM gives a failed request's blocks to the next one and exchanges no digests: bars would never end here.
        state.engine.lift(session)
        worker.xfer_stats.record_failed_transfer()
        count(failed_transfers=1)
        logger.warning("Sending to %s failed for %s, complete: %s: %s", session, error.requests, error.complete, error)
        raise
    worker.xfer_stats.record_transfer(
        duration_s=time.perf_counter() - started, total_bytes=descriptors.nbytes, num_descs=len(descriptors)
    )
