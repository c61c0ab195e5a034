-------------------------------- MODULE Load --------------------------------
(* A load of rows past the log into a table with a key, beside a writer, its commits and deletes with a filter: which *)
(* of two rows of one key stands. flush.commits.load tells the same in words, under "Order", and                      *)
(* flush.commits.load_notes of attempts and their end.                                                                *)
(*                                                                                                                    *)
(* One key. Odd generations put it, even ones delete it; a row is the number of its generation. The range of a commit *)
(* ends where the plan says, so its marker is a compare-and-swap (Commit.tla). Several processes load with one token; *)
(* each may begin again at any step. The rows of the writer pass the filter, the loaded row does not.                 *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    Generations,
    Loaders,
    Attempts,           \* most generations of attempts at the load
    Bug                 \* the guard that is left out, "none" for none

VARIABLES
    acked,              \* the newest acknowledged generation
    published,          \* the newest one in an SST
    base,               \* the rows of the key, in the order of the versions that wrote them; marker; version; the
                        \* generation of the load, and whether it has landed
    committer,
    loader,
    notes,              \* of attempts: whose, and which generation
    deleter,            \* the region's thread, at a delete with a filter
    filtered            \* generations that are such deletes

vars == <<acked, published, base, committer, loader, notes, deleter, filtered>>

Loaded == Generations + 1
Puts(g) == g % 2 = 1

Init ==
    /\ acked = 0
    /\ published = 0
    /\ base = [rows |-> <<>>, version |-> 1, moved |-> 1, mark |-> 0, load |-> 0, landed |-> FALSE]
    /\ committer = [at |-> "start"]
    /\ loader = [l \in Loaders |-> [at |-> "start"]]
    /\ notes = {}
    /\ deleter = [at |-> "start"]
    /\ filtered = {}

Shown == IF acked > base.mark THEN (IF Puts(acked) THEN acked ELSE 0)
         ELSE IF base.rows = <<>> THEN 0 ELSE base.rows[Len(base.rows)]

Ack ==
    /\ acked < Generations
    /\ deleter.at = "start"
    /\ acked' = acked + 1
    /\ UNCHANGED <<published, base, committer, loader, notes, deleter, filtered>>

Publish ==
    /\ published < acked
    /\ published' = published + 1
    /\ UNCHANGED <<acked, base, committer, loader, notes, deleter, filtered>>

(* What Lance does with a write of the key by whoever read `me`: a row that was moved since is a conflict, and so is  *)
(* a key that both insert.                                                                                            *)
Conflicts(me) ==
    /\ base.moved > me.version
    /\ ~(Bug = "does_not_see_that_both_insert" /\ me.rows = <<>>)
Over(me) == IF Conflicts(me) \/ base.moved <= me.version THEN <<>> ELSE base.rows

---------------------------------------------------------------------------------------------------------------------
(* The committer. Manifests first, then the base. *)

ReadManifests ==
    /\ committer.at = "start"
    /\ committer' = [at |-> "manifests read", seen |-> published]
    /\ UNCHANGED <<acked, published, base, loader, notes, deleter, filtered>>

OpenBase ==
    /\ committer.at = "manifests read"
    /\ committer' = IF committer.seen > base.mark
                    THEN [at |-> "write", last |-> committer.seen, version |-> base.version, rows |-> base.rows,
                          mark |-> base.mark]
                    ELSE [at |-> "start"]
    /\ UNCHANGED <<acked, published, base, loader, notes, deleter, filtered>>

(* A delete of a key that the version read does not have touches nothing, so it conflicts with nothing. *)
Write ==
    LET me == committer
        touches == Puts(me.last) \/ me.rows # <<>>
    IN  /\ me.at = "write"
        /\ IF base.mark # me.mark \/ (touches /\ Conflicts(me))
           THEN UNCHANGED base
           ELSE base' = [base EXCEPT !.rows = IF Puts(me.last) THEN Append(Over(me), me.last)
                                              ELSE IF touches THEN <<>> ELSE @,
                                     !.version = @ + 1, !.moved = IF touches THEN base.version + 1 ELSE @,
                                     !.mark = me.last]
        /\ committer' = [at |-> "start"]
        /\ UNCHANGED <<acked, published, loader, notes, deleter, filtered>>

Restart ==
    /\ committer.at # "start"
    /\ committer' = [at |-> "start"]
    /\ UNCHANGED <<acked, published, base, loader, notes, deleter, filtered>>

---------------------------------------------------------------------------------------------------------------------
(* A load. *)

Goes(l, to) == loader' = [loader EXCEPT ![l] = to]

MayLand(note) == ~base.landed /\ note.attempt > base.load

(* The note comes first. *)
Begin(l) ==
    LET attempt == base.load + 1 IN
    /\ loader[l].at = "start"
    /\ attempt <= Attempts
    /\ Goes(l, [at |-> "flush", attempt |-> attempt])
    /\ notes' = notes \cup {[of |-> l, attempt |-> attempt]}
    /\ UNCHANGED <<acked, published, base, committer, deleter, filtered>>

(* Whoever loads flushes and commits all that was acknowledged before. The flush goes through the region's thread.    *)
Settle(l) ==
    /\ loader[l].at = "flush"
    /\ deleter.at = "start" \/ Bug = "flushes_past_the_regions_thread"
    /\ Goes(l, [at |-> "commit", attempt |-> loader[l].attempt, before |-> acked])
    /\ UNCHANGED <<acked, published, base, committer, notes, deleter, filtered>>

Read(l) ==
    LET me == loader[l]
        landed == base.landed /\ Bug # "does_not_look_for_its_token"
    IN  /\ me.at = "commit"
        /\ base.mark >= me.before \/ Bug = "loads_past_rows_of_the_log"
        /\ Goes(l, IF landed THEN [at |-> "done", before |-> 0, after |-> acked]
                   ELSE IF me.attempt # base.load + 1 THEN [at |-> "start"]
                   ELSE [at |-> "merge", attempt |-> me.attempt, before |-> me.before, version |-> base.version,
                         rows |-> base.rows])
        /\ notes' = IF landed THEN notes \ {[of |-> l, attempt |-> me.attempt]} ELSE notes
        /\ UNCHANGED <<acked, published, base, committer, deleter, filtered>>

(* Its rows and its generation, in one version. *)
Merge(l) ==
    LET me == loader[l]
        refused == base.load >= me.attempt \/ Conflicts(me)
    IN  /\ me.at = "merge"
        /\ IF refused THEN UNCHANGED <<base, notes>>
           ELSE /\ base' = [base EXCEPT !.rows = Append(Over(me), Loaded), !.version = @ + 1,
                                        !.moved = base.version + 1, !.load = me.attempt, !.landed = TRUE]
                /\ notes' = notes \ {[of |-> l, attempt |-> me.attempt]}
        /\ Goes(l, IF refused THEN [at |-> "commit", attempt |-> me.attempt, before |-> me.before]
                   ELSE [at |-> "done", before |-> me.before, after |-> acked])
        /\ UNCHANGED <<acked, published, committer, deleter, filtered>>

(* A process that loads is killed, or repeats what it has not heard of. Its note stays. *)
LoadAgain(l) ==
    /\ loader[l].at \in {"flush", "commit", "merge"}
    /\ Goes(l, [at |-> "start"])
    /\ UNCHANGED <<acked, published, base, committer, notes, deleter, filtered>>

(* Whoever waits for a note that is not renewed, as far as clocks tell, ends its attempt: its generation is committed *)
(* without rows.                                                                                                      *)
End ==
    \E note \in notes :
        /\ IF MayLand(note) /\ Bug # "passes_a_note_over"
           THEN /\ base' = [base EXCEPT !.load = @ + 1, !.version = @ + 1]
                /\ UNCHANGED notes
           ELSE /\ notes' = notes \ {note}
                /\ UNCHANGED base
        /\ UNCHANGED <<acked, published, committer, loader, deleter, filtered>>

---------------------------------------------------------------------------------------------------------------------
(* A delete with a filter, in the region's thread: for notes first, then for the newest row, then the tombstone.      *)

LookForNotes ==
    /\ deleter.at = "start"
    /\ acked < Generations
    /\ ~Puts(acked + 1)
    /\ Bug = "looks_for_no_note" \/ \A note \in notes : ~MayLand(note)
    /\ deleter' = [at |-> "no note"]
    /\ UNCHANGED <<acked, published, base, committer, loader, notes, filtered>>

LookAt ==
    /\ deleter.at = "no note"
    /\ deleter' = IF Shown \in {0, Loaded} THEN [at |-> "start"] ELSE [at |-> "passes"]
    /\ UNCHANGED <<acked, published, base, committer, loader, notes, filtered>>

LogTombstone ==
    /\ deleter.at = "passes"
    /\ acked' = acked + 1
    /\ filtered' = filtered \cup {acked + 1}
    /\ deleter' = [at |-> "start"]
    /\ UNCHANGED <<published, base, committer, loader, notes>>

Environment ==
    \/ Ack
    \/ Publish
    \/ Restart
    \/ \E l \in Loaders : LoadAgain(l)

Next ==
    \/ ReadManifests
    \/ OpenBase
    \/ Write
    \/ \E l \in Loaders : Begin(l)
    \/ \E l \in Loaders : Settle(l)
    \/ \E l \in Loaders : Read(l)
    \/ \E l \in Loaders : Merge(l)
    \/ End
    \/ LookForNotes
    \/ LookAt
    \/ LogTombstone
    \/ Environment

Spec == Init /\ [][Next]_vars

---------------------------------------------------------------------------------------------------------------------
OneRow == Len(base.rows) <= 1

(* A load that has returned is hidden by no row that was acknowledged before it began, *)
NotHidden == \A l \in Loaders : loader[l].at = "done" => acked <= base.mark \/ acked > loader[l].before
(* and hides none that was acknowledged after it returned; nor does its repetition. *)
HidesNothingNewer ==
    \A l \in Loaders : loader[l].at = "done" /\ acked > loader[l].after => Shown = (IF Puts(acked) THEN acked ELSE 0)
(* A row that no load has replaced is the newest one. *)
NothingLost == ~base.landed => Shown = (IF Puts(acked) THEN acked ELSE 0)

(* A delete with a filter that the loaded row does not pass leaves it there: what it deleted was there before. *)
NotFiltered ==
    \A l \in Loaders : loader[l].at = "done" /\ acked = loader[l].before + 1 /\ acked \in filtered => Shown = Loaded

(* Not so: TLC must find a way to a load that stands, with all generations below it, *)
NeverDone == ~(base.rows = <<Loaded>> /\ base.mark = Generations)
(* and to one that lands after an attempt was ended, with a delete before it. *)
NeverAgain == ~(base.landed /\ base.load = Attempts /\ filtered # {} /\ Shown = Loaded)
=============================================================================
