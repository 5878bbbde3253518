"""Every attack of the list has a test, and the test exists: what the threat model names can be looked up here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_C, _J, _F, _P = (f"tests/attacks/test_{name}.py" for name in ("certificates", "joining", "flooding", "chunks"))
_I, _L, _H, _S = (f"tests/attacks/test_{name}.py" for name in ("contents", "lies", "forged_coordinator", "secrets"))
_M = "tests/attacks/test_malformed.py"
_FLOWER, _WATCH = "tests/test_federation_contract.py", "tests/coordinator/storage/test_witness_store.py"
TABLE: dict[str, str] = {
    "a certificate of another CA": f"{_C}::test_a_certificate_of_another_root_is_shut_out",
    "a self-made intermediate": f"{_C}::test_a_self_made_intermediate_that_bears_the_real_ones_name_is_shut_out",
    "a leaf that acts as a CA": f"{_C}::test_a_sites_own_certificate_does_not_make_further_ones",
    "a stolen intermediate": f"{_C}::test_a_certificate_that_the_ledger_never_issued_is_turned_away",
    "expired at the handshake": f"{_C}::test_an_expired_certificate_is_shut_out_at_the_handshake",
    "expired on an open connection": (
        f"{_C}::test_a_certificate_that_ends_while_its_connection_is_open_makes_no_further_call"
    ),
    "revoked mid-stream": (
        f"{_C}::test_a_revocation_ends_open_streams_at_once_and_the_next_call_of_the_same_connection"
    ),
    "two SANs, no SAN": f"{_C}::test_a_certificate_with_other_than_one_known_name_is_turned_away",
    "TLS 1.2": f"{_C}::test_tls_1_2_is_turned_away_on_every_call",
    "agent as operator": f"{_C}::test_an_agent_makes_no_operators_call_and_none_of_a_joining_site",
    "operator as agent": f"{_C}::test_an_operator_makes_no_agents_call",
    "joining certificate as agent": f"{_C}::test_a_joining_certificate_does_nothing_but_ask",
    "certificate of before a new enrolment": f"{_C}::test_a_certificate_of_before_a_new_enrolment_is_turned_away",
    "a token used twice": f"{_J}::test_a_token_is_good_for_one_request",
    "an ended token": f"{_J}::test_an_ended_invitation_is_refused_by_the_agent_and_by_the_port",
    "a guessed token": f"{_J}::test_a_guessed_token_opens_no_conversation",
    "another site's invitation": f"{_J}::test_an_invitation_of_another_site_is_of_no_use",
    "a swapped root": f"{_J}::test_a_swapped_root_in_the_invitation_is_found_by_its_fingerprint",
    "enrolment without two roles": f"{_J}::test_no_approval_no_certificate_and_one_person_is_not_enough",
    "replay": f"{_L}::test_a_replayed_envelope_and_a_reused_key_are_refused_from_either_site",
    "an envelope signed by another site": f"{_L}::test_nobody_speaks_for_another_site_nor_uses_its_grant",
    "reordered, truncated, foreign chunks": (
        f"{_P}::test_a_chunk_that_is_not_the_announced_one_is_refused_on_arrival"
    ),
    "duplicate chunks": (f"{_P}::test_order_and_repetition_do_not_matter_and_what_lacks_a_chunk_is_not_submitted"),
    "a lying list of chunks": f"{_P}::test_a_list_of_chunks_that_lies_is_found_by_the_digest_of_the_whole",
    "a 10 GB announcement": (f"{_F}::test_an_announcement_of_ten_gigabytes_is_refused_before_a_block_is_set_aside"),
    "slow-loris, connections": f"{_F}::test_silent_connections_do_not_keep_a_site_out",
    "slow-loris, streams": f"{_F}::test_silent_streams_of_one_site_leave_the_others_their_places",
    "a flood of calls": f"{_F}::test_too_many_calls_are_turned_away_and_the_other_sites_are_not",
    "a flood of refused calls": (f"{_F}::test_a_flood_of_refused_calls_grows_the_ledger_no_further_than_its_bound"),
    "starving a site with its revoked certificate": (
        f"{_F}::test_a_stolen_certificate_that_was_revoked_or_has_ended_does_not_starve_its_site"
    ),
    "header bombs": f"{_F}::test_headers_above_the_limit_are_refused_and_the_port_goes_on",
    "message bombs": f"{_F}::test_a_message_above_the_limit_is_not_even_read",
    "bytes that are not a message, to every method": (
        f"{_M}::test_bytes_that_are_not_a_message_are_refused_by_every_method_and_written_down"
    ),
    "a flood of them under a revoked, a joining and a good certificate": (
        f"{_M}::test_a_flood_of_bad_messages_is_paced_and_written_down_and_leaves_no_memory_behind"
    ),
    "calls whose message never comes": f"{_M}::test_silent_calls_of_a_revoked_certificate_hold_no_thread",
    "compressed message bombs": f"{_F}::test_a_compressed_message_is_not_inflated_beyond_the_limit",
    "zip bombs and hidden bytes": f"{_I}::test_no_byte_of_an_archive_is_free_for_a_second_message",
    "PNG bombs": f"{_I}::test_a_picture_that_inflates_is_refused_uninflated",
    "path traversal in tar names": f"{_I}::test_a_path_in_the_place_of_a_name_is_refused",
    "links and devices in tar": f"{_I}::test_a_member_that_is_no_plain_file_is_refused",
    "NaN weights, renamed and extra tensors, duplicate keys, metadata": (
        f"{_I}::test_an_update_with_anything_but_finite_numbers_in_the_one_form_is_refused"
    ),
    "a model of another architecture": (f"{_I}::test_a_model_has_exactly_the_tensors_of_an_approved_architecture"),
    "plain bytes declared as sealed to a reader": (
        f"{_I}::test_what_is_declared_as_sealed_to_a_reader_and_is_not_is_refused"
    ),
    "a lie about k, components, modality, reader": f"{_L}::test_a_lie_about_a_set_is_refused_by_its_own_rule",
    "a lie about epsilon, delta (patients), steps": f"{_L}::test_a_lie_about_an_update_is_refused_by_its_own_rule",
    "a lie about rounds": f"{_L}::test_rounds_beyond_the_grant_and_rounds_told_twice_are_refused",
    "a level of one's own": f"{_L}::test_a_statement_in_any_but_the_one_form_is_refused",
    "a malicious Flower bundle": f"{_FLOWER}::test_a_bundle_that_would_leave_a_trace_is_carried_and_never_run",
    "another bundle than the pinned one": f"{_FLOWER}::test_an_agent_pinned_to_another_bundle_declines_everything",
    "Fleet calls as another's node": f"{_FLOWER}::test_a_site_cannot_speak_as_another_sites_node",
    "Fleet calls with a stolen node key": (
        f"{_FLOWER}::test_a_stolen_node_key_is_of_no_use_with_another_sites_certificate"
    ),
    "another site's messages and objects": (
        f"{_FLOWER}::test_a_site_reaches_neither_anothers_messages_nor_objects_nor_sends_unasked"
    ),
    "a coordinator that forks or rewinds its ledger": (
        f"{_H}::test_a_ledger_that_was_rewound_or_forked_is_refused_for_good_and_nothing_is_trained"
    ),
    "a coordinator that grants beyond the site's policy": (
        f"{_H}::test_a_coordinator_grants_nothing_beyond_the_sites_own_policy"
    ),
    "a yes without an entry, or with another's": (
        f"{_H}::test_a_yes_without_an_entry_or_with_another_sites_entry_trains_nothing"
    ),
    "a run reservation that was never written": (
        f"{_H}::test_a_run_that_the_coordinators_ledger_never_granted_is_not_trained_for"
    ),
    "a ledger made anew": f"{_WATCH}::test_a_ledger_made_anew_with_a_restore_in_it_is_no_restored_one",
    "exception texts": f"{_S}::test_whatever_breaks_inside_a_peer_hears_a_number_and_nothing_else",
    "secrets in messages and logs": f"{_S}::test_no_token_and_no_private_key_is_in_a_message_or_a_log",
}


def defined_in(path: Path) -> set[str]:
    """The tests that a file defines."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


@pytest.mark.parametrize("attack", sorted(TABLE))
def test_the_attack_has_its_test(attack: str) -> None:
    file, _, name = TABLE[attack].partition("::")
    assert name in defined_in(ROOT / file), f"{attack}: {name} is not in {file}"


def test_every_test_of_the_suite_that_makes_an_attack_is_in_a_file_of_the_table() -> None:
    named = {where.partition("::")[0] for where in TABLE.values()}
    suite = {str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_*.py")}
    assert suite - {str(Path(__file__).relative_to(ROOT))} <= named
