"""Draw `slice_table.svg`: two real caches, the table that `compile` makes of them, and what `build` makes of ids.

    python docs/slice_table.py [FILE]

Every number in the picture comes from the library.
"""

import sys
from pathlib import Path

import kvcompile
from kvcompile import Cache, Descriptors, Field, Group, Plan, Region, Request

HEADS, TOKENS, CELL = 4, 16, 256
PIECE = TOKENS * CELL
SRC_BASE, DST_BASE = 1_000_000, 5_000_000
SRC_IDS, DST_IDS = [3, 1], [0, 2]
BLOCKS = 4
WIDTH, HEIGHT = 900, 620
LEFT, SCALE = 150, 176 / (HEADS * 2 * PIECE)  # pixels a byte: four dst blocks fit
INK, FAINT = "#1f2933", "#6b7884"
COLOURS = {"k": "#2f7fc1", "v": "#d9822b"}


def cache(base: int, tp_rank: int, tp_size: int) -> Cache:
    """Make one rank: all K of a block, then all V, in HND order."""
    local = HEADS // tp_size
    fields = [
        Field.hnd(name, heads=HEADS, tokens=TOKENS, cell_nbytes=CELL, offset=number * local * PIECE)
        for number, name in enumerate(("k", "v"))
    ]
    region = Region("layers.0", 0, base, 2 * local * PIECE, BLOCKS, fields)
    return Cache([region], [Group(TOKENS)], tp_rank=tp_rank, tp_size=tp_size)


def text(
    x: float, y: float, words: object, *, size: int = 14, anchor: str = "start", ink: str = INK, bold: bool = False
) -> str:
    """Return one line of text."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"{weight}>{words}</text>'


def code(x: float, y: float, words: object) -> str:
    """Return one line of Python."""
    return text(x, y, words, bold=True).replace("<text ", '<text class="m" ')


def mono(x: float, y: float, words: object, *, ink: str = INK, bold: bool = False) -> str:
    """Return one right-aligned number or name of the library."""
    return text(x, y, words, anchor="end", ink=ink, bold=bold).replace("<text ", '<text class="m" ')


def box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1) -> str:
    """Return one filled rectangle with a thin edge."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        f'fill-opacity="{opacity:g}" stroke="{INK}" stroke-width="0.8"/>'
    )


def memory(y: float, side: Cache, ids: list[int], sent: range) -> list[str]:
    """Draw the blocks of one side: a piece a head, coloured where this pair of ranks moves it."""
    region = side.regions[0]
    heads = range(side.tp_rank * HEADS // side.tp_size, (side.tp_rank + 1) * HEADS // side.tp_size)
    parts = []
    for block in range(BLOCKS):
        left = LEFT + block * (region.block_stride * SCALE + 10)
        for number, name in enumerate(("k", "v")):
            for place, head in enumerate(heads):
                used = block in ids and head in sent
                x = left + (number * len(heads) + place) * PIECE * SCALE
                parts.append(box(x, y, PIECE * SCALE, 40, COLOURS[name] if used else "#eef1f4"))
                ink = "#ffffff" if used else FAINT
                parts.append(text(x + PIECE * SCALE / 2, y + 25, f"{name}{head}", size=11, anchor="middle", ink=ink))
        chosen = block in ids
        label = f"block {block}"
        middle = left + region.block_stride * SCALE / 2
        parts.append(text(middle, y + 58, label, size=12, anchor="middle", ink=INK if chosen else FAINT, bold=chosen))
    return parts


def table(y: float, plan: Plan) -> list[str]:
    """Draw the rows of the plan; steps of 1 and phases of 0 are left out."""
    names = ("src_origin", "src_stride", "dst_origin", "dst_stride", "length")
    parts = [box(LEFT - 20, y, 720, 28 + 26 * len(plan.table), "#ffffff")]
    for column, name in enumerate(names):
        parts.append(mono(LEFT + 130 + 135 * column, y + 19, name, ink=FAINT))
        for number, row in enumerate(plan.table):
            parts.append(mono(LEFT + 130 + 135 * column, y + 45 + 26 * number, f"{int(row[name]):,}"))
    for number, name in enumerate(("k", "v")):
        parts.append(box(LEFT - 8, y + 33 + 26 * number, 14, 14, COLOURS[name]))
    return parts


def descriptors(y: float, built: Descriptors) -> list[str]:
    """Draw what `build` returns, one line a descriptor."""
    parts = []
    for column, name in enumerate(("src", "dst", "length")):
        parts.append(mono(LEFT + 130 + 135 * column, y, name, ink=FAINT))
    for number, row in enumerate(zip(built.src.tolist(), built.dst.tolist(), built.length.tolist(), strict=True)):
        colour = COLOURS["k" if number < len(built) // 2 else "v"]
        parts.append(box(LEFT - 8, y + 14 + 24 * number, 14, 14, colour))
        for column, value in enumerate(row):
            parts.append(mono(LEFT + 130 + 135 * column, y + 26 + 24 * number, f"{value:,}"))
    return parts


def draw() -> str:
    """Compile, build and return the picture as SVG."""
    src, dst = cache(SRC_BASE, 1, 2), cache(DST_BASE, 0, 1)
    plan = kvcompile.compile(src, dst)
    built = plan.build([Request("r", [SRC_IDS], [DST_IDS])])
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(24, 34, "A slice table: two memory layouts in, five numbers a slice out", size=18, bold=True),
        text(24, 84, "src", bold=True),
        text(24, 102, "rank 1 of TP2,", size=12, ink=FAINT),
        text(24, 118, "heads 2 and 3", size=12, ink=FAINT),
        *memory(66, src, SRC_IDS, range(2, 4)),
        text(24, 176, "dst", bold=True),
        text(24, 194, "rank 0 of TP1,", size=12, ink=FAINT),
        text(24, 210, "heads 0 to 3", size=12, ink=FAINT),
        *memory(158, dst, DST_IDS, range(2, 4)),
        code(24, 262, "compile(src, dst)"),
        text(24, 284, "Once a peer: a row for each piece of a block that is contiguous on both sides.", ink=FAINT),
        *table(300, plan),
        code(24, 422, f"plan.build([Request(id, src_blocks=[{SRC_IDS}], dst_blocks=[{DST_IDS}])])"),
        text(24, 444, "Per batch: address = origin + id * stride, for each row and pair of ids.", ink=FAINT),
        *descriptors(474, built),
        text(
            24,
            600,
            "The real table also has groups, steps and phases: 0, 1 and 0 in every row here.",
            size=12,
            ink=FAINT,
        ),
    ]
    sans, mono = "Helvetica,Arial,'DejaVu Sans',sans-serif", "Menlo,Consolas,'DejaVu Sans Mono',monospace"
    style = f"text{{font-family:{sans}}}.m{{font-family:{mono}}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(draw())
