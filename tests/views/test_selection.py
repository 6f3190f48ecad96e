"""Which files belong to a rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.analysis.roles import assign_roles
from slimckpt.errors import UnknownRankError
from slimckpt.views.providers import Member
from slimckpt.views.selection import numbers_of, pick, places_of


def members(*paths: str) -> list[Member]:
    """Files by name; what they hold does not matter here."""
    encoded = [path.encode() for path in paths]
    nothing: Any = None
    roles = assign_roles(encoded)
    return [Member(path, role, nothing) for path, role in zip(encoded, roles, strict=True)]


def picked(files: list[Member], rank: int | None = None, **coords: int) -> list[str]:
    place = pick(places_of(files), rank, coords, "it")
    return [file.path.decode() for file in files if place.holds(file)]


def test_deepspeed_files_that_state_only_tp_belong_to_every_dp() -> None:
    files = members(
        "mp_rank_00_model_states.pt",
        "mp_rank_01_model_states.pt",
        *(f"zero_pp_rank_{dp}_mp_rank_0{tp}_optim_states.pt" for dp in (0, 1) for tp in (0, 1)),
        "latest",
    )
    assert len(places_of(files)) == 4
    assert picked(files, dp=1, tp=0) == [
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "latest",
    ]
    with pytest.raises(UnknownRankError, match=r"laid out by dp, tp.*dp=0 tp=0; dp=0 tp=1"):
        picked(files, 0)
    with pytest.raises(UnknownRankError, match="2 ranks of tp=1; say which: dp=0 tp=1; dp=1 tp=1"):
        picked(files, tp=1)


def test_where_tp_does_not_vary_a_number_is_the_dp() -> None:
    files = members(
        "mp_rank_00_model_states.pt",
        *(f"zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in range(4)),
    )
    assert sorted(numbers_of(places_of(files))) == [0, 1, 2, 3]
    assert picked(files, 3) == [
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_3_mp_rank_00_optim_states.pt",
    ]


def test_a_single_coordinate_is_its_own_number() -> None:
    files = members("mp_rank_03/model.pt", "common")
    assert (
        picked(files)
        == picked(files, 3)
        == picked(files, tp=3)
        == ["mp_rank_03/model.pt", "common"]
    )
    with pytest.raises(UnknownRankError, match="no rank 0; there are tp=3"):
        picked(files, 0)


def test_a_single_place_of_several_coordinates_is_rank_0() -> None:
    files = members("mp_rank_00_000/model.pt")
    assert picked(files, 0) == picked(files) == ["mp_rank_00_000/model.pt"]


def test_ranks_that_state_coordinates_too_are_found_by_both() -> None:
    files = members(
        "rank_0/mp_rank_00/m", "rank_1/mp_rank_01/m", "mp_rank_01/tp_only", "mp_rank_07/loose"
    )
    assert picked(files, 1) == ["rank_1/mp_rank_01/m", "mp_rank_01/tp_only"]
    assert picked(files, tp=1) == picked(files, 1)
    assert picked(files, tp=7) == ["mp_rank_07/loose"]
    assert picked(files, 1, tp=1) == picked(files, 1)
    with pytest.raises(UnknownRankError):
        picked(files, 0, tp=1)


def test_nothing_stated_is_rank_0() -> None:
    files = members("a", "b/c")
    assert picked(files) == picked(files, 0) == ["a", "b/c"]
    for ask in ({"rank": 1}, {"tp": 0}):
        with pytest.raises(UnknownRankError, match="there are rank 0"):
            picked(files, **ask)


def test_numbers_of_numpy_are_numbers_and_others_are_not() -> None:
    files = members("rank_0/a", "rank_1/a")
    assert picked(files, np.int64(1)) == ["rank_1/a"]
    for wrong in ("1", 1.0):
        with pytest.raises(TypeError):
            picked(files, wrong)  # type: ignore[arg-type]


def test_long_lists_are_cut() -> None:
    files = members(*(f"mp_rank_{tp:02}_{pp:03}/m" for tp in range(20) for pp in range(20)))
    with pytest.raises(UnknownRankError, match=r"; … \(400 in all\)") as caught:
        picked(files, 0)
    assert len(str(caught.value)) < 1000


@given(
    st.lists(
        st.sampled_from(
            [
                "rank_0/a",
                "rank_1/a",
                "rank_2/mp_rank_01/a",
                "mp_rank_00/a",
                "mp_rank_01/a",
                "common",
                "mp_rank_00_001/a",
                "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                "mp_rank_01_001/b",
            ]
        ),
        unique=True,
        min_size=1,
    )
)
def test_every_file_belongs_to_some_place_and_every_place_can_be_asked_for(
    paths: list[str],
) -> None:
    files = members(*paths)
    places = places_of(files)
    for file in files:
        assert any(place.holds(file) for place in places)
    for place in places:
        assert pick([place], None, dict(place.coords), "it") == place
        assert any(place.holds(file) for file in files)
    for number, place in numbers_of(places).items():
        assert pick(places, number, {}, "it") == place
