------------------------------- MODULE Lease -------------------------------
(***************************************************************************)
(* Read leases of one region: an owner answers reads from memory without   *)
(* asking storage, though a claim deposes it without telling it.           *)
(*                                                                         *)
(* The region is one register: each entry of its log overwrites the one    *)
(* before, so what an owner shows is a position of the log.  Claims are    *)
(* two steps here and edits of the manifest one; collection is left out.   *)
(* Module Log takes these apart.                                           *)
(*                                                                         *)
(* There is no clock, only lengths of time: a tick takes 1 or Rate units   *)
(* from every timer of a process, as its own clock runs, and that may      *)
(* change from tick to tick.  A process sleeps by doing nothing while      *)
(* ticks pass; what it began goes on where it stopped.                     *)
(***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
  Writers,     \* processes that claim the region, write to it and answer reads
  Patient,     \* those of them whose settings say LongLease, not ShortLease
  LongLease,   \* units; 0: each read asks storage first, as in a table of the arrow format
  ShortLease,
  Rate,        \* how many times faster one clock may run than another
  MaxEpoch,    \* the model is bounded by the number of claims
  MaxPosition, \* and by the length of the log: no row is put above this position
  Bug          \* the planted bug, "none" for the protocol as it is

VARIABLES
  manifest,    \* the newest one: its epoch, read lease, the epoch that left it at rest, the newest position in the base
  log,         \* by position: the epoch of the entry, a sentinel's too
  writer,      \* the memory of each writer
  read,        \* the read under way; one at a time, since no read depends on another that has not ended
  acked,       \* history: the newest position that was acknowledged
  answered     \* history: the newest position that a read has shown

vars == <<manifest, log, writer, read, acked, answered>>

Max(a, b) == IF a > b THEN a ELSE b
Less(a, b) == IF a > b THEN a - b ELSE 0
Setting(w) == IF w \in Patient THEN LongLease ELSE ShortLease

NoProof == [step |-> "none", cover |-> 0]
Fresh == [pc |-> "idle", epoch |-> 0, told |-> 0, lease |-> 0, before |-> 0, wait |-> 0, shown |-> 0, cover |-> 0,
          put |-> NoProof, look |-> NoProof]
(* told: the epoch of an owner that told this process that it has ended.   lease: of its own manifest.                *)
(* before: the lease of the manifest before.   wait: units until no older owner answers reads.                        *)
(* shown: its newest visible position.   cover: units that the lease of its newest proof still has.                   *)
(* put, look: an append and a look at the manifest under way, and what would be left of a lease that began with them. *)

NoRead == [by |-> "nobody", step |-> "none", must |-> 0, shown |-> 0]
(* by: the writer that answers it.   must: what the read must see, since it was acknowledged, or seen by another read, before this one began. *)
(* shown: what it shows, of a read that storage answers.                                                              *)

(* The first writer owns the region, which has no entry yet. *)
First == CHOOSE w \in Writers : w \in Patient \/ Patient = {}
Init ==
  /\ manifest = [epoch |-> 1, lease |-> Setting(First), rest |-> 0, committed |-> 0]
  /\ log = <<>>
  /\ writer = [w \in Writers |-> IF w = First THEN [Fresh EXCEPT !.pc = "serving", !.epoch = 1, !.lease = Setting(w)]
                                 ELSE Fresh]
  /\ read = NoRead
  /\ acked = 0
  /\ answered = 0

-----------------------------------------------------------------------------
History == <<acked, answered>>
Becomes(w, memory) == writer' = [writer EXCEPT ![w] = memory]
IsRead(w, steps) == read.step \in steps /\ read.by = w
Reads(step) == read' = [read EXCEPT !.step = step]
Dropped(w) == read' = IF IsRead(w, {"begun", "waits", "asks", "covered"}) THEN NoRead ELSE read
Ends(w) == Becomes(w, Fresh) /\ Dropped(w)

Serving(w) == writer[w].pc = "serving"
Alone(w) == writer[w].wait = 0 \/ Bug = "AnswersWithoutTheWait"
Confirmed(w, proof) == Max(writer[w].cover, IF Bug = "ProofCountsFromItsEnd" THEN writer[w].lease ELSE proof.cover)

(* -- Claim ---------------------------------------------------------------- *)

(* A former owner told the process that it has ended.  What is told may be old by the time that it claims. *)
HearRelease(w, former) ==
  /\ writer[w].pc = "idle"
  /\ writer[former].pc = "ended"
  /\ Becomes(w, [writer[w] EXCEPT !.told = writer[former].epoch])
  /\ UNCHANGED <<manifest, log, read, History>>

(* A claim of memwal clears `rest`; another program's may keep it, and nothing relies on that.                         *)
(* The claim's manifest keeps the longer lease.  An owner that told the claimer of its end answers nothing any more. *)
RaiseEpoch(w) ==
  LET lease == IF Bug = "ClaimShortensTheLease" THEN Setting(w) ELSE Max(manifest.lease, Setting(w))
      isTold == writer[w].told = manifest.epoch \/ (Bug = "AskerNeverWaits" /\ writer[w].told > 0)
  IN /\ writer[w].pc = "idle"
     /\ manifest.epoch < MaxEpoch
     /\ manifest' = [manifest EXCEPT !.epoch = @ + 1, !.lease = lease]
     /\ Becomes(w, [Fresh EXCEPT !.pc = "raised", !.epoch = manifest.epoch + 1, !.lease = lease,
                                 !.before = IF isTold THEN 0 ELSE manifest.lease])
     /\ UNCHANGED <<log, read, History>>

(* The wait begins with the sentinel.  Replay takes no step: what lies below the sentinel does not change any more. *)
PutSentinel(w) ==
  LET me == writer[w]
      isOvertaken == log # <<>> /\ log[Len(log)] > me.epoch
      factor == IF Bug = "WaitsByItsOwnClock" THEN 1 ELSE Rate
  IN /\ me.pc = "raised"
     /\ IF isOvertaken THEN Ends(w) /\ UNCHANGED log
        ELSE /\ log' = Append(log, me.epoch)
             /\ Becomes(w, [me EXCEPT !.pc = "serving", !.shown = Len(log) + 1, !.wait = factor * me.before, !.before = 0])
             /\ UNCHANGED read
     /\ UNCHANGED <<manifest, History>>

(* -- Append: nothing is written while an older owner may answer reads ------- *)

SendEntry(w) ==
  LET me == writer[w]
  IN /\ Serving(w) /\ Alone(w)
     /\ me.put.step = "none"
     /\ me.shown < MaxPosition
     /\ Becomes(w, [me EXCEPT !.put = [step |-> "sent", cover |-> me.lease]])
     /\ UNCHANGED <<manifest, log, read, History>>

(* An entry in our slot is a proof, which counts from before it was sent.  It becomes visible and is acknowledged. *)
Acknowledge(w) ==
  LET me == writer[w]
      slot == me.shown + 1
  IN /\ Serving(w)
     /\ me.put.step = "sent"
     /\ Len(log) >= slot
     /\ IF log[slot] # me.epoch THEN Ends(w) /\ UNCHANGED acked
        ELSE /\ Becomes(w, [me EXCEPT !.shown = slot, !.put = NoProof, !.cover = Confirmed(w, me.put)])
             /\ acked' = Max(acked, slot)
             /\ UNCHANGED read
     /\ UNCHANGED <<manifest, log, answered>>

(* -- Read ------------------------------------------------------------------ *)

BeginRead(w) ==
  /\ Serving(w)
  /\ read.step = "none"
  /\ read' = [NoRead EXCEPT !.by = w, !.step = "begun", !.must = Max(acked, answered)]
  /\ UNCHANGED <<manifest, log, writer, History>>

(* The lease covers the read, then or while it waits for a proof; or a proof is to begin after this moment. *)
LookAtLease(w) ==
  LET isCovered == Alone(w) /\ writer[w].cover > 0
  IN /\ Serving(w)
     /\ IsRead(w, {"begun"}) \/ (IsRead(w, {"waits", "asks"}) /\ isCovered)
     /\ Reads(IF isCovered THEN "covered" ELSE "waits")
     /\ UNCHANGED <<manifest, log, writer, History>>

(* A proof by the manifest; for a read, or beside to renew the lease. *)
BeginProof(w) ==
  LET me == writer[w]
  IN /\ Serving(w) /\ Alone(w)
     /\ me.look.step = "none"
     /\ Becomes(w, [me EXCEPT !.look = [step |-> "sent", cover |-> me.lease]])
     /\ IF IsRead(w, {"waits"}) THEN Reads("asks") ELSE UNCHANGED read
     /\ UNCHANGED <<manifest, log, History>>

(* It covers reads that took their ticket before it began, whatever the lease; others by the lease alone. *)
EndProof(w) ==
  LET me == writer[w]
      covers == {"asks"} \cup (IF Bug = "OlderProofCovers" THEN {"waits"} ELSE {})
  IN /\ Serving(w)
     /\ me.look.step \in {"ours", "theirs"}
     /\ IF me.look.step = "theirs" THEN Ends(w)
        ELSE /\ Becomes(w, [me EXCEPT !.look = NoProof, !.cover = Confirmed(w, me.look)])
             /\ IF IsRead(w, covers) THEN Reads("covered") ELSE UNCHANGED read
     /\ UNCHANGED <<manifest, log, History>>

(* From memory and the newest base, however late; also by an owner that has released the region meanwhile. Where the     *)
(* base has a generation that is in its memory, the owner asks storage again, which is left out here.                  *)
Shown(w) == Max(writer[w].shown, manifest.committed)
Answer(w) ==
  /\ IsRead(w, {"covered"})
  /\ answered' = Max(answered, Shown(w))
  /\ Dropped(w)
  /\ UNCHANGED <<manifest, log, writer, acked>>

(* -- Release ---------------------------------------------------------------- *)

(* An owner that has not waited itself says nothing: the lease of the owner before it stands. *)
EndReads(w) ==
  LET me == writer[w]
  IN /\ Serving(w)
     /\ me.put.step = "none" /\ me.look.step = "none"
     /\ Becomes(w, IF Alone(w) \/ Bug = "ReleasesBeforeItWaited"
                   THEN [Fresh EXCEPT !.pc = "ended", !.epoch = me.epoch, !.shown = me.shown]
                   ELSE Fresh)
     /\ IF IsRead(w, {"covered"}) /\ writer'[w].pc = "ended" THEN UNCHANGED read ELSE Dropped(w)
     /\ UNCHANGED <<manifest, log, History>>

WriteRelease(w) ==
  /\ writer[w].pc = "ended"
  /\ manifest.epoch = writer[w].epoch
  /\ manifest' = [manifest EXCEPT !.lease = 0]
  /\ UNCHANGED <<log, writer, read, History>>

(* -- Rest: reads of a region that its owner has released, answered by storage ----------------------------------------- *)

(* Flush and commit, which an owner may do while it waits: of what it has replayed. *)
Commit(w) ==
  /\ Serving(w)
  /\ manifest.epoch = writer[w].epoch
  /\ manifest.committed < writer[w].shown
  /\ manifest' = [manifest EXCEPT !.committed = writer[w].shown]
  /\ UNCHANGED <<log, writer, read, History>>

WriteRest(w) ==
  /\ writer[w].pc = "ended"
  /\ manifest.epoch = writer[w].epoch
  /\ manifest.committed = writer[w].shown \/ Bug = "RestsWithARow"
  /\ manifest' = [manifest EXCEPT !.lease = 0, !.rest = writer[w].epoch]
  /\ UNCHANGED <<log, writer, read, History>>

BeginStoredRead ==
  /\ read.step = "none"
  /\ read' = [NoRead EXCEPT !.by = "storage", !.step = "begun", !.must = Max(acked, answered)]
  /\ UNCHANGED <<manifest, log, writer, History>>

(* One look at the newest manifest. If it is not at rest, the read becomes one of an owner, after a claim. *)
LookAtRest ==
  LET atRest == manifest.rest = manifest.epoch \/ (Bug = "RestOfAnyEpoch" /\ manifest.rest > 0)
  IN /\ IsRead("storage", {"begun"})
     /\ read' = IF atRest THEN [read EXCEPT !.step = "captured", !.shown = manifest.committed] ELSE NoRead
     /\ UNCHANGED <<manifest, log, writer, History>>

(* From a base version opened afterwards, in which rows of a newer owner may be by now. *)
AnswerStored ==
  /\ IsRead("storage", {"captured"})
  /\ \E shown \in read.shown .. manifest.committed : answered' = Max(answered, shown)
  /\ read' = NoRead
  /\ UNCHANGED <<manifest, log, writer, acked>>

-----------------------------------------------------------------------------
(* Storage takes a put and answers a look at some moment between the request and the answer. *)

Land(w) ==
  /\ writer[w].put.step = "sent"
  /\ Len(log) = writer[w].shown
  /\ log' = Append(log, writer[w].epoch)
  /\ UNCHANGED <<manifest, writer, read, History>>

SeeManifest(w) ==
  /\ writer[w].look.step = "sent"
  /\ Becomes(w, [writer[w] EXCEPT !.look.step = IF manifest.epoch = writer[w].epoch THEN "ours" ELSE "theirs"])
  /\ UNCHANGED <<manifest, log, read, History>>

Tick ==
  \E fast \in SUBSET Writers :
    /\ writer' = [w \in Writers |->
         LET units == IF w \in fast THEN Rate ELSE 1
         IN [writer[w] EXCEPT !.wait = Less(@, units), !.cover = Less(@, units),
                              !.put.cover = Less(@, units), !.look.cover = Less(@, units)]]
    /\ UNCHANGED <<manifest, log, read, History>>

Crash(w) ==
  /\ writer[w].pc # "idle"
  /\ Ends(w)
  /\ UNCHANGED <<manifest, log, History>>

Environment ==
  \/ \E w \in Writers :
       \/ Land(w)
       \/ SeeManifest(w)
       \/ Crash(w)
  \/ Tick

Next ==
  \/ \E w \in Writers :
       \/ \E former \in Writers : HearRelease(w, former)
       \/ RaiseEpoch(w)
       \/ PutSentinel(w)
       \/ SendEntry(w)
       \/ Acknowledge(w)
       \/ BeginRead(w)
       \/ LookAtLease(w)
       \/ BeginProof(w)
       \/ EndProof(w)
       \/ Answer(w)
       \/ EndReads(w)
       \/ WriteRelease(w)
       \/ Commit(w)
       \/ WriteRest(w)
  \/ BeginStoredRead
  \/ LookAtRest
  \/ AnswerStored
  \/ Environment

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* What must hold. *)

(* Once a read may be answered from memory, it sees all that was acknowledged or seen before it began, by any owner. *)
(* So acknowledged writes and answers of reads are linearizable: they have the order of the log.                     *)
NoStaleRead ==
  /\ \A w \in Writers : IsRead(w, {"covered"}) => Shown(w) >= read.must
  /\ IsRead("storage", {"captured"}) => read.shown >= read.must

(* Why: a newer owner waits longer than an older one is covered, also by proofs whose answers are still under way. *)
Coverage(w) ==
  LET me == writer[w]
      put == IF me.put.step = "sent" /\ Len(log) > me.shown /\ log[me.shown + 1] = me.epoch THEN me.put.cover ELSE 0
      look == IF me.look.step = "ours" THEN me.look.cover ELSE 0
  IN Max(me.cover, Max(put, look))
WaitOutlastsLeases ==
  \A w, v \in Writers : Serving(w) /\ Serving(v) /\ writer[v].epoch > writer[w].epoch
    => writer[v].wait >= Rate * Coverage(w)

(* Not vacuous: each of these must be violated. *)
NeverAcked == acked = 0
NeverTwoOwners == \A w, v \in Writers : Serving(w) /\ Serving(v) => w = v
NeverAnsweredByNewOwner == \A w \in Writers : ~(IsRead(w, {"covered"}) /\ writer[w].epoch = 2)
NeverAnsweredAtRest == ~(IsRead("storage", {"captured"}) /\ read.must > 0)
NeverOldButRight == \A w \in Writers : IsRead(w, {"covered"}) => writer[w].shown >= acked
=============================================================================
