"""Rules in TOML: what they say, what is wrong with them, and that layouts are written as such."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import SAMPLES

import slimckpt
from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.layouts.layout import Box, Layout, Piece, Shard, TensorLayout
from slimckpt.layouts.placement import Placement
from slimckpt.layouts.recorded import given
from slimckpt.layouts.splits import Split
from slimckpt.layouts.toml_rules import read_toml
from slimckpt.layouts.toml_writing import to_toml
from slimckpt.views.bound import bind_rules

MESH = "[mesh]\ndp = 2\ntp = 4\n"


def rules(text: str) -> Any:
    return read_toml((MESH + text).encode(), "rules.toml")


def rule(text: str) -> Any:
    return rules(f'[[rule]]\nmatch = "w"\n{text}\n').placements("w")


def test_a_rule_says_how_a_tensor_is_split() -> None:
    assert rule('dim = 1\naxis = "tp"') == (Placement((2, 4), (Split(1, (1,), "even"),)),)
    assert rule('dim = 0\naxis = ["tp", "dp"]\nsplit = "ceil"') == (
        Placement((2, 4), (Split(0, (1, 0), "ceil"),)),
    )
    assert rule('dim = 0\naxis = "dp"\nsplit = [3, 10]') == (
        Placement((2, 4), (Split(0, (0,), (3, 10)),)),
    )
    assert rule('dim = 0\naxis = "tp"\nsections = [4, 1, 1]\ngroups = 8\nonly = {dp = 1}') == (
        Placement((2, 4), (Split(0, (1,), "even", (4, 1, 1), 8),), only=((0, 1),)),
    )
    assert rule('dim = 0\naxis = "tp"\n[[rule.then]]\ndim = 0\naxis = "dp"\nparts = 2') == (
        Placement((2, 4), (Split(0, (1,)), Split(0, (0,), parts=2))),
    )
    assert rule("per_rank = true") == ()


def test_the_first_rule_that_matches_counts_and_where_none_does_it_is_replicated() -> None:
    found = rules(
        '[[rule]]\nmatch = "a.*.w"\nper_rank = true\n'
        '[[rule]]\nmatch = ["a.1.w", "b[[]0]"]\ndim = 0\naxis = "tp"\n'
        '[[rule]]\nmatch = "*.w"\ndim = 1\naxis = "tp"\n'
    )
    split = Placement((2, 4), (Split(0, (1,)),)), Placement((2, 4), (Split(1, (1,)),))
    assert found.n_ranks == 8
    assert found.placements("a.1.w") == ()
    assert found.placements("b[0]") == (split[0],)
    assert found.placements("c.d.w") == (split[1],)
    assert found.placements("b0") == found.placements("A.1.W") == (Placement((2, 4)),)


WRONG = {
    "no TOML": ("[[rule]\n", r"line 4"),
    "no text": ("x = '\xff'".encode("latin-1"), "utf-8"),
    "an unknown key": ("[mash]\n", "'mash'"),
    "an unknown key of a rule": ('[[rule]]\nmatch = "w"\nsplits = "even"', "rule 1.*'splits'"),
    "no match": ("[[rule]]\ndim = 0\n", "rule 1.*match"),
    "a table": ('[rule]\nmatch = "w"\n', r"\[\[rule\]\]"),
    "no such axis": ('[[rule]]\nmatch = "w"\ndim = 0\naxis = "pp"', "rule 1.*'pp'.*dp, tp"),
    "no axis": ('[[rule]]\nmatch = "w"\ndim = 0\n', "rule 1.*axis = None"),
    "no dim": ('[[rule]]\nmatch = "w"\naxis = "tp"\n', "rule 1.*dim"),
    "a negative dim": ('[[rule]]\nmatch = "w"\ndim = -1\naxis = "tp"\n', "dim = -1"),
    "no such split": ('[[rule]]\nmatch = "w"\ndim=0\naxis="tp"\nsplit="odd"', "'odd'.*ceil"),
    "too few sizes": ('[[rule]]\nmatch = "w"\ndim=0\naxis="tp"\nsplit=[1, 2]', "2 sizes for 4"),
    "an axis twice": (
        '[[rule]]\nmatch="w"\ndim=0\naxis="tp"\n[[rule.then]]\ndim=1\naxis="tp"',
        "only once",
    ),
    "an empty section": ('[[rule]]\nmatch="w"\ndim=0\naxis="tp"\nsections=[1, 0]', "sections"),
    "groups of nothing": ('[[rule]]\nmatch="w"\ndim=0\naxis="tp"\ngroups = 0', "groups = 0"),
    "parts that do not divide": ('[[rule]]\nmatch="w"\ndim=0\naxis="tp"\nparts = 3', "4 ranks"),
    "nowhere": ('[[rule]]\nmatch="w"\nonly = {dp = 2}', "no place"),
    "only where it is split": ('[[rule]]\nmatch="w"\ndim=0\naxis="tp"\nonly={tp=1}', "split over"),
    "only that is no table": ('[[rule]]\nmatch="w"\nonly = 3', "rule 1.*only = 3"),
    "ranks that are no ranks": ('[[rule]]\nmatch="w"\nranks = [8]', "ranks = .8.*below 8"),
    "no ranks": ('[[rule]]\nmatch="w"\nranks = []', "ranks = "),
    "ranks and only": ('[[rule]]\nmatch="w"\nranks = [0]\nonly = {dp = 0}', "not both"),
    "a mesh past all bounds": (b"[mesh]\ndp = 99999999999999999999\n", "more than"),
    "per rank and split": ('[[rule]]\nmatch="w"\nper_rank=true\ndim=0\naxis="tp"', "per_rank"),
    "then without a first": (
        '[[rule]]\nmatch="w"\n[[rule.then]]\ndim=0\naxis="tp"',
        "behind a dim",
    ),
    "an empty mesh": (None, "mesh"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_rules_names_the_line_or_the_rule(name: str) -> None:
    text, match = WRONG[name]
    data = (
        b"[mesh]\n" if text is None else text if isinstance(text, bytes) else (MESH + text).encode()
    )
    with pytest.raises(UsageError, match=match) as caught:
        read_toml(data, "rules.toml")
    assert "rules.toml" in str(caught.value)


def alike(one: Layout, other: Layout) -> None:
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        shards = (
            {(s.holder, s.shape, *sorted(s.pieces)) for s in t.shards}
            for t in (tensor, other.tensors[name])
        )
        assert len(set(map(frozenset, shards))) == 1, name


def typed(layout: Layout) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in layout.tensors.items()}


STRATEGIES = [
    *("dp1mp2_rank0", "dp2mp4_rank0", "dp2mp4_op_rank0", "dp8mp1_op2_rank0", "dp8mp1_op_rank0"),
    "pp2_merged",
]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_layout_of_a_strategy_is_written_as_rules_that_give_it_back(name: str) -> None:
    with slimckpt.open(SAMPLES / "ms_dp8_ckpt") as ckpt:
        whole = typed(ckpt.layout())
    layout = given(SAMPLES / "ms_strategies" / f"{name}.ckpt").place(whole)
    text = to_toml(layout)
    assert "No rule" not in text and text.count("[[rule]]") < 10
    back = read_toml(text.encode(), "written")
    assert back.n_ranks == len(layout.ranks)
    alike(layout, back.place(whole))
    assert back.placements("rng.seed") == ()


FUSED = """
[mesh]
pp = 2
dp = 2
tp = 3

[[rule]]
match = "layers.*.fc1"
dim = 0
axis = "tp"
split = "balanced"
sections = [1, 1]

[[rule]]
match = ["layers.*.qkv", "other.qkv"]
dim = 0
axis = "tp"
sections = [4, 1, 1]
groups = 6
[[rule.then]]
dim = 1
axis = "dp"
split = "ceil"

[[rule]]
match = "layers.*.uneven"
only = {pp = 1}
dim = 1
axis = ["tp", "dp"]
split = [1, 2, 3, 4, 5, 0]

[[rule]]
match = "layers.1.expert"
dim = 0
axis = "pp"
split = "ceil"

[[rule]]
match = "*"
per_rank = true
"""


def test_fused_and_uneven_tensors_are_written_as_rules_that_give_them_back() -> None:
    whole = {
        f"layers.{n}.{name}": ("F32", shape)
        for n in range(12)
        for name, shape in (
            ("fc1", (20, 4)),
            ("qkv", (72, 5)),
            ("uneven", (2, 15)),
            ("expert", (3, 2)),
        )
    }
    whole["other.qkv"] = whole["layers.0.qkv"]
    layout = read_toml(FUSED.encode(), "fused.toml").place(whole)
    assert len(layout.tensors) == 38
    text = to_toml(layout)
    assert "No rule" not in text
    for said in ('"layers.*.fc1"', "sections = [4, 1, 1]", "groups = 6", '"layers.1.expert"'):
        assert said in text, text
    alike(layout, read_toml(text.encode(), "written").place(whole))


SPLITS = [
    Split(0, axes, how, sections, groups)
    for axes in ((0,), (1,))
    for how in ("ceil", "balanced", "even")
    for sections, groups in (((), 1), ((1, 1), 1), ((2, 1), 1), ((1, 1), 4), ((2, 1), 2))
] + [Split(0, (0, 1)), Split(0, (1, 0)), Split(0, (0, 1), "ceil"), Split(0, (0,), (0, 2, 1))]


@pytest.mark.parametrize("mesh", [(4, 1), (1, 1), (2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 12, 24])
def test_parts_that_are_empty_or_on_no_rank_are_written_as_rules_that_give_them_back(
    mesh: tuple[int, int], length: int
) -> None:
    ranks = tuple(range(mesh[0] * mesh[1]))
    shape = (length, 2)
    tensors = {"all": TensorLayout("F32", shape, Placement(mesh).shards(shape))}
    for number, split in enumerate(SPLITS):
        only = tuple((axis, 0) for axis in (0, 1) if axis not in split.axes)
        for kept in {(), only}:
            try:
                shards = Placement(mesh, (split,), only=kept).shards(shape)
            except UsageError:
                continue
            some = tuple(shard for shard in shards if 0 not in shard.shape)
            tensors[f"{number} {kept}"] = TensorLayout("F32", shape, shards)
            tensors[f"{number} {kept} without empty ones"] = TensorLayout("F32", shape, some)
    assert len(tensors) > 2
    for name, tensor in tensors.items():
        layout = Layout({name: tensor}, ranks, "x")
        text = to_toml(layout)
        assert "No rule" not in text, (name, text)
        alike(layout, read_toml(text.encode(), "written").place(typed(layout)))


def test_a_tensor_on_some_ranks_is_whole_by_a_rule_that_names_them(tmp_path: Path) -> None:
    from safetensors_bytes import safetensors_file

    for rank, rows in enumerate((2, 0, 0, 1)):
        path = tmp_path / f"rank_{rank}" / "model.safetensors"
        path.parent.mkdir()
        body = bytes(range(4 * rank, 4 * rank + rows))
        tensors = [("w", "U8", (rows,), body)] if rows else []
        path.write_bytes(safetensors_file([*tensors, ("v", "U8", (1,), b"v")]))
    text = '[mesh]\nr = 4\n[[rule]]\nmatch = "w"\nranks = [3, 0]\ndim = 0\naxis = "r"\n'
    layout = read_toml((text + "split = [2, 0, 0, 1]\n").encode(), "some.toml")
    with slimckpt.open(tmp_path) as ckpt:
        assert np.asarray(ckpt.tensor("w", layout=layout)).tolist() == [0, 1, 12]
        again = ckpt.reshard(layout, layout)
        assert [sorted(again[rank]) for rank in range(4)] == [["v", "w"], ["v"], ["v"], ["v", "w"]]
    wrong = read_toml((text + 'split = "even"\n').encode(), "wrong.toml")
    with slimckpt.open(tmp_path) as ckpt, pytest.raises(CheckFailedError, match=r"'w'.*rank"):
        ckpt.tensor("w", layout=wrong)


def test_stacked_layers_saved_an_item_each_are_written_as_one_rule() -> None:
    """Megatron's torch_dist has an item of each layer in the file of each rank."""
    shards = tuple(
        Shard(f"__{rank}_0.distcp", (1, 3), (Piece(Box((layer, 3 * rank), (1, 3)), (0, 0)),))
        for layer in range(2)
        for rank in range(2)
    )
    text = to_toml(Layout({"w": TensorLayout("F32", (2, 6), shards)}, (), ".metadata"))
    assert "No rule" not in text
    placed = read_toml(text.encode(), "written").place({"w": ("F32", (2, 6))}).tensors["w"]
    assert [(s.holder, s.shape, s.pieces[0].box.offsets) for s in placed.shards] == [
        (0, (2, 3), (0, 0)),
        (1, (2, 3), (0, 3)),
    ]


def test_what_no_rule_gives_is_named_in_a_comment() -> None:
    box = (Piece(Box((0,), (4,)), 0, (0, 4)),)
    odd = TensorLayout("F32", (4,), (Shard(0, (4,), box),))
    text = to_toml(Layout({'w"\n': odd}, (0,), "x"))
    assert "# No rule gives how these lie" in text
    assert '# them out (reshard --skip):\n#   "w\\"\\n"\n' in text
    assert read_toml(text.encode(), "written").placements("w") == ()


def test_ranks_told_apart_by_coordinates_are_those_of_axes_of_that_name(tmp_path: Path) -> None:
    from safetensors_bytes import safetensors_file

    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    for tp in range(2):
        for pp in range(2):
            part = whole[2 * pp : 2 * pp + 2, 3 * tp : 3 * tp + 3]
            path = tmp_path / f"mp_rank_{tp:02}_{pp:03}" / "model.safetensors"
            path.parent.mkdir()
            path.write_bytes(safetensors_file([("w", "F32", (2, 3), part.tobytes())]))
    text = '[mesh]\npp = 2\ndp = 3\ntp = 2\n[[rule]]\nmatch = "w"\ndim = 0\naxis = "pp"\n'
    text += '[[rule.then]]\ndim = 1\naxis = "tp"\n'
    layout = read_toml(text.encode(), "megatron.toml")
    with slimckpt.open(tmp_path) as ckpt:
        assert (np.asarray(ckpt.tensor("w", layout=layout)) == whole).all()
        with pytest.raises(UsageError, match=r"by pp, tp.*has x"):
            ckpt.layout(read_toml(b"[mesh]\nx = 4\n", "x.toml"))
        with pytest.raises(CheckFailedError, match="not in it"):
            ckpt.layout(read_toml(b"[mesh]\npp = 1\ntp = 2\n", "x.toml"))


def test_rules_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(CheckFailedError, match=r"for 8 ranks, and here has 3 \(ranks 0,2-3\)"):
        bind_rules(rules(""), (0, 2, 3), (), lambda **_: None, "here")
