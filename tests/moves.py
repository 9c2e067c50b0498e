"""Whether all src ranks of a deployment together move what the oracle wants to its dst ranks."""

import kvcompile
from kvcompile import Cache, Request
from tests import oracle, replay


def check_moves(srcs: list[Cache], dsts: list[Cache], requests: list[Request], election: str = "nearest") -> int:
    """Each byte that the oracle wants is moved once, from a rank that has it; return how many."""
    total = 0
    for dst in dsts:
        wanted: dict[int, set[tuple[int, int]]] = {}
        written: list[tuple[int, tuple[int, int]]] = []
        for number, src in enumerate(srcs):
            built = kvcompile.compile(src, dst, election=election).build(requests)
            assert not built.failed
            written += [(target, (number, source)) for source, target in replay.moved(replay.triples(built))]
            for request in requests:
                for source, target in oracle.copies(request, src, dst):
                    wanted.setdefault(target, set()).add((number, source))
        targets = [target for target, _ in written]
        assert len(set(targets)) == len(targets)
        assert set(targets) == set(wanted)
        assert all(source in wanted[target] for target, source in written)
        total += len(targets)
    return total
