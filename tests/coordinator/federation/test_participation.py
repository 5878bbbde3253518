from __future__ import annotations

from pathlib import Path

from coordinator.federation.participation import RoundMembers, members, sentence


def test_what_is_kept_of_a_round_is_read_again_and_a_round_that_is_not_closed_is_not(tmp_path: Path) -> None:
    kept = [
        RoundMembers(1, False, ("north", "south"), {"west": "offline"}),
        RoundMembers(2, True, ("north",), {"south": "no_reply", "west": "not_granted"}),
    ]
    for one in (*kept, RoundMembers(3, False, ("north",), {})):
        one.keep(tmp_path)
    assert members(tmp_path, 2) == kept
    assert members(tmp_path / "earlier", 2) == []
    assert kept[1].to_table()["missing"] == ["south", "west"], "a certificate says who, and not why"


def test_a_part_of_the_sites_is_never_told_as_all() -> None:
    sites = ("north", "south", "west")
    assert sentence(sites, [sites, sites]) == "all 3 sites are in all 2 rounds"
    assert sentence(sites, [sites, sites[:2]]) == "west is in 1 of 2 rounds; the other sites are in all"
    assert sentence(sites, [(), ()]) == "north is in none, south in none, west in none"
