"""The report's sentences: the meaning of a rule, a level, a stage or a quarantine reason, and the remedy.

The rules are stable names for machines (policies.review.rules, policies.ledger_service, coordinator.admission, and
the site's own agent, which may decline by itself); a test finds each of them in the source and asks for its sentence
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from policies.accounting import rounding
from policies.review.mechanism_terms import TEXTS
from protos.common import text

rounded_up, rounded_down, format_rounded_up = rounding.rounded_up, rounding.rounded_down, rounding.format_rounded_up
epsilon_text, epsilon_at_least = rounding.epsilon_text, rounding.epsilon_at_least
count, utc = text.count, text.utc

# What to do, by who has to do it.
_POLICY: Final = "Change the job to what the policy admits. Changing the policy needs the site and the federation."
_LARGER: Final = "Choose larger groups (or a larger cohort) and ask again; nothing was read for this request."
_BUDGET: Final = "For training, ask for fewer steps or more noise. Releases per patient, once used up, stay used."
_AGENT: Final = "Bring the site's agent to the coordinator's version, then make the release again under a new grant."
_AGAIN: Final = "Ask for a new grant. The old one stays spent, by design."
_INQUIRE: Final = (
    "Call the site. If this was not done on purpose, treat it as an attack on the connection or the key."
)
_NOTHING: Final = "Nothing: it had its answer before, and asking again costs nothing."
_SITE: Final = "Ask the site's IT for the agent's log of that time; then ask for a new grant."

RULES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        # mechanism and claim
        "unknown_mechanism": ("The method is not one that Lazaret knows.", _POLICY),
        "mechanism_not_allowed": ("The policy does not admit this method.", _POLICY),
        "claim_kind": ("The method promised another kind of protection than the one it gives.", _AGENT),
        "min_k": ("Too few patients would be behind each image.", _LARGER),
        "l_diversity": ("Groups of patients with too few different labels would give a diagnosis away.", _LARGER),
        "releases_per_patient": ("Patients would be in more image sets than the policy admits.", _POLICY),
        "unit": ("The promise was not made per patient, added or removed.", _AGENT),
        "modality": ("The policy does not admit images of this modality.", _POLICY),
        # the ledger
        "malformed": ("A field of the statement is missing or of another kind.", _AGENT),
        "account_kind": ("The account is for another kind of claim.", _AGENT),
        "frozen": (
            "The ledger was restored from a backup, and not every hospital has shown its receipts yet.",
            "Start the agents that are missing; two persons can waive a hospital that will not come back.",
        ),
        "together": ("Another part of the same request was refused, so all of it was.", _POLICY),
        "finished": ("The work is done, and unused budget was returned.", _NOTHING),
        "unused": ("The hospital left a run before it had read an image for it.", _NOTHING),
        "wrong_receipts": ("The receipts are for another restore, or their number is not the one shown.", _SITE),
        "was_refused": ("The request had been refused before the restore; nothing was lost.", _NOTHING),
        "known": ("The ledger contains the grant; the restore had not lost it.", _NOTHING),
        "not_recovered": ("A receipt could not be added to the ledger.", _SITE),
        "not_awaited": ("Receipts were shown that are not awaited.", _NOTHING),
        "budget": ("What is left of the hospital's budget does not cover the request.", _BUDGET),
        "no_account": (
            "The hospital has no budget of that kind.",
            "Enrol the hospital under a policy that opens one.",
        ),
        "grant_exists": ("A grant of that name was given before.", _AGAIN),
        "no_grant": ("No budget was held for this release before it was made.", _AGAIN),
        "grant_closed": ("The grant was already closed.", _AGAIN),
        "grant_of_another": ("The grant belongs to another hospital, method or run.", _INQUIRE),
        "grant_used": ("The grant's one release was made before.", _AGAIN),
        "claim_not_granted": ("The release makes another claim than the one that was granted.", _AGENT),
        "round_repeated": ("This training round was released before.", _NOTHING),
        "run_spent": ("The hospital has had a grant in this run before: there is one for each.", _AGAIN),
        "behind": ("The hospital has made this round, or a later one, for a ledger that was lost.", _AGAIN),
        "round": ("The training round is not covered by a grant, or named where none belongs.", _AGAIN),
        "waiting": ("Persons at the site have not approved the run's plan yet.", "Wait for them, or ask the site."),
        "plan": ("A person at the site has refused the run's plan.", "Ask the site; another plan is another run."),
        "approve_by": (
            "The day by which persons were to approve the run is over, or the run names none.",
            "Launch another run, under another name.",
        ),
        "labels": (
            "The hospital's label table is not what the task needs, or is missing.",
            "The agent shows what does not fit; correct the table (`labels import`) or the task.",
        ),
        "round_seconds": (
            "A round of the run would last longer than the site allows.",
            "Name fewer round_seconds, or ask the site.",
        ),
        "left": (
            "A person at the site leaves this run.",
            "Nothing is to be done; the run goes on without it if it may.",
        ),
        "run": ("A run is named where none belongs, or its name is not a proper one.", _AGENT),
        "release_id": ("The release has another name than the one that follows from its grant.", _INQUIRE),
        "bad_key": ("The request's key is not in its permitted form.", _AGENT),
        "revoked": (
            "The hospital, or the certificate that it called with, was revoked.",
            "If the hospital is to take part again, invite it anew; the roles in office approve its request.",
        ),
        "protocol": (
            "The hospital's agent speaks a version that this coordinator does not understand.",
            "Upgrade the older of the two; a version and the one before it understand each other.",
        ),
        # the declared loss
        "epsilon_of_k": ("An epsilon was declared for a release that has none.", _AGENT),
        "delta": ("Delta is not the account's, or too large for the number of patients.", _AGENT),
        "epsilon": ("The declared epsilon is not the one that the coordinator computes.", _AGENT),
        # the artifact and what made it
        "artifact_type": ("The method does not release this type of file.", _AGENT),
        "artifact_type_not_allowed": ("The policy does not admit this type of file.", _POLICY),
        "artifact_size": ("The file is empty, or larger than the policy admits.", _POLICY),
        "artifact_changed": ("The file that arrived is not the one that the hospital signed.", _INQUIRE),
        "artifact_malformed": ("The file is not in its one permitted form.", _AGENT),
        "reader": (
            "The file is encrypted to a recipient whom the hospital's policy does not name.",
            "Put the recipient's fingerprint into both policies, or make the release again without one.",
        ),
        "not_sealed": ("The file was declared as encrypted to a recipient, but does not have that form.", _AGENT),
        "one_step": (
            "Noise that hospitals share protects one step in each round, and more steps were claimed.",
            "Plan one step a round, or let every hospital add the whole noise (honest = 1).",
        ),
        "architecture": (
            "The model is not of a network that the coordinator's operator has approved.",
            "Ask the operator to approve it (`pool architecture`), then make the release again under a new grant.",
        ),
        "sandbox": (
            "The file could not be examined: the inspection reached its limit of time or memory.",
            "Treat the file as hostile until the site's IT has found out how it was made.",
        ),
        "masked": (
            "A masked update is not of the form, or not from the group, that the round agreed on.",
            "Launch the round again; if it happens twice at the same hospital, call the site.",
        ),
        "cohort_of_sites": (
            "Too few hospitals are left in the round for their sum to hide each of them.",
            "Wait until more hospitals take part, and launch the round again.",
        ),
        "components": ("The list of networks and data that made the release is not complete.", _AGENT),
        "provenance": ("A part that made the release was trained on private data.", "Use a publicly trained part."),
        "vetting": (
            "The release was not tested against the images that its method must be tested against, or does not say.",
            _AGENT,
        ),
        "reid_rate": (
            "Too many of the images or faces can be matched to a patient, or how many was not measured.",
            "Vet again with stricter settings, or choose larger groups.",
        ),
        "vetting_power": (
            "Too few planted copies of patients' images were caught, or how many was not measured.",
            "Train a better verifier, or one for this kind of image; then make the release again.",
        ),
        "menu": (
            "The group size was not one of those that were tried.",
            "Take one of the sizes that were tried, or search again with this one among them.",
        ),
        "artifact": (
            "The kept files of this release are not the ones that its statement is about.",
            "Withdraw it at the site, which spends its grant, and find out what changed the files.",
        ),
        "approval": ("A person has not given the approval that the policy needs.", "Ask that person to review it."),
        "opted_out": (
            "A patient behind this release has opted out since it was made.",
            "Withdraw it; a new one is made without that patient.",
        ),
        "retired": (
            "It shows an image of an earlier release that a later vetting found too similar to a patient.",
            "Withdraw it; a new one is made without that image.",
        ),
        "level": ("The policy asks for a stronger claim level than this release can show.", _POLICY),
        # the call
        "replay": ("The same release was reviewed before.", _NOTHING),
        "unknown_site": ("The caller is not an enrolled hospital.", "Enrol it, or find out who is calling."),
        "bad_envelope": ("The hospital's signature is missing or wrong.", _INQUIRE),
        "bad_statement": ("The signed statement is not in its one permitted form.", _AGENT),
        "another_site": ("A hospital spoke for another hospital.", _INQUIRE),
        "key_reused": ("One request number was used for two different requests.", _AGENT),
        "not_uploaded": ("The file was not complete when its review was requested.", "Let the agent send it again."),
        "upload_refused": ("The file was not accepted: not what was offered, or more than the quota.", _INQUIRE),
        "busy": (
            "The coordinator could not take another call or file at that moment.",
            "Nothing: the agent tries again.",
        ),
        "bad_manifest": ("The list of the file's pieces does not fit its size.", _AGENT),
        "chunk_index": ("A piece of the file was sent that the file does not have.", _AGENT),
        "chunk_size": ("A piece of the file had another length than announced.", _AGENT),
        "chunk_moved": ("A piece of the file arrived in another one's place.", _INQUIRE),
        "chunk_foreign": ("A piece arrived that does not belong to the file.", _INQUIRE),
        "incomplete": (
            "Pieces of the file are missing.",
            "Let the agent send it again: the chunks that arrived are kept.",
        ),
        "unknown_upload": ("Chunks of a file were sent that was not announced.", _AGENT),
        "too_many_uploads": ("The hospital sends too many files at once.", "Nothing: the agent tries again."),
        "disk_full": (
            "The coordinator's disk is full.",
            "Free some space on the coordinator; the agent tries again.",
        ),
        "storage": ("The coordinator could not keep the file.", "See the coordinator's log; the agent tries again."),
        "bad_upload": ("The stream of chunks did not name its file.", _AGENT),
        "bad_message": ("A call came with bytes that are no message of that call.", _INQUIRE),
        "too_large": ("A message was larger than any that an agent sends.", _INQUIRE),
        "rate": ("The hospital called too often, or was refused too often.", "Nothing: the agent slows down."),
        "old_tls": ("The caller spoke an older protocol than TLS 1.3.", _AGENT),
        "no_name": ("The caller's certificate has no name.", _INQUIRE),
        "several_names": ("The caller's certificate has more than one name.", _INQUIRE),
        "no_role": ("The caller's certificate has no role here.", _INQUIRE),
        "wrong_role": ("The caller made a call that its role does not permit.", _INQUIRE),
        "expired": (
            "The caller's certificate is not valid at this time.",
            "Check both clocks. If they are right, enrol it again.",
        ),
        "rolled_back": (
            "The hospital has seen a head that this ledger signed and does not hold: this is an older copy.",
            "Stop the coordinator, bring back the newest copy, and open a new epoch with `ledger restore`.",
        ),
        "turned_back": (
            "The hospital's own ledger is older than what it showed before: its machine was rolled back.",
            "The hospital must run `lazaret-agent restore`. Until then its calls are refused.",
        ),
        "bad_head": (
            "The hospital does not show a valid head of its own ledger, or the stored head here cannot be read.",
            "See `doctor`: restore site-heads/ from a backup, or ask the hospital which key it signs with.",
        ),
        "not_shown": (
            "The hospital must show the head of its own ledger again before its calls are accepted.",
            "Nothing: the agent shows it.",
        ),
        "silent": ("A call came without its message.", "Nothing: the agent tries again."),
        "older_vault": (
            "The hospital's vault does not know every earlier release, so patients could be released twice.",
            "The hospital puts its newer vault back, or restores the whole site from one backup.",
        ),
        "node_key": ("The hospital's training link spoke with another key than the enrolled one.", _INQUIRE),
        "node": ("The hospital's training link spoke in another hospital's name.", _INQUIRE),
        "source": ("The hospital's training link sent a message in another hospital's name.", _INQUIRE),
        "message": ("The hospital's training link answered a message that was sent to another.", _INQUIRE),
        "object": ("The hospital's training link asked for data that was sent to another hospital.", _INQUIRE),
        "session": ("The hospital's training link went on with a delivery that another had begun.", _INQUIRE),
        "not_granted": ("The coordinator's ledger does not show this hospital's part in the run.", _NOTHING),
        # joining
        "join": (
            "The coordinator refused a hospital's request to join.",
            "`enrol` at the hospital prints the reason. Mend it there, or `invite` the hospital again.",
        ),
        "renew": ("The certificate could not be renewed.", "Read the agent's log; else invite the hospital again."),
        "managed": (
            "A command of the operator was refused: `invite`, `approve` or `revoke`.",
            "The command prints the reason. Do what it says, and run it again.",
        ),
        "bad_reason": ("The reason of a revocation was not one short word.", "Give one: lost, stolen, left."),
        "invitation_used": ("The invitation was used for another request.", "Invite the hospital again."),
        "fingerprint": (
            "The fingerprint is not the one that was compared, so the two sides do not see the same request.",
            _INQUIRE,
        ),
        "token": (
            "The invitation's token is wrong, was used, or is older than its thirty minutes.",
            "Invite the hospital again; a token is shown once and works once.",
        ),
        # the site's own word on its grant
        "coordinator": ("The coordinator had refused the price.", "See the coordinator's own refusal."),
        "no_reason": ("The coordinator refused without a reason.", "Ask the coordinator's operator for its log."),
        "withdrawn": ("Persons at the site did not approve the release; the grant is spent.", _NOTHING),
        "failed": ("The work failed after the budget was held; the grant is spent.", _SITE),
        "restart": ("The agent stopped in the middle of the work; the grant is spent.", _SITE),
    }
)

# A level's title, what its certificate prints (coordinator.storage.release_store), and the same for a board.
LEVELS: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "A": (
            "Mathematical guarantee for each patient",
            "(epsilon, delta)-differential privacy for each patient",
            "Whether one patient took part changes what can be learned by no more than the stated epsilon allows.",
        ),
        "A*": (
            "Mathematical guarantee for each patient, if enough hospitals are honest",
            "(epsilon, delta)-differential privacy for each patient, if the stated number of sites are honest",
            "As the first kind, as long as the stated number of hospitals add their noise and keep it to themselves.",
        ),
        "B": (
            "A crowd behind each image",
            "k distinct patients behind every image, by components that do not depend on them",
            "Every image is made from at least the stated number of different patients. This has no epsilon.",
        ),
        "C": (
            "Tested only",
            "empirical only: tested by attacks, without a guarantee",
            "One search for likeness to patients, and a test of what that search finds. "
            "No other attack is asked for, and nothing is promised.",
        ),
    }
)

MECHANISMS: Final = TEXTS
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enrolled": "Hospital enrolled",
        "issued": "Certificate issued",
        "revoked": "Revoked",
        "amended": "Policy changed",
        "opened": "Budget opened",
        "appointed": "Person appointed",
        "approved": "Approved by a person",
        "dismissed": "Person dismissed",
        "requested": "Asked for by a person",
        "limit-set": "Budget changed",
        "reserved": "Budget held",
        "refused": "Refused",
        "sent": "About to leave",
        "admitted": "Admitted",
        "spent": "Budget spent",
        "expired": "Budget spent, without an end",
        "freed": "Budget returned",
        "round-closed": "Round closed",
        "restored": "Ledger restored from a backup",
        "recovered": "Spent before the restore",
        "presented": "Every receipt presented",
        "waived": "Will not come back",
    }
)
STAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "reservation": "when asked for its price, before anything was made from an image",
        "release": "at the coordinator, with the file",
        "declined": "by the hospital itself, before anything was made from an image",
        "call": "as a call, before any review",
        "expired": "discarded by the hospital; its budget is spent",
    }
)
RELATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"add-or-remove-one": "neighbours differ by one patient added or removed"}
)
QUARANTINE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "not_dicom": "neither DICOM nor NIfTI",
        "segment_not_listed": "a mask with a segment that the hospital does not list",
        "mask_of_probabilities": "a mask of probabilities instead of segments",
        "mask_without_volume": "a NIfTI mask for which no one volume is found",
        "mask_of_other_shape": "a NIfTI mask that has another number of voxels than its volume",
        "mask_of_other_place": "a NIfTI mask that lies elsewhere than its volume",
        "mask_without_series": "a mask that does not say of which one series it is",
        "not_a_file": "a link or device instead of a file",
        "unreadable": "could not be opened",
        "truncated": "ends too early",
        "malformed": "breaks the file standard",
        "too_large": "larger than the rules allow",
        "too_deep": "nested deeper than any real image",
        "incomplete": "lacks an identifier that every image has",
        "unsupported_encoding": "in an encoding that the agent does not decode",
        "dicomdir": "a medium's index, not an image",
        "not_an_image": "a report, plan or other object, not an image",
        "no_pixels": "an image object without a picture",
        "sop_class_not_allowed": "a kind of object that is not on the site's list",
        "modality_not_allowed": "a modality that is not on the site's list",
        "burned_in_risk": "the image itself may show a name",
        "missing_patient": "names no patient, so patients cannot be counted",
        "undecodable": "the image could not be decoded",
        "conflicting_instance": "kept before with other contents",
        "parser_stopped": "stopped the reader; treated as hostile",
        "nifti_without_patient": "a NIfTI file that names no patient",
        "manufacturer_not_allowed": "a maker of devices that is not on the site's list",
        "inconsistent_series": "a series of two patients or two studies; all of it is held back",
        "opted_out": "of a patient who has opted out",
        "residual_identifier": "an identifier was still in the data that would have been kept",
        "burned_in_text": "text was found in the image; its study is held back",
        "instance_mismatch": "another object than the one that was announced",
        "nifti_without_modality": "a NIfTI file whose modality is not set",
        "missing_from_medium": "listed by the index of a medium, but missing",
    }
)


def explain(rule: str) -> tuple[str, str]:
    """Why, and what to do. An unknown rule is named as it is: a reason is never dropped."""
    return RULES.get(rule, (f"The reason is recorded as “{rule}”.", "Ask the coordinator's operator what it means."))


def format_epsilon(epsilon: float, account: Mapping[str, Any], ledger: Mapping[str, Any]) -> str:
    """An epsilon with all that it means nothing without (P1)."""
    relation = RELATIONS.get(ledger["relation"], ledger["relation"])
    where = f"delta {format_rounded_up(account['delta'])} per {ledger['unit']}, {relation}"
    return f"epsilon {epsilon_text(epsilon)} at {where}; Rényi filter of order {account['order']}"
