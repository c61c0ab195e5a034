------------------------------- MODULE Resize -------------------------------
(* Another number of regions for a table: seal, drain, commit, prove, decide, switch, open. flush/resizing/README.md  *)
(* tells the same in words.                                                                                           *)
(*                                                                                                                    *)
(* Two resizers may run at once, for different numbers. Each may sleep for ever or begin again at any step; what one  *)
(* has decided anybody finishes. A producer sends batches of one row for each key, in order; it routes by the version *)
(* of the base that it read last, claims the regions and sends each its rows, and where one refuses it reads the      *)
(* routing again and sends the whole batch again, under the same number. So a batch may be half applied when a resize *)
(* begins. A row is a pair of key and batch; the table counts how often it has each.                                  *)
(*                                                                                                                    *)
(* A claim is one step here, and so is a flush: Log.tla and Commit.tla take them apart.                               *)
EXTENDS Naturals, FiniteSets

CONSTANTS
    Keys,               \* numbers
    Buckets,            \* how many regions the table begins with
    Resizers,           \* each the number of regions that it wants
    Batches,
    RoutingMax,
    Allowed,            \* of "restart", "power cut"
    Bug                 \* the guard that is left out, "none" for none

VARIABLES
    region,             \* manifest and log of each region, and what its owner's memory may still answer
    base,               \* the table: routing, regions, rows; and the routing that is on the disk
    decision,           \* per routing version: what follows, by a conditional create
    producer,
    resizer

vars == <<region, base, decision, producer, resizer>>

Regions == 0 .. (IF \E m \in Resizers : m > Buckets THEN CHOOSE m \in Resizers : \A o \in Resizers : o <= m
                                                    ELSE Buckets) - 1
Home(k, n) == k % n
KeysOf(r, n) == {k \in Keys : Home(k, n) = r}
Rows == Keys \X (1 .. Batches)
None == [row \in Rows |-> 0]
Plus(counts, rows) == [row \in Rows |-> counts[row] + (IF row \in rows THEN 1 ELSE 0)]
Sum(one, other) == [row \in Rows |-> one[row] + other[row]]
Max(S) == CHOOSE x \in S : \A y \in S : y <= x

Nobody == 0             \* the owner of a region is whoever claimed it last: a resizer by its number, or
TheProducer == 1000
Undecided == [buckets |-> 0, high |-> 0, missing |-> {}]

Init ==
    /\ region = [r \in Regions |->
        [made |-> r < Buckets, owner |-> Nobody, sealed |-> FALSE, routing |-> 1, log |-> None,
         ssts |-> None, high |-> 0, missing |-> {}, memory |-> "none"]]
    /\ base = [routing |-> 1, buckets |-> Buckets, rows |-> None, synced |-> 1]
    /\ decision = [v \in 1 .. RoutingMax |-> IF v = 1 THEN [Undecided EXCEPT !.buckets = Buckets] ELSE Undecided]
    /\ producer = [at |-> "route", batch |-> 1]
    /\ resizer = [m \in Resizers |-> [at |-> "start"]]

---------------------------------------------------------------------------------------------------------------------
(* The producer, and the regions that it writes to. *)

Route ==
    /\ producer.at = "route" /\ producer.batch <= Batches
    /\ producer' = [at |-> "send", batch |-> producer.batch, routing |-> base.routing, buckets |-> base.buckets,
                    claims |-> {}, acked |-> {}]
    /\ UNCHANGED <<region, base, decision, resizer>>

RoutesAgain == producer' = [at |-> "route", batch |-> producer.batch]

(* A claim by another routing than the region's is refused, and so is one of a sealed region. *)
Claim(r) ==
    LET checked == Bug # "claims_without_checking_the_routing"
        refused == ~region[r].made \/ region[r].sealed \/ (checked /\ region[r].routing > producer.routing)
    IN  /\ producer.at = "send" /\ r < producer.buckets /\ r \notin producer.claims
        /\ IF refused THEN RoutesAgain /\ UNCHANGED region
           ELSE /\ region' = [region EXCEPT ![r].owner = TheProducer]
                /\ producer' = [producer EXCEPT !.claims = @ \cup {r}]
        /\ UNCHANGED <<base, decision, resizer>>

(* Of a batch that counts as applied only the rows go in that an exception lists. *)
LeftOver(r) ==
    LET wanted == KeysOf(r, producer.buckets) IN
    IF producer.batch > region[r].high THEN wanted
    ELSE IF producer.batch = region[r].high THEN wanted \cap region[r].missing ELSE {}

(* A put is refused by the sentinel of a later claim. A batch is acknowledged when all regions with rows of it are. *)
Put(r) ==
    LET rows == {<<k, producer.batch>> : k \in LeftOver(r)}
        acked == producer.acked \cup {r}
        all == {Home(k, producer.buckets) : k \in Keys}
    IN  /\ producer.at = "send" /\ r \in producer.claims
        /\ r \in all \ producer.acked
        /\ IF region[r].owner # TheProducer THEN RoutesAgain /\ UNCHANGED region
           ELSE /\ region' = [region EXCEPT ![r].log = Plus(@, rows), ![r].memory = "answers",
                                 ![r].high = Max({@, producer.batch}),
                                 ![r].missing = IF producer.batch >= region[r].high THEN {} ELSE @]
                /\ producer' = IF acked = all THEN [producer EXCEPT !.batch = @ + 1, !.acked = {},
                                                       !.at = IF producer.batch = Batches THEN "route" ELSE "send"]
                                              ELSE [producer EXCEPT !.acked = acked]
        /\ UNCHANGED <<base, decision, resizer>>

---------------------------------------------------------------------------------------------------------------------
(* A resizer to m regions: flush.resizing.steps. *)

Goes(m, to) == resizer' = [resizer EXCEPT ![m] = to]
GivesUp(m) == Goes(m, [at |-> "start"])
Involved(me, m) == {r \in Regions : r < me.buckets \/ r < m}
Opened(v) == \A r \in Regions : r < decision[v].buckets => region[r].routing >= v
Finished == (base.routing < RoutingMax => decision[base.routing + 1].buckets = 0) /\ Opened(base.routing)

(* Step 1: an earlier resize is finished first. One to the present number goes back, where another has sealed. *)
Begin(m) ==
    /\ resizer[m].at = "start" /\ Finished /\ base.routing < RoutingMax
    /\ base.buckets # m \/ \E r \in Regions : r < m /\ region[r].sealed
    /\ Goes(m, [at |-> "seal", routing |-> base.routing, buckets |-> base.buckets, claims |-> {}])
    /\ UNCHANGED <<region, base, decision, producer>>

(* Step 2: claim and seal are one write. A region that does not exist is created sealed. *)
Seal(m, r) ==
    LET me == resizer[m]
        claims == IF Bug = "seals_without_a_claim" THEN region[r].owner ELSE m
    IN  /\ me.at = "seal" /\ r \in Involved(me, m) \ me.claims
        /\ IF region[r].made /\ region[r].routing > me.routing THEN GivesUp(m) /\ UNCHANGED region
           ELSE /\ region' = [region EXCEPT ![r].made = TRUE, ![r].sealed = TRUE, ![r].owner = claims,
                                 ![r].routing = IF region[r].made THEN @ ELSE me.routing,
                                 ![r].memory = IF @ = "answers" THEN "answers, deposed" ELSE @]
                /\ Goes(m, [me EXCEPT !.claims = @ \cup {r}])
        /\ UNCHANGED <<base, decision, producer>>

Owned(m, r) == region[r].owner = m \/ Bug = "seals_without_a_claim"

(* Step 3, when the older owner's lease has ended. *)
Drain(m, r) ==
    LET me == resizer[m] IN
    /\ me.at = "seal" /\ r < me.buckets /\ r \in me.claims /\ region[r].log # None
    /\ region[r].memory # "answers, deposed" \/ Bug = "decides_before_the_leases_end"
    /\ Owned(m, r)
    /\ region' = [region EXCEPT ![r].ssts = Sum(@, region[r].log), ![r].log = None]
    /\ UNCHANGED <<base, decision, producer, resizer>>

(* Step 4, and whoever else commits. *)
Commit(r) ==
    /\ region[r].ssts # None
    /\ base' = [base EXCEPT !.rows = Sum(@, region[r].ssts)]
    /\ region' = [region EXCEPT ![r].ssts = None]
    /\ UNCHANGED <<decision, producer, resizer>>

(* Step 5, from storage: all claims are ours, so what was read under them still holds: sealed, drained, committed,    *)
(* and no older owner answers any more. Read one after the other, the claims once more at the end: one step here.     *)
Prove(m) ==
    LET me == resizer[m]
        old == {r \in Regions : r < me.buckets}
        high == Max({region[r].high : r \in old})
        missing == UNION {IF region[r].high < high THEN KeysOf(r, me.buckets)
                                                   ELSE region[r].missing \cap KeysOf(r, me.buckets) : r \in old}
    IN  /\ me.at = "seal" /\ Involved(me, m) \subseteq me.claims
        /\ IF \E r \in Involved(me, m) : ~Owned(m, r) THEN GivesUp(m)
           ELSE /\ \A r \in old : region[r].log = None /\ region[r].ssts = None
                /\ \A r \in Involved(me, m) :
                      region[r].memory # "answers, deposed" \/ Bug = "decides_before_the_leases_end"
                /\ Goes(m, [at |-> "decide", next |-> me.routing + 1, high |-> high,
                            missing |-> IF Bug = "forgets_half_applied_batches" THEN {} ELSE missing])
        /\ UNCHANGED <<region, base, decision, producer>>

(* Step 6: the routing that follows, and the one map that all its regions begin with: the newest batch of any, and    *)
(* the rows of it that some lack. By one conditional create: before it nothing has changed, after it nothing can be   *)
(* taken back. Where another has decided, that holds.                                                                 *)
Decide(m) ==
    LET me == resizer[m] IN
    /\ me.at = "decide"
    /\ decision' = IF decision[me.next].buckets = 0 \/ Bug = "decides_over_another"
                   THEN [decision EXCEPT ![me.next] = [buckets |-> m, high |-> me.high, missing |-> me.missing]]
                   ELSE decision
    /\ GivesUp(m)
    /\ UNCHANGED <<region, base, producer>>

---------------------------------------------------------------------------------------------------------------------
(* What anybody does who opens the table: flush.resizing.routing. *)

(* Step 7: one version of the base, by compare-and-swap. *)
Switch ==
    /\ base.routing < RoutingMax /\ decision[base.routing + 1].buckets # 0
    /\ base' = [base EXCEPT !.routing = @ + 1, !.buckets = decision[base.routing + 1].buckets]
    /\ UNCHANGED <<region, decision, producer, resizer>>

(* The switch goes to the disk before a region is opened, whoever made it. *)
Sync ==
    /\ base.synced < base.routing
    /\ base' = [base EXCEPT !.synced = base.routing]
    /\ UNCHANGED <<region, decision, producer, resizer>>

(* Step 8: a claim whose sentinel carries the map; only this breaks a seal. *)
Open(r) ==
    LET v == IF Bug = "opens_before_the_switch" /\ base.routing < RoutingMax /\ decision[base.routing + 1].buckets # 0
             THEN base.routing + 1 ELSE base.routing
    IN  /\ decision[v].buckets # 0 /\ r < decision[v].buckets
        /\ base.synced >= base.routing \/ Bug = "opens_before_the_sync"
        /\ region[r].made /\ region[r].sealed /\ region[r].routing < v
        /\ region' = [region EXCEPT ![r].sealed = FALSE, ![r].owner = Nobody, ![r].routing = v, ![r].memory = "none",
                         ![r].high = decision[v].high, ![r].missing = decision[v].missing]
        /\ UNCHANGED <<base, decision, producer, resizer>>

---------------------------------------------------------------------------------------------------------------------
(* Time, crashes, the machine. *)

LeaseEnds(r) ==
    /\ region[r].memory = "answers, deposed"
    /\ region' = [region EXCEPT ![r].memory = "none"]
    /\ UNCHANGED <<base, decision, producer, resizer>>

Restart(m) ==
    /\ "restart" \in Allowed /\ resizer[m].at # "start"
    /\ GivesUp(m)
    /\ UNCHANGED <<region, base, decision, producer>>

(* Versions of the base that nobody has synced are gone; all processes are. Commits sync before they prune. *)
PowerCut ==
    /\ "power cut" \in Allowed /\ base.synced < base.routing
    /\ base' = [base EXCEPT !.routing = base.synced, !.buckets = decision[base.synced].buckets]
    /\ producer' = [at |-> "route", batch |-> producer.batch]
    /\ resizer' = [m \in Resizers |-> [at |-> "start"]]
    /\ region' = [r \in Regions |-> [region[r] EXCEPT !.memory = "none"]]
    /\ UNCHANGED decision

Environment ==
    \/ \E r \in Regions : LeaseEnds(r)
    \/ \E m \in Resizers : Restart(m)
    \/ PowerCut

Next ==
    \/ Route
    \/ \E r \in Regions : Claim(r)
    \/ \E r \in Regions : Put(r)
    \/ \E m \in Resizers : Begin(m)
    \/ \E m \in Resizers : \E r \in Regions : Seal(m, r)
    \/ \E m \in Resizers : \E r \in Regions : Drain(m, r)
    \/ \E r \in Regions : Commit(r)
    \/ \E m \in Resizers : Prove(m)
    \/ \E m \in Resizers : Decide(m)
    \/ Switch
    \/ Sync
    \/ \E r \in Regions : Open(r)
    \/ Environment

Spec == Init /\ [][Next]_vars

(* Somebody opens the table again and again, storage answers, time goes on. *)
FairSpec == Spec /\ WF_vars(Switch) /\ WF_vars(Sync) /\ \A r \in Regions : WF_vars(Open(r))

---------------------------------------------------------------------------------------------------------------------
(* What must hold. *)

Active(r) == region[r].made /\ ~region[r].sealed
Times(row) ==
    base.rows[row] + Cardinality({r \in Regions : region[r].log[row] = 1})
                   + Cardinality({r \in Regions : region[r].ssts[row] = 1})
                   + Cardinality({r \in Regions : region[r].log[row] > 1 \/ region[r].ssts[row] > 1}) * 2

(* Each row of an acknowledged batch is in the table, none twice. *)
NothingLost == \A row \in Rows : row[2] < producer.batch => Times(row) >= 1
NothingTwice == \A row \in Rows : Times(row) <= 1

(* All regions that take writes are of one routing, and the table has it, on the disk. *)
OneRouting == \A r, s \in Regions : Active(r) /\ Active(s) => region[r].routing = region[s].routing
OpenIsSwitched == \A r \in Regions : Active(r) => base.routing >= region[r].routing
(* A row is in the log of the region that it belongs to, so no key is in two that take writes. *)
RowsAtHome ==
    \A r \in Regions, row \in Rows :
        Active(r) /\ region[r].log[row] > 0 => Home(row[1], decision[region[r].routing].buckets) = r
(* Nobody answers from memory for a key that another region may have taken. *)
NoStaleMemory ==
    \A r, s \in Regions :
        region[r].memory = "answers, deposed" /\ Active(s) => region[s].routing <= region[r].routing
(* A drained region stays so until it is opened. *)
SwitchedIsDrained ==
    \A r \in Regions :
        region[r].made /\ region[r].routing < base.routing => region[r].log = None /\ region[r].ssts = None

(* The table has the routing that was decided, so a decision is final. *)
FollowsTheDecision == base.buckets = decision[base.routing].buckets

(* Not so: TLC must find a way to the last routing, all of it open, and every batch in. *)
NeverDone == ~(base.routing = RoutingMax /\ Opened(RoutingMax) /\ producer.batch > Batches)

(* No decision is made twice. *)
DecidedOnce == [][\A v \in DOMAIN decision : decision[v].buckets # 0 => decision'[v] = decision[v]]_vars

(* What is decided is opened, by whomever. *)
Finishes == \A v \in 2 .. RoutingMax : decision[v].buckets # 0 ~> (base.routing >= v /\ Opened(v))
=============================================================================
