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
  Remembers,   \* whether a collector keeps the epochs that it has read for its next collection, as it does
  Bug          \* the planted bug, "none" for the protocol as it is

VARIABLES
  manifest,    \* the newest one: its epoch, replay_after, the rows in SSTs and the base, whether its owner rests
  edits,       \* manifests that were sent as the next one, and may still follow the newest
  entry,       \* by position: what the slot holds
  late,        \* pairs of positions of which storage got the lower one later, by the times that it tells
  sent,        \* every put ever sent, as <<position, entry>>
  writer,      \* the memory of each writer
  collector,   \* the memory of each collector
  acked        \* the tokens that some client knows to be durable

vars == <<manifest, edits, entry, late, sent, writer, collector, acked>>

None == "none"
Empty == [epoch |-> 0, row |-> None, map |-> {}]  \* a slot without an entry
Positions == 1 .. MaxEpoch + Cardinality(Tokens)

(* An entry carries its writer's epoch, a row (a sentinel has none), and the applied map: all tokens up to here. *)
Entry(epoch, row, map) == [epoch |-> epoch, row |-> row, map |-> map]

NoFlush == [after |-> 0, rows |-> {}]
Fresh == [pc |-> "idle", base |-> [epoch |-> 0, after |-> 0, flushed |-> {}, rest |-> FALSE],
          pos |-> 0, at |-> 0, applied |-> {}, rows |-> {}, row |-> None, proved |-> FALSE, frozen |-> NoFlush]
(* base: the newest manifest that the writer knows; once claimed, of its own epoch.   pos: its newest position.        *)
(* at: replay has read up to here; at + 1 is its sentinel in the end.   applied, rows: its map, and its rows in no SST. *)
(* row: what its append holds.   proved: whether a manifest of its epoch was seen after its sentinel was put.           *)
(* frozen: the memtable whose flush is under way, and the position that its SST covers.                                *)

Gone == MaxEpoch + 1
Idle == [pc |-> "idle", boundary |-> 0, listed |-> {}, epochs |-> [p \in Positions |-> 0], condemned |-> {}]
(* epochs: those that it has read; 0: not read, Gone: nothing to read.                                                 *)

Init ==
  /\ manifest = [epoch |-> 0, after |-> 0, flushed |-> {}, rest |-> FALSE]
  /\ edits = {}
  /\ entry = [p \in Positions |-> Empty]
  /\ late = {}
  /\ sent = {}
  /\ writer = [w \in Writers |-> Fresh]
  /\ collector = [c \in Collectors |-> Idle]
  /\ acked = {}

-----------------------------------------------------------------------------
Log == <<entry, late, sent>>
Storage == <<manifest, edits, Log>>
Exists(p) == p \in Positions /\ entry[p] # Empty
Serving(w) == writer[w].pc \in {"serving", "append", "created", "repeated"}
(* A fresh replay reads the tail: from replay_after to the first empty slot. *)
InTail(p) == p > manifest.after /\ \A q \in manifest.after + 1 .. p : Exists(q)
Tail == {p \in Positions : InTail(p)}
RowsOf(positions) == {entry[p].row : p \in positions} \ {None}
Edited(base, after, rows) == [base EXCEPT !.after = after, !.flushed = @ \cup rows]
Becomes(w, memory) == writer' = [writer EXCEPT ![w] = memory]
(* A claim or an owner ends by itself, which is right only where a newer epoch exists. It may claim again. *)
Ends(w) == Becomes(w, IF manifest.epoch > writer[w].base.epoch THEN Fresh ELSE [Fresh EXCEPT !.pc = "ended wrongly"])

(* -- Claim, steps 1 and 2: the epoch ------------------------------------ *)

ReadManifest(w) ==
  /\ writer[w].pc = "idle"
  /\ manifest.epoch < MaxEpoch
  /\ Becomes(w, [Fresh EXCEPT !.pc = "read", !.base = manifest, !.pos = manifest.after])
  /\ UNCHANGED <<Storage, collector, acked>>

(* The former owner, which has ended, told its manifest and position: neither is read. *)
HearRelease(w, former) ==
  /\ writer[w].pc = "idle"
  /\ writer[former].pc = "released"
  /\ manifest.epoch < MaxEpoch
  /\ writer' = [writer EXCEPT
       ![w] = [Fresh EXCEPT !.pc = "read", !.base = writer[former].base, !.pos = writer[former].pos],
       ![former] = Fresh]
  /\ UNCHANGED <<Storage, collector, acked>>

(* Each manifest takes the slot of the next version, so what was sent for this slot can land no more. *)
Follows(next) == manifest' = next /\ edits' = {}

RaiseEpoch(w) ==
  LET me == writer[w]
      mine == [me.base EXCEPT !.epoch = @ + 1, !.rest = FALSE]
  IN /\ me.pc = "read"
     /\ IF manifest = me.base
        THEN /\ Follows(mine)
             /\ Becomes(w, [me EXCEPT !.pc = "probe", !.base = mine])
        ELSE Becomes(w, Fresh) /\ UNCHANGED <<manifest, edits>>  \* version taken: back to step 1
     /\ UNCHANGED <<Log, collector, acked>>

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
  /\ UNCHANGED <<manifest, edits, entry, late, collector, acked>>

(* The answer to a put: CREATED, or ALREADY_EXISTS and then the bytes in the slot.  No answer, or nothing to read back: *)
(* the same put is sent again, which changes nothing here.                                                            *)
Lands(position, content) ==
  IF entry[position] # Empty THEN UNCHANGED <<entry, late>>
  ELSE /\ entry' = [entry EXCEPT ![position] = content]
       /\ late' = late \cup {<<position, p>> : p \in {q \in Positions : q > position /\ Exists(q)}}
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
     /\ UNCHANGED <<manifest, edits, sent, collector, acked>>

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
  IN /\ me.pc \in {"created", "repeated"} \/ (me.pc = "serving" /\ ~me.proved)
     /\ IF ~me.proved /\ manifest.epoch # me.base.epoch THEN Ends(w) /\ UNCHANGED acked
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
     /\ UNCHANGED <<manifest, edits, entry, late, collector, acked>>

(* Another's entry in our slot: a newer owner has it, and our row is surely not written. But where the slot may have    *)
(* been collected, our entry may have been in it before, and be replayed: then the outcome is not known.               *)
(* Who is told that its put was refused may put the row again, under another token.  (Here another put of the token    *)
(* may have been written.)                                                                                            *)
WasWritten(w) ==
  /\ \A put \in sent \ {Put(w)} : put[2].row # writer[w].row
  /\ writer[w].row \in manifest.flushed \cup RowsOf(Tail)
IsRefused(w) ==
  IF writer[w].pos + 1 <= manifest.after /\ Bug # "RefusedAfterACollection"
  THEN Becomes(w, Fresh)
  ELSE IF WasWritten(w) THEN Becomes(w, [Fresh EXCEPT !.pc = "refused wrongly"]) ELSE Ends(w)

Append(w) ==
  LET me == writer[w]
      grown == [me EXCEPT !.pos = @ + 1, !.applied = @ \cup {me.row}, !.rows = @ \cup {me.row}]
  IN /\ me.pc = "append"
     /\ Answered(w)
     /\ IF ~IsOurs(w) THEN IsRefused(w) /\ UNCHANGED acked
        ELSE IF me.proved THEN /\ Becomes(w, [grown EXCEPT !.pc = "serving", !.row = None])
                               /\ acked' = acked \cup {me.row}
        ELSE Becomes(w, [grown EXCEPT !.pc = "created"]) /\ UNCHANGED acked
     /\ UNCHANGED <<manifest, edits, sent, collector>>

(* No answer within the budget: the writer stops itself, and the client is told that the outcome is not known. It may  *)
(* claim again.                                                                                                       *)
Poison(w) ==
  LET me == writer[w]
  IN /\ me.pc = "append"
     /\ CASE Bug = "UnknownIsNotWritten" -> Becomes(w, [me EXCEPT !.pc = "serving", !.row = None]) /\ UNCHANGED acked
          [] Bug = "UnknownIsAcked" -> /\ Becomes(w, [me EXCEPT !.pc = "serving", !.row = None, !.pos = @ + 1,
                                                      !.applied = @ \cup {me.row}, !.rows = @ \cup {me.row}])
                                       /\ acked' = acked \cup {me.row}
          [] OTHER -> Becomes(w, Fresh) /\ UNCHANGED acked
     /\ UNCHANGED <<Storage, collector>>

(* A put that comes again is answered by the map, after a look at our next slot: a newer claim would have filled it.    *)
(* Where the manifest has not named our epoch since the sentinel, it is asked as well (Prove).                         *)
AckRepeated(w, t) ==
  LET me == writer[w]
  IN /\ me.pc = "serving"
     /\ t \in me.applied
     /\ IF Exists(me.pos + 1) THEN Ends(w) /\ UNCHANGED acked
        ELSE IF me.proved THEN acked' = acked \cup {t} /\ UNCHANGED writer
        ELSE Becomes(w, [me EXCEPT !.pc = "repeated", !.row = t]) /\ UNCHANGED acked
     /\ UNCHANGED <<Storage, collector>>

(* -- Flush, and the end of an owner -------------------------------------- *)

(* The rows are in an SST by now, and the manifest that lists it is sent. Appends go on beside it. *)
SendEdit(w) ==
  LET me == writer[w]
  IN /\ me.pc = "serving"
     /\ me.rows # {}
     /\ me.frozen = NoFlush
     /\ Becomes(w, [me EXCEPT !.frozen = [after |-> me.pos, rows |-> me.rows]])
     /\ edits' = IF manifest = me.base THEN edits \cup {Edited(me.base, me.pos, me.rows)} ELSE edits
     /\ UNCHANGED <<manifest, Log, collector, acked>>

(* The answer to the edit, to its first attempt or to one after an unknown outcome: it lands now, has landed before, or *)
(* another version follows the one that it was made for. While there is no answer, the rows stay in memory.            *)
Publish(w) ==
  LET me == writer[w]
      next == Edited(me.base, me.frozen.after, me.frozen.rows)
      done == [me EXCEPT !.base = next, !.rows = @ \ me.frozen.rows, !.frozen = NoFlush, !.proved = TRUE]
  IN /\ Serving(w)
     /\ me.frozen # NoFlush
     /\ IF manifest = me.base
        THEN /\ Becomes(w, done)
             /\ IF Bug = "UnknownEditIsPublished" THEN UNCHANGED <<manifest, edits>> ELSE Follows(next)
        ELSE /\ IF manifest = next THEN Becomes(w, done) ELSE me.pc = "serving" /\ Ends(w)
             /\ UNCHANGED <<manifest, edits>>
     /\ UNCHANGED <<Log, collector, acked>>

Release(w) ==
  /\ writer[w].pc = "serving"
  /\ Becomes(w, [Fresh EXCEPT !.pc = "released", !.base = writer[w].base, !.pos = writer[w].pos])
  /\ UNCHANGED <<Storage, collector, acked>>

(* An owner without rows in memory ends, and says so in the manifest. It does not wait for the answer. *)
Rest(w) ==
  LET me == writer[w]
      next == [me.base EXCEPT !.after = IF Bug = "RestsBeforeItFlushed" THEN @ ELSE me.pos, !.rest = TRUE]
  IN /\ me.pc = "serving"
     /\ me.frozen = NoFlush
     /\ me.rows = {} \/ Bug = "RestsBeforeItFlushed"
     /\ manifest = me.base
     /\ Becomes(w, Fresh)
     /\ \/ Follows(next)
        \/ edits' = edits \cup {next} /\ UNCHANGED manifest
     /\ UNCHANGED <<Log, collector, acked>>

-----------------------------------------------------------------------------
(* Collection of entries: the boundary; the listing; one header after the other; the listing again, and the verdict;   *)
(* one delete after the other in any order.                                                                           *)

CollectorOnly == UNCHANGED <<Storage, writer, acked>>
Turns(c, to) == collector' = [collector EXCEPT ![c] = to]

ReadBoundary(c) ==
  /\ collector[c].pc = "idle"
  /\ \E p \in 1 .. manifest.after : Exists(p)
  /\ Turns(c, [collector[c] EXCEPT !.pc = "list", !.boundary = manifest.after])
  /\ CollectorOnly

Highest(positions) == IF positions = {} THEN 0 ELSE CHOOSE p \in positions : \A q \in positions : q <= p
Lowest(positions) == CHOOSE p \in positions : \A q \in positions : p <= q

(* The newest entry has the map, and stays. *)
ListEntries(c) ==
  LET me == collector[c]
      found == {p \in Positions : Exists(p)}
      listed == {p \in found : p <= me.boundary /\ (p < Highest(found) \/ Bug = "NewestMapCollected")}
  IN /\ me.pc = "list"
     /\ Turns(c, [Idle EXCEPT !.pc = IF listed = {} THEN "idle" ELSE "read", !.listed = listed,
                             !.epochs = [p \in Positions |-> IF p \in listed THEN me.epochs[p] ELSE 0]])
     /\ CollectorOnly

(* Which headers are wanted: those of both ends, then of the middle of each stretch over which the epoch changes. *)
Left(me) == {p \in me.listed : me.epochs[p] # Gone}
Known(me) == {p \in Left(me) : me.epochs[p] # 0}
Wanted(me) ==
  LET ends == {p \in Left(me) : p = Highest(Left(me)) \/ \A q \in Left(me) : p <= q} \ Known(me)
      between(a, b) == {p \in Left(me) : a < p /\ p < b}
      middle(a, b) == CHOOSE p \in between(a, b) :
                        LET below == Cardinality(between(a, p)) IN 2 * below \in {Cardinality(between(a, b)) - 1, Cardinality(between(a, b)) - 2}
      stretches == {<<a, b>> \in Known(me) \X Known(me) :
                      a < b /\ between(a, b) # {} /\ between(a, b) \cap Known(me) = {} /\ me.epochs[a] # me.epochs[b]}
  IN IF ends # {} THEN ends ELSE {middle(stretch[1], stretch[2]) : stretch \in stretches}

ReadHeader(c) ==
  LET me == collector[c]
  IN /\ me.pc = "read"
     /\ \E p \in Wanted(me) :
          Turns(c, [me EXCEPT !.epochs[p] = IF Exists(p) THEN entry[p].epoch ELSE Gone])
     /\ CollectorOnly

(* A fence is the first entry of an epoch above 1, told by the epoch of the entry before it. *)
IsFence(me, p) ==
  LET before == Highest({q \in Known(me) : q < p})
  IN p \in Known(me) /\ me.epochs[p] # (IF before = 0 THEN 1 ELSE me.epochs[before])

(* An entry that is younger than one above it, or that is gone by now, vouches for nothing: it may be a sentinel that   *)
(* was refused, came late and found its slot collected. So entries without rows above it stay.                         *)
MayBeFence(me, p) ==
  /\ entry[p].row = None
  /\ \E q \in me.listed :
       /\ q < p
       /\ \/ <<q, p>> \in late /\ Exists(q)
          \/ ~Exists(q) /\ Bug # "GoneEntryVouches"
  /\ Bug # "LateEntryVouches"

ListAgain(c) ==
  LET me == collector[c]
      garbage == {p \in me.listed : Exists(p) /\ (Bug = "FencesCollected" \/ ~(IsFence(me, p) \/ MayBeFence(me, p)))}
      epochs == [p \in Positions |-> IF me.epochs[p] = Gone \/ ~Remembers THEN 0 ELSE me.epochs[p]]
  IN /\ me.pc = "read"
     /\ Wanted(me) = {}
     /\ Turns(c, [Idle EXCEPT !.pc = IF garbage = {} THEN "idle" ELSE "delete", !.epochs = epochs, !.condemned = garbage])
     /\ CollectorOnly

(* A delete may be repeated: storage takes it late, too. EndCollection ends this. *)
DeleteEntry(c) ==
  \E p \in collector[c].condemned :
    /\ Exists(p)
    /\ entry' = [entry EXCEPT ![p] = Empty]
    /\ late' = {pair \in late : p \notin {pair[1], pair[2]}}
    /\ UNCHANGED <<manifest, edits, sent, writer, collector, acked>>

-----------------------------------------------------------------------------
(* Storage takes a put late or again, as the put-if-absent that it was; a process dies, a collector in any step too. *)

LandLate ==
  \E put \in sent :
    /\ entry[put[1]] = Empty
    /\ Lands(put[1], put[2])
    /\ UNCHANGED <<manifest, edits, sent, writer, collector, acked>>

LandEdit ==
  \E next \in edits :
    /\ Follows(next)
    /\ UNCHANGED <<Log, writer, collector, acked>>

Crash(w) ==
  /\ writer[w].pc # "idle"
  /\ Becomes(w, Fresh)
  /\ UNCHANGED <<Storage, collector, acked>>

(* Its work is done, or there was an error, or a crash, after which no epoch is remembered. *)
EndCollection(c) ==
  /\ collector[c].pc # "idle"
  /\ \/ Turns(c, Idle)
     \/ Remembers /\ collector[c].pc = "delete" /\ Turns(c, [Idle EXCEPT !.epochs = collector[c].epochs])
  /\ CollectorOnly

Environment ==
  \/ LandLate
  \/ LandEdit
  \/ \E w \in Writers : Crash(w)
  \/ \E c \in Collectors : EndCollection(c)

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
       \/ SendEdit(w)
       \/ Publish(w)
       \/ Release(w)
       \/ Rest(w)
  \/ \E c \in Collectors :
       \/ ReadBoundary(c)
       \/ ListEntries(c)
       \/ ReadHeader(c)
       \/ ListAgain(c)
       \/ DeleteEntry(c)
  \/ Environment

Spec == Init /\ [][Next]_vars
(* Storage answers at once and nobody crashes: only sleep is left.  It begins with an owner, and a claimer that has     *)
(* raised the epoch and found the tip, but not yet put its sentinel.                                                  *)
Owner == CHOOSE w \in Writers : TRUE
Sleeper == CHOOSE w \in Writers \ {Owner} : TRUE
Asleep ==
  LET of(epoch, pc) == [Fresh EXCEPT !.pc = pc, !.base = [manifest EXCEPT !.epoch = epoch], !.proved = epoch = 1]
  IN /\ manifest = [epoch |-> 2, after |-> 0, flushed |-> {}, rest |-> FALSE]
     /\ entry = [p \in Positions |-> Empty]
     /\ edits = {} /\ late = {} /\ sent = {} /\ acked = {}
     /\ writer = [w \in Writers |-> CASE w = Owner -> of(1, "serving") [] w = Sleeper -> of(2, "sentinel")
                                      [] OTHER -> Fresh]
     /\ collector = [c \in Collectors |-> Idle]
Calm ==
  \/ \E w \in Writers :
       \/ ReadManifest(w) /\ w \notin {Owner, Sleeper}
       \/ Step(w)
       \/ \E t \in Tokens : SendEntry(w, t)
       \/ SendEdit(w) \/ Publish(w)
  \/ \E c \in Collectors : ReadBoundary(c) \/ ListEntries(c) \/ ReadHeader(c) \/ ListAgain(c) \/ DeleteEntry(c)
CalmSpec == Asleep /\ [][Calm]_vars
(* Where collections are dangerous: a claimer found its slot filled, by a row of the owner before it, and that sentinel *)
(* may land late. The older owner sleeps, before it puts the row behind, or without the answer to this one. The newer   *)
(* one has put a row and flushed.                                                                                     *)
Claimed ==
  LET row == CHOOSE t \in Tokens : TRUE
      first == Entry(1, row, {row})
      other == CHOOSE t \in Tokens \ {row} : TRUE
      sentinel == Entry(2, None, {row})
      second == Entry(2, other, {row, other})
      flushed == [epoch |-> 2, after |-> 3, flushed |-> {row, other}, rest |-> FALSE]
      newer == [Fresh EXCEPT !.pc = "serving", !.base = flushed, !.pos = 3, !.at = 1, !.applied = {row, other},
                             !.proved = TRUE]
      asleep == [Fresh EXCEPT !.base = [epoch |-> 1, after |-> 0, flushed |-> {}, rest |-> FALSE], !.proved = TRUE]
      before == [asleep EXCEPT !.pc = "serving", !.pos = 1, !.applied = {row}, !.rows = {row}]
      without == [asleep EXCEPT !.pc = "append", !.row = row]
  IN /\ manifest = flushed
     /\ entry = [p \in Positions |-> CASE p = 1 -> first [] p = 2 -> sentinel [] p = 3 -> second [] OTHER -> Empty]
     /\ sent = {<<1, first>>, <<1, Entry(2, None, {})>>, <<2, sentinel>>, <<3, second>>}
     /\ edits = {} /\ late = {}
     /\ collector = [c \in Collectors |-> Idle]
     /\ \E memory \in {before, without} :
          /\ writer = [w \in Writers |-> CASE w = Owner -> memory [] w = Sleeper -> newer [] OTHER -> Fresh]
          /\ acked = IF memory = before THEN {row, other} ELSE {other}
ClaimedSpec == Claimed /\ [][Next]_vars
TokenSymmetry == Permutations(Tokens)
Fair == Spec /\ \A w \in Writers : WF_vars(Step(w))
CollectorSymmetry == Permutations(Collectors)
Symmetry == Permutations(Writers) \cup Permutations(Collectors) \cup Permutations(Tokens)

-----------------------------------------------------------------------------
(* What must hold. *)

NoAckedRowLost == acked \subseteq manifest.flushed \cup RowsOf(Tail)

(* A read that finds the region at rest needs no owner: whoever acknowledged a row has flushed it. *)
RestHasAll == manifest.rest => acked \subseteq manifest.flushed

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
       /\ writer[w].pc \in {"append", "created", "repeated"} /\ writer'[w].pc = "serving" /\ acked' # acked
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

(* A claim or an owner ends by itself only where a newer epoch exists; what was told as not written is not written. *)
FencedByNewerOnly == \A w \in Writers : writer[w].pc # "ended wrongly"
RefusedIsNotWritten == \A w \in Writers : writer[w].pc # "refused wrongly"

(* Under fair storage the newest claim is served and its appends are answered, unless it crashes or a newer one comes. *)
Newest(w) == writer[w].base.epoch = manifest.epoch
ClaimsEnd ==
  \A w \in Writers : writer[w].pc \in {"probe", "map", "sentinel", "fencing", "replay"} /\ Newest(w)
                     ~> Serving(w) \/ ~Newest(w) \/ writer[w].pc = "idle"
Appending == {"append", "created", "repeated"}
AppendsEnd == \A w \in Writers : writer[w].pc \in Appending ~> writer[w].pc \notin Appending

(* Not vacuous: each of these must be violated. *)
NeverAcked == acked = {}
NeverTakenOver == \A w \in Writers : ~(Serving(w) /\ writer[w].base.epoch = 2)
NeverAtRest == ~(manifest.rest /\ acked # {})
NeverDeposed == \A w \in Writers : ~(Serving(w) /\ writer[w].base.epoch < manifest.epoch)
=============================================================================
