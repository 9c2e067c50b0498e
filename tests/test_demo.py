"""`kvcompile demo`: every byte right over both engines, faults found and located, children ended on every path."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

typer = pytest.importorskip("typer", reason="needs the extra cli")
testing = pytest.importorskip("typer.testing", reason="needs the extra cli")

from kvcompile import backend  # noqa: E402
from kvcompile.cli.app import app  # noqa: E402
from kvcompile.cli.demo_values import GAP, Arena, Load  # noqa: E402
from kvcompile.cli.geometries import MODELS, Serving, cache, regions  # noqa: E402

MAIN = [sys.executable, "-c", "from kvcompile.cli import main; main()"]


def run(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed, on one line."""
    result = testing.CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def local(*arguments: str) -> tuple[int, str]:
    return run("demo", "--engine", "local", "--gib", "0.3", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--src-order nhd --dst-order hnd --src-tp 4 --dst-tp 1",
        "--src-tp 3 --dst-tp 2 --dst-block 48 --election balanced",
        "--model llama-3.3-70b --src-tp 2 --dst-tp 4 --src-block 128 --dst-block 16",
        "--model llama-3.3-70b --src-tp 1 --dst-tp 16 --dst-order nhd --election balanced --gib 0.4",
        "--model deepseek-v3 --src-tp 2 --dst-tp 2 --src-block 64 --dst-block 48",
        "--model kimi-k3-like --src-tp 8 --dst-tp 2 --requests 3 --gib 0.7",
        "--model kimi-k3-like --src-tp 2 --dst-tp 3 --dst-block 1536 --requests 2 --gib 0.7",
    ],
)
def test_every_byte_is_right(arguments: str) -> None:
    code, output = local(*arguments.split())
    assert code == 0, output
    assert "every byte is right: checked all" in output


def test_default_table() -> None:
    """GQA with 4 KV heads, TP 8 to TP 2: the lower replica of each head sends, one slice for each layer, K and V."""
    code, output = local("--gib", "0.6")
    assert code == 0
    for pair in ("0 → 0", "2 → 0", "4 → 1", "6 → 1"):
        assert f"│ {pair} │ 188 │" in output, output
    assert "12 more rank pairs have nothing to send" in output


@pytest.mark.parametrize(
    ("place", "where"),
    [
        # decode rank 0 has heads 0 and 1; a block is K then V, each 2 heads of 16 tokens of 256 bytes
        (GAP, "layer layers.0, field k, head 0, token {token}, byte 0, {whose}, block 0: got"),
        (GAP + 4096 + 256 + 17, "layer layers.0, field k, head 1, token {token}, byte 17, {whose}, block 0: got"),
        (GAP + 8192 + 3 * 256 + 255, "layer layers.0, field v, head 0, token {token}, byte 255, {whose}, block 0: got"),
        (0, "layer between layers, field padding"),
        (-1, "layer between layers, field padding"),
    ],
)
def test_one_flipped_bit_is_found(place: int, where: str) -> None:
    code, output = local("--gib", "0.21", "--corrupt", str(place))
    assert code == 1
    assert "1 wrong byte(s)" in output
    found = output.split("the first: ")[1]
    assert found.startswith("decode rank 0, ")
    inside = found.split(", token ")[1].split(",")[0]
    whose = "request " + found.split("request ")[1].split(",")[0]
    expected = where.format(token=inside, whose=whose)
    assert expected in found or (" no request" in found and expected.split(", {")[0].split(", token")[0] in found), (
        found
    )
    if "padding" in where:
        assert "no request (must stay untouched)" in found


@pytest.mark.parametrize("fault", ["drops", "doubles", "shifts", "zeroes"])
def test_faults_of_a_transfer_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """One descriptor of each write is lost, sent elsewhere or short, and the engine reports success."""
    copy = backend.copy

    def faulty(src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> None:
        keep = np.ones(len(src), bool)
        src, dst, length = src.copy(), dst.copy(), length.copy()
        if fault == "drops":
            keep[-1] = False
        elif fault == "doubles":
            dst[-1] = dst[0]
        elif fault == "shifts":
            dst[-1] += np.uint64(1)
        else:
            length[-1] -= np.uint64(1)
        copy(src[keep], dst[keep], length[keep])

    monkeypatch.setattr(backend, "copy", faulty)
    code, output = local("--src-tp", "2", "--dst-tp", "1")
    assert code == 1
    assert "wrong byte(s)" in output


def test_wrong_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stray write into a block of no request."""
    check = Arena.check

    def stray(self: Arena, *arguments: object) -> object:
        self.memory[len(self.memory) - GAP - 1] = 7  # last byte of the last block of the last layer
        return check(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Arena, "check", stray)
    code, output = local("--src-tp", "2", "--dst-tp", "1")
    assert code == 1
    assert re.search(r"layer layers\.\d+, field v, head 3, token \d+, byte 255", output), output


def test_over_mooncake() -> None:
    started = time.monotonic()
    code, output = run("demo", "--src-tp", "2", "--dst-tp", "1", "--gib", "1", "--requests", "4")
    assert code == 0, output
    assert "every byte is right: checked all" in output
    assert "│ 0 → 0 │" in output
    assert "│ 1 → 0 │" in output
    assert time.monotonic() - started < 120


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def running_demo(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a demo of three ranks in a process of its own; yield it and its ranks' process ids."""
    command = [*MAIN, "demo", "--src-tp", "2", "--dst-tp", "1", "--gib", "1", *arguments]
    # What a script runs in the background ignores Ctrl-C, and so would all that it starts.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    signal.signal(signal.SIGINT, heard)
    try:
        deadline = time.monotonic() + 30
        while len(ranks := children(demo.pid)) < 3 and time.monotonic() < deadline and demo.poll() is None:
            time.sleep(0.05)
        assert len(ranks) == 3
        yield demo, ranks
    finally:
        demo.kill()
        demo.communicate()


def all_end(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_ends_the_demo(victim: int) -> None:
    with running_demo() as (demo, ranks):
        time.sleep(1)
        os.kill(ranks[victim], signal.SIGKILL)
        output = " ".join(demo.communicate(timeout=20)[0].split())
        assert demo.returncode == 1
        name = ["prefill rank 0", "prefill rank 1", "decode rank 0"][victim]
        assert f"demo: {name} was killed by signal 9" in output
        assert all_end(ranks, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_demo(number: signal.Signals) -> None:
    with running_demo() as (demo, ranks):
        time.sleep(1)
        demo.send_signal(number)
        demo.wait(20)
        assert demo.returncode != 0
        assert all_end(ranks, 10)


def test_an_idle_rank_ends_with_the_demo() -> None:
    """Also one that has nothing to tell, and so never meets the closed pipe."""
    command = [sys.executable, "-m", "kvcompile.cli.demo_rank"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        time.sleep(1)
        assert idle.poll() is None
        idle.stdin.close()
        try:
            assert idle.wait(20) == 0
        finally:
            idle.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "gpt-1"], 2, "expected one of qwen3-235b-a22b, llama-3.3-70b, deepseek-v3, kimi-k3-like"),
        (["--src-tp", "0"], 2, "src-tp"),
        (["--dst-order", "nhc"], 2, "dst-order"),
        (["--gib", "0.1"], 1, "too little for 8 requests"),
        (["--model", "kimi-k3-like", "--src-block", "100"], 1, "block size is 100, expected a multiple of 64"),
    ],
)
def test_bad_options(arguments: list[str], code: int, message: str) -> None:
    result = run("demo", "--engine", "local", *arguments)
    assert result[0] == code
    assert message in result[1].replace("│ ", "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing: str) -> None:
    program = f"import sys; sys.modules['{missing}'] = None; from kvcompile.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "pip install 'kvcompile[cli]'" in result.stderr


def test_without_mooncake() -> None:
    """The ranks' own sentence reaches the user."""
    folder = "import sys, types; sys.modules['mooncake.engine'] = None"
    code = f"{folder}; from kvcompile.cli.demo_rank import Rank, Spec; " + (
        "Rank(print).open(Spec('src', 0, 'qwen3-235b-a22b', 1, 1, 'hnd', 16, [4], 'mooncake'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "KVCompileError: Mooncake cannot be imported" in result.stderr


def test_warmup() -> None:
    code, output = run("warmup")
    assert code == 0
    assert output.startswith("kernels ready in ")


def test_geometries() -> None:
    """Figures of the models' configs and of the reports that geometries.py cites."""
    sizes = {}
    for name, model in MODELS.items():
        made = regions(model, Serving(8, "hnd", model.block_size), 0, len(model.layers), [1] * len(model.groups()))
        sizes[name] = sum(region.block_stride * region.num_blocks for region in made)
    assert sizes["qwen3-235b-a22b"] == 94 * 2 * 1 * 16 * 128 * 2  # one head of 128 a rank, K and V, bfloat16
    assert sizes["llama-3.3-70b"] == 80 * 2 * 1 * 16 * 128 * 2
    assert sizes["deepseek-v3"] == 61 * 64 * (512 + 64) * 2
    kimi = MODELS["kimi-k3-like"]
    made = regions(kimi, Serving(8, "hnd", 768), 0, 93, [1, 1])
    latent = [region for region in made if region.fields[0].name == "latent"]
    state = [region for region in made if region.fields[-1].name == "ssm"]
    assert (len(latent), len(state)) == (24, 69)
    assert {(region.block_stride, region.kernel_blocks) for region in latent} == {(73728, 12)}
    assert {region.block_stride for region in state} == {884736}
    last = state[0].fields[-1]
    assert last.offset + 12 * last.cell_nbytes == 814080
    assert 704 * 1152 < 814080 <= 768 * 1152 == 884736


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_values_depend_on_every_coordinate(order: str) -> None:
    """Written through strides, read back byte by byte through the data model's formula; no two cells alike."""
    model, serving = MODELS["llama-3.3-70b"], Serving(2, order, 16)
    shape = (model, serving, 1, 3, [6])
    nbytes = sum(region.block_stride * region.num_blocks for region in regions(*shape))
    arena = Arena(nbytes, 3, lambda _: None)
    made = cache(*shape, arena.place)
    arena.fill(0xFE)
    loads = [Load(0, [[5, 1]], [[0, 1]], [0]), Load(1, [[2]], [[2]], [0])]
    arena.write(made, loads)
    cells = {}
    for load in loads:
        for region in made.regions:
            for field in region.fields:
                for head in range(4):
                    for token in range(16 * len(load.src_blocks[0])):
                        block, inside = load.src_blocks[0][token // 16], token % 16
                        start = region.base - arena.memory.ctypes.data + block * region.block_stride + field.offset
                        start += head * field.head_stride + inside * field.token_stride
                        cells[load.number, region.layer, field.name, head, token] = arena.memory[start:][:256].tobytes()
    assert len(set(cells.values())) == len(cells) == 3 * 2 * 4 * 48
    assert all(0xFE not in cell for cell in cells.values())
    for region in made.regions:
        for block in (0, 3, 4):
            start = region.base - arena.memory.ctypes.data + block * region.block_stride
            assert (arena.memory[start:][: region.block_stride] == 0xFE).all()
