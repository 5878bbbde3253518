/*
 * Two ledgers and a lossy network: can a release leave the hospital that the books do not cover?
 *
 * One account of one site, GRANTS grants on it, each for ROUNDS releases of price 1, and a budget of LIMIT. A
 * one-off release is ROUNDS = 1; a federated run is more. The README beside this file says which line of the model
 * is which function of the code, and what is left out.
 *
 * Time: there is none. A lease expires, a process dies and a message arrives whenever the checker likes.
 * Network: a message, once sent, can be read any number of times, in any order, or never.
 * Disk: an atomic step writes one ledger transaction; what is not called volatile survives a crash. A reply is
 * put into the network in the step that makes it durable: a crash in between is a reply that nobody reads.
 *
 * Every rule can be broken with a -D of the names below; each break must be found, see tests/test_model.py.
 *   RESTART_FREES CANCEL_NOT_DURABLE OUT_BEFORE_GRANT SENT_NOT_DURABLE RESERVE_NOT_DURABLE REJECTED_FREES
 *   SITE_PAYS_ANSWERED SITE_UNCHECKED SITE_ROLLBACK                                   (the site)
 *   EXPIRY_FREES SETTLEMENT_FREES GRANT_NOT_DURABLE NO_KEYS HUB_PAYS_ADMITTED HUB_UNCHECKED   (the coordinator)
 *   RESTORE_UNFROZEN RECEIPTS_STALE RECEIPTS_OF_SENT_ONLY RECEIPTS_SKIP_REFUSED
 *   WAIVER_KEEPS_HELD                                                                 (restore from backup)
 * RESTART_FREES_UNSENT is not a break: with durable sent entries it is safe, which is what makes
 * SENT_NOT_DURABLE a test of the sent entry. NO_RESTORE narrows what is run, ONLY_LOSS and ONLY_GRANTING what is
 * asked, and WITNESS asks for a state that must be found: a model in which nothing happens would be safe too.
 */
#ifndef GRANTS
#define GRANTS 2
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#ifndef LIMIT
#define LIMIT 1
#endif
#ifdef SENT_NOT_DURABLE
#define RESTART_FREES_UNSENT
#endif

mtype = { NONE, HELD, SPENT, FREED, REFUSED };  /* a grant in a ledger */
mtype = { IDLE, ASKED, CLEARED, PACKED };       /* a grant in the agent's memory */
mtype = { YES, NO };                            /* what an idempotency key has led to */

/* The site's ledger, and what the agent's process knows besides */
mtype site[GRANTS] = NONE;      /* REFUSED: by the site itself */
byte sitePaid[GRANTS];          /* what a SPENT grant has cost */
byte sent[GRANTS];              /* sent entries: rounds that are about to leave, or have left */
byte heard[GRANTS];             /* the last round whose admission is written down here */
mtype agent[GRANTS] = IDLE;     /* volatile */

/* The coordinator's ledger, here the hub's */
mtype hub[GRANTS] = NONE;
byte hubPaid[GRANTS];
byte admitted[GRANTS];          /* the last admitted round: the grant's `used` */
mtype answer[GRANTS] = NONE;    /* to the key of the reservation */
mtype verdict[GRANTS * ROUNDS] = NONE;  /* to the key of each submission */
byte filled;                    /* spent by a waiver, under no grant */
bool restored, frozen;          /* the second epoch; frozen until the receipts are in */

/* The network */
bool mReserve[GRANTS], mGranted[GRANTS], mRefused[GRANTS];
bool mSettle[GRANTS];           /* "declined" or "expired": nothing more will come */
byte mUsed[GRANTS];             /* "spent, so much of it": 0 is no message */
bool mAdmitted[GRANTS * ROUNDS], mRejected[GRANTS * ROUNDS];
bool mReceipts, receipt[GRANTS];

#ifdef WITNESS
bool inSecondEpoch[GRANTS];     /* granted after the restore */
#endif

/* The truth: artifacts that left the hospital. They stay in the network too, for the coordinator to read */
byte left[GRANTS];

/* the checker names the assertion that failed; each has one of its own */
hidden byte real_loss_above_the_limit = 1;
hidden byte site_does_not_cover_the_loss = 1;
hidden byte hub_does_not_cover_the_loss = 1;
hidden byte site_overspent = 1;
hidden byte hub_overspent = 1;
hidden byte released_under_a_freed_grant = 1;
hidden byte two_answers_to_one_key = 1;
hidden byte granted_over_a_forgotten_loss = 1;
hidden byte witnessed = 1;

#define KEY(i, r) ((i) * ROUNDS + (r) - 1)
#define SITE_TAKES(i) (site[i] == HELD -> ROUNDS : sitePaid[i])
#define HUB_TAKES(i) (hub[i] == HELD -> ROUNDS : hubPaid[i])
#if GRANTS == 2
#define SUM(F) (F(0) + F(1))
#define ANY(F) (F(0) || F(1))
#elif GRANTS == 3
#define SUM(F) (F(0) + F(1) + F(2))
#define ANY(F) (F(0) || F(1) || F(2))
#elif GRANTS == 4
#define SUM(F) (F(0) + F(1) + F(2) + F(3))
#define ANY(F) (F(0) || F(1) || F(2) || F(3))
#else
#error "write SUM and ANY, Crash and init for that many grants"
#endif
#if ROUNDS < 1 || ROUNDS > 2
#error "write the steps of Site and Hub for that many rounds"
#endif
#define LEFT(i) left[i]
#define RUNNING(i) (agent[i] != IDLE)
#define LOSS SUM(LEFT)
#define SITE_TAKEN SUM(SITE_TAKES)
#define HUB_TAKEN (SUM(HUB_TAKES) + filled)
/* ids are drawn fresh: one that was ever used anywhere is never drawn again; grants start in their ids' order */
#define USED(i) (mReserve[i] || mSettle[i])

/* ------------------------------------------------------------------------------------------------ the site */

#ifdef CANCEL_NOT_DURABLE
bool forgets[GRANTS];
#define unsynced(i) forgets[i] = true
#else
#define unsynced(i) skip
#endif

#ifdef SITE_UNCHECKED
#define SITE_HAS_ROOM true
#else
#define SITE_HAS_ROOM (SITE_TAKEN + ROUNDS <= LIMIT)
#endif

inline reserve(i) {             /* pipeline.price: the site's own ledger first, durable, then ask */
  if
  :: SITE_HAS_ROOM -> site[i] = HELD; agent[i] = ASKED; mReserve[i] = true
  :: else -> site[i] = REFUSED; mSettle[i] = true
  fi
}

inline refused(i) {             /* pipeline.price: the coordinator said no, so nothing was read */
  agent[i] = IDLE;
  if
  :: site[i] == HELD -> site[i] = FREED; unsynced(i)
  :: else
  fi
}

inline close(i) {               /* pipeline.give_up, recover: an end that is not known costs everything */
  if
#ifdef RESTART_FREES
  :: agent[i] == IDLE -> site[i] = FREED
#endif
#ifdef RESTART_FREES_UNSENT
  :: agent[i] == IDLE && sent[i] == 0 -> site[i] = FREED
#endif
  :: site[i] = SPENT; sitePaid[i] = ROUNDS
  fi;
  mSettle[i] = true
}

inline finish(i) {              /* a run that ends early pays what may have left: every sent entry */
  site[i] = SPENT;
#ifdef SITE_PAYS_ANSWERED
  sitePaid[i] = heard[i];
#else
  sitePaid[i] = sent[i];
#endif
  mUsed[i] = sitePaid[i]
}

inline record(i, r) {           /* register.record, from leave or from ask at a restart */
  if
  :: mAdmitted[KEY(i, r)] && heard[i] < r -> heard[i] = r;
     if
     :: r == ROUNDS -> site[i] = SPENT; sitePaid[i] = ROUNDS
     :: else
     fi
  :: mRejected[KEY(i, r)] && r == ROUNDS ->     /* it was made from patients, and it left */
#ifdef REJECTED_FREES
     site[i] = FREED
#else
     site[i] = SPENT; sitePaid[i] = ROUNDS
#endif
  fi
}
#define TOLD(i, r) (site[i] == HELD && sent[i] >= r && \
    ((mAdmitted[KEY(i, r)] && heard[i] < r) || (mRejected[KEY(i, r)] && r == ROUNDS)))

inline crash() {                /* kill -9, power: what is volatile is gone */
  d_step {
    j = 0;
    do
    :: j < GRANTS -> agent[j] = IDLE;
#ifdef CANCEL_NOT_DURABLE
       if
       :: forgets[j] -> site[j] = HELD; forgets[j] = false
       :: else
       fi;
#endif
#ifdef SENT_NOT_DURABLE
       sent[j] = 0;
#endif
#ifdef RESERVE_NOT_DURABLE
       if
       :: site[j] == HELD -> site[j] = NONE
       :: else
       fi;
#endif
       j++
    :: else -> break
    od;
    j = 0
  }
}

#ifdef OUT_BEFORE_GRANT
#define MAY_PACK(i) (agent[i] == CLEARED || agent[i] == ASKED)
#else
#define MAY_PACK(i) (agent[i] == CLEARED)
#endif

proctype Site(byte i) {
end:
  do
  :: atomic { site[i] == NONE && !USED(i) && (i == 0 || USED(i - 1)) -> reserve(i) }
  :: atomic { agent[i] == ASKED && mGranted[i] -> agent[i] = CLEARED }
  :: atomic { agent[i] == ASKED && mRefused[i] -> refused(i) }
  :: atomic { MAY_PACK(i) && site[i] == HELD && sent[i] < ROUNDS -> sent[i]++; agent[i] = PACKED }  /* set_out */
  :: atomic { agent[i] == PACKED -> left[i]++; agent[i] = CLEARED }      /* leave, or the federated link */
  :: atomic { TOLD(i, 1) -> record(i, 1) }
#if ROUNDS > 1
  :: atomic { TOLD(i, 2) -> record(i, 2) }
  :: atomic { site[i] == HELD && sent[i] > 0 && agent[i] != IDLE -> finish(i) }
#endif
  :: atomic { site[i] == HELD -> close(i) }
  od
}

proctype Crash() {
  byte j;
end:
  do
  :: atomic { ANY(RUNNING) -> crash() }
  od
}

/* ----------------------------------------------------------------------------------------- the coordinator */

#ifdef NO_KEYS
#define NEW(what) true
#else
#define NEW(what) (what == NONE)
#endif

#ifdef HUB_UNCHECKED
#define HUB_HAS_ROOM true
#else
#define HUB_HAS_ROOM (HUB_TAKEN + ROUNDS <= LIMIT)
#endif

inline decide(i) {              /* register.reserve: hold the price, or refuse, for whatever reason of policy */
  if
  :: hub[i] == NONE && !frozen && HUB_HAS_ROOM ->
#if !defined(ONLY_LOSS) && !defined(WITNESS)
     assert(granted_over_a_forgotten_loss == 0 || LOSS <= HUB_TAKEN);
#endif
     answer[i] = YES; mGranted[i] = true; hub[i] = HELD;
#ifdef WITNESS
     inSecondEpoch[i] = restored
#endif
  :: answer[i] = NO; mRefused[i] = true
  fi
}

inline review(i, r) {           /* register.admit: under a held grant, in order, or not at all */
  if
  :: hub[i] == HELD && admitted[i] < r -> verdict[KEY(i, r)] = YES; mAdmitted[KEY(i, r)] = true; admitted[i] = r
  :: verdict[KEY(i, r)] = NO; mRejected[KEY(i, r)] = true
  fi;
  if
  :: hub[i] == HELD && r == ROUNDS -> hub[i] = SPENT; hubPaid[i] = ROUNDS
  :: else
  fi
}

proctype Hub(byte i) {
end:
  do
  :: atomic { mReserve[i] && NEW(answer[i]) -> decide(i) }
  :: atomic { left[i] >= 1 && NEW(verdict[KEY(i, 1)]) -> review(i, 1) }
#if ROUNDS > 1
  :: atomic { left[i] >= 2 && NEW(verdict[KEY(i, 2)]) -> review(i, 2) }
  :: atomic { mUsed[i] > 0 && hub[i] == HELD -> hub[i] = SPENT; hubPaid[i] = mUsed[i] }  /* the site's signed word */
#endif
  :: atomic { mSettle[i] && hub[i] == HELD ->
#ifdef SETTLEMENT_FREES
       hub[i] = FREED
#else
       hub[i] = SPENT; hubPaid[i] = ROUNDS
#endif
     }
  :: atomic { hub[i] == HELD ->                 /* the lease ran out, by whatever the clock says */
#ifdef EXPIRY_FREES
       hub[i] = FREED
#else
       hub[i] = SPENT; hubPaid[i] = ROUNDS
#endif
     }
#ifdef HUB_PAYS_ADMITTED
  :: atomic { hub[i] == HELD && admitted[i] > 0 -> hub[i] = SPENT; hubPaid[i] = admitted[i] }
#endif
#ifdef GRANT_NOT_DURABLE
  :: atomic { hub[i] == HELD -> hub[i] = NONE; answer[i] = NONE }        /* said yes, then died before the write */
#endif
  od
}

/* ------------------------------------------------------------------------------------- restore from backup */

#ifndef NO_RESTORE
bool saved;                     /* at any moment, once; a backup of the empty ledger is there from the start */
mtype oldHub[GRANTS] = NONE;
byte oldPaid[GRANTS], oldAdmitted[GRANTS];
mtype oldAnswer[GRANTS] = NONE;
mtype oldVerdict[GRANTS * ROUNDS] = NONE;

#ifdef RECEIPTS_OF_SENT_ONLY
#define RECEIPT(i) (sent[i] > 0)
#elif defined(RECEIPTS_SKIP_REFUSED)     /* "the coordinator has an answer to that reservation, so it knows it" */
#define RECEIPT(i) ((site[i] == HELD || site[i] == SPENT) && answer[i] == NONE)
#else
#define RECEIPT(i) (site[i] == HELD || site[i] == SPENT)
#endif
#ifdef RECEIPTS_STALE
#define ASKED_FOR_RECEIPTS (frozen || !restored)
#else
#define ASKED_FOR_RECEIPTS frozen
#endif

inline save() {
  d_step {
    saved = true; j = 0;
    do
    :: j < GRANTS -> oldHub[j] = hub[j]; oldPaid[j] = hubPaid[j]; oldAdmitted[j] = admitted[j];
       oldAnswer[j] = answer[j]; j++
    :: else -> break
    od;
    j = 0;
    do
    :: j < GRANTS * ROUNDS -> oldVerdict[j] = verdict[j]; j++
    :: else -> break
    od;
    j = 0
  }
}

inline restore() {              /* the backup's copy is blanked, so that equal states are seen to be equal */
  d_step {
    saved = false; restored = true; j = 0;
#ifndef RESTORE_UNFROZEN
    frozen = true;
#endif
    do
    :: j < GRANTS -> hub[j] = oldHub[j]; hubPaid[j] = oldPaid[j]; admitted[j] = oldAdmitted[j];
       answer[j] = oldAnswer[j];
       oldHub[j] = NONE; oldPaid[j] = 0; oldAdmitted[j] = 0; oldAnswer[j] = NONE; j++
    :: else -> break
    od;
    j = 0;
    do
    :: j < GRANTS * ROUNDS -> verdict[j] = oldVerdict[j]; oldVerdict[j] = NONE; j++
    :: else -> break
    od;
    j = 0
  }
}

inline present() {              /* the site's grants that have no free end, and what was sent under them */
  d_step {
    mReceipts = true; j = 0;
    do
    :: j < GRANTS -> receipt[j] = RECEIPT(j); j++
    :: else -> break
    od;
    j = 0
  }
}

inline recover() {              /* what the backup had lost is spent whole; then the freeze ends */
  d_step {
    frozen = false; mReceipts = false; j = 0;
    do
    :: j < GRANTS ->
       if
       :: receipt[j] && hub[j] == NONE -> hub[j] = SPENT; hubPaid[j] = ROUNDS
       :: else
       fi;
       receipt[j] = false; j++
    :: else -> break
    od;
    j = 0
  }
}

inline waive() {                /* two persons: this site will not come back, so all of its budget is spent */
  d_step {
    frozen = false; mReceipts = false; j = 0;
    do
    :: j < GRANTS -> receipt[j] = false;
#ifndef WAIVER_KEEPS_HELD
       if
       :: hub[j] == HELD -> hub[j] = SPENT; hubPaid[j] = ROUNDS
       :: else
       fi;
#endif
       j++
    :: else -> break
    od;
    j = 0;
    if
    :: HUB_TAKEN < LIMIT -> filled = LIMIT - HUB_TAKEN
    :: else
    fi
  }
}

proctype Backup() {
  byte j;
end:
  do
  :: atomic { !saved && !restored -> save() }
  :: atomic { !restored -> restore() }
  :: atomic { ASKED_FOR_RECEIPTS -> present() }
  :: atomic { frozen && mReceipts -> recover() }
  :: atomic { frozen -> waive() }
  od
}
#endif

#ifdef SITE_ROLLBACK            /* the site's own ledger goes back to any earlier state, and nobody notices */
bool siteSaved, siteRestored;
mtype oldSite[GRANTS] = NONE;
byte oldSitePaid[GRANTS], oldSent[GRANTS], oldHeard[GRANTS];

inline copySite(toLedger) {
  d_step {
    j = 0;
    do
    :: j < GRANTS && toLedger -> site[j] = oldSite[j]; sitePaid[j] = oldSitePaid[j]; sent[j] = oldSent[j];
       heard[j] = oldHeard[j]; agent[j] = IDLE; j++
    :: j < GRANTS && !toLedger -> oldSite[j] = site[j]; oldSitePaid[j] = sitePaid[j]; oldSent[j] = sent[j];
       oldHeard[j] = heard[j]; j++
    :: else -> break
    od;
    j = 0
  }
}

proctype SiteBackup() {
  byte j;
end:
  do
  :: atomic { !siteSaved && !siteRestored -> siteSaved = true; copySite(false) }
  :: atomic { !siteRestored -> siteRestored = true; copySite(true) }
  od
}
#endif

init {
  atomic {
    run Site(0); run Hub(0); run Site(1); run Hub(1);
#if GRANTS > 2
    run Site(2); run Hub(2);
#endif
#if GRANTS > 3
    run Site(3); run Hub(3);
#endif
    run Crash();
#ifndef NO_RESTORE
    run Backup();
#endif
#ifdef SITE_ROLLBACK
    run SiteBackup();
#endif
  }
}

/* ---------------------------------------------------------------------------------------------- what must hold */

#define UNDER_FREED(i) (left[i] > 0 && site[i] == FREED)
#define TWO_ANSWERS(i) (mGranted[i] && mRefused[i])
#define TWO_VERDICTS(i) (mAdmitted[KEY(i, 1)] && mRejected[KEY(i, 1)])

/* states that must be found; the name of each is in tests/test_model.py */
#define ENDED(i) (site[i] == SPENT && hub[i] == SPENT)
#if WITNESS == 1
#define SEEN (left[0] == ROUNDS && heard[0] == ROUNDS && admitted[0] == ROUNDS && ENDED(0))
#elif WITNESS == 2
#define SEEN (LOSS == LIMIT && SITE_TAKEN == LIMIT && HUB_TAKEN == LIMIT)
#elif WITNESS == 3
#define SEEN (site[0] == FREED && heard[1] == ROUNDS && ENDED(1))
#elif WITNESS == 4
#define SEEN (left[0] == 0 && mGranted[0] && mSettle[0] && agent[0] == IDLE && ENDED(0))
#elif WITNESS == 5
#define SEEN (left[0] > 0 && admitted[0] == 0 && heard[0] == 0 && mRejected[KEY(0, ROUNDS)] && !restored && ENDED(0))
#elif WITNESS == 6
#define SEEN (left[0] > 0 && hub[0] == SPENT && answer[0] == NONE && inSecondEpoch[1] && admitted[1] == ROUNDS \
    && ENDED(1))
#elif WITNESS == 7
#define SEEN (!frozen && filled > 0 && LOSS > 0)
#elif WITNESS == 8
#define SEEN (sitePaid[0] == 1 && hubPaid[0] == 1 && left[0] == 1 && heard[1] == ROUNDS && ENDED(1) && LOSS == LIMIT)
#endif

/* Not covered by these: what the coordinator's books say while it is frozen, since it was not told yet; and after a
   restore they may say more than the limit, since what is re-entered is the whole price, nothing given back. */
never {
  do
#if defined(WITNESS)
  :: atomic { SEEN -> assert(witnessed == 0) }
#elif !defined(ONLY_GRANTING)
  :: atomic { LOSS > LIMIT -> assert(real_loss_above_the_limit == 0) }
#ifndef ONLY_LOSS
  :: atomic { LOSS > SITE_TAKEN -> assert(site_does_not_cover_the_loss == 0) }
  :: atomic { !frozen && LOSS > HUB_TAKEN -> assert(hub_does_not_cover_the_loss == 0) }
  :: atomic { SITE_TAKEN > LIMIT -> assert(site_overspent == 0) }
  :: atomic { HUB_TAKEN > LIMIT && (ROUNDS == 1 || !restored) -> assert(hub_overspent == 0) }
  :: atomic { ANY(UNDER_FREED) -> assert(released_under_a_freed_grant == 0) }
  :: atomic { !restored && (ANY(TWO_ANSWERS) || ANY(TWO_VERDICTS)) -> assert(two_answers_to_one_key == 0) }
#endif
#endif
  :: else
  od
}
