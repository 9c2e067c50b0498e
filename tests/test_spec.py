"""Deployments in TOML files: what they say, what is refused and how it is named, and the commands that read them."""

import json
import textwrap
from pathlib import Path

import pytest

from kvcompile import KVCompileError, LayoutError, compile, prove, spec
from kvcompile.proof.contents import contents

typer = pytest.importorskip("typer.testing")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.toml"))


def parse(text: str) -> spec.Deployment:
    return spec.parse(textwrap.dedent(text).encode(), "my.toml")


def invoke(*arguments: str) -> typer.Result:
    from kvcompile.cli.app import app  # noqa: PLC0415

    return typer.CliRunner().invoke(app, list(arguments))


def test_ranks_of_both_sides() -> None:
    found = parse("""
        [model]
        name = "llama-3.3-70b"
        [src]
        tp_size = 4
        pp_size = 2
        order = "nhd"
        [dst]
        tp_size = 2
        dp_size = 3
        block_size = 64
        [plan]
        election = "balanced"
        bridge_padding = true
    """)
    assert found.src_names == [f"pp{stage} tp{rank}" for stage in (0, 1) for rank in range(4)]
    assert found.dst_names == [f"dp{replica} tp{rank}" for replica in range(3) for rank in (0, 1)]
    assert [(cache.dp_rank, cache.dp_size) for cache in found.dst] == [(n // 2, 3) for n in range(6)]
    assert [len(cache.regions) for cache in found.src] == [40] * 8
    k = found.src[0].regions[0].fields[0]
    assert (k.heads, k.cell_nbytes, k.token_stride) == (8, 256, 512)
    assert found.dst[0].groups[0].block_size == 64
    assert found.options == {"election": "balanced", "bridge_padding": True}


@pytest.mark.parametrize("name", spec.BUILT_IN)
def test_built_in_models_are_their_published_configs(name: str) -> None:
    """What a built-in model keeps is what its whole config.json says."""
    from kvcompile.models import layers_of  # noqa: PLC0415

    whole = json.loads((ROOT / "tests" / "data" / f"{name}.json").read_text())
    assert layers_of(spec.BUILT_IN[name]) == layers_of(whole)


def test_a_config_json_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "here.json").write_text(json.dumps(spec.BUILT_IN["deepseek-v3"]))
    (tmp_path / "x.toml").write_text('[model]\nconfig = "here.json"\n')
    assert len(spec.read(tmp_path / "x.toml").src[0].regions) == 61
    (tmp_path / "x.toml").write_text('[model]\nconfig = "there.json"\n')
    with pytest.raises(LayoutError, match=r"x.toml, \[src\]: .*there.json"):
        spec.read(tmp_path / "x.toml")


def test_layers_by_hand_keep_one_thing_or_several() -> None:
    found = parse("""
        [[model.layers]]
        count = 2
        kind = "attention"
        heads = 4
        k_dim = 8
        [[model.layers]]
        keeps = [{ kind = "latent", lora_rank = 16, rope_dim = 8 }, { kind = "indexer", head_dim = 4, scaled = false }]
        [src]
        kv_dtype = "fp8"
        num_blocks = { attention = 7 }
    """)
    regions = found.src[0].regions
    assert [region.layer for region in regions][:2] == ["layers.0", "layers.1"]
    assert {region.layer for region in regions} == {"layers.0", "layers.1", "layers.2"}
    assert {region.num_blocks for region in regions} == {7}
    assert regions[0].fields[0].cell_nbytes == 8


WRONG = {
    "no TOML": ("[model", "my.toml: no TOML: "),
    "no model": ("[src]\ntp_size = 2", "my.toml: model is nothing, expected one of name, config and [[model.layers]]"),
    "two models": (
        '[model]\nname = "llama-3.3-70b"\nconfig = "x"',
        "my.toml: model is ['name', 'config'], expected one of",
    ),
    "unknown model": ('[model]\nname = "gpt-2"', "my.toml: model.name is 'gpt-2', expected one of qwen3-235b-a22b, "),
    "a file": ('[model]\nconfig = "x.json"', "my.toml: model.config is x.json, expected name or [[model.layers]]"),
    "unknown table": ('model.name = "llama-3.3-70b"\n[prefill]', "my.toml: unknown key 'prefill'"),
    "unknown key": ('model.name = "llama-3.3-70b"\n[dst]\ntp = 2', "my.toml: unknown key 'dst.tp'"),
    "kind": (
        'model.name = "llama-3.3-70b"\n[dst]\ntp_size = "2"',
        "my.toml: dst.tp_size is '2', expected an integer from 1 to ",
    ),
    "boolean": (
        'model.name = "llama-3.3-70b"\nsrc.tp_size = true',
        "my.toml: src.tp_size is True, expected an integer from 1",
    ),
    "range": (
        'model.name = "llama-3.3-70b"\n[src]\ntp_size = 0',
        "my.toml: src.tp_size is 0, expected an integer from 1 to ",
    ),
    "no table": ('model.name = "llama-3.3-70b"\nsrc = 3', "my.toml: src is 3, expected a table"),
    "election": (
        'model.name = "llama-3.3-70b"\nplan.election = "best"',
        "my.toml: plan.election is 'best', expected one of nearest",
    ),
    "order": ('model.name = "llama-3.3-70b"\nsrc.order = "abc"', "my.toml, [src]: order"),
    "dtype": (
        'model.name = "llama-3.3-70b"\ndst.kv_dtype = "int3"',
        "my.toml, [dst]: kv_dtype is 'int3', expected one of auto",
    ),
    "stages": ('model.name = "llama-3.3-70b"\nsrc.pp_size = 81', "my.toml, [src]: pp_size makes stages"),
    "missing": (
        '[[model.layers]]\nkind = "attention"\nheads = 2',
        "my.toml: model.layers[0].k_dim is missing, expected an integer",
    ),
    "kind of layer": (
        '[[model.layers]]\nkind = "rnn"',
        "my.toml: model.layers[0].kind is 'rnn', expected one of attention",
    ),
    "of a layer": (
        '[[model.layers]]\nkeeps = [{ kind = "latent", lora_rank = 1, rope_dim = 1, heads = 1 }]',
        "my.toml: unknown key 'model.layers[0].keeps[0].heads'",
    ),
    "ranks": (
        'model.name = "llama-3.3-70b"\nsrc.tp_size = 10000',
        "my.toml, [src]: tp_size 10000, dp_size 1: expected at most",
    ),
    "pairs": ('model.name = "llama-3.3-70b"\nsrc.tp_size = 512\ndst.tp_size = 512', "expected at most 65536 pairs"),
    "no such layer": (
        'model.name = "llama-3.3-70b"\nplan.layers = ["layers.0", "layers.80"]',
        "my.toml: plan.layers is ['layers.0', 'layers.80'], expected names of layers: none is called 'layers.80'",
    ),
    "order of state": (
        'model.name = "llama-3.3-70b"\nsrc.conv_order = "x"',
        "my.toml, [src]: conv_order is 'x', expected one of row_first, dim_first",
    ),
    "no text": ("\xff", "my.toml: no TOML: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_key(name: str) -> None:
    text, says = WRONG[name]
    with pytest.raises(KVCompileError) as caught:
        spec.parse(text.encode("latin-1"), "my.toml")
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="cannot be read: No such file"):
        spec.read(tmp_path / "none.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (spec.MAX_NBYTES + 1))
    with pytest.raises(LayoutError, match="over 1048576 bytes"):
        spec.read(tmp_path / "big.toml")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_exact(name: str) -> None:
    result = invoke("prove", str(ROOT / "examples" / name))
    assert result.exit_code == 0, result.output
    assert "exact: every byte of every dst field" in result.output


def test_prove_fails_where_a_byte_is_missing(tmp_path: Path) -> None:
    """A plan of one layer leaves all others missing."""
    path = tmp_path / "x.toml"
    path.write_text('model.name = "llama-3.3-70b"\n[plan]\nlayers = ["layers.0"]\n')
    result = invoke("prove", str(path))
    assert result.exit_code == 1
    assert "NOT exact" in result.output
    assert "nobody writes it" in result.output


def test_layers_of_one_stage(tmp_path: Path) -> None:
    """Ranks of another stage hold none of them, and send nothing."""
    path = tmp_path / "x.toml"
    path.write_text(
        'model.name = "llama-3.3-70b"\nsrc.pp_size = 2\ndst.pp_size = 2\nplan.layers = ["layers.1", "layers.2"]\n'
    )
    result = invoke("plan", str(path))
    assert result.exit_code == 0, result.output
    assert result.output.count("2 layers from layers.1") == 1


def test_replicas_of_src_are_proved_one_by_one(tmp_path: Path) -> None:
    """A request lies on one of them, which sends all of it."""
    path = tmp_path / "x.toml"
    path.write_text('model.name = "llama-3.3-70b"\nsrc = { tp_size = 2, dp_size = 3 }\ndst.dp_size = 2\n')
    result = invoke("prove", str(path), "--plan", "election=balanced")
    assert result.exit_code == 0, result.output
    for replica in range(3):
        assert f"src replica {replica}: exact: every byte of every dst field" in result.output
    path.write_text(path.read_text() + 'plan.layers = ["layers.0"]\n')
    result = invoke("prove", str(path))
    assert result.exit_code == 1
    assert "src replica 2: NOT exact: 316 missing" in result.output


def test_plan_says_who_sends_what(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('model.name = "qwen3-235b-a22b"\n[src]\ntp_size = 8\n[dst]\ntp_size = 2\n')
    result = invoke("plan", str(path), "--explain")
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if line[:1] == "│"]
    assert [row[:3] for row in rows] == [
        [src, dst, f"94 layers from layers.0: k v heads [{head}, {head + 1})"]
        for src, dst, head in (("tp0", "tp0", 0), ("tp2", "tp0", 1), ("tp4", "tp1", 2), ("tp6", "tp1", 3))
    ]
    assert {tuple(row[4:6]) for row in rows} == {("770,048", "188")}
    assert "nothing merges, whatever the block ids" in result.output


def test_a_wrong_file_is_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[model]\n")
    for command in ("prove", "plan"):
        result = invoke(command, str(path))
        assert result.exit_code == 2
        assert "x.toml: model is nothing" in result.stderr


def test_a_config_json_with_settings() -> None:
    config = str(ROOT / "tests" / "data" / "qwen3-235b-a22b.json")
    result = invoke(
        "prove",
        config,
        "--src",
        "tp_size=8 order=nhd",
        "--dst",
        "tp_size=2 block_size=64",
        "--plan",
        "election=balanced",
    )
    assert result.exit_code == 0, result.output
    assert "8 src ranks to 2 dst ranks" in result.output
    for settings, says in (
        ("tp=8", "unknown key 'src.tp'"),
        ("tp_size", "src settings: 'tp_size', expected key=value"),
    ):
        result = invoke("plan", config, "--src", settings)
        assert result.exit_code == 2
        assert says in result.stderr


def test_settings_win_over_the_file() -> None:
    found = spec.read(ROOT / "examples" / "gqa.toml", {"src": "tp_size=4", "dst": "", "plan": 'layers=["layers.0"]'})
    assert len(found.src) == 4
    assert len(found.dst) == 2
    assert found.options == {"layers": ["layers.0"]}


def test_contents_are_layers_and_heads() -> None:
    found = parse("""
        [[model.layers]]
        count = 3
        kind = "attention"
        heads = 6
        k_dim = 8
        [src]
        tp_size = 3
        [dst]
        tp_size = 2
    """)
    sent = contents(found.src[1], found.dst[1], compile(found.src[1], found.dst[1]))
    assert [tuple(each) for each in sent] == [
        (0, 0, ("layers.0", "layers.1", "layers.2"), (("k", ((3, 4),)), ("v", ((3, 4),))))
    ]
    assert prove(found.src, found.dst).exact
