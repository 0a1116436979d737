"""Rank grids, at sizes nobody here owns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import ConfigError
from redline.plan import make_grid

SIZES = st.integers(1, 4)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_ranks_and_coordinates_are_one_to_one(tp, cp, dp, pp, pp_before_dp):
    world = tp * cp * dp * pp
    grid = make_grid(world, tp=tp, pp=pp, cp=cp, pp_before_dp=pp_before_dp)
    assert grid.world_size == world and grid.dp == dp
    seen = [tuple(grid.coords(rank).items()) for rank in range(world)]
    assert len(set(seen)) == world
    assert [grid.rank(grid.coords(rank)) for rank in range(world)] == list(range(world))
    for axes in (("tp",), ("pp",), ("dp", "cp"), ("tp", "cp", "dp", "pp")):
        groups = grid.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert (
                len({tuple(v for k, v in grid.coords(rank).items() if k not in axes) for rank in group}) == 1
            )


def test_megatrons_order():
    """tp fastest, then cp, dp, pp: the groups of 16 ranks at tp 2, pp 4."""
    grid = make_grid(16, tp=2, pp=4)
    assert grid.groups("tp") == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    assert grid.groups("dp")[:2] == ((0, 2), (1, 3))
    assert grid.groups("pp")[0] == (0, 4, 8, 12)
    assert grid.coords(13) == {"tp": 1, "cp": 0, "dp": 0, "pp": 3}
    other = make_grid(16, tp=2, pp=4, pp_before_dp=True)
    assert other.groups("pp")[0] == (0, 2, 4, 6) and other.groups("dp")[0] == (0, 8)


def test_a_large_machine():
    grid = make_grid(2048, tp=8, pp=16, cp=2)
    assert grid.dp == 8 and grid.coords(2047) == {"tp": 7, "cp": 1, "dp": 7, "pp": 15}
    assert len(grid.groups("dp", "cp")) == 128 and len(grid.groups("dp", "cp")[0]) == 16


def test_experts_have_a_grid_of_their_own():
    grid = make_grid(32, tp=4, pp=1, ep=8, etp=1)
    assert (grid.dp, grid.edp) == (8, 4)
    assert grid.expert_coords(11) == {"etp": 0, "ep": 3, "edp": 1, "pp": 0}
    assert make_grid(32, tp=4, ep=8).edp == 1  # expert tensor parallelism defaults to tp


@pytest.mark.parametrize(
    ("world", "sizes", "rule"),
    [
        (6, {"tp": 4}, "ranks-arranged"),
        (1, {"pp": 2}, "ranks-arranged"),
        (8, {"tp": 2, "ep": 8}, "experts-arranged"),
    ],
)
def test_ranks_that_do_not_fit(world, sizes, rule):
    with pytest.raises(ConfigError, match=rule):
        make_grid(world, **sizes)
