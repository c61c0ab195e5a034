----------------------------- MODULE Manifests -----------------------------
(***************************************************************************)
(* The manifest versions of one region: put-if-absent into the slot behind *)
(* the newest version, while collectors prune the oldest ones.             *)
(*                                                                         *)
(* A writer that slept finds the slot behind its version empty again once  *)
(* that was pruned, and is told CREATED.  What it leaves there is a false  *)
(* version.  No writer may count it as written, and no reader may take it  *)
(* for the newest.                                                         *)
(*                                                                         *)
(* Every write here is a claim, which raises the epoch: epoch = version.   *)
(* An edit by the owner takes the same steps.  Storage as in module Log.   *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
  Writers,      \* they look for the newest version and write the next one
  Collectors,   \* they prune
  MaxVersion,   \* the model is bounded by the number of versions
  Kept,         \* newest versions that every collection keeps
  MaxPuts,      \* and by the number of versions proposed
  Bug           \* the planted bug, "none" for the protocol as it is

VARIABLES
  slot,         \* by version: the edit id of what it holds and that of the version before it
  hint,         \* a version and its edit id
  sent,         \* every put ever sent, as <<version, content>>
  ids,          \* the newest edit id
  writer,       \* the memory of each writer
  collector,    \* the memory of each collector
  chain         \* history: the edit id that a slot got first, 0 while it was never filled

vars == <<slot, hint, sent, ids, writer, collector, chain>>

Versions == 1 .. MaxVersion
Empty == [id |-> 0, before |-> 0]
Exists(v) == v \in Versions /\ slot[v] # Empty
Highest(versions) == CHOOSE v \in versions : \A u \in versions : u <= v
Newest == Highest({v \in Versions : chain[v] # 0})

Fresh == [pc |-> "idle", start |-> 0, startId |-> 0, top |-> 0, topId |-> 0, id |-> 0, began |-> 0]
(* start, startId: where the search begins; startId 0: whatever is there.   top, topId: the newest version found.      *)
(* id: that of the version being written.   began: history, the newest version when the search began.                  *)

Init ==
  /\ slot = [v \in Versions |-> IF v = 1 THEN [id |-> 1, before |-> 0] ELSE Empty]
  /\ hint = [version |-> 1, id |-> 1]
  /\ sent = {}
  /\ ids = 1
  /\ writer = [w \in Writers |-> Fresh]
  /\ collector = [c \in Collectors |-> [pc |-> "idle", gone |-> {}, newest |-> Empty]]
  /\ chain = [v \in Versions |-> IF v = 1 THEN 1 ELSE 0]

-----------------------------------------------------------------------------
Storage == <<slot, hint, sent, ids, chain>>
Becomes(w, memory) == writer' = [writer EXCEPT ![w] = memory]

(* -- The newest version: a start, probes, and then a read of the start ---- *)

ReadHint(w) ==
  /\ writer[w].pc = "idle"
  /\ Becomes(w, [Fresh EXCEPT !.pc = "probe", !.start = hint.version, !.top = hint.version, !.began = Newest,
                              !.startId = hint.id])
  /\ UNCHANGED <<Storage, collector>>

(* Without a sound hint the search starts at the highest version of a page. *)
ListPage(w) ==
  LET top == Highest({v \in Versions : Exists(v)})
  IN /\ writer[w].pc = "list"
     /\ Becomes(w, [writer[w] EXCEPT !.pc = "probe", !.start = top, !.top = top, !.startId = 0])
     /\ UNCHANGED <<Storage, collector>>

ProbeVersion(w) ==
  LET me == writer[w]
  IN /\ me.pc = "probe"
     /\ Becomes(w, IF Exists(me.top + 1) THEN [me EXCEPT !.top = @ + 1] ELSE [me EXCEPT !.pc = "read"])
     /\ UNCHANGED <<Storage, collector>>

(* The start in its place, after the next version was missing, proves that nothing above it was pruned. *)
Checked(w, me) ==
  LET sound == Exists(me.start) /\ (me.startId \in {0, slot[me.start].id} \/ Bug = "HintWithoutId")
  IN Becomes(w, [me EXCEPT !.pc = CASE ~sound /\ Bug # "StartNotRead" -> "list"
                                    [] me.startId = 0 /\ Bug # "ListedOnce" -> "again"
                                    [] OTHER -> "found"])

ReadTop(w) ==
  LET me == writer[w]
      read == [me EXCEPT !.pc = "check", !.topId = slot[me.top].id]
  IN /\ me.pc = "read"
     /\ IF ~Exists(me.top) THEN Becomes(w, [me EXCEPT !.pc = "list"])
        ELSE IF me.top = me.start THEN Checked(w, read)  \* one read for both
        ELSE Becomes(w, read)
     /\ UNCHANGED <<Storage, collector>>

ReadStart(w) ==
  /\ writer[w].pc = "check"
  /\ Checked(w, writer[w])
  /\ UNCHANGED <<Storage, collector>>

(* A listed start has no known edit id.  Still the highest of a page, it is no false version, so it was not pruned. *)
ListAgain(w) ==
  LET me == writer[w]
      listed == Highest({v \in Versions : Exists(v)})
  IN /\ me.pc = "again"
     /\ Becomes(w, IF listed \in {me.start, me.top} THEN [me EXCEPT !.pc = "found"]
                   ELSE [me EXCEPT !.pc = "probe", !.start = listed, !.top = listed, !.topId = 0])
     /\ UNCHANGED <<Storage, collector>>

(* -- The next version ------------------------------------------------------ *)

(* Each version has a fresh edit id, so that two claimers never propose the same bytes. *)
SendVersion(w) ==
  LET me == writer[w]
      id == IF Bug = "NoEditId" THEN me.top + 1 ELSE ids + 1
  IN /\ me.pc = "found"
     /\ me.top + 1 \in Versions
     /\ ids <= MaxPuts
     /\ ids' = ids + 1
     /\ sent' = sent \cup {<<me.top + 1, [id |-> id, before |-> me.topId]>>}
     /\ Becomes(w, [Fresh EXCEPT !.pc = "put", !.top = me.top, !.topId = me.topId, !.id = id])
     /\ UNCHANGED <<slot, hint, collector, chain>>

Lands(version, content) ==
  /\ slot' = [slot EXCEPT ![version] = IF @ = Empty THEN content ELSE @]
  /\ chain' = [chain EXCEPT ![version] = IF @ = 0 THEN content.id ELSE @]

PutVersion(w) ==
  LET me == writer[w]
  IN /\ me.pc = "put"
     /\ Lands(me.top + 1, [id |-> me.id, before |-> me.topId])
     /\ Becomes(w, IF slot'[me.top + 1].id # me.id THEN Fresh
                   ELSE [me EXCEPT !.pc = IF Bug = "NoLookBefore" THEN "written" ELSE "follow"])
     /\ UNCHANGED <<hint, sent, ids, collector>>

(* The version before, in its place, proves that our slot had never been filled; else this is a lost race. *)
ReadBefore(w) ==
  LET me == writer[w]
  IN /\ me.pc = "follow"
     /\ Becomes(w, IF slot[me.top].id = me.topId THEN [me EXCEPT !.pc = "written"] ELSE Fresh)
     /\ UNCHANGED <<Storage, collector>>

WriteHint(w) ==
  LET me == writer[w]
  IN /\ me.pc = "written"
     /\ hint' = [version |-> me.top + 1, id |-> me.id]
     /\ Becomes(w, [me EXCEPT !.pc = "owner", !.topId = 0])
     /\ UNCHANGED <<slot, sent, ids, collector, chain>>

-----------------------------------------------------------------------------
(* A collection: the listing first, then the newest version, the hint, and the oldest versions one after the other. *)

ListVersions(c) ==
  /\ collector[c].pc = "idle"
  /\ Newest > Kept
  /\ collector' = [collector EXCEPT ![c].pc = "look", ![c].gone = {v \in Versions : Exists(v)}]
  /\ UNCHANGED <<Storage, writer>>

(* The look of the collector is that of a writer: it takes one step here, since ReadHint to ReadStart are checked above. *)
LookForNewest(c) ==
  LET newest == [id |-> chain[Newest], before |-> Newest]
  IN /\ collector[c].pc = "look"
     /\ collector' = [collector EXCEPT ![c] =
          IF Newest \in @.gone
          THEN [pc |-> "hint", newest |-> newest, gone |-> {v \in @.gone : v <= Newest - Kept}]
          ELSE [@ EXCEPT !.pc = "idle", !.gone = {}]]
     /\ UNCHANGED <<Storage, writer>>

HintBeforePruning(c) ==
  /\ collector[c].pc = "hint"
  /\ hint' = [version |-> collector[c].newest.before, id |-> collector[c].newest.id]
  /\ collector' = [collector EXCEPT ![c].newest = Empty, ![c].pc = IF collector[c].gone = {} THEN "idle" ELSE "prune"]
  /\ UNCHANGED <<slot, sent, ids, writer, chain>>

Prune(c) ==
  LET gone == collector[c].gone
      next == IF Bug = "NewestFirst" THEN Highest(gone) ELSE CHOOSE v \in gone : \A u \in gone : v <= u
  IN /\ collector[c].pc = "prune"
     /\ slot' = [slot EXCEPT ![next] = Empty]
     /\ collector' = [collector EXCEPT ![c].gone = gone \ {next}, ![c].pc = IF gone = {next} THEN "idle" ELSE @]
     /\ UNCHANGED <<hint, sent, ids, writer, chain>>

-----------------------------------------------------------------------------
LandLate ==
  \E put \in sent :
    /\ slot[put[1]] = Empty
    /\ Lands(put[1], put[2])
    /\ UNCHANGED <<hint, sent, ids, writer, collector>>

(* A writer crashes, or ends its work.  Before it sent anything, a crash leaves nothing behind; nor does one that is not *)
(* started again, which is the same as to sleep for ever.                                                               *)
Crash(w) ==
  /\ writer[w].pc \in {"put", "follow", "written", "owner"}
  /\ Becomes(w, Fresh)
  /\ UNCHANGED <<Storage, collector>>

(* A collector ends between two deletes, and begins another collection in the end. Ended before, it has changed nothing. *)
EndCollection(c) ==
  /\ collector[c].pc = "prune"
  /\ collector' = [collector EXCEPT ![c].pc = "idle", ![c].gone = {}]
  /\ UNCHANGED <<Storage, writer>>

Environment ==
  \/ LandLate
  \/ \E w \in Writers : Crash(w)
  \/ \E c \in Collectors : EndCollection(c)

Next ==
  \/ \E w \in Writers :
       \/ ReadHint(w)
       \/ ListPage(w)
       \/ ProbeVersion(w)
       \/ ReadTop(w)
       \/ ReadStart(w)
       \/ ListAgain(w)
       \/ SendVersion(w)
       \/ PutVersion(w)
       \/ ReadBefore(w)
       \/ WriteHint(w)
  \/ \E c \in Collectors :
       \/ ListVersions(c)
       \/ LookForNewest(c)
       \/ HintBeforePruning(c)
       \/ Prune(c)
  \/ Environment

Spec == Init /\ [][Next]_vars

(* A put of version 2 by a writer that sleeps is still under way, though another writer has written that version. *)
Sleeper == CHOOSE w \in Writers : TRUE
Late ==
  /\ slot = [v \in Versions |-> CASE v = 1 -> [id |-> 1, before |-> 0] [] v = 2 -> [id |-> 3, before |-> 1] [] OTHER -> Empty]
  /\ hint = [version |-> 1, id |-> 1]
  /\ sent = {<<2, [id |-> 2, before |-> 1]>>, <<2, [id |-> 3, before |-> 1]>>}
  /\ ids = 3
  /\ writer = [w \in Writers |-> IF w = Sleeper THEN [Fresh EXCEPT !.pc = "put", !.top = 1, !.topId = 1, !.id = 2] ELSE Fresh]
  /\ collector = [c \in Collectors |-> [pc |-> "idle", gone |-> {}, newest |-> Empty]]
  /\ chain = [v \in Versions |-> CASE v = 1 -> 1 [] v = 2 -> 3 [] OTHER -> 0]
LateSpec == Late /\ [][Next]_vars
(* To keep this small, what follows a collection that began before the last version was there is left out. *)
CollectsLate == \A c \in Collectors : collector[c].pc # "idle" => Newest = MaxVersion
Symmetry == Permutations(Writers) \cup Permutations(Collectors)

-----------------------------------------------------------------------------
(* What must hold. *)

(* What a writer counts as written is in the chain, so it is no false version. *)
WrittenIsTrue == \A w \in Writers : writer[w].pc \in {"written", "owner"} => chain[writer[w].top + 1] = writer[w].id

(* Each version of the chain follows the one before it, so every write was made in view of all earlier ones. *)
ChainHasNoFork == \A v \in Versions : v > 1 /\ slot[v] # Empty /\ slot[v].id = chain[v] => slot[v].before = chain[v - 1]

(* A look finds the newest version of some moment since it began, and never a false one. *)
LooksAreTrue ==
  \A w \in Writers : writer[w].pc = "found" => chain[writer[w].top] = writer[w].topId /\ writer[w].top >= writer[w].began

OneOwnerPerEpoch ==
  \A w, v \in Writers : w # v /\ writer[w].pc = "owner" /\ writer[v].pc = "owner" => writer[w].top # writer[v].top

HintIsTrue == chain[hint.version] = hint.id

(* What was pruned is not needed: the newest versions stay. *)
NewestStay == \A v \in Versions : v > Newest - Kept /\ v <= Newest => slot[v].id = chain[v]

(* Not vacuous: each of these must be violated. *)
NeverFalse == \A v \in Versions : slot[v] # Empty => slot[v].id = chain[v]
NeverOwner == \A w \in Writers : writer[w].pc # "owner"
=============================================================================
