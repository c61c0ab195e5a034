-------------------------------- MODULE Load --------------------------------
(* A load of rows past the log into a table with a key, beside a writer and its commits: which of two rows of one key *)
(* stands. flush.commits.load tells the same in words, under "Order".                                                 *)
(*                                                                                                                    *)
(* One key. Odd generations put it, even ones delete it; a row is the number of its generation. The range of a commit *)
(* ends where the plan says, so its marker is a compare-and-swap (Commit.tla). Several processes load with one token; *)
(* each may begin again at any step.                                                                                  *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    Generations,
    Loaders,
    Bug                 \* the guard that is left out, "none" for none

VARIABLES
    acked,              \* the newest acknowledged generation
    published,          \* the newest one in an SST
    base,               \* the rows of the key, in the order of the versions that wrote them; marker; token; version
    committer,
    loader

vars == <<acked, published, base, committer, loader>>

Loaded == Generations + 1
Puts(g) == g % 2 = 1

Init ==
    /\ acked = 0
    /\ published = 0
    /\ base = [rows |-> <<>>, version |-> 1, moved |-> 1, mark |-> 0, landed |-> FALSE]
    /\ committer = [at |-> "start"]
    /\ loader = [l \in Loaders |-> [at |-> "start"]]

Ack == acked < Generations /\ acked' = acked + 1 /\ UNCHANGED <<published, base, committer, loader>>
Publish == published < acked /\ published' = published + 1 /\ UNCHANGED <<acked, base, committer, loader>>

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
    /\ UNCHANGED <<acked, published, base, loader>>

OpenBase ==
    /\ committer.at = "manifests read"
    /\ committer' = IF committer.seen > base.mark
                    THEN [at |-> "write", last |-> committer.seen, version |-> base.version, rows |-> base.rows,
                          mark |-> base.mark]
                    ELSE [at |-> "start"]
    /\ UNCHANGED <<acked, published, base, loader>>

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
        /\ UNCHANGED <<acked, published, loader>>

Restart ==
    /\ committer.at # "start"
    /\ committer' = [at |-> "start"]
    /\ UNCHANGED <<acked, published, base, loader>>

---------------------------------------------------------------------------------------------------------------------
(* A load. *)

Goes(l, to) == loader' = [loader EXCEPT ![l] = to]

(* Whoever loads has flushed and committed all that was acknowledged before. *)
Begin(l) ==
    /\ loader[l].at = "start"
    /\ Goes(l, [at |-> "commit", before |-> acked])
    /\ UNCHANGED <<acked, published, base, committer>>

Read(l) ==
    LET me == loader[l] IN
    /\ me.at = "commit"
    /\ base.mark >= me.before \/ Bug = "loads_past_rows_of_the_log"
    /\ Goes(l, IF base.landed /\ Bug # "does_not_look_for_its_token" THEN [at |-> "done", before |-> 0, after |-> acked]
               ELSE [at |-> "merge", before |-> me.before, version |-> base.version, rows |-> base.rows])
    /\ UNCHANGED <<acked, published, base, committer>>

(* Its rows and its marker, in one version. *)
Merge(l) ==
    LET me == loader[l]
        refused == (base.landed /\ Bug # "does_not_look_for_its_token") \/ Conflicts(me)
    IN  /\ me.at = "merge"
        /\ IF refused THEN UNCHANGED base
           ELSE base' = [base EXCEPT !.rows = Append(Over(me), Loaded), !.version = @ + 1, !.moved = base.version + 1,
                                     !.landed = TRUE]
        /\ Goes(l, IF refused THEN [at |-> "commit", before |-> me.before]
                   ELSE [at |-> "done", before |-> me.before, after |-> acked])
        /\ UNCHANGED <<acked, published, committer>>

LoadAgain(l) ==
    /\ loader[l].at \in {"commit", "merge"}
    /\ Goes(l, [at |-> "start"])
    /\ UNCHANGED <<acked, published, base, committer>>

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
    \/ \E l \in Loaders : Read(l)
    \/ \E l \in Loaders : Merge(l)
    \/ Environment

Spec == Init /\ [][Next]_vars

---------------------------------------------------------------------------------------------------------------------
Shown == IF acked > base.mark THEN (IF Puts(acked) THEN acked ELSE 0)
         ELSE IF base.rows = <<>> THEN 0 ELSE base.rows[Len(base.rows)]

OneRow == Len(base.rows) <= 1

(* A load that has returned is hidden by no row that was acknowledged before it began, *)
NotHidden == \A l \in Loaders : loader[l].at = "done" => acked <= base.mark \/ acked > loader[l].before
(* and hides none that was acknowledged after it returned; nor does its repetition. *)
HidesNothingNewer ==
    \A l \in Loaders : loader[l].at = "done" /\ acked > loader[l].after => Shown = (IF Puts(acked) THEN acked ELSE 0)
(* A row that no load has replaced is the newest one. *)
NothingLost == ~base.landed => Shown = (IF Puts(acked) THEN acked ELSE 0)

(* Not so: TLC must find a way to a load that stands, with all generations below it. *)
NeverDone == ~(base.rows = <<Loaded>> /\ base.mark = Generations)
=============================================================================
