------------------------------- MODULE Append -------------------------------
(* A table without a key: the rows of SSTs, and of loads past the log, are appended, and the record that they are     *)
(* there is in the same version. flush.commits.append_pass, flush.commits.load and flush.base.swap tell the same in   *)
(* words.                                                                                                             *)
(*                                                                                                                    *)
(* Equal rows are to stay two, so nothing but this record tells a range that is tried again from another one. Each    *)
(* generation is one row here, and a load is one row. A committer may begin again at any step: an error, a lost       *)
(* answer, a restart. Several processes load with one token.                                                          *)
EXTENDS Naturals, FiniteSets

CONSTANTS
    Generations,
    Committers,
    Loaders,
    OthersAppend,       \* how often another program appends rows
    Bug                 \* the guard that is left out, "none" for none

VARIABLES
    published,          \* the newest published generation
    listed,             \* the generations that the newest region manifest lists
    base,               \* rows: how often each is there; the newest version that changed rows; the records
    committer,
    loader

vars == <<published, listed, base, committer, loader>>

Gens == 1 .. Generations
Load == Generations + 1
Max(S) == CHOOSE x \in S : \A y \in S : y <= x

Init ==
    /\ published = 0
    /\ listed = {}
    /\ base = [rows |-> [row \in Gens \cup {Load} |-> 0], version |-> 1, progress |-> 0, landed |-> FALSE, mark |-> 0,
               others |-> 0]
    /\ committer = [c \in Committers |-> [at |-> "start"]]
    /\ loader = [l \in Loaders |-> [at |-> "start"]]

Publish ==
    /\ published < Generations
    /\ published' = published + 1
    /\ listed' = listed \cup {published + 1}
    /\ UNCHANGED <<base, committer, loader>>

Plus(rows) == [row \in DOMAIN base.rows |-> base.rows[row] + (IF row \in rows THEN 1 ELSE 0)]

(* Lance's Merge passes only where no version since the one read has changed rows; its Append passes always. *)
Passes(read) == base.version = read \/ Bug = "appends_without_a_swap"

---------------------------------------------------------------------------------------------------------------------
(* A committer. *)

Goes(c, to) == committer' = [committer EXCEPT ![c] = to]
BeginsAgain(c) == Goes(c, [at |-> "start"])

ReadManifests(c) ==
    /\ committer[c].at = "start"
    /\ Goes(c, [at |-> "manifests read", seen |-> listed])
    /\ UNCHANGED <<published, listed, base, loader>>

OpenBase(c) ==
    LET me == committer[c] IN
    /\ me.at = "manifests read"
    /\ Goes(c, [at |-> "base read", version |-> base.version, progress |-> base.progress,
                gens |-> {g \in me.seen : g > base.progress}])
    /\ UNCHANGED <<published, listed, base, loader>>

(* Step 1: files that no version refers to; how many generations they hold depends on the plan. *)
WriteFiles(c) ==
    LET me == committer[c] IN
    /\ me.at = "base read" /\ me.gens # {}
    /\ \E last \in me.gens :
        Goes(c, [me EXCEPT !.at = "written", !.gens = {g \in @ : g <= last}])
    /\ UNCHANGED <<published, listed, base, loader>>

(* Step 2: a compare-and-swap on the table, with the progress in the same version. *)
Swap(c) ==
    LET me == committer[c] IN
    /\ me.at = "written"
    /\ IF Passes(me.version)
       THEN base' = [base EXCEPT !.rows = Plus(me.gens), !.version = @ + 1, !.progress = Max({@, Max(me.gens)})]
       ELSE UNCHANGED base
    /\ BeginsAgain(c)
    /\ UNCHANGED <<published, listed, loader>>

(* Step 3: Lance's own marker follows, by a merge without rows, which takes the marker only upwards. *)
Mark(c) ==
    LET me == committer[c] IN
    /\ me.at = "base read" /\ me.gens = {} /\ base.mark < me.progress
    /\ base' = [base EXCEPT !.mark = me.progress]
    /\ UNCHANGED <<published, listed, committer, loader>>

Prune(c) ==
    LET me == committer[c] IN
    /\ me.at = "base read" /\ me.gens = {} /\ base.mark >= me.progress
    /\ listed' = {g \in listed : g > me.progress}
    /\ BeginsAgain(c)
    /\ UNCHANGED <<published, base, loader>>

Restart(c) ==
    /\ committer[c].at # "start"
    /\ BeginsAgain(c)
    /\ UNCHANGED <<published, listed, base, loader>>

---------------------------------------------------------------------------------------------------------------------
(* A load: a region that never exists, whose only generation is its token. *)

Loads(l, to) == loader' = [loader EXCEPT ![l] = to]

ReadToken(l) ==
    /\ loader[l].at = "start"
    /\ Loads(l, IF base.landed THEN [at |-> "done"] ELSE [at |-> "read", version |-> base.version])
    /\ UNCHANGED <<published, listed, base, committer>>

AppendLoad(l) ==
    LET me == loader[l]
        late == Bug = "records_a_load_after_its_rows"
    IN  /\ me.at = "read"
        /\ IF Passes(me.version)
           THEN base' = [base EXCEPT !.rows = Plus({Load}), !.version = @ + 1, !.landed = @ \/ ~late]
           ELSE UNCHANGED base
        /\ Loads(l, [at |-> IF late /\ Passes(me.version) THEN "record" ELSE "start"])
        /\ UNCHANGED <<published, listed, committer>>

RecordLate(l) ==
    /\ loader[l].at = "record"
    /\ base' = [base EXCEPT !.landed = TRUE]
    /\ Loads(l, [at |-> "start"])
    /\ UNCHANGED <<published, listed, committer>>

LoadAgain(l) ==
    /\ loader[l].at \notin {"start", "done"}
    /\ Loads(l, [at |-> "start"])
    /\ UNCHANGED <<published, listed, base, committer>>

OtherAppends ==
    /\ base.others < OthersAppend
    /\ base' = [base EXCEPT !.others = @ + 1, !.version = @ + 1]
    /\ UNCHANGED <<published, listed, committer, loader>>

Environment ==
    \/ Publish
    \/ \E c \in Committers : Restart(c)
    \/ \E l \in Loaders : LoadAgain(l)
    \/ \E l \in Loaders : RecordLate(l)
    \/ OtherAppends

Next ==
    \/ \E c \in Committers : ReadManifests(c)
    \/ \E c \in Committers : OpenBase(c)
    \/ \E c \in Committers : WriteFiles(c)
    \/ \E c \in Committers : Swap(c)
    \/ \E c \in Committers : Mark(c)
    \/ \E c \in Committers : Prune(c)
    \/ \E l \in Loaders : ReadToken(l)
    \/ \E l \in Loaders : AppendLoad(l)
    \/ Environment

Spec == Init /\ [][Next]_vars

---------------------------------------------------------------------------------------------------------------------
(* Each generation's rows are there once where the progress says so, else not at all; so are those of the load. *)
OnceEach ==
    /\ \A g \in Gens : base.rows[g] = IF g <= base.progress THEN 1 ELSE 0
    /\ base.rows[Load] = IF base.landed THEN 1 ELSE 0
NothingLost == \A g \in 1 .. published : g <= base.progress \/ g \in listed
MarkFollows == base.mark <= base.progress


(* Not so: TLC must find a way to all rows. *)
NeverDone == ~(listed = {} /\ base.progress = Generations /\ base.landed)
=============================================================================
