"""Strategy and group files of MindSpore decode to what MindSpore's own protobuf classes read."""

import json
from typing import Any

import pytest
from sample_files import SAMPLES, expected

from slimckpt.errors import DamagedFileError
from slimckpt.formats.mindspore_strategy import Strategy, read_groups, read_strategy

FOLDER = SAMPLES / "ms_strategies"
FILES: dict[str, Any] = expected("ms_strategies")["files"]
STRATEGIES = [name for name, truth in FILES.items() if "layouts" in truth]


def plain(strategy: Strategy) -> dict[str, Any]:
    """As the truth spells it."""
    layouts = {
        name: {field: getattr(layout, field) for field in layout.__slots__}
        for name, layout in strategy.parameters.items()
    }
    operators = {n: {"stage": s, "strategy": p} for n, (s, p) in strategy.operators.items()}
    found = {"current_stage": strategy.current_stage, "ops": operators, "layouts": layouts}
    return json.loads(json.dumps(found))  # tuples are lists there


def test_every_sample_is_looked_at() -> None:
    assert len(FILES) == 12 and len(STRATEGIES) == 10


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_decodes_to_what_mindspore_reads(name: str) -> None:
    found = plain(read_strategy((FOLDER / name).read_bytes(), name))
    assert found == {key: FILES[name][key] for key in found}


def test_a_group_file_decodes_to_what_mindspore_reads() -> None:
    name = "dp2mp4_group_rank5.ckpt"
    found = read_groups((FOLDER / name).read_bytes(), name)
    assert {n: list(ranks) for n, ranks in found.groups.items()} == FILES[name]["groups"]
    assert list(found.restore) == FILES[name]["ckpt_restore_rank_list"]


@pytest.mark.parametrize("folder", ["ms_strategies/dp2mp4_rank0", "ms_uneven4_ckpt/strategy"])
def test_the_json_form_says_the_same_as_the_protobuf_form(folder: str) -> None:
    one, other = (
        read_strategy((SAMPLES / f"{folder}{suffix}").read_bytes(), folder)
        for suffix in (".ckpt", ".json")
    )
    assert one.parameters == other.parameters
    assert one.operators == other.operators


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"parallel_layout_item": {"w": {"dev_matrix": "4", "tensor_map": [0]}}}',
        b'{"parallel_layout_item": {"w": {"dev_matrix": [4.5], "tensor_map": [0]}}}',
        b'{"parallel_layout_item": {"w": {}}}',
        b"\x08\x02\x12",
        (FOLDER / "dp2mp4_rank0.ckpt").read_bytes()[:-3],
        (FOLDER / "dp2mp4_group_rank5.ckpt").read_bytes(),
    ],
)
def test_what_is_no_strategy_is_an_error_that_names_the_file(data: bytes) -> None:
    with pytest.raises(DamagedFileError, match=r"here\.ckpt"):
        read_strategy(data, "here.ckpt")
    with pytest.raises(DamagedFileError, match=r"here\.ckpt"):
        read_groups(data[:-1], "here.ckpt")
