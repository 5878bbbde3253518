"""A coordinator that cheats gets refusals and no share; a site that cheats drops out alone."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.secagg.member import Member
from protos.secagg.messages import (
    ADVERT_BYTES,
    FRAME,
    PARCEL_BYTES,
    Dealer,
    SealedShares,
    SecAggError,
    SecAggMessageError,
    SumStep,
    SurvivorList,
    commit,
    pack_reveal,
    pair_seed,
    read_advert,
    read_parcel,
    read_reveal,
    self_seed,
    sign,
    split_messages,
)
from protos.secagg.ring import Ring
from protos.secagg.server import Server
from protos.secagg.session import KnownPartners, Params, Quorum, SumSession, roster_digest, start_context
from protos.secagg.shamir import SHARE_BYTES, join
from tests.support.secagg import Sites, UnsafeStream, play, run_round, site_key

RNG = np.random.default_rng(5)


def _roll(sites: Sites, alive: set[int], dead: set[int]) -> bytes:
    return SurvivorList(frozenset(alive), frozenset(dead)).encode(sites.session)


def _all_shares(members: dict[str, Member], of: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Shares of one site's seed and of its mask key, as its peers hold them."""
    seeds, keys = {}, {}
    for i, name in enumerate(sorted(members)):
        secrets = members[name]._secrets
        assert secrets is not None
        seeds[i + 1], keys[i + 1] = secrets.shares[of]
    return seeds, keys


def _refused_for_good(member: Member, step: SumStep, request: bytes, why: str) -> None:
    """It refuses, forgets its secrets, and answers nothing ever again."""
    lattice = np.zeros(8, np.int64) if step is SumStep.MASK else None
    with pytest.raises(SecAggError, match=why):
        member.answer(step, request, lattice)
    assert member.done
    assert member._secrets is None
    for other in SumStep:
        with pytest.raises(SecAggError, match="out of turn"):
            member.answer(other, b"", np.zeros(8, np.int64) if other is SumStep.MASK else None)


# -- the coordinator lists a victim both dead and alive (works on Flower's SecAgg+) ----------------------------------


def test_whoever_gets_shares_of_both_kinds_has_the_victims_vector() -> None:
    # why the next test matters: with both secrets the mask is gone
    sites = Sites(5)
    members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
    play(members, hub, vectors, SumStep.MASK)
    answers = {n: members[n].mask(r, vectors[n]) for n, r in hub.requests().items()}
    seeds, keys = _all_shares(members, 0)
    stolen = sites.ring.read(answers["site-00"][39:-64]).copy()
    sites.ring.add_mask(stolen, self_seed(sites.session, 0, join(seeds, 4)), -1)
    key = X25519PrivateKey.from_private_bytes(join(keys, 4))
    for i in range(1, 5):
        sites.ring.add_mask(stolen, pair_seed(sites.session, key, 0, hub._adverts[i]), 1)
    assert sites.ring.lower(stolen).tolist() == vectors["site-00"].tolist()


def test_a_site_listed_both_dead_and_alive_is_answered_by_nobody() -> None:
    sites = Sites(5)
    members = sites.members()
    play(members, Server(sites.session), sites.vectors(), SumStep.AGREE)
    for member in members.values():
        _refused_for_good(member, SumStep.AGREE, _roll(sites, {0, 1, 2, 3, 4}, {0}), "both dead and alive")


def test_a_site_that_sent_its_vector_and_is_called_dead_keeps_it_behind_its_self_mask() -> None:
    sites = Sites(5)
    members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
    play(members, hub, vectors, SumStep.MASK)
    answers = {n: members[n].mask(r, vectors[n]) for n, r in hub.requests().items()}
    lie = _roll(sites, {1, 2, 3, 4}, {0})
    agreements = [members[name].agree(lie) for name in sites.names[1:]]
    reveals = [members[name].reveal(b"".join(agreements)) for name in sites.names[1:]]
    roll = SurvivorList(frozenset({1, 2, 3, 4}), frozenset({0}))
    shares = {s + 1: found[0] for s, found in (read_reveal(sites.session, raw, roll) for raw in reveals)}
    key = X25519PrivateKey.from_private_bytes(join(shares, 4))  # they did give its mask key
    left = sites.ring.read(answers["site-00"][39:-64]).copy()
    for i in range(1, 5):
        sites.ring.add_mask(left, pair_seed(sites.session, key, 0, hub._adverts[i]), 1)
    assert not (sites.ring.lower(left) == vectors["site-00"]).any()
    _refused_for_good(members["site-00"], SumStep.AGREE, lie, "not listed alive")


@settings(max_examples=30)
@given(st.data())
def test_a_reveal_has_one_kind_of_share_for_each_site_whatever_the_roll(data: st.DataObject) -> None:
    sites = Sites(6)
    members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
    silent = data.draw(st.lists(st.sampled_from(sites.names), unique=True, max_size=2))
    requests = play(members, hub, vectors, SumStep.REVEAL, silent)
    held = {name: dict(members[name]._secrets.shares) for name in requests}  # type: ignore[union-attr]
    for name, request in requests.items():
        answer = members[name].reveal(request)
        for i, other in enumerate(sites.names):
            seed, key = held[name][i]
            assert (seed in answer, key in answer) == ((False, True) if other in silent else (True, False))


# -- the coordinator tells different sites different survivors -------------------------------------------------------


@pytest.mark.parametrize(("n", "corrupt"), [(4, 1), (5, 1), (5, 2), (7, 2), (7, 3)])
def test_no_two_rolls_find_enough_signatures_even_when_corrupt_sites_sign_both(n: int, corrupt: int) -> None:
    sites = Sites(n, corrupt=corrupt)
    threshold = sites.params.quorum.threshold
    honest = sites.names[corrupt:]
    victim = n - 1
    everyone, lie = set(range(n)), set(range(n - 1))
    for split_at in range(len(honest) + 1):
        members = sites.members()
        play(members, Server(sites.session), sites.vectors(), SumStep.AGREE)
        rolls = {True: _roll(sites, everyone, set()), False: _roll(sites, lie, {victim})}
        signed: dict[bool, dict[str, bytes]] = {True: {}, False: {}}
        for i, name in enumerate(honest):
            told = i >= split_at
            if name == sites.names[victim] and not told:
                continue  # it would refuse
            signed[told][name] = members[name].agree(rolls[told])
        for i, name in enumerate(sites.names[:corrupt]):
            for told, roll in rolls.items():
                signed[told][name] = sign(sites.session, SumStep.AGREE, i, roll, sites.keys[name])
        revealed = {told: 0 for told in rolls}
        for told, agreements in signed.items():
            request = b"".join(agreements[name] for name in sorted(agreements))
            for name in set(agreements) & set(honest):
                try:
                    members[name].reveal(request)
                    revealed[told] += 1
                except SecAggError:
                    assert len(agreements) < threshold
        assert not (revealed[True] and revealed[False])


def test_agreements_to_another_roll_doubled_ones_and_strangers_are_refused() -> None:
    sites = Sites(5)
    quorum = sites.params.quorum
    assert quorum.threshold == 4
    for make, why in (
        (lambda own, other, late: [*own[:3], other], "different rolls"),
        (lambda own, other, late: own[:3], "too few"),
        (lambda own, other, late: [own[0], own[0], own[1], own[2]], "ascending"),
        (lambda own, other, late: [own[1], own[0], own[2], own[3]], "ascending"),
        (lambda own, other, late: [*own[:3], late], "not on it"),
        (lambda own, other, late: [*own[:3], own[3][:-1] + bytes([own[3][-1] ^ 1])], "not signed"),
        (lambda own, other, late: [*own[:3], own[3][:-1]], "whole number"),
        (lambda own, other, late: own * 2, "too many"),
    ):
        members = sites.members()
        play(members, Server(sites.session), sites.vectors(), SumStep.AGREE, ["site-04"])
        roll = _roll(sites, {0, 1, 2, 3}, {4})
        own = [members[name].agree(roll) for name in sites.names[:4]]
        other = sign(sites.session, SumStep.AGREE, 3, _roll(sites, {0, 1, 2, 3, 4}, set()), sites.keys["site-03"])
        late = sign(sites.session, SumStep.AGREE, 4, roll, sites.keys["site-04"])
        _refused_for_good(members["site-00"], SumStep.REVEAL, b"".join(make(own, other, late)), why)


def test_a_roll_that_drops_below_the_quorum_or_leaves_sites_out_is_refused() -> None:
    sites = Sites(5)
    for alive, dead, why in (
        ({0, 1, 2}, {3, 4}, "are needed"),
        ({0}, {1, 2, 3, 4}, "are needed"),
        ({0, 1, 2, 3}, set(), "not of the sites"),
        ({0, 1, 2, 3}, {4, 5}, "not in the roster"),
        (set(), {0, 1, 2, 3, 4}, "not listed alive"),
    ):
        members = sites.members()
        play(members, Server(sites.session), sites.vectors(), SumStep.AGREE)
        raw = sum(1 << i for i in alive).to_bytes(1, "little") + sum(1 << i for i in dead).to_bytes(1, "little")
        _refused_for_good(members["site-00"], SumStep.AGREE, raw, why)


# -- the coordinator puts itself between two sites -------------------------------------------------------------------


def _forged(sites: Sites, raw: bytes, signer: str) -> bytes:
    """An advertisement in a site's name with keys that somebody else knows."""
    mine = X25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
    sender = int.from_bytes(raw[37:39], "little")
    return sign(sites.session, SumStep.ADVERTISE, sender, mine + raw[71:135], site_key(signer))


def test_a_key_that_a_site_did_not_sign_is_refused() -> None:
    sites = Sites(4)
    for change, why in (
        (
            lambda raws: [*raws[:1], _forged(sites, raws[1], "mallory"), *raws[2:]],
            "not signed by the enrolled key of site-01",
        ),
        (
            lambda raws: [*raws[:1], _forged(sites, raws[1], "site-02"), *raws[2:]],
            "not signed by the enrolled key of site-01",
        ),
        (lambda raws: [_forged(sites, raws[0], "site-00"), *raws[1:]], "was changed"),
        (lambda raws: raws[1:], "is missing"),
        (lambda raws: [raws[0], raws[0], *raws[2:]], "ascending"),
        (lambda raws: [raws[1], raws[0], *raws[2:]], "ascending"),
        (lambda raws: raws[:2], "are needed"),
        (lambda raws: [*raws, raws[0]], "too many"),
        (lambda raws: [*raws[:3], raws[3] + b"x"], "whole number"),
    ):
        members = sites.members()
        request = play(members, Server(sites.session), sites.vectors(), SumStep.SHARE)["site-00"]
        raws = split_messages(sites.session, request, ADVERT_BYTES)
        _refused_for_good(members["site-00"], SumStep.SHARE, b"".join(change(raws)), why)


def test_a_key_that_two_sites_advertise_is_refused_by_hub_and_sites() -> None:
    sites = Sites(4)
    hub, members = Server(sites.session), sites.members()
    adverts = {name: members[name].advertise(b"") for name in sites.names}
    copied = sign(sites.session, SumStep.ADVERTISE, 3, adverts["site-00"][39:135], sites.keys["site-03"])
    assert hub.receive("site-00", adverts["site-00"]) is None
    assert "not fresh" in str(hub.receive("site-03", copied))
    request = b"".join([*(adverts[name] for name in sites.names[:3]), copied])
    _refused_for_good(members["site-01"], SumStep.SHARE, request, "the same")


def test_a_key_of_small_order_is_refused_by_hub_and_sites() -> None:
    sites = Sites(4)
    for zero in (bytes(32), b"\1" + bytes(31), ((1 << 255) - 19).to_bytes(32, "little")):
        hub, members = Server(sites.session), sites.members()
        adverts = [members[name].advertise(b"") for name in sites.names]
        for body in (zero + adverts[3][71:135], adverts[3][39:71] + zero + adverts[3][103:135]):
            weak = sign(sites.session, SumStep.ADVERTISE, 3, body, sites.keys["site-03"])
            with pytest.raises(SecAggMessageError, match="small order"):
                read_advert(sites.session, weak)
        assert "small order" in str(hub.receive("site-03", weak))
        _refused_for_good(members["site-00"], SumStep.SHARE, b"".join([*adverts[:3], weak]), "small order")


# -- replays and sessions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", list(SumStep))
def test_a_message_of_another_round_run_or_start_vector_counts_nowhere(step: SumStep) -> None:
    sites = Sites(4)
    for old in (Sites(4, round=1), Sites(4, run="run-0"), Sites(4, context=hashlib.sha256(b"other").digest())):
        before, vectors = old.members(), old.vectors()
        hub = Server(old.session)
        request = play(before, hub, vectors, step)["site-01"]
        stale = before["site-01"].answer(step, request, vectors["site-01"] if step is SumStep.MASK else None)
        now, members = Server(sites.session), sites.members()
        play(members, now, sites.vectors(), step)
        assert "another session" in str(now.receive("site-01", stale))
        if step in (SumStep.SHARE, SumStep.MASK, SumStep.REVEAL):  # what comes from other sites' messages
            _refused_for_good(members["site-00"], step, request, "another session")


def test_sites_that_were_given_different_start_vectors_share_nothing() -> None:
    # Pasquini, Francati, Ateniese 2022: a model under which the others' updates vanish leaves the victim's alone
    honest, crafted = np.zeros(9, np.float32), np.full(9, -1e3, np.float32)
    sites = Sites(4)
    seen = {
        name: sites.as_seen(context=start_context(honest if name == "site-00" else crafted, [b"fedavg"]))
        for name in sites.names
    }
    members = {name: sites.member(name, seen[name]) for name in sites.names}
    adverts = b"".join(members[name].advertise(b"") for name in sites.names)
    for name in sites.names:
        _refused_for_good(members[name], SumStep.SHARE, adverts, "start vector differ")
    # a coordinator that keeps to either story gets no sum with the victim in it and others' vanished updates
    for told, survivors in (("site-00", None), ("site-01", ("site-01", "site-02", "site-03"))):
        again, vectors = {name: sites.member(name, seen[name]) for name in sites.names}, sites.vectors()
        if survivors is None:
            with pytest.raises(SecAggError, match="1 sites have answered"):
                run_round(again, Server(seen[told]), vectors)
        else:
            total = run_round(again, Server(seen[told]), vectors)
            assert total.survivors == survivors
            assert total.lattice.tolist() == sum(vectors[name] for name in survivors).tolist()  # type: ignore[union-attr]


def test_every_step_is_done_once_and_in_its_order() -> None:
    sites = Sites(4)
    for reached, asked in itertools.product(SumStep, SumStep):
        if reached is asked:
            continue
        members = sites.members()
        requests = play(members, Server(sites.session), sites.vectors(), reached)
        _refused_for_good(members["site-00"], asked, requests["site-00"], "out of turn")


def test_after_one_reveal_there_is_nothing_left_to_reveal() -> None:
    sites = Sites(4)
    members = sites.members()
    request = play(members, Server(sites.session), sites.vectors(), SumStep.REVEAL)["site-00"]
    members["site-00"].reveal(request)
    assert members["site-00"].done
    _refused_for_good(members["site-00"], SumStep.REVEAL, request, "out of turn")


def test_a_vector_that_does_not_fit_ends_the_members_part() -> None:
    sites = Sites(4)
    for bad in (np.zeros(7, np.int64), np.full(8, sites.ring.peak + 1), np.zeros(8), None):
        members = sites.members()
        request = play(members, Server(sites.session), sites.vectors(), SumStep.MASK)["site-00"]
        with pytest.raises(ValueError, match=r"lattice|bound|vector"):
            members["site-00"].answer(SumStep.MASK, request, bad)  # type: ignore[arg-type]
        assert members["site-00"].done or bad is None


# -- the coordinator changes encrypted shares ------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_any_changed_bit_of_a_parcel_is_found(data: st.DataObject) -> None:
    sites = Sites(4)
    members = sites.members()
    raw = bytearray(play(members, Server(sites.session), sites.vectors(), SumStep.MASK)["site-00"])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    _refused_for_good(members["site-00"], SumStep.MASK, bytes(raw), ".")


def test_parcels_swapped_doubled_missing_or_meant_for_others_are_refused() -> None:
    sites = Sites(5)
    for change, why in (
        (lambda mine, others: [mine[1], mine[0], *mine[2:]], "ascending"),
        (lambda mine, others: [mine[0], mine[0], *mine[2:]], "ascending"),
        (lambda mine, others: mine[:2], "are needed"),
        (lambda mine, others: [*mine[:3], others[3]], "another site"),
        (lambda mine, others: [*mine, b"x"], "whole number"),
    ):
        members = sites.members()
        requests = play(members, Server(sites.session), sites.vectors(), SumStep.MASK)
        mine, others = (
            split_messages(sites.session, requests[name], PARCEL_BYTES) for name in ("site-00", "site-01")
        )
        _refused_for_good(members["site-00"], SumStep.MASK, b"".join(change(mine, others)), why)


def test_parcels_made_for_other_advertisements_are_refused() -> None:
    # the coordinator shows site-04 to some and not to others
    sites = Sites(5)
    members = sites.members()
    adverts = [members[name].advertise(b"") for name in sites.names]
    shares = [members[name].share(b"".join(adverts if i else adverts[:4])) for i, name in enumerate(sites.names[:4])]
    parcels = [share[39 + 96 : 39 + 96 + PARCEL_BYTES] for share in shares[1:]]
    _refused_for_good(members["site-00"], SumStep.MASK, b"".join(parcels), "other advertisements")


# -- strangers in the roster -----------------------------------------------------------------------------------------


def test_a_roster_of_sybils_has_another_digest_and_too_few_that_the_site_knows() -> None:
    sites = Sites(5)
    sybils = {name: sites.roster[name] for name in sites.names[:1]}
    sybils |= {f"site-0{i}": site_key(f"made up {i}").public_key().public_bytes_raw() for i in range(1, 5)}
    assert roster_digest(sybils) != roster_digest(sites.roster)
    session = SumSession("run-1", 0, sites.params, bytes(32), sybils)
    with pytest.raises(SecAggError, match="2 more must be ones that this site knows"):
        Member(session, "site-00", sites.keys["site-00"], sites.knows(minimum=2), UnsafeStream("x"))
    with pytest.raises(ValueError, match="at least one other"):
        KnownPartners(frozenset(), 0)


def test_the_known_sites_may_not_be_dropped_until_only_sybils_are_left() -> None:
    sites = Sites(6)
    known = sites.knows(["site-00", "site-04", "site-05"], 2)  # its own key does not count

    def victim() -> dict[str, Member]:
        member = Member(sites.session, "site-00", sites.keys["site-00"], known, UnsafeStream("/site-00"))
        return {**sites.members(), "site-00": member}

    members = victim()
    play(members, Server(sites.session), sites.vectors(), SumStep.AGREE, ["site-05"])
    _refused_for_good(members["site-00"], SumStep.AGREE, _roll(sites, {0, 1, 2, 3, 4}, {5}), "1 more must be")
    members = victim()
    adverts = play(members, Server(sites.session), sites.vectors(), SumStep.SHARE)["site-00"]
    _refused_for_good(members["site-00"], SumStep.SHARE, adverts[: 5 * ADVERT_BYTES], "1 more must be")


def test_a_site_takes_no_part_under_a_name_or_key_that_is_not_its_own() -> None:
    sites = Sites(4)
    for name, key in (("site-09", "site-09"), ("site-01", "site-00")):
        with pytest.raises(SecAggError, match="its own key"):
            Member(sites.session, name, site_key(key), sites.knows(), UnsafeStream("x"))


# -- seeds: Flower's have 32 bits ------------------------------------------------------------------------------------


def test_every_bit_of_a_256_bit_seed_counts() -> None:
    ring = Ring(4, 64, 1.0, 0)
    seen = set()
    for bit in (None, *range(256)):
        seed = bytearray(32)
        if bit is not None:
            seed[bit // 8] ^= 1 << bit % 8
        total = np.zeros(4, ring.dtype)
        ring.add_mask(total, bytes(seed), 1)
        seen.add(total.tobytes())
    assert len(seen) == 257
    for short in (b"", bytes(4), bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="32-byte"):
            ring.add_mask(total, short, 1)


def test_masks_differ_for_each_pair_and_each_round() -> None:
    masks = []
    for sites in (Sites(5), Sites(5, round=1), Sites(5, run="run-2")):  # with the very same keys
        members, hub = sites.members(), Server(sites.session)
        play(members, hub, sites.vectors(), SumStep.SHARE)
        for i, j in itertools.combinations(range(5), 2):
            mine, theirs = (members[sites.names[k]]._secrets for k in (i, j))
            assert mine is not None
            assert theirs is not None
            seed = pair_seed(sites.session, mine.mask_key, i, hub._adverts[j])
            assert seed == pair_seed(sites.session, theirs.mask_key, j, hub._adverts[i])
            masks.append(seed)
        masks += [self_seed(sites.session, i, bytes(32)) for i in range(5)]
    streams = set()
    for seed in masks:
        total = np.zeros(8, "<u8")
        sites.ring.add_mask(total, seed, 1)
        streams.add(total.tobytes())
    assert len(streams) == len(masks) == 45


# -- a site cheats ---------------------------------------------------------------------------------------------------


def _cheat(sites: Sites, step: SumStep, spoil: Callable[[bytes], bytes]) -> None:
    """site-02 spoils its answer to ``step``: it is dropped, alone, and the sum of the others is right."""
    members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
    for now in SumStep:
        for name, request in hub.requests().items():
            answer = members[name].answer(now, request, vectors[name] if now is SumStep.MASK else None)
            if now is step and name == "site-02":
                assert hub.receive(name, spoil(answer)) is not None
            else:
                assert hub.receive(name, answer) is None
        hub.advance()
    total = hub.aggregate()
    assert list(total.dropped) == ["site-02"]
    assert total.lattice.tolist() == sum(vectors[name] for name in total.survivors).tolist()  # type: ignore[union-attr]
    assert ("site-02" in total.survivors) == (step >= SumStep.AGREE)


@settings(max_examples=60)
@given(st.sampled_from(list(SumStep)), st.integers(0, 1 << 16), st.integers(0, 7))
def test_a_site_whose_message_has_one_wrong_bit_drops_out_alone(step: SumStep, place: int, bit: int) -> None:
    def flip(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[place % len(raw)] ^= 1 << bit
        return bytes(changed)

    _cheat(Sites(6), step, flip)


@pytest.mark.parametrize("step", list(SumStep))
def test_a_site_that_sends_too_much_too_little_or_noise_drops_out_alone(step: SumStep) -> None:
    for spoil in (
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: raw * 2,
        lambda raw: bytes(len(raw)),
        lambda raw: RNG.bytes(len(raw)),
        lambda raw: bytes(1 << 20),
    ):
        _cheat(Sites(6), step, spoil)


def test_one_site_cannot_speak_for_another_nor_twice_nor_late() -> None:
    sites = Sites(5)
    members, hub = sites.members(), Server(sites.session)
    adverts = {name: members[name].advertise(b"") for name in sites.names}
    assert "another's channel" in str(hub.receive("site-01", adverts["site-00"]))
    assert hub.receive("site-00", adverts["site-00"]) is None
    again = sites.member("site-00").advertise(b"")
    assert "nothing is expected" in str(hub.receive("site-00", again))
    assert "nothing is expected" in str(hub.receive("site-09", again))
    for name in sites.names[2:]:
        assert hub.receive(name, adverts[name]) is None
    hub.advance()
    assert "nothing is expected" in str(hub.receive("site-01", adverts["site-01"]))
    assert hub.dropped == {"site-01": "one site's message from another's channel"}


def _spoilt_parcel(sites: Sites, member: Member, answer: bytes, place: int) -> bytes:
    """A share message whose parcel at ``place`` is properly signed and holds something else than it says."""
    secrets = member._secrets
    assert secrets is not None
    assert secrets.dealer is not None
    dealer = Dealer(
        sites.session,
        secrets.dealer.own,
        X25519PrivateKey.from_private_bytes(bytes(range(32))),
        secrets.dealer.adverts,
    )
    holders = [i for i in sorted(secrets.adverts) if i != dealer.own]
    junk = dealer.seal(secrets.adverts[holders[place]], (bytes(SHARE_BYTES), bytes(SHARE_BYTES)), member._key)
    start = 39 + 96 + place * PARCEL_BYTES
    body = answer[39:start] + junk + answer[start + PARCEL_BYTES : -64]
    return sign(sites.session, SumStep.SHARE, dealer.own, body, member._key)


def test_a_spoilt_parcel_costs_its_dealers_share_and_not_the_round() -> None:
    sites = Sites(6)
    members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
    for step in SumStep:
        for name, request in hub.requests().items():
            answer = members[name].answer(step, request, vectors[name] if step is SumStep.MASK else None)
            if step is SumStep.SHARE and name == "site-02":
                answer = _spoilt_parcel(sites, members[name], answer, 0)
            assert hub.receive(name, answer) is None
        hub.advance()
    assert 1 not in hub._shares[2]  # site-00 could not read its share of site-02
    total = hub.aggregate()
    assert total.lattice.tolist() == sum(vectors.values()).tolist()  # type: ignore[union-attr]


def test_shares_that_are_no_field_elements_or_not_the_committed_ones_are_not_taken() -> None:
    sites = Sites(4)
    members = sites.members()
    play(members, Server(sites.session), sites.vectors(), SumStep.MASK)
    ours, theirs = (members[name]._secrets for name in ("site-00", "site-01"))
    assert ours is not None
    assert theirs is not None
    assert ours.dealer is not None
    assert theirs.dealer is not None
    key, small, huge = sites.keys["site-01"], bytes(SHARE_BYTES), b"\xff" * SHARE_BYTES

    def parcel(shares: tuple[bytes, bytes]) -> SealedShares:
        assert theirs is not None
        assert theirs.dealer is not None
        raw = theirs.dealer.seal(theirs.adverts[0], shares, key)
        return read_parcel(sites.session, raw, theirs.dealer.adverts)

    good = parcel((small, small))
    assert ours.dealer.open(good, ours.adverts[1]) == (small, small)
    assert ours.dealer.open(parcel((small, huge)), ours.adverts[1]) is None
    assert ours.dealer.open(parcel((huge, small)), ours.adverts[1]) is None
    for commitments in ((good.commitments[0], bytes(32)), (bytes(32), good.commitments[1]), good.commitments[::-1]):
        lie = SealedShares(good.dealer, good.holder, (commitments[0], commitments[1]), good.sealed)
        assert ours.dealer.open(lie, ours.adverts[1]) is None


def test_parcels_out_of_place_or_for_other_advertisements_drop_their_dealer() -> None:
    sites = Sites(6)

    def rebuilt(answer: bytes, change: Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]]) -> bytes:
        head, parcels = change(
            answer[39 : 39 + 96], split_messages(sites.session, answer[39 + 96 : -64], PARCEL_BYTES)
        )
        return sign(sites.session, SumStep.SHARE, 2, head + b"".join(parcels), sites.keys["site-02"])

    for change in (
        lambda head, parcels: (head, [parcels[1], parcels[0], *parcels[2:]]),
        lambda head, parcels: (head, [parcels[0], parcels[0], *parcels[2:]]),
        lambda head, parcels: (bytes(32) + head[32:], parcels),
    ):
        _cheat(sites, SumStep.SHARE, lambda answer, change=change: rebuilt(answer, change))  # type: ignore[misc]


def test_a_site_that_signs_another_roll_drops_out_alone() -> None:
    sites = Sites(6)
    other = _roll(sites, {0, 1, 2, 3, 4}, {5})
    _cheat(sites, SumStep.AGREE, lambda _: sign(sites.session, SumStep.AGREE, 2, other, sites.keys["site-02"]))


def test_wrong_shares_at_the_end_are_set_aside_and_too_many_of_them_give_no_sum() -> None:
    sites = Sites(6)
    spare = 6 - sites.params.quorum.threshold
    for liars in (spare, spare + 1):
        members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
        requests = play(members, hub, vectors, SumStep.REVEAL)
        for i, name in enumerate(sites.names):
            answer = members[name].reveal(requests[name])
            if i < liars:
                lies = {j: (1, (7).to_bytes(SHARE_BYTES, "big")) for j in range(6)}
                answer = sign(sites.session, SumStep.REVEAL, i, pack_reveal(sites.session, lies), sites.keys[name])
            assert hub.receive(name, answer) is None
        hub.advance()
        if liars == spare:
            assert hub.aggregate().lattice.tolist() == sum(vectors.values()).tolist()  # type: ignore[union-attr]
        else:
            with pytest.raises(SecAggError, match="shares of site-00"):
                hub.aggregate()


def test_a_reveal_of_the_kind_that_was_not_asked_for_drops_its_sender() -> None:
    sites = Sites(6)
    members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
    play(members, hub, vectors, SumStep.REVEAL, ["site-05"])
    for rows in (
        {0: (2, bytes(33))},
        {5: (1, bytes(33))},
        {0: (3, bytes(33))},
        {0: (0, b"\1" * 33)},
        {0: (1, b"\xff" * 33)},
    ):
        answer = sign(sites.session, SumStep.REVEAL, 1, pack_reveal(sites.session, rows), sites.keys["site-01"])
        with pytest.raises(SecAggMessageError, match="nobody asked"):
            read_reveal(sites.session, answer, hub._roll)


def test_a_site_that_shares_another_seed_or_key_than_it_advertised_is_named() -> None:
    sites = Sites(5)
    for lie in ("seed", "mask_key"):
        members, hub, vectors = sites.members(), Server(sites.session), sites.vectors()
        play(members, hub, vectors, SumStep.SHARE)
        secrets = members["site-02"]._secrets
        assert secrets is not None
        setattr(secrets, lie, bytes(32) if lie == "seed" else X25519PrivateKey.from_private_bytes(bytes(range(32))))
        requests, silent = hub.requests(), {"site-02"} if lie == "mask_key" else set()
        for step in list(SumStep)[1:]:
            for name, request in requests.items():
                if not (name in silent and step >= SumStep.MASK):
                    hub.receive(
                        name, members[name].answer(step, request, vectors[name] if step is SumStep.MASK else None)
                    )
            hub.advance()
            requests = hub.requests() if hub.step else {}
        with pytest.raises(SecAggError, match="site-02 has shared another"):
            hub.aggregate()


def test_a_hub_gives_no_sum_before_the_end_and_asks_nobody_afterwards() -> None:
    sites = Sites(4)
    for step in SumStep:
        hub = Server(sites.session)
        play(sites.members(), hub, sites.vectors(), step)
        with pytest.raises(SecAggError, match="after the reveals"):
            hub.aggregate()
    hub = Server(sites.session)
    run_round(sites.members(), hub, sites.vectors())
    for call in (hub.requests, hub.advance):
        with pytest.raises(SecAggError, match="over"):
            call()
    assert hub.receive("site-00", b"") == "nothing is expected of this site"


@settings(max_examples=200)
@given(st.sampled_from(list(SumStep)), st.binary(max_size=400))
def test_noise_is_refused_by_every_step_of_a_member(step: SumStep, raw: bytes) -> None:
    sites = Sites(3, corrupt=1)
    member = sites.member("site-00")
    if step is not SumStep.ADVERTISE:
        member.advertise(b"")
    with pytest.raises(SecAggError):
        member.answer(step, raw or b"x", np.zeros(8, np.int64) if step is SumStep.MASK else None)
    assert member.done


def test_an_error_and_a_representation_hold_no_secret() -> None:
    sites = Sites(4)
    members = sites.members()
    play(members, Server(sites.session), sites.vectors(), SumStep.AGREE)
    secrets = members["site-00"]._secrets
    assert secrets is not None
    for value in (secrets.seed, secrets.mask_key.private_bytes_raw(), secrets.share_key.private_bytes_raw()):
        for text in (repr(secrets), repr(members["site-00"]), repr(secrets.dealer)):
            assert value.hex() not in text
            assert repr(value) not in text
    assert commit(sites.session, b"b", (0,), secrets.seed) != commit(sites.session, b"b", (1,), secrets.seed)
    assert FRAME == 103
    assert Params(sites.ring, Quorum.smallest(4, 1, 2)) == sites.params
