------------------------------- MODULE Tail --------------------------------
(***************************************************************************)
(* Readers of one region from storage alone: they look at the manifest,    *)
(* read the tail of the log, follow it, and open the base table, while     *)
(* entries are appended, flushed, committed and collected.                 *)
(*                                                                         *)
(* The region is one register, as in module Lease: what a reader shows is  *)
(* a position.  Who writes is of no concern, since a take-over fills only  *)
(* the next slot.  Publishing, commits and collections are one step each:  *)
(* modules Log and Commit.  A look for the newest manifest is one step:    *)
(* module Manifests.                                                       *)
(***************************************************************************)
EXTENDS Naturals

CONSTANTS
  MaxPosition, \* the model is bounded by the length of the log
  Bug          \* the planted bug, "none" for the protocol as it is

VARIABLES
  tip,         \* the newest position that was filled: all slots up to it were
  gone,        \* positions whose entries were collected
  manifest,    \* the newest one: replay_after, and the position up to which SSTs were pruned
  base,        \* the newest version of the base table: it has the rows up to this position
  reader       \* the memory of the reader; readers do not meet, so that one stands for all

vars == <<tip, gone, manifest, base, reader>>

Positions == 1 .. MaxPosition
Exists(p) == p <= tip /\ p > 0 /\ p \notin gone
First == [after |-> 0, pruned |-> 0]

Fresh == [pc |-> "idle", known |-> First, at |-> 0, top |-> 0, absent |-> 0, follows |-> FALSE, seen |-> 0]
(* known: its manifest.   at: it has read the tail up to here.   top: the end that it reads to; absent: a position     *)
(* behind it that was missing, 0 for none yet.   follows: whether this look goes on from the one before.               *)
(* seen: what it showed last; while it looks, what it must show: the newest row that was on storage when it began.      *)

Init ==
  /\ tip = 0
  /\ gone = {}
  /\ manifest = First
  /\ base = 0
  /\ reader = Fresh

-----------------------------------------------------------------------------
Storage == <<tip, gone, manifest, base>>
Becomes(memory) == reader' = memory /\ UNCHANGED Storage
Max(a, b) == IF a > b THEN a ELSE b

(* Overtaken: the rows of a missing entry are in an SST by now, so it begins anew. *)
Anew(me) == [me EXCEPT !.pc = "begin", !.known = First, !.at = 0, !.top = 0, !.follows = FALSE]

(* -- A first look, or one that was overtaken -------------------------------- *)

BeginLook ==
  /\ reader.pc = "idle"
  /\ Becomes([reader EXCEPT !.seen = tip, !.pc = IF reader.follows THEN "slot" ELSE "begin"])

ReadManifest ==
  LET me == reader
  IN /\ me.pc = "begin"
     /\ Becomes([me EXCEPT !.pc = "list", !.known = manifest, !.at = manifest.after])

(* A listing is no single moment and may lag: it shows the newest position, or an older one, or none. *)
ListTip ==
  LET me == reader
  IN /\ me.pc = "list"
     /\ \E listed \in {p \in Positions : Exists(p)} \cup {0} :
          Becomes([me EXCEPT !.pc = "probe", !.top = Max(me.at, listed), !.absent = 0])

(* Doubling steps from a known end, then bisection.  A probe may meet a position that was collected. *)
ProbeTip ==
  LET me == reader
      step == IF me.absent = 0 THEN me.top + 1 .. me.top + 2 ELSE me.top + 1 .. me.absent - 1
  IN /\ me.pc = "probe"
     /\ IF me.absent = me.top + 1 THEN Becomes([me EXCEPT !.pc = "read", !.absent = 0])
        ELSE \E p \in step : Becomes(IF Exists(p) THEN [me EXCEPT !.top = p] ELSE [me EXCEPT !.absent = p])

(* Each entry up to the end.  Where one is missing, the manifest is asked why. *)
ReadEntry ==
  LET me == reader
      p == me.at + 1
  IN /\ me.pc = "read"
     /\ Becomes(
          IF me.at = me.top
          THEN [me EXCEPT !.top = 0,
                         !.pc = CASE Bug = "ManifestReadOnce" -> "captured"
                                   [] me.follows -> "follow"
                                   [] OTHER -> "check"]
          ELSE IF Exists(p) THEN [me EXCEPT !.at = p]
          ELSE [me EXCEPT !.pc = "missing"])

ExplainMissing ==
  LET me == reader
      newest == IF Bug = "ExplainedByTheKnownManifest" THEN me.known ELSE manifest
  IN /\ me.pc = "missing"
     /\ Becomes(IF newest.after > me.at THEN Anew(me) ELSE [me EXCEPT !.pc = "corrupt"])

(* The manifest again.  It stays the known one beside a flush, which the next look finds out. *)
CheckNotFlushed ==
  LET me == reader
  IN /\ me.pc = "check"
     /\ Becomes(IF manifest.after > me.at THEN Anew(me) ELSE [me EXCEPT !.pc = "captured"])

(* -- A look that follows one ------------------------------------------------- *)

(* The slot behind the last entry, and on; where there are many, the end is searched as above. *)
ReadSlot ==
  LET me == reader
      p == me.at + 1
      found == [me EXCEPT !.at = p]
  IN /\ me.pc = "slot"
     /\ IF Exists(p) THEN Becomes(found) \/ Becomes([found EXCEPT !.pc = "probe", !.top = p])
        ELSE Becomes([me EXCEPT !.pc = IF Bug = "SlotProvesTheEnd" THEN "captured" ELSE "follow"])

(* Then the manifest.  If it is not the known one but for a prune, rows were flushed meanwhile. *)
FollowManifest ==
  LET me == reader
      isSame == manifest.after = me.known.after \/ Bug = "FollowsPastAFlush"
  IN /\ me.pc = "follow"
     /\ Becomes(IF isSame THEN [me EXCEPT !.pc = "captured", !.known = manifest] ELSE Anew(me))

(* -- The base, after the levels above it ------------------------------------- *)

(* If it has committed rows of the memtable, the levels are captured again; the next look finds their flush. *)
ReadBase ==
  LET me == reader
      newest == IF me.at > me.known.after THEN me.at
                ELSE IF me.known.after > me.known.pruned THEN me.known.after
                ELSE base
  IN /\ me.pc = "captured"
     /\ Becomes(IF base > me.known.after THEN [me EXCEPT !.pc = "slot", !.follows = TRUE]
                ELSE [me EXCEPT !.pc = "idle", !.follows = TRUE, !.seen = newest])

-----------------------------------------------------------------------------
(* What goes on beside.  The newest entry stays, for its applied map. *)

Append ==
  /\ tip < MaxPosition
  /\ tip' = tip + 1
  /\ UNCHANGED <<gone, manifest, base, reader>>

Publish ==
  /\ \E p \in manifest.after + 1 .. tip : manifest' = [manifest EXCEPT !.after = p]
  /\ UNCHANGED <<tip, gone, base, reader>>

Commit ==
  /\ base < manifest.after
  /\ base' = manifest.after
  /\ UNCHANGED <<tip, gone, manifest, reader>>

Prune ==
  /\ manifest.pruned < base
  /\ manifest' = [manifest EXCEPT !.pruned = base]
  /\ UNCHANGED <<tip, gone, base, reader>>

Collect ==
  /\ \E p \in Positions :
       /\ Exists(p)
       /\ p < tip
       /\ p <= manifest.after
       /\ gone' = gone \cup {p}
  /\ UNCHANGED <<tip, manifest, base, reader>>

Environment ==
  \/ Append
  \/ Publish
  \/ Commit
  \/ Prune
  \/ Collect

Look ==
  \/ ReadManifest
  \/ ListTip
  \/ ProbeTip
  \/ ReadEntry
  \/ ExplainMissing
  \/ CheckNotFlushed
  \/ ReadSlot
  \/ FollowManifest
  \/ ReadBase

Next ==
  \/ BeginLook
  \/ ReadManifest
  \/ ListTip
  \/ ProbeTip
  \/ ReadEntry
  \/ ExplainMissing
  \/ CheckNotFlushed
  \/ ReadSlot
  \/ FollowManifest
  \/ ReadBase
  \/ Environment

Spec == Init /\ [][Next]_vars
Fair == Spec /\ WF_vars(Look)

-----------------------------------------------------------------------------
(* What must hold. *)

(* A look shows the newest row of those that were on storage when it began, or a newer one; so what a reader has seen   *)
(* never goes back.                                                                                                    *)
SeesAllDurable == [][reader'.seen >= reader.seen]_vars

(* A missing entry is always explained: nothing that is needed is collected unless the manifest says where the rows are. *)
NeverCorrupt == reader.pc # "corrupt"

(* The log is bounded in this model, so flushes and collections come to an end: then every look does. *)
LooksEnd == reader.pc # "idle" ~> reader.pc = "idle"

(* Not vacuous: each of these must be violated. *)
NeverShown == ~(reader.pc = "idle" /\ reader.seen > 0)
NeverMissing == reader.pc # "missing"
NeverFollowed == ~(reader.pc = "follow" /\ reader.at > reader.known.after)
=============================================================================
