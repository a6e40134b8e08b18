import itertools
import pickle
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from headway.certificates import certify
from headway.core import checks
from headway.core.examples import BLOCK, Examples, join
from headway.core.factored import FactoredLayer
from headway.core.files import Slices
from headway.core.forms import Form
from headway.core.layer import AttentionLayer, load_layer
from headway.core.positions import Rotary
from headway.core.shards import rebatch, write
from headway.core.sources import draw, draw_batches
from headway.learning import learn

SAME = {"rtol": 0, "atol": 0}
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def layer(seed=0, **options):
    return AttentionLayer.random(2, 3, out_width=2, offset=True, seed=seed, **options)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(count=10, seed=0, padded=False, mask="none"):
    padding = torch.zeros(count, 4, dtype=torch.bool) if padded else None
    if padded:
        padding[::2, -1] = True
    return Examples(normal(count, 4, 3, seed=seed), normal(count, 4, 2, seed=seed + 1), padding, mask)


def assert_same(one, two):
    assert one.mask == two.mask
    assert_close(one.X, two.X, **SAME)
    assert_close(one.Y, two.Y, **SAME)
    assert (one.padding is None) == (two.padding is None)
    if one.padding is not None:
        assert torch.equal(one.padding, two.padding)


# In memory


def test_inputs_are_not_changed_and_the_text_says_the_sizes():
    X, Y = normal(3, 4, 3), normal(3, 4, 2)
    copies = X.clone(), Y.clone()
    data = Examples(X, Y)
    list(data.batches(2))
    data.digest()
    assert_close((X, Y), copies, **SAME)
    assert repr(data) == "Examples(3 sequences of 4 tokens, width 3 → 2, torch.float64)"


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_batches_are_all_sequences_in_order(padded):
    data = small(10, padded=padded)
    batches = list(data.batches(4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert_close(torch.cat([batch.X for batch in batches]), data.X, **SAME)
    assert_close(torch.cat([batch.Y for batch in batches]), data.Y, **SAME)
    assert all((batch.padding is None) != padded for batch in batches)


@pytest.mark.parametrize("size", [0, -1])
def test_batches_of_no_sequences_are_refused(refused, size):
    with refused("size", str(size)):
        list(small().batches(size))


def test_a_digest_is_of_the_contents():
    data = small()
    assert data.digest() == Examples(data.X.clone(), data.Y.clone()).digest()
    moved = data.Y.clone()
    moved[3, 2, 1] += 1e-12
    others = [
        Examples(data.X, moved),
        Examples(data.X, data.Y, mask="causal"),
        Examples(data.X, data.Y, torch.zeros(10, 4, dtype=torch.bool)),
        Examples(data.X, data.Y.float()),
        data.take(range(9)),
        data.take([1, 0, *range(2, 10)]),
    ]
    assert len({data.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_hashes_know_a_sequence_again_whatever_holds_it(tmp_path):
    """One number a sequence: of its rows that count, in any precision, order or container."""
    data = small()
    known = data.hashes()
    assert known.dtype == np.int64
    assert len(set(known.tolist())) == len(data) == len(known)
    index = [7, 2, 2, 0]
    assert data.take(index).hashes().tolist() == known[index].tolist()
    assert Examples(data.X.float(), data.Y.float()).hashes().tolist() == known.tolist()
    assert write(tmp_path / "e", rebatch([data], [4, 6]), 2).hashes().tolist() == known.tolist()
    Xs, Ys = [*data.X[:3], normal(6, 3, seed=1)], [*data.Y[:3], normal(6, 2, seed=2)]
    padded = Examples.pad(Xs, Ys)
    assert padded.hashes()[:3].tolist() == known[:3].tolist()
    padded.X[0, 5], padded.Y[1, 4] = 3.0, 4.0
    assert padded.hashes()[:3].tolist() == known[:3].tolist(), "filling is not looked at"
    moved = data.Y.clone()
    moved[3, 2, 1] *= 1 + 1e-5
    assert (Examples(data.X, moved).hashes() != known).nonzero()[0].tolist() == [3]
    assert (Examples(data.X.flip(1), data.Y).hashes() != known).all()
    assert Examples(data.X[:, :, :2], torch.cat([data.X[:, :, 2:], data.Y], 2)).hashes()[0] != known[0]


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_padded_sequences_are_labelled_as_the_short_ones(mask):
    truth = layer(mask=mask)
    Xs = [normal(k, 3, seed=k) for k in (2, 5, 3)]
    Ys = [truth(x) for x in Xs]
    data = Examples.pad(Xs, Ys, mask)
    assert data.mask == mask
    assert data.padding.sum(1).tolist() == [3, 0, 2]
    labels = truth(data.X, data.padding)
    for i, (x, y) in enumerate(zip(Xs, Ys, strict=True)):
        assert_close(data.X[i, : len(x)], x, **SAME)
        assert_close(data.Y[i, : len(x)], y, **SAME)
        assert_close(labels[i, : len(x)], y, **EXACT)
        assert (data.X[i, len(x) :] == 0).all()


@given(
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    padded=st.booleans(),
)
def test_rebatch_cuts_the_same_sequences_anew(blocks, cuts, padded):
    count = sum(blocks)
    data = small(count, padded=padded)
    starts = np.cumsum([0, *blocks])
    source = [data.take(range(a, b)) for a, b in itertools.pairwise(starts)]
    ends = [end for end in np.cumsum(cuts) if end < count]
    sizes = np.diff([0, *ends, count]).tolist()
    found = list(rebatch(source, sizes))
    assert [len(batch) for batch in found] == sizes
    assert_close(torch.cat([batch.X for batch in found]), data.X, **SAME)
    assert_close(torch.cat([batch.Y for batch in found]), data.Y, **SAME)
    if padded:
        assert torch.equal(torch.cat([batch.padding for batch in found]), data.padding)


def test_rebatch_refuses_more_than_there_is(refused):
    with refused("sizes"):
        list(rebatch([small(4)], [3, 3]))


def test_rebatch_gives_an_empty_batch_where_one_is_asked_for():
    assert [len(batch) for batch in rebatch([small(4)], [1, 0, 3, 0])] == [1, 0, 3, 0]


@pytest.mark.parametrize("first", ["full", "padded"])
def test_joining_full_and_padded_batches_keeps_the_padding(first):
    parts = [small(2, padded=first == "padded"), small(2, padded=first != "padded")]
    (joined,) = rebatch(parts, [4])
    assert int(joined.padding.sum()) == 1


# Shards


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_shards_round_trip(tmp_path, padded, mask):
    data = small(10, padded=padded, mask=mask)
    shards = write(tmp_path / "new", rebatch([data], [4, 3, 3]), shards=3)
    again = Examples.open(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        f"examples-0000{j}-of-00003.safetensors" for j in range(3)
    ]
    for held in (shards, again):
        assert (len(held), held.length, held.width, held.out_width) == (10, 4, 3, 2)
        assert (held.dtype, held.device, held.mask) == (torch.float64, torch.device("cpu"), mask)
        assert held.digest() == data.digest()
        assert_same(held.take(range(10)), data)
        assert [len(batch) for batch in held.batches(4)] == [4, 4, 2]
    assert repr(again) == "Shards(10 sequences of 4 tokens, width 3 → 2, torch.float64)"


def test_shards_of_a_draw_are_the_draw(tmp_path):
    data = draw(layer(), BLOCK + 76, 2, seed=1)
    blocks = draw_batches(layer(), BLOCK + 76, 2, seed=1)
    shards = write(tmp_path, rebatch(blocks, [550, 550]), shards=2)
    assert shards.digest() == data.digest()
    assert load_file(shards.files[0])["X"].dtype == torch.int8


def test_signs_are_stored_as_int8_and_other_tokens_as_they_are(tmp_path):
    X = normal(6, 4, 3).sign()
    stored = load_file(write(tmp_path / "signs", [Examples(X, layer()(X))]).files[0])["X"]
    assert stored.dtype == torch.int8
    assert_close(stored.double(), X, **SAME)
    X[5, 3, 2] = 0.5
    assert_close(load_file(write(tmp_path / "other", [Examples(X, layer()(X))]).files[0])["X"], X, **SAME)


def test_signs_given_as_floats_keep_their_digest(tmp_path):
    X = normal(6, 4, 3).sign()
    data = Examples(X, layer()(X))
    assert write(tmp_path, [data]).digest() == data.digest()


@pytest.mark.parametrize("tensor", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize(
    "index", [[0], [9], [3, 4], [2, 3, 4, 5, 6, 7, 8], [9, 0, 5, 5, 4, 3], list(range(10))], ids=str
)
def test_take_across_shards(tmp_path, index, tensor):
    data = small(10, padded=True)
    shards = write(tmp_path, rebatch([data], [4, 3, 3]), shards=3)
    assert_same(shards.take(torch.tensor(index) if tensor else index), data.take(index))


def test_near_neighbours_are_read_in_one_piece(tmp_path, monkeypatch):
    """Few sequences left out are read with the others: beginning anew costs more."""
    data = draw(layer(), 3 * BLOCK, 2, seed=1)
    shards = write(tmp_path, rebatch([data], [BLOCK + 500, 2 * BLOCK - 500]), shards=2)
    reads = []

    class Watched:
        def __init__(self, file):
            self.file = file

        def rows(self, name, low, high):
            reads.append(name)
            return self.file.rows(name, low, high)

    opened = type(shards)._file
    monkeypatch.setattr(type(shards), "_file", lambda self, j: Watched(opened(self, j)))
    everything = np.arange(len(data))
    for index, pieces in ((everything, 4), (everything[everything % 7 != 3], 4), (everything[::1000], 4)):
        reads.clear()
        assert_same(shards.take(index), data.take(index))
        assert reads == ["X", "Y"] * pieces


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_rows_of_a_file_are_those_of_the_library(tmp_path, dtype):
    draw = torch.Generator().manual_seed(0)
    X = (9 * torch.randn(7, 3, 2, generator=draw)).to(dtype)
    save_file({"X": X, "other": torch.arange(5, dtype=torch.uint8), "empty": X[:0]}, tmp_path / "x.safetensors")
    held = Slices(tmp_path / "x.safetensors")
    for low, high in ((0, 7), (2, 3), (5, 7), (4, 4)):
        torch.testing.assert_close(held.rows("X", low, high), X[low:high], rtol=0, atol=0)
    assert held.rows("other", 1, 3).tolist() == [1, 2] and held.rows("empty", 0, 0).shape == (0, 3, 2)


def test_a_file_cut_short_while_it_is_read_is_named(refused, tmp_path):
    shards = write(tmp_path / "x", [small(10)])
    shards.take([0])
    whole = shards.files[0].read_bytes()
    shards.files[0].write_bytes(whole[:-40])
    with refused(str(shards.files[0]), "the file that was opened", "ends too soon"):
        shards.take(range(10))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_shards_that_were_read_are_not_held(tmp_path):
    """Files mapped into memory would count as the process's own."""
    data = Examples(torch.randn(2048, 16, 64, dtype=torch.float64), torch.randn(2048, 16, 64, dtype=torch.float64))
    shards = write(tmp_path / "x", rebatch([data], [512] * 4), shards=4)

    def mapped():
        found = re.search(r"^RssFile:\s*(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.M)
        return int(found[1]) * 1024

    shards.take([0])
    before = mapped()
    for part in shards.batches(64):
        assert len(part) == 64
    assert mapped() - before < 4 << 20  # of 32 MiB


def test_take_nothing(tmp_path):
    data = small(3)
    assert_same(write(tmp_path, [data]).take([]), data.take([]))


@pytest.mark.parametrize("index", [[10], [-1]], ids=str)
def test_take_beyond_the_end_is_refused(refused, tmp_path, index):
    with refused("index", str(index[0])):
        write(tmp_path, [small(10)]).take(index)


@pytest.mark.parametrize("where", ["memory", "shards"])
def test_a_mask_is_not_an_index(refused, tmp_path, where):
    data = small(4)
    held = write(tmp_path, [data]) if where == "shards" else data
    with refused("index", "bool"):
        held.take(torch.tensor([True, False, False, True]))


def test_labels_equal_to_the_inputs_are_written(tmp_path):
    X = normal(4, 3, 2)
    assert_same(write(tmp_path, [Examples(X, X)]).take(range(4)), Examples(X, X))


def test_shards_have_the_permissions_of_any_new_file(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    shards = write(tmp_path / "new", [small()])
    assert stat.S_IMODE(shards.files[0].stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_write_into_a_folder_in_use_is_refused_and_leaves_it(refused, tmp_path):
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    with refused("folder", str(tmp_path)):
        write(tmp_path, [small()])
    with refused("folder", str(kept)):
        write(kept, [small()])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert kept.read_text() == "mine"


def test_a_writer_that_dies_leaves_nothing(tmp_path):
    def batches():
        yield small(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "data", batches(), shards=2)
    assert list(tmp_path.iterdir()) == []


def test_fewer_batches_than_shards_are_refused(tmp_path):
    with pytest.raises(checks.InputError, match="shards: expected as many"):
        write(tmp_path / "data", [small(3)], shards=2)
    assert list(tmp_path.iterdir()) == []


def test_the_layer_is_stored_beside_the_shards(tmp_path):
    layer = AttentionLayer.random(heads=2, width=3, seed=4)
    write(tmp_path / "data", [draw(layer, 5, 4, seed=5)], truth=layer)
    assert torch.equal(load_layer(tmp_path / "data" / "truth.safetensors").Theta, layer.Theta)
    assert len(Examples.open(tmp_path / "data")) == 5


# Refusals


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ["X", "Y"])
def test_an_entry_that_is_not_finite_is_refused_with_its_index(refused, name, bad):
    parts = {"X": normal(5, 4, 3), "Y": normal(5, 4, 2)}
    parts[name][3, 2, 1] = bad
    with refused(f"examples.{name}", f"{bad} at index (3, 2, 1)"):
        Examples(**parts)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("examples.X", {"X": normal(5, 4)}, "shape (5, 4)"),
        ("examples.X", {"X": [normal(4, 3), normal(2, 3)]}, "lengths 2 to 4"),
        ("examples.X", {"X": [normal(4, 3).tolist(), normal(2, 3).tolist()]}, "lengths 2 to 4"),
        ("examples.X", {"X": [["a", "b"]]}, "list"),
        ("examples.X", {"X": normal(5, 4, 3) > 0}, "bool"),
        ("examples.X", {"X": normal(5, 4, 3).to(torch.complex64)}, "complex64"),
        ("examples.Y", {"Y": normal(4, 5, 2)}, "shape (4, 5, 2)"),
        ("examples.Y", {"Y": normal(5, 2, 4)}, "shape (5, 2, 4)"),
        ("examples.Y", {"Y": normal(6, 4, 2)}, "shape (6, 4, 2)"),
        ("examples.Y", {"Y": normal(5, 4)}, "shape (5, 4)"),
        ("examples.Y", {"Y": None}, "NoneType"),
        ("examples.padding", {"padding": torch.zeros(5, 4)}, "float32"),
        ("examples.padding", {"padding": torch.zeros(4, 5, dtype=torch.bool)}, "shape (4, 5)"),
        ("examples.padding", {"padding": torch.eye(5, 4) < 2}, "filling only"),
        ("examples.mask", {"mask": "both"}, "'both'"),
    ],
    ids=["X_flat", "X_lengths", "X_lengths_list", "X_words", "X_bool", "X_complex", "Y_transposed",
         "Y_swapped", "Y_count", "Y_flat", "Y_none", "padding_float", "padding_shape", "padding_all", "mask"],
)
def test_malformed_examples_are_refused(refused, name, change, word):
    with refused(name, word):
        Examples(**{"X": normal(5, 4, 3), "Y": normal(5, 4, 2), **change})


@pytest.mark.parametrize(
    ("name", "Xs", "Ys", "word"),
    [
        ("Xs, Ys", [], [], "0 and 0"),
        ("Xs, Ys", [normal(2, 3)], [], "1 and 0"),
        ("Xs[1]", [normal(2, 3), normal(2, 4)], [normal(2, 2), normal(2, 2)], "shape (2, 4)"),
        ("Xs[0]", [torch.tensor(1.0)], [normal(1, 2)], "shape ()"),
        ("Ys[1]", [normal(2, 3), normal(4, 3)], [normal(2, 2), normal(3, 2)], "shape (3, 2)"),
        ("Ys[0]", [normal(2, 3)], [torch.full((2, 2), torch.nan)], "nan at index (0, 0)"),
    ],
    ids=["empty", "unpaired", "width", "scalar", "rows", "nan"],
)
def test_pad_refuses(refused, name, Xs, Ys, word):
    with refused(name, word):
        Examples.pad(Xs, Ys)


@pytest.mark.parametrize(
    ("X", "padding", "word"),
    [
        (normal(5, 1, 3), None, "1 token per sequence"),
        (torch.ones(5, 4, 3), None, "the same token everywhere"),
        (torch.ones(5, 4, 3, dtype=torch.int8), None, "the same token everywhere"),
        (torch.cat([torch.ones(5, 3, 3), torch.zeros(5, 1, 3)], 1),
         torch.tensor([[False] * 3 + [True]] * 5), "the same token everywhere"),
        (torch.zeros(0, 4, 3), None, "shape (0, 4, 3)"),
        (torch.zeros(5, 4, 0), None, "shape (5, 4, 0)"),
    ],
    ids=["one_token", "constant", "constant_int8", "constant_but_filling", "no_sequences", "no_features"],
)
def test_tokens_that_teach_nothing_are_refused(refused, X, padding, word):
    with refused("examples.X", word):
        checks.tokens(X, padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_tokens_that_differ_are_let_through(dtype):
    X = torch.ones(5, 4, 3, dtype=dtype)
    X[2, 1, 0] = -1
    checks.tokens(X, None)
    checks.tokens(X, torch.zeros(5, 4, dtype=torch.bool))


# Folders that are not what they seem


@pytest.fixture
def shards(tmp_path):
    return write(tmp_path / "shards", rebatch([small(9)], [3, 3, 3]), shards=3)


def test_a_foreign_folder_is_refused(refused, tmp_path):
    with refused("examples", "nothing"):
        Examples.open(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"?")
    with refused("examples", "photo.jpg"):
        Examples.open(tmp_path)
    with refused("examples", "no folder"):
        Examples.open(tmp_path / "photo.jpg")
    with refused("examples", "no folder"):
        Examples.open(tmp_path / "absent")


@pytest.mark.parametrize("keep", [0, 4, 60, -1], ids="keep{}".format)
def test_a_truncated_shard_is_refused(refused, shards, keep):
    victim = shards.files[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with refused(str(victim), "does not open"):
        Examples.open(shards.folder)


def test_a_pickle_is_never_read(refused, shards):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    victim = shards.files[0]
    victim.write_bytes(pickle.dumps(Trap()))
    with refused(str(victim), "pickled files are never read"):
        Examples.open(shards.folder)


@pytest.mark.parametrize("j", [0, 1, 2], ids="shard{}".format)
def test_a_missing_shard_is_refused_by_name(refused, shards, j):
    shards.files[j].unlink()
    with refused("examples", "all 3 shards", "2 of them", shards.files[j].name):
        Examples.open(shards.folder)


def test_two_sets_in_one_folder_are_refused(refused, shards):
    shards.files[0].with_name("examples-00000-of-00001.safetensors").write_bytes(shards.files[0].read_bytes())
    with refused("examples"):
        Examples.open(shards.folder)


@pytest.mark.parametrize(
    "other",
    [
        {"X": normal(3, 5, 3), "Y": normal(3, 5, 2)},
        {"X": normal(3, 4, 2), "Y": normal(3, 4, 2)},
        {"X": normal(3, 4, 3), "Y": normal(3, 4, 3)},
        {"X": normal(3, 4, 3), "Y": normal(3, 4, 2), "padding": torch.zeros(3, 4, dtype=torch.uint8)},
    ],
    ids=["length", "width", "out_width", "padding"],
)
def test_shards_of_differing_shapes_are_refused(refused, shards, other):
    save_file(other, shards.files[2], metadata={"mask": "none"})
    with refused(str(shards.files[2]), shards.files[0].name):
        Examples.open(shards.folder)


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"X": normal(3, 4, 3)}, "['X']"),
        ({"X": normal(3, 4, 3), "Y": normal(3, 4, 2), "Z": normal(1)}, "['X', 'Y', 'Z']"),
        ({"X": normal(3, 4, 3), "Y": normal(4, 3, 2)}, "[4, 3, 2]"),
        ({"X": normal(4, 3), "Y": normal(4, 2)}, "[4, 3]"),
    ],
    ids=["no_labels", "unknown", "transposed", "flat"],
)
def test_a_shard_with_other_tensors_is_refused(refused, shards, tensors, word):
    save_file(tensors, shards.files[0])
    with refused(str(shards.files[0]), word):
        Examples.open(shards.folder)


def test_a_shard_with_an_unknown_mask_is_refused(refused, shards):
    save_file({"X": normal(3, 4, 3), "Y": normal(3, 4, 2)}, shards.files[0], metadata={"mask": "both"})
    with refused("mask", "'both'"):
        Examples.open(shards.folder)


def test_a_nan_in_a_shard_is_refused_when_read(refused, shards):
    X = normal(3, 4, 3)
    X[1, 2, 0] = torch.nan
    save_file({"X": X, "Y": normal(3, 4, 2)}, shards.files[1], metadata={"mask": "none"})
    with refused("examples.X", f"nan in {shards.files[1].name}, row 1 there", "token 2, feature 0"):
        Examples.open(shards.folder).take(range(3, 6))


# Keys of other sequences, and positions


def wide(count=10, seed=0, vectors=False, padded=True):
    """Examples with everything a sequence may have."""
    data = small(count, seed, padded=padded)
    last = (2,) if vectors else ()
    hidden = torch.zeros(count, 5, dtype=torch.bool)
    hidden[::3, 0] = True
    return Examples(data.X, data.Y, data.padding, "causal", keys=normal(count, 5, 6, seed=seed + 2),
                    key_padding=hidden if padded else None, positions=normal(count, 4, *last, seed=seed + 3),
                    key_positions=normal(count, 5, *last, seed=seed + 4))


def assert_all_the_same(one, two):
    assert_same(one, two)
    assert list(one.beside()) == list(two.beside())
    for name, value in one.beside().items():
        assert torch.equal(two.beside()[name], value), name


def test_examples_without_them_have_the_digest_and_hashes_they_always_had():
    X = torch.arange(30, dtype=torch.float64).view(2, 5, 3) / 8 - 1
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    plain, padded = Examples(X, 4 * X[..., :2]), Examples(X, 4 * X[..., :2], padding, "causal")
    assert plain.digest() == "4c17aa4f25e041093cfed17fada774f002e588d76d415f8d9a8935f6caeb1719"
    assert padded.digest() == "658f5b0558497e46b4ae3dbcf3e1300f9a3076065252ca2eadf10aabe18d14bd"
    assert plain.hashes().tolist() == [-3566250178734675730, 6032807358239080297]
    assert padded.hashes().tolist() == [-3566250178734675730, 2021775079453455402]


@pytest.mark.parametrize("vectors", [False, True], ids=["numbers", "vectors"])
def test_what_goes_with_a_sequence_is_taken_with_it(vectors):
    data = wide(vectors=vectors)
    assert list(data.beside()) == ["padding", "keys", "key_padding", "positions", "key_positions"]
    part = data.take([7, 0])
    for name, value in data.beside().items():
        assert torch.equal(part.beside()[name], value[[7, 0]]), name
    assert_all_the_same(join(list(data.batches(3))), data)
    assert data.key_width == 6 and small().key_width is None
    assert repr(data) == "Examples(10 sequences of 4 tokens, width 3 and 6 → 2, torch.float64)"


@pytest.mark.parametrize("vectors", [False, True], ids=["numbers", "vectors"])
def test_shards_keep_keys_and_positions(tmp_path, vectors):
    data = wide(vectors=vectors)
    shards = write(tmp_path / "e", rebatch([data], [4, 6]), 2)
    assert_all_the_same(shards.take(range(10)), data)
    assert_all_the_same(shards.take([9, 3, 4]), data.take([9, 3, 4]))
    assert (shards.key_width, shards.digest()) == (6, data.digest())
    assert shards.hashes().tolist() == data.hashes().tolist()
    assert repr(shards) == "Shards(10 sequences of 4 tokens, width 3 and 6 → 2, torch.float64)"


def test_signs_of_keys_are_stored_as_int8(tmp_path):
    data = Examples(normal(4, 3, 2), normal(4, 3, 2), keys=normal(4, 5, 2).sign())
    shards = write(tmp_path / "e", [data])
    assert shards.take([0]).keys.dtype == torch.int8
    assert shards.digest() == data.digest()


def test_a_digest_and_the_hashes_are_of_keys_and_positions_too():
    data = wide()
    parts = {name: getattr(data, name) for name in ("keys", "key_padding", "positions", "key_positions")}

    def but(**change):
        return Examples(data.X, data.Y, data.padding, data.mask, **{**parts, **change})

    others = [but(keys=data.keys + 1), but(key_padding=None), but(key_padding=data.key_padding.roll(1, 1)),
              but(positions=data.positions + 1), but(positions=None), but(key_positions=data.key_positions + 1),
              but(key_positions=None), but(positions=None, key_positions=None)]
    assert len({data.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    for other in others:
        assert (other.hashes() != data.hashes()).any()
    hidden = data.keys.clone()
    hidden[0, 0] = 7.0
    assert but(keys=hidden).hashes().tolist() == data.hashes().tolist(), "filling is not looked at"


def test_positions_for_all_sequences_are_not_copied():
    data = Examples(normal(10, 4, 3), normal(10, 4, 2), positions=[0, 2, 3, 5])
    assert data.positions.shape == (10, 4) and data.positions.stride(0) == 0
    assert data.take([3]).positions.tolist() == [[0.0, 2.0, 3.0, 5.0]]


def test_joined_parts_have_what_any_of_them_has():
    some, other = Examples(normal(2, 4, 3), normal(2, 4, 2), positions=normal(4)), small(3)
    assert_close(join([other, some]).positions[:3], torch.arange(4.0, dtype=torch.float64).expand(3, 4), **SAME)
    one, two = wide(4), wide(3, seed=5, padded=False)
    assert not bool(join([one, two]).key_padding[4:].any())
    assert_close(join([one, two]).keys[4:], two.keys, **SAME)


def test_keys_in_some_parts_only_are_refused(refused):
    with refused("parts", "some without"):
        join([wide(2), small(2)])


def test_pad_fills_keys_and_positions_up():
    Xs, Zs = [normal(k, 3, seed=k) for k in (2, 4)], [normal(k, 6, seed=k) for k in (5, 3)]
    data = Examples.pad(Xs, [x[:, :2] for x in Xs], keys=Zs, positions=[x[:, 0] for x in Xs],
                        key_positions=[z[:, :2] for z in Zs])
    assert data.padding.sum(1).tolist() == [2, 0] and data.key_padding.sum(1).tolist() == [0, 2]
    assert_close(data.keys[1, :3], Zs[1], **SAME)
    assert_close(data.positions[0], torch.tensor([*Xs[0][:, 0], 0, 0], dtype=torch.float64), **SAME)
    assert data.key_positions.shape == (2, 5, 2)


def test_a_layer_is_called_with_what_the_examples_have():
    data = Examples(normal(3, 4, 5), normal(3, 4, 5), keys=normal(3, 6, 5), positions=normal(4),
                    key_padding=torch.tensor([[False] * 5 + [True]] * 3))
    known = FactoredLayer.random(2, 5, size=2, cross=True, form=Form(rotary=Rotary()))
    Y = known(data.X, data.keys, key_padding=data.key_padding, positions=data.positions)
    assert_close(known(data.X, **data.arguments()), Y, **SAME)
    own = small(padded=True)
    assert_close(layer()(own.X, **own.arguments()), layer()(own.X, own.padding), **SAME)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("examples.keys", {"keys": normal(3, 5, 6)}, "shape (3, 5, 6)"),
        ("examples.keys", {"keys": normal(4, 5)}, "shape (4, 5)"),
        ("examples.keys", {"keys": normal(4, 0, 6)}, "at least one key"),
        ("examples.keys", {"keys": torch.full((4, 5, 6), torch.nan)}, "nan"),
        ("examples.keys", {"key_padding": torch.zeros(4, 5, dtype=torch.bool)}, "none"),
        ("examples.keys", {"key_positions": normal(4, 5)}, "none"),
        ("examples.key_padding", {"keys": normal(4, 5, 6), "key_padding": torch.zeros(4, 5)}, "float32"),
        ("examples.key_padding", {"keys": normal(4, 5, 6), "key_padding": torch.zeros(4, 3).bool()}, "(4, 3)"),
        ("examples.key_padding", {"keys": normal(4, 5, 6), "key_padding": torch.ones(4, 5).bool()}, "filling only"),
        ("examples.positions", {"positions": normal(3)}, "(3,)"),
        ("examples.positions", {"positions": normal(4, 2)}, "(4, 2)"),
        ("examples.positions", {"positions": normal(4, 2, 3)}, "(4, 2, 3)"),
        ("examples.positions", {"positions": torch.full((4,), torch.inf)}, "inf"),
        ("examples.key_positions", {"keys": normal(4, 5, 6), "key_positions": normal(4)}, "(4,)"),
    ],
)
def test_malformed_keys_and_positions_are_refused(refused, name, change, word):
    with refused(name, word):
        Examples(normal(4, 4, 3), normal(4, 4, 2), **change)


@pytest.mark.parametrize(("change", "word"), [
    ({"keys": [normal(2, 3)]}, "one for every X"), ({"positions": [normal(2), normal(2)]}, "positions[1]"),
    ({"key_positions": [normal(2), normal(2)]}, "one for every sequence")])
def test_pad_refuses_keys_and_positions_of_other_lengths(change, word):
    Xs = [normal(2, 3), normal(4, 3)]
    with pytest.raises(checks.InputError, match=re.escape(word)):
        Examples.pad(Xs, Xs, **change)


@pytest.mark.parametrize(("tensors", "word"), [
    ({"keys": normal(3, 5, 2)}, "keys with a row"), ({"positions": normal(4, 2)}, "positions with a row"),
    ({"key_positions": normal(4, 5)}, "key_positions with a row"), ({"places": normal(4, 4)}, "places")])
def test_shards_with_other_shapes_are_refused(refused, tmp_path, tensors, word):
    folder = tmp_path / "e"
    folder.mkdir()
    path = folder / "examples-00000-of-00001.safetensors"
    save_file({"X": normal(4, 4, 3), "Y": normal(4, 4, 2), **tensors}, path)
    with refused(str(path), word):
        Examples.open(folder)


def test_positions_that_are_not_finite_are_named_when_read(refused, tmp_path):
    folder = tmp_path / "e"
    folder.mkdir()
    places = normal(4, 4)
    places[2, 1] = torch.nan
    save_file({"X": normal(4, 4, 3), "Y": normal(4, 4, 2), "positions": places},
              folder / "examples-00000-of-00001.safetensors")
    with refused("examples.positions", "row 2 there", "token 1"):
        Examples.open(folder).take([2])


def test_learners_of_plain_scores_refuse_keys_and_positions(refused):
    plain = small()
    for name, change in {"keys": {"keys": normal(10, 4, 3)}, "positions": {"positions": normal(4)}}.items():
        data = Examples(plain.X, plain.Y, **change)
        with refused("examples", f"examples with {name}"):
            learn(data)
        with refused("examples", f"examples with {name}"):
            certify(layer(), data)
