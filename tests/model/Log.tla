-------------------------------- MODULE Log --------------------------------
(***************************************************************************)
(* The write-ahead log of one region: claims, sentinels, appends, replay,  *)
(* flushes and the collection of entries.                                  *)
(*                                                                         *)
(* An action of the protocol makes one storage call, or none.  Storage     *)
(* never loses what it holds, but it may take a put late, more than once,  *)
(* and without an answer: every put ever sent stays in `sent` and may fill *)
(* its slot whenever that is empty.  A process may sleep before any step   *)
(* and crash at any moment; it starts again with nothing in memory.        *)
(*                                                                         *)
(* Here the newest manifest is one object with a conditional write.  How   *)
(* that is made of versions which are pruned: module Manifests.  When an   *)
(* owner answers reads: module Lease.  Readers of storage: module Tail.    *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
  Writers,     \* processes that claim the region and append to it
  Collectors,  \* processes that delete entries
  Tokens,      \* rows that clients put, each under its token, and again until they are acked
  MaxEpoch,    \* the model is bounded by the number of claims
  Bug          \* the planted bug, "none" for the protocol as it is

VARIABLES
  manifest,    \* the newest one: its epoch, replay_after, and the rows in SSTs and the base
  entry,       \* by position: what the slot holds
  late,        \* positions whose entry is younger than one behind it, by the times that storage tells
  sent,        \* every put ever sent, as <<position, entry>>
  writer,      \* the memory of each writer
  collector,   \* the memory of each collector
  acked        \* the tokens that some client knows to be durable

vars == <<manifest, entry, late, sent, writer, collector, acked>>

None == "none"
Empty == [epoch |-> 0, row |-> None, map |-> {}]  \* a slot without an entry
Positions == 1 .. MaxEpoch + Cardinality(Tokens)

(* An entry carries its writer's epoch, a row (a sentinel has none), and the applied map: all tokens up to here. *)
Entry(epoch, row, map) == [epoch |-> epoch, row |-> row, map |-> map]

Fresh == [pc |-> "idle", base |-> [epoch |-> 0, after |-> 0, flushed |-> {}],
          pos |-> 0, at |-> 0, applied |-> {}, rows |-> {}, row |-> None, proved |-> FALSE]
(* base: the newest manifest that the writer knows; once claimed, of its own epoch.   pos: its newest position.        *)
(* at: replay has read up to here; at + 1 is its sentinel in the end.   applied, rows: its map, and its rows in no SST. *)
(* row: what its append holds.   proved: whether a manifest of its epoch was seen after its sentinel was put.           *)

Idle == [pc |-> "idle", boundary |-> 0, condemned |-> {}]

Init ==
  /\ manifest = [epoch |-> 0, after |-> 0, flushed |-> {}]
  /\ entry = [p \in Positions |-> Empty]
  /\ late = {}
  /\ sent = {}
  /\ writer = [w \in Writers |-> Fresh]
  /\ collector = [c \in Collectors |-> Idle]
  /\ acked = {}

-----------------------------------------------------------------------------
Storage == <<manifest, entry, late, sent>>
Exists(p) == p \in Positions /\ entry[p] # Empty
Becomes(w, memory) == writer' = [writer EXCEPT ![w] = memory]
Ends(w) == Becomes(w, [Fresh EXCEPT !.pc = "fenced"])

(* -- Claim, steps 1 and 2: the epoch ------------------------------------ *)

ReadManifest(w) ==
  /\ writer[w].pc \in {"idle", "fenced"}
  /\ manifest.epoch < MaxEpoch
  /\ Becomes(w, [Fresh EXCEPT !.pc = "read", !.base = manifest, !.pos = manifest.after])
  /\ UNCHANGED <<Storage, collector, acked>>

(* The former owner, which has ended, told its manifest and position: neither is read. *)
HearRelease(w, former) ==
  /\ writer[w].pc \in {"idle", "fenced"}
  /\ writer[former].pc = "released"
  /\ manifest.epoch < MaxEpoch
  /\ writer' = [writer EXCEPT
       ![w] = [Fresh EXCEPT !.pc = "read", !.base = writer[former].base, !.pos = writer[former].pos],
       ![former] = Fresh]
  /\ UNCHANGED <<Storage, collector, acked>>

RaiseEpoch(w) ==
  LET me == writer[w]
      mine == [me.base EXCEPT !.epoch = @ + 1]
  IN /\ me.pc = "read"
     /\ IF manifest = me.base
        THEN /\ manifest' = mine
             /\ Becomes(w, [me EXCEPT !.pc = "probe", !.base = mine])
        ELSE Becomes(w, Fresh) /\ UNCHANGED manifest  \* version taken: back to step 1
     /\ UNCHANGED <<entry, late, sent, collector, acked>>

(* -- Claim, steps 3 and 4: the tip and the sentinel --------------------- *)

ProbeTip(w) ==
  LET me == writer[w]
  IN /\ me.pc = "probe"
     /\ Becomes(w, IF Exists(me.pos + 1) THEN [me EXCEPT !.pos = @ + 1] ELSE [me EXCEPT !.pc = "map"])
     /\ UNCHANGED <<Storage, collector, acked>>

(* The newest entry has the whole map.  At or below replay_after it may have been collected: then no map is newer. *)
ReadMap(w) ==
  LET me == writer[w]
      found == IF Exists(me.pos) THEN entry[me.pos] ELSE Empty
      next == [me EXCEPT !.pc = IF me.base.epoch = 1 THEN "serving" ELSE "sentinel",
                         !.at = IF me.base.epoch = 1 THEN 0 ELSE me.base.after,
                         !.proved = me.base.epoch = 1]
  IN /\ me.pc = "map"
     /\ IF found = Empty
        THEN IF me.pos <= me.base.after THEN Becomes(w, next) ELSE Ends(w)
        ELSE IF found.epoch > me.base.epoch THEN Ends(w) ELSE Becomes(w, [next EXCEPT !.applied = found.map])
     /\ UNCHANGED <<Storage, collector, acked>>

Put(w) ==
  LET me == writer[w]
  IN <<me.pos + 1, Entry(me.base.epoch, me.row, me.applied \cup ({me.row} \ {None}))>>

SendSentinel(w) ==
  /\ writer[w].pc = "sentinel"
  /\ writer[w].pos + 1 \in Positions
  /\ sent' = sent \cup {Put(w)}
  /\ Becomes(w, [writer[w] EXCEPT !.pc = "fencing"])
  /\ UNCHANGED <<manifest, entry, late, collector, acked>>

(* The answer to a put: CREATED, or ALREADY_EXISTS and then the bytes in the slot.  No answer, or nothing to read back: *)
(* the same put is sent again, which changes nothing here.                                                            *)
Lands(position, content) ==
  IF entry[position] # Empty THEN UNCHANGED <<entry, late>>
  ELSE /\ entry' = [entry EXCEPT ![position] = content]
       /\ late' = IF \E p \in Positions : p > position /\ Exists(p) THEN late \cup {position} ELSE late
Answered(w) == Lands(Put(w)[1], Put(w)[2])
IsOurs(w) == entry'[Put(w)[1]] = Put(w)[2] \/ (Bug = "BytesNotCompared" /\ entry'[Put(w)[1]].epoch <= Put(w)[2].epoch)

FenceOlder(w) ==
  LET me == writer[w]
      found == entry'[me.pos + 1]
  IN /\ me.pc = "fencing"
     /\ Answered(w)
     /\ IF IsOurs(w) THEN Becomes(w, [me EXCEPT !.pc = "replay"])
        ELSE IF found.epoch > me.base.epoch THEN Ends(w)
        ELSE Becomes(w, [me EXCEPT !.pc = "probe", !.pos = @ + 1, !.applied = {}, !.at = 0])
     /\ UNCHANGED <<manifest, sent, collector, acked>>

(* -- Claim, step 6: replay, an entry at a time up to the sentinel ------- *)

Replay(w) ==
  LET me == writer[w]
      done == [me EXCEPT !.pc = "serving", !.pos = @ + 1,
                         !.proved = Bug = "UnprovedClaimServes"]
  IN /\ me.pc = "replay"
     /\ IF me.at = me.pos THEN Becomes(w, done)
        ELSE IF ~Exists(me.at + 1) \/ entry[me.at + 1].epoch > me.base.epoch THEN Ends(w)
        ELSE Becomes(w, [me EXCEPT !.at = @ + 1, !.rows = @ \cup ({entry[me.at + 1].row} \ {None})])
     /\ UNCHANGED <<Storage, collector, acked>>

(* Step 5 (the note of the sentinel's position), or a look at the manifest: our epoch is still the newest. *)
Prove(w) ==
  LET me == writer[w]
  IN /\ me.pc \in {"serving", "created"}
     /\ ~me.proved
     /\ IF manifest.epoch # me.base.epoch THEN Ends(w) /\ UNCHANGED acked
        ELSE IF me.pc = "serving" THEN Becomes(w, [me EXCEPT !.proved = TRUE]) /\ UNCHANGED acked
        ELSE /\ Becomes(w, [me EXCEPT !.proved = TRUE, !.pc = "serving", !.row = None])
             /\ acked' = acked \cup {me.row}
     /\ UNCHANGED <<Storage, collector>>

(* -- Append -------------------------------------------------------------- *)

SendEntry(w, t) ==
  LET me == writer[w]
  IN /\ me.pc = "serving"
     /\ t \notin me.applied
     /\ me.pos + 1 \in Positions
     /\ Becomes(w, [me EXCEPT !.pc = "append", !.row = t])
     /\ sent' = sent \cup {<<me.pos + 1, Entry(me.base.epoch, t, me.applied \cup {t})>>}
     /\ UNCHANGED <<manifest, entry, late, collector, acked>>

Append(w) ==
  LET me == writer[w]
      grown == [me EXCEPT !.pos = @ + 1, !.applied = @ \cup {me.row}, !.rows = @ \cup {me.row}]
  IN /\ me.pc = "append"
     /\ Answered(w)
     /\ IF ~IsOurs(w) THEN Ends(w) /\ UNCHANGED acked
        ELSE IF me.proved THEN /\ Becomes(w, [grown EXCEPT !.pc = "serving", !.row = None])
                               /\ acked' = acked \cup {me.row}
        ELSE Becomes(w, [grown EXCEPT !.pc = "created"]) /\ UNCHANGED acked
     /\ UNCHANGED <<manifest, sent, collector>>

(* No answer within the budget: the writer stops itself, and the client is told that the outcome is not known. *)
Poison(w) ==
  LET me == writer[w]
  IN /\ me.pc = "append"
     /\ CASE Bug = "UnknownIsNotWritten" -> Becomes(w, [me EXCEPT !.pc = "serving", !.row = None]) /\ UNCHANGED acked
          [] Bug = "UnknownIsAcked" -> /\ Becomes(w, [me EXCEPT !.pc = "serving", !.row = None, !.pos = @ + 1,
                                                      !.applied = @ \cup {me.row}, !.rows = @ \cup {me.row}])
                                       /\ acked' = acked \cup {me.row}
          [] OTHER -> Becomes(w, [Fresh EXCEPT !.pc = "poisoned"]) /\ UNCHANGED acked
     /\ UNCHANGED <<Storage, collector>>

(* A put that comes again is answered by the map, after a look at our next slot: a newer claim would have filled it. *)
AckRepeated(w, t) ==
  LET me == writer[w]
  IN /\ me.pc = "serving"
     /\ me.proved
     /\ t \in me.applied
     /\ IF Exists(me.pos + 1) THEN Ends(w) /\ UNCHANGED acked ELSE acked' = acked \cup {t} /\ UNCHANGED writer
     /\ UNCHANGED <<Storage, collector>>

(* -- Flush, and the end of an owner -------------------------------------- *)

(* The rows are in an SST by now.  The manifest's edit is refused once another version follows the known one. *)
Publish(w) ==
  LET me == writer[w]
      next == [me.base EXCEPT !.after = me.pos, !.flushed = @ \cup me.rows]
  IN /\ me.pc = "serving"
     /\ me.pos > me.base.after
     /\ IF manifest = me.base
        THEN manifest' = next /\ Becomes(w, [me EXCEPT !.base = next, !.rows = {}, !.proved = TRUE])
        ELSE Ends(w) /\ UNCHANGED manifest
     /\ UNCHANGED <<entry, late, sent, collector, acked>>

Release(w) ==
  /\ writer[w].pc = "serving"
  /\ Becomes(w, [Fresh EXCEPT !.pc = "released", !.base = writer[w].base, !.pos = writer[w].pos])
  /\ UNCHANGED <<Storage, collector, acked>>

-----------------------------------------------------------------------------
(* Collection of entries: the boundary first, then the listing, then one delete after the other in any order. *)

ReadBoundary(c) ==
  /\ collector[c].pc = "idle"
  /\ manifest.after > collector[c].boundary
  /\ collector' = [collector EXCEPT ![c] = [Idle EXCEPT !.pc = "list", !.boundary = manifest.after]]
  /\ UNCHANGED <<Storage, writer, acked>>

Highest(positions) == IF positions = {} THEN 0 ELSE CHOOSE p \in positions : \A q \in positions : q <= p

(* A fence is the first entry of an epoch above 1, told by the epoch of the entry before it.  An entry that is younger   *)
(* than the one behind it vouches for nothing: it may be a sentinel that was refused, came late and found its slot      *)
(* collected.                                                                                                         *)
IsFence(p, below) ==
  LET before == Highest({q \in below : q < p})
  IN \/ entry[p].epoch # (IF before = 0 THEN 1 ELSE entry[before].epoch)
     \/ before \in late /\ Bug # "LateEntryVouches"

ListEntries(c) ==
  LET listed == {p \in Positions : Exists(p)}
      below == {p \in listed : p <= collector[c].boundary /\ (p < Highest(listed) \/ Bug = "NewestMapCollected")}
      garbage == {p \in below : Bug = "FencesCollected" \/ ~IsFence(p, below)}
  IN /\ collector[c].pc = "list"
     /\ collector' = [collector EXCEPT ![c].pc = IF garbage = {} THEN "idle" ELSE "delete", ![c].condemned = garbage]
     /\ UNCHANGED <<Storage, writer, acked>>

DeleteEntry(c) ==
  \E p \in collector[c].condemned :
    LET left == collector[c].condemned \ {p}
    IN /\ entry' = [entry EXCEPT ![p] = Empty]
       /\ late' = late \ {p}
       /\ collector' = [collector EXCEPT ![c].condemned = left, ![c].pc = IF left = {} THEN "idle" ELSE @]
       /\ UNCHANGED <<manifest, sent, writer, acked>>

-----------------------------------------------------------------------------
(* Storage takes a put late or again, as the put-if-absent that it was; a process dies. *)

LandLate ==
  \E put \in sent :
    /\ entry[put[1]] = Empty
    /\ Lands(put[1], put[2])
    /\ UNCHANGED <<manifest, sent, writer, collector, acked>>

Crash(w) ==
  /\ writer[w].pc # "idle"
  /\ Becomes(w, Fresh)
  /\ UNCHANGED <<Storage, collector, acked>>

Environment ==
  \/ LandLate
  \/ \E w \in Writers : Crash(w)

Step(w) ==
  \/ RaiseEpoch(w)
  \/ ProbeTip(w)
  \/ ReadMap(w)
  \/ SendSentinel(w)
  \/ FenceOlder(w)
  \/ Replay(w)
  \/ Prove(w)
  \/ Append(w)

Next ==
  \/ \E w \in Writers :
       \/ ReadManifest(w)
       \/ \E former \in Writers : HearRelease(w, former)
       \/ RaiseEpoch(w)
       \/ ProbeTip(w)
       \/ ReadMap(w)
       \/ SendSentinel(w)
       \/ FenceOlder(w)
       \/ Replay(w)
       \/ Prove(w)
       \/ \E t \in Tokens : SendEntry(w, t)
       \/ Append(w)
       \/ Poison(w)
       \/ \E t \in Tokens : AckRepeated(w, t)
       \/ Publish(w)
       \/ Release(w)
  \/ \E c \in Collectors :
       \/ ReadBoundary(c)
       \/ ListEntries(c)
       \/ DeleteEntry(c)
  \/ Environment

Spec == Init /\ [][Next]_vars
(* Storage answers at once and nobody crashes: only sleep is left.  It begins with an owner, and a claimer that has     *)
(* raised the epoch and found the tip, but not yet put its sentinel.                                                  *)
Owner == CHOOSE w \in Writers : TRUE
Sleeper == CHOOSE w \in Writers \ {Owner} : TRUE
Asleep ==
  LET of(epoch, pc) == [Fresh EXCEPT !.pc = pc, !.base = [manifest EXCEPT !.epoch = epoch], !.proved = epoch = 1]
  IN /\ manifest = [epoch |-> 2, after |-> 0, flushed |-> {}]
     /\ entry = [p \in Positions |-> Empty]
     /\ late = {} /\ sent = {} /\ acked = {}
     /\ writer = [w \in Writers |-> CASE w = Owner -> of(1, "serving") [] w = Sleeper -> of(2, "sentinel")
                                      [] OTHER -> Fresh]
     /\ collector = [c \in Collectors |-> Idle]
Calm ==
  \/ \E w \in Writers :
       \/ ReadManifest(w) /\ writer[w].pc = "idle"
       \/ Step(w)
       \/ \E t \in Tokens : SendEntry(w, t)
       \/ Publish(w)
  \/ \E c \in Collectors : ReadBoundary(c) \/ ListEntries(c) \/ DeleteEntry(c)
CalmSpec == Asleep /\ [][Calm]_vars
TokenSymmetry == Permutations(Tokens)
Fair == Spec /\ \A w \in Writers : WF_vars(Step(w))
Symmetry == Permutations(Writers) \cup Permutations(Collectors) \cup Permutations(Tokens)

-----------------------------------------------------------------------------
(* What must hold.  A fresh replay reads the tail: from replay_after to the first empty slot. *)

InTail(p) == p > manifest.after /\ \A q \in manifest.after + 1 .. p : Exists(q)
Tail == {p \in Positions : InTail(p)}
RowsOf(positions) == {entry[p].row : p \in positions} \ {None}
Serving(w) == writer[w].pc \in {"serving", "append", "created"}

NoAckedRowLost == acked \subseteq manifest.flushed \cup RowsOf(Tail)

NoRowTwice ==
  \A p \in Tail : entry[p].row # None =>
    entry[p].row \notin manifest.flushed /\ \A q \in Tail : q # p => entry[q].row # entry[p].row

(* The owner has replayed every acked row, and its map names every acked token. *)
OwnerHasAll ==
  \A w \in Writers : Serving(w) /\ writer[w].base.epoch = manifest.epoch =>
    /\ acked \subseteq manifest.flushed \cup writer[w].rows
    /\ acked \subseteq writer[w].applied

(* Once a claim has returned, an older epoch acks only what lies below the claim's sentinel, so that it was replayed. *)
OneOwnerAcks ==
  [][\A w, v \in Writers :
       /\ writer[w].pc \in {"append", "created"} /\ writer'[w].pc = "serving"
       /\ Serving(v) /\ writer[v].base.epoch > writer[w].base.epoch
       => writer'[w].pos <= writer[v].at]_vars

(* What was collected is not needed: no entry that a replay is about to read, and not the sentinel that a deposed owner *)
(* must find in its next slot, unless its own put of that slot had landed and was replayed.                            *)
CollectedIsNotNeeded ==
  /\ \A w \in Writers : writer[w].pc = "replay" /\ writer[w].base.epoch = manifest.epoch =>
       \A p \in writer[w].at + 1 .. writer[w].pos : Exists(p)
  /\ \A w, v \in Writers :
       Serving(w) /\ writer[w].proved /\ Serving(v) /\ writer[v].base.epoch > writer[w].base.epoch
       => Exists(writer[w].pos + 1) \/ (writer[w].pc = "append" /\ writer[w].pos + 1 <= writer[v].at)

(* A claim or an owner ends by itself only where a newer epoch exists. *)
FencedByNewerOnly ==
  [][\A w \in Writers : writer'[w].pc = "fenced" /\ writer[w].pc # "fenced" => manifest.epoch > writer[w].base.epoch]_vars

(* Under fair storage the newest claim is served and its appends are answered, unless it crashes or a newer one comes. *)
Newest(w) == writer[w].base.epoch = manifest.epoch
ClaimsEnd ==
  \A w \in Writers : writer[w].pc \in {"probe", "map", "sentinel", "fencing", "replay"} /\ Newest(w)
                     ~> Serving(w) \/ ~Newest(w) \/ writer[w].pc = "idle"
AppendsEnd == \A w \in Writers : writer[w].pc \in {"append", "created"} ~> writer[w].pc \notin {"append", "created"}

(* Not vacuous: each of these must be violated. *)
NeverAcked == acked = {}
NeverTakenOver == \A w \in Writers : ~(Serving(w) /\ writer[w].base.epoch = 2)
NeverCollected == \A p \in Positions : Exists(p) => \A q \in 1 .. p : Exists(q)
NeverFenced == \A w \in Writers : writer[w].pc # "fenced"
=============================================================================
