"""Caches from an engine's own tensors: the address of every cell is the tensor's, and what contradicts is refused."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from kvcompile import Buffer, Cache, Group, LayoutError, fields, memory
from kvcompile.fields import Arrangement
from kvcompile.memory import strided

HND, NHD = "hnd", "nhd"


def dense(order: str, heads: int = 8, tokens: int = 4) -> Arrangement:
    return fields.dense(heads=heads, tokens=tokens, k_nbytes=16, order=order)


def address(cache: Cache, layer: str, name: str, block: int, head: int, token: int) -> int:
    """Address of a cell; ``head`` counts on the rank."""
    ((region, field),) = ((r, f) for r in cache.regions for f in r.fields if (r.layer, f.name) == (layer, name))
    start = region.base + block * region.block_stride + field.offset
    return start + head * field.head_stride + token * field.token_stride


def at(array: np.ndarray, *index: int) -> int:
    return array.ctypes.data + sum(i * stride for i, stride in zip(index, array.strides, strict=False))


class Frameworkless:
    """Nothing but ``__array_interface__``."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__


class Dlpack:
    """Nothing but ``__dlpack__``."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self) -> object:
        return self.array.__dlpack__()


class Cuda:
    """Nothing but ``__cuda_array_interface__``: a CuPy array has strides of None where it is dense."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3}


def torchlike(array: np.ndarray) -> SimpleNamespace:
    """A stand-in with torch's names, for a run without torch."""
    owner = array
    while owner.base is not None:
        owner = owner.base
    storage = SimpleNamespace(data_ptr=lambda: owner.ctypes.data, nbytes=lambda: owner.nbytes)
    return SimpleNamespace(
        shape=array.shape,
        data_ptr=lambda: array.ctypes.data,
        stride=lambda: tuple(stride // array.itemsize for stride in array.strides),
        element_size=lambda: array.itemsize,
        untyped_storage=lambda: storage,
    )


WRAPPERS = (lambda array: array, Frameworkless, Dlpack, Cuda, torchlike)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("order", [HND, NHD, "LPBNHC", "LHBPNC"])
def test_every_cell_is_where_the_tensor_has_it(order: str, wrap: type) -> None:
    """A tensor in the order's own shape: the declared order is the shape's."""
    letters = fields.arrangement.ordered(order).replace("L", "")
    sizes = {"B": 5, "P": 2, "H": 4, "N": 4, "C": 8}
    array = np.zeros([sizes[letter] for letter in letters], np.float16)
    cache = Cache.from_torch({"a": wrap(array)}, fields=dense(order), groups=[Group(4)], tp_rank=1, tp_size=2)
    for block, part, head, token in np.ndindex(5, 2, 4, 4):
        index = {"B": block, "P": part, "H": head, "N": token, "C": 0}
        expected = at(array, *(index[letter] for letter in letters))
        assert address(cache, "a", "kv"[part], block, head, token) == expected
    assert cache.regions[0].num_blocks == 5
    assert cache.buffers == (Buffer(array.ctypes.data, array.nbytes),)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC"])
def test_vllm_s_views(order: str) -> None:
    """vLLM 0.33.0: always [blocks, heads, tokens, K and V], whatever the strides; all layers one storage."""
    letters = fields.arrangement.ordered(order).replace("P", "")
    sizes = {"L": 3, "B": 5, "H": 4, "N": 4, "C": 16}
    storage = np.zeros(7 + 3 * 5 * 4 * 4 * 16, np.float16)
    physical = storage[7:].reshape([sizes[letter] for letter in letters])
    view = physical.transpose([letters.index(letter) for letter in "LBHNC"])
    tensors = {f"layer.{number}": view[number] for number in range(3)}
    made = fields.dense(heads=4, tokens=4, k_nbytes=16, order=order)
    cache = Cache.from_torch(tensors, fields=made, groups=[Group(4)], dims="B H N PC")
    assert cache.buffers == (Buffer(storage.ctypes.data, storage.nbytes),)
    for number, block, head, token in np.ndindex(3, 5, 4, 4):
        expected = at(view, number, block, head, token, 0)
        assert address(cache, f"layer.{number}", "k", block, head, token) == expected
        assert address(cache, f"layer.{number}", "v", block, head, token) == expected + 16


@pytest.mark.parametrize(("order", "actual"), [("LBHNC", "BNHC"), ("LBNHC", "BHNC"), ("LHBNC", "BHNC")])
def test_an_order_that_the_strides_contradict(order: str, actual: str) -> None:
    """Even where heads and tokens are as many, so that the shape alone does not tell."""
    physical = np.zeros([{"B": 5, "H": 4, "N": 4, "C": 32}[letter] for letter in actual], np.uint8)
    view = physical.transpose([actual.index(letter) for letter in "BHNC"])
    with pytest.raises(LayoutError, match=r"layer 'a', tensor 0: the order has .* the strides say otherwise"):
        Cache.from_torch({"a": view}, fields=dense(order, heads=4), groups=[Group(4)], dims="B H N PC")


def test_sglang_s_halves_and_slots() -> None:
    """SGLang 0.5.23: K and V of a layer are halves of one allocation [2, slots, heads, elements]."""
    fused = np.zeros((2, 6 * 4, 8, 8), np.float16)
    cache = Cache.from_torch(
        {"a": (fused[0], fused[1])}, fields=dense("LPBNHC"), groups=[Group(4)], dims="BN H C", kernel_blocks=1
    )
    assert cache.buffers == (Buffer(fused.ctypes.data, fused.nbytes),)
    assert {region.num_blocks for region in cache.regions} == {6}
    for part, slot, head in np.ndindex(2, 24, 8):
        assert address(cache, "a", "kv"[part], slot // 4, head, slot % 4) == at(fused, part, slot, head, 0)
    whole = Cache.from_torch({"a": fused}, fields=dense("LPBNHC"), groups=[Group(4)], dims="P BN H C")
    for part, slot, head in np.ndindex(2, 24, 8):
        assert address(whole, "a", "kv"[part], slot // 4, head, slot % 4) == at(fused, part, slot, head, 0)


def test_slices_and_padded_strides() -> None:
    """A layer's blocks cut out of packed rows, heads out of padded ones, kernel blocks out of blocks."""
    rows = np.zeros((6, 3, 2, 5, 4, 16), np.uint8)  # [blocks, layers, K and V, heads and one more, tokens, bytes]
    views = {f"layer.{number}": rows[1:, number, :, :4] for number in range(3)}
    cache = Cache.from_torch(views, fields=dense(HND, heads=4), groups=[Group(4)])
    assert cache.buffers == (Buffer(rows.ctypes.data, rows.nbytes),)
    for number, block, part, head, token in np.ndindex(3, 5, 2, 4, 4):
        expected = at(rows, 1 + block, number, part, head, token, 0)
        assert address(cache, f"layer.{number}", "kv"[part], block, head, token) == expected
    dense_blocks = np.zeros((12, 2, 4, 4, 16), np.uint8)
    cache = Cache.from_torch({"a": dense_blocks}, fields=dense(HND, heads=4), groups=[Group(16)], kernel_blocks=4)
    assert (cache.regions[0].num_blocks, cache.bound(0)) == (12, 3)


def test_latents_indexers_and_scales() -> None:
    latent = np.zeros((5, 64, 576), np.float16)
    pages = np.zeros((5, 64, 132), np.uint8)
    cache = Cache.from_torch(
        {"a": (latent, pages)},
        fields=(fields.latent(tokens=64, cell_nbytes=1152), fields.indexer(tokens=64, head_dim=128)),
        groups=[Group(64)],
        dims=("B N C", "B PNC PNC"),
        tp_rank=3,
        tp_size=4,
    )
    assert address(cache, "a", "latent", 2, 0, 7) == at(latent, 2, 7, 0)
    flat = pages.reshape(5, -1)
    assert address(cache, "a", "indexer", 2, 0, 7) == at(flat, 2, 7 * 128)
    assert address(cache, "a", "indexer_scale", 2, 0, 7) == at(flat, 2, 64 * 128 + 7 * 4)


@pytest.mark.parametrize("order", [HND, NHD])
def test_nvfp4_pages(order: str) -> None:
    """vLLM 0.33.0, FlashInfer: uint8 [pages, 2*heads, tokens, D/2 + D/16], dense; all data of K, then its scales."""
    physical = np.zeros((5, 8, 16, 72) if order == HND else (5, 16, 8, 72), np.uint8)
    view = physical if order == HND else physical.transpose(0, 2, 1, 3)
    made = fields.nvfp4(heads=4, tokens=16, head_dim=128, order=order)
    cache = Cache.from_torch({"a": view}, fields=made, groups=[Group(16)], dims="B PH PN PC")
    data, scale = 4 * 16 * 64, 4 * 16 * 8
    assert [field.offset for field in cache.regions[0].fields] == [0, data, data + scale, 2 * data + scale]
    strides = (16 * 64, 64) if order == HND else (64, 4 * 64)
    assert (cache.regions[0].fields[2].head_stride, cache.regions[0].fields[2].token_stride) == strides
    other = fields.nvfp4(heads=4, tokens=16, head_dim=128, order=NHD if order == HND else HND)
    with pytest.raises(LayoutError, match="strides say otherwise"):
        Cache.from_torch({"a": view}, fields=other, groups=[Group(16)], dims="B PH PN PC")


def test_nvfp4_slots() -> None:
    """MiniMax-M3: slots 2*head+side, data then scales in each."""
    pages = np.zeros((3, 8, 16, 72), np.uint8)
    made = fields.nvfp4(heads=4, tokens=16, head_dim=128, order="LBHPNC")
    cache = Cache.from_torch({"a": pages}, fields=made, groups=[Group(16)], dims="B HPN PN PC")
    flat = pages.reshape(3, 8, -1)
    for head, token in np.ndindex(4, 16):
        for side, name in enumerate("kv"):
            slot = 2 * head + side
            assert address(cache, "a", name, 1, head, token) == at(flat, 1, slot, token * 64)
            assert address(cache, "a", f"{name}_scale", 1, head, token) == at(flat, 1, slot, 16 * 64 + token * 8)


@pytest.mark.parametrize("order", ["row_first", "dim_first"])
def test_state(order: str) -> None:
    """Convolution and SSM state as two views of one padded page."""
    conv, ssm = fields.gdn(k_heads=4, v_heads=8, k_dim=8, v_dim=8, kernel=4, order=order)
    page = np.zeros((3, 4096), np.uint8)
    shape = (3, 64, 3) if order == "dim_first" else (3, 3, 64)
    conv_view = np.lib.stride_tricks.as_strided(page.view(np.float16), shape, (4096, shape[2] * 2, 2))
    ssm_view = np.lib.stride_tricks.as_strided(page[:, 384:].view(np.float32), (3, 4, 8, 8), (4096, 256, 32, 4))
    cache = Cache.from_torch(
        {"a": (conv_view, ssm_view)},
        fields=(conv, ssm),
        groups=[Group(16, state=True)],
        dims=("B PHC C" if order == "dim_first" else "B N PHC", "B H C C"),
        tp_rank=1,
        tp_size=2,
    )
    assert cache.buffers == (Buffer(page.ctypes.data, page.nbytes),)
    whole = fields.stack(
        (conv, ssm), layers=["a"], base=page.ctypes.data, num_blocks=3, tp_rank=1, tp_size=2, align=4096
    )
    assert [(f, r.base, r.block_stride) for r in cache.regions for f in r.fields] == [
        (f, r.base, r.block_stride) for r in whole for f in r.fields
    ]


def test_layers_may_differ() -> None:
    """Groups, arrangements and kernel blocks by layer name; touching storages stay apart."""
    first, second = np.zeros((4, 2, 4, 4, 16), np.uint8), np.zeros((8, 2, 2, 4, 16), np.uint8)
    cache = Cache.from_torch(
        {"a": first, "b": second},
        fields={"a": dense(HND, heads=4), "b": dense(HND, heads=2)},
        groups=[Group(4), Group(8)],
        group={"a": 0, "b": 1},
        kernel_blocks={"a": 1, "b": 2},
    )
    assert [(region.group, region.kernel_blocks) for region in cache.regions] == [(0, 1), (1, 2)]
    assert len(cache.buffers) == 2


GOOD = np.zeros((5, 2, 8, 4, 16), np.uint8)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([GOOD], {}, "expected a mapping"),
        ({"a": 3}, {}, "layer 'a', tensor 0: a int, expected a torch tensor"),
        ({"a": GOOD[:0]}, {}, "no size of 0"),
        ({"a": GOOD[::-1]}, {}, "no negative stride"),
        ({"a": GOOD[..., ::2]}, {}, "bytes of a cell are 2 apart"),
        ({"a": GOOD[:, :, :4]}, {}, "for H hold"),
        ({"a": GOOD[:, :, :, :3]}, {}, "for N hold"),
        ({"a": GOOD[..., :8]}, {}, "for C hold 8"),
        ({"a": GOOD[0]}, {}, "expected 5; say with dims="),
        ({"a": GOOD}, {"dims": "B P H N"}, "dims name 4 dimensions, expected 5"),
        ({"a": GOOD}, {"dims": "B P H N X"}, "letters BPHNC"),
        ({"a": GOOD}, {"dims": "B 1 H N C"}, "dimension 1 has 2 entries, expected 1"),
        ({"a": GOOD[0]}, {"dims": "P H N C"}, "no dimension for B"),
        ({"a": GOOD[:, :, :, :, :]}, {"dims": "B P N H C"}, "strides say otherwise"),
        ({"a": GOOD[:, :, :4]}, {"dims": "B PH PH N C", "tp_size": 2}, "expected them dense"),
        ({"a": (GOOD, GOOD, GOOD)}, {}, "3 tensors, 1 arrangements"),
        ({"a": GOOD}, {"group": {"b": 0}}, "layer 'a' is not among"),
        ({"a": GOOD}, {"fields": "hnd"}, "expected a Arrangement"),
        ({"a": GOOD}, {"groups": [Group(8)]}, "expected block_size 8"),
        ({"a": GOOD}, {"kernel_blocks": 0}, "kernel_blocks is 0"),
    ],
)
def test_what_does_not_fit(tensors: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Cache.from_torch(tensors, **{"fields": dense(HND), "groups": [Group(4)], **options})


def test_own_buffers() -> None:
    start = GOOD.ctypes.data
    cache = Cache.from_torch({"a": GOOD}, fields=dense(HND), groups=[Group(4)], buffers=[Buffer(start - 16, 20000)])
    assert cache.buffers == (Buffer(start - 16, 20000),)


def test_dlpack_is_read_and_not_consumed() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, 1:]
    found = strided(Dlpack(array), "here")
    assert (found.address, found.shape, found.strides, found.itemsize) == (array.ctypes.data, (2, 2, 4), (48, 16, 4), 4)
    assert found.storage is None


def test_dlpack_of_other_libraries() -> None:
    """A byte offset beside the address, and no strides where a tensor is dense: DLPack allows both."""
    array = np.zeros(100, np.uint8)
    shape = (ctypes.c_int64 * 2)(3, 4)
    raw = memory._DLTensor(array.ctypes.data, 1, 0, 2, 0, 16, 1, shape, None, 20)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.addressof(raw), b"dltensor", None)
    found = strided(SimpleNamespace(__dlpack__=lambda: capsule), "here")
    assert found == (array.ctypes.data + 20, (3, 4), (8, 2), 2, None)


def test_real_torch() -> None:
    """The same with torch itself: a storage, views of it with offsets and permuted strides."""
    torch = pytest.importorskip("torch")
    storage = torch.zeros(64 + 2 * 5 * 4 * 8 * 16, dtype=torch.bfloat16)
    physical = storage[64:].view(2, 5, 4, 8, 16)  # [layers, blocks, tokens, heads, K and V]
    tensors = {f"layer.{number}": physical[number].permute(0, 2, 1, 3) for number in range(2)}
    made = fields.dense(heads=8, tokens=4, k_nbytes=16, order="LBNHC")
    cache = Cache.from_torch(tensors, fields=made, groups=[Group(4)], dims="B H N PC")
    assert cache.buffers == (Buffer(storage.data_ptr(), storage.nbytes),)
    for number, block, head, token in np.ndindex(2, 5, 8, 4):
        expected = physical[number, block, token, head].data_ptr()
        assert address(cache, f"layer.{number}", "k", block, head, token) == expected
    with pytest.raises(LayoutError, match="strides say otherwise"):
        Cache.from_torch(
            tensors,
            fields=fields.dense(heads=8, tokens=4, k_nbytes=16, order="LBHNC"),
            groups=[Group(4)],
            dims="B H N PC",
        )
    fp8 = storage.view(torch.float8_e4m3fn)
    assert strided(fp8, "here").itemsize == 1
