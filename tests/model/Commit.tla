------------------------------- MODULE Commit -------------------------------
(* From a memtable to the base table: flush and publish, commit with its plan and its marker, collection of SSTs and  *)
(* of plans, reads from storage.  flush/README.md tells the same in words.                                            *)
(*                                                                                                                    *)
(* What is a step here is one request to storage, or one commit of Lance. Between any two steps every other process   *)
(* may run, and a process may sleep for ever, which is how it crashes; a committer may also begin again at any step,  *)
(* which is what it does after an error, an answer that was lost, or a restart.                                       *)
(*                                                                                                                    *)
(* All rows are acknowledged and in the log from the beginning: how they get there is the model of the log. A region  *)
(* has two keys, and each of its generations puts one of them and deletes the other, so that the newest row of a key  *)
(* is always of another generation than the row below it. A row is the number of its generation, 0 where there is     *)
(* none.                                                                                                              *)
(*                                                                                                                    *)
(* A conditional edit of a manifest is one step (Manifests.tla takes it apart). Lance puts a pass on top of versions  *)
(* that it has not read, except where one of them moved a row that the pass touches, or inserted a key that it        *)
(* inserts; and it takes no marker that is not above the recorded one.                                                *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Regions,
    Generations,        \* how many generations each region has
    Epochs,             \* how often each region is claimed: a writer that was deposed may still sleep in a flush
    Committers,
    SstCollectors,
    PlanCollectors,
    Readers,
    Allowed,            \* what else happens: see Init
    VersionsMax,        \* versions of the base up to which other programs make more
    Bug                 \* the guard that is left out, "none" for none

Symmetry == Permutations(Committers) \cup Permutations(SstCollectors) \cup Permutations(PlanCollectors)

VARIABLES
    manifest,           \* per region: replay_after, the writer epoch, the SSTs listed
    dirs,               \* per region: SST directories on storage, each a name of a generation and an epoch
    written,            \* per region: the SSTs that some writer has written, and may publish when it wakes; those that
                        \* are offered as the next version of the manifest; those that their flusher gave up
    outlived,           \* per region: directories that were there before the newest claim
    published,          \* per region: the SSTs that were ever published
    plans,              \* per region: the plan's end for each first generation; 0: no plan
    versions,           \* the base table: every version ever made and not lost
    kept,               \* the versions that were not cleaned up
    synced,             \* the newest version that is on the disk
    tag,                \* the tagged version, 0 for none, and what was published while it was the newest
    restored,           \* what a restore put the base back to, and which generations it took back
    committer, sstCollector, planCollector, reader

vars == <<manifest, dirs, written, outlived, published, plans, versions, kept, synced, tag, restored, committer,
          sstCollector, planCollector, reader>>

Gens == 1 .. Generations
Keys == {"a", "b"}
Max(S) == CHOOSE x \in S : \A y \in S : y <= x
Min(S) == CHOOSE x \in S : \A y \in S : x <= y

Put(g) == CASE g % 3 = 1 -> {"a"} [] g % 3 = 2 -> {"b"} [] OTHER -> {}
Delete(g) == CASE g % 3 = 1 -> {} [] g % 3 = 2 -> {"a"} [] OTHER -> {"b"}
Writes(g, k) == k \in Put(g) \cup Delete(g)

Last == Len(versions)
Newest == versions[Last]

(* The row of a key after generations 1 to g of its region: what a reader who has seen these must be shown. *)
Row(r, k, g) ==
    LET by == {x \in 1 .. g : Writes(x, k) /\ x > restored.mark[r] /\ x \notin restored.gone[r]}
    IN  IF by = {} THEN restored.rows[r][k] ELSE IF k \in Put(Max(by)) THEN Max(by) ELSE 0

(* The same over some generations that lie above a row. *)
Above(gens, k, row) ==
    LET by == {g \in gens : Writes(g, k)} IN IF by = {} THEN row ELSE IF k \in Put(Max(by)) THEN Max(by) ELSE 0

GensOf(ssts) == {sst.gen : sst \in ssts}
Logged(m) == {g \in Gens : g > m.replay}

Init ==
    /\ manifest = [r \in Regions |-> [replay |-> 0, epoch |-> 1, ssts |-> {}]]
    /\ dirs = [r \in Regions |-> {}]
    /\ written = [r \in Regions |-> [ssts |-> {}, offered |-> {}, ended |-> {}]]
    /\ outlived = [r \in Regions |-> {}]
    /\ published = [r \in Regions |-> {}]
    /\ plans = [r \in Regions |-> [g \in Gens |-> 0]]
    /\ versions = << [rows |-> [r \in Regions |-> [k \in Keys |-> 0]], mark |-> [r \in Regions |-> 0],
                      indexed |-> [r \in Regions |-> 0], moved |-> [r \in Regions |-> {}], restore |-> FALSE] >>
    /\ kept = {1}
    /\ synced = 1
    /\ tag = [version |-> 0, until |-> [r \in Regions |-> 0]]
    /\ restored = [done |-> FALSE, rows |-> [r \in Regions |-> [k \in Keys |-> 0]], mark |-> [r \in Regions |-> 0],
                   gone |-> [r \in Regions |-> {}], back |-> [r \in Regions |-> 0]]
    /\ committer = [c \in Committers |-> [at |-> "start"]]
    /\ sstCollector = [c \in SstCollectors |-> [at |-> "start"]]
    /\ planCollector = [c \in PlanCollectors |-> [at |-> "start"]]
    /\ reader \in [Readers -> [at : {"start"}, level : {"durable", "flushed", "committed"},
                               shown : {[r \in Regions |-> [k \in Keys |-> 0]]}]]
    /\ Allowed \subseteq {"restart", "power cut", "clean up", "tag", "restore", "compaction", "index", "discard"}

---------------------------------------------------------------------------------------------------------------------
(* A writer: flush.sst.flusher. The name of an SST is fresh in each attempt. *)

WriteSst(r) ==
    LET m == manifest[r]
        gen == m.replay + 1
        sst(g) == [gen |-> g, epoch |-> m.epoch]
    IN  \E g \in {gen} \cup (IF Bug = "publishes_past_a_failed_flush" THEN {gen + 1} ELSE {}) :
        /\ g \in Gens
        /\ sst(g) \notin written[r].ssts
        /\ written' = [written EXCEPT ![r].ssts = @ \cup {sst(g)}]
        /\ dirs' = [dirs EXCEPT ![r] = @ \cup {sst(g)}]
        /\ UNCHANGED <<manifest, outlived, published, plans, versions, kept, synced, tag, restored, committer,
                       sstCollector, planCollector, reader>>

(* The edit lists the SST and moves replay_after; it is refused from an older epoch, and out of order. *)
MayPublish(r, sst) ==
    /\ sst.epoch = manifest[r].epoch
    /\ IF Bug = "publishes_past_a_failed_flush" THEN sst.gen > manifest[r].replay
                                                ELSE sst.gen = manifest[r].replay + 1

(* It is sent as the version behind the newest. It may land late and without an answer, unless another version takes   *)
(* the slot before. A step of its own only where flushers give up SSTs; else the writer sleeps before it sends.        *)
Offer(r) ==
    /\ "discard" \in Allowed
    /\ \E sst \in written[r].ssts \ written[r].ended :
        /\ MayPublish(r, sst)
        /\ written' = [written EXCEPT ![r].offered = @ \cup {sst}]
    /\ UNCHANGED <<manifest, dirs, outlived, published, plans, versions, kept, synced, tag, restored, committer,
                   sstCollector, planCollector, reader>>

NextVersion(r) == written' = [written EXCEPT ![r].offered = {}]

Publish(r) ==
    \E sst \in IF "discard" \in Allowed THEN written[r].offered ELSE written[r].ssts :
        /\ MayPublish(r, sst)
        /\ manifest' = [manifest EXCEPT ![r].replay = sst.gen, ![r].ssts = @ \cup {sst}]
        /\ published' = [published EXCEPT ![r] = @ \cup {sst}]
        /\ tag' = IF tag.version # 0 /\ Newest.mark[r] = versions[tag.version].mark[r]
                  THEN [tag EXCEPT !.until[r] = sst.gen] ELSE tag
        /\ NextVersion(r)
        /\ UNCHANGED <<dirs, outlived, plans, versions, kept, synced, restored, committer, sstCollector,
                       planCollector, reader>>

(* No attempt follows, and the flusher deletes its own SST: it was never offered, or the slot that it was offered for  *)
(* is taken, by a version that has not published its generation.                                                      *)
Discard(r) ==
    /\ "discard" \in Allowed
    /\ \E sst \in written[r].ssts \ written[r].ended :
        /\ sst \notin written[r].offered \/ Bug = "discards_after_an_unknown_outcome"
        /\ sst.gen > manifest[r].replay
        /\ dirs' = [dirs EXCEPT ![r] = @ \ {sst}]
        /\ written' = [written EXCEPT ![r].ended = @ \cup {sst}]
    /\ UNCHANGED <<manifest, outlived, published, plans, versions, kept, synced, tag, restored, committer,
                   sstCollector, planCollector, reader>>

(* Another writer takes the region. What was on storage before the claim was written by the older one. *)
Claim(r) ==
    /\ manifest[r].epoch < Epochs
    /\ manifest' = [manifest EXCEPT ![r].epoch = @ + 1]
    /\ outlived' = [outlived EXCEPT ![r] = @ \cup dirs[r]]
    /\ NextVersion(r)
    /\ UNCHANGED <<dirs, published, plans, versions, kept, synced, tag, restored, committer, sstCollector,
                   planCollector, reader>>

---------------------------------------------------------------------------------------------------------------------
(* A committer: flush.commits.committer, rounds, plan and merge_passes. *)

StorageUnchanged == UNCHANGED <<manifest, dirs, written, outlived, published, tag, restored, sstCollector,
                                planCollector, reader>>
BaseUnchanged == UNCHANGED <<versions, kept, synced>>
Goes(c, to) == committer' = [committer EXCEPT ![c] = to]
BeginsAgain(c) == Goes(c, [at |-> "start"])
BaseFirst == Bug = "opens_the_base_before_the_manifests"

(* Step 1. *)
ReadManifests(c) ==
    LET me == committer[c] IN
    /\ me.at = IF BaseFirst THEN "base read" ELSE "start"
    /\ Goes(c, IF BaseFirst THEN [at |-> "plan", seen |-> manifest, read |-> me.read, plan |-> [r \in Regions |-> 0]]
                            ELSE [at |-> "manifests read", seen |-> manifest])
    /\ StorageUnchanged /\ BaseUnchanged /\ UNCHANGED plans

OpenBase(c) ==
    LET me == committer[c] IN
    /\ me.at = IF BaseFirst THEN "start" ELSE "manifests read"
    /\ Goes(c, IF BaseFirst THEN [at |-> "base read", read |-> Last]
                            ELSE [at |-> "plan", seen |-> me.seen, read |-> Last, plan |-> [r \in Regions |-> 0]])
    /\ StorageUnchanged /\ BaseUnchanged /\ UNCHANGED plans

ToCommit(me, r) == {sst \in me.seen[r].ssts : sst.gen > versions[me.read].mark[r]}

(* A generation that is missing between the committed one and the published ones: a restore has taken it back, or it  *)
(* is lost.                                                                                                           *)
IsGap(me, r) ==
    LET first == Min(GensOf(ToCommit(me, r))) IN
    first # versions[me.read].mark[r] + 1 /\ first > restored.back[r] + 1

(* Step 2: the range that begins at `first` ends where the first committer said. How many SSTs a committer proposes   *)
(* depends on its memory.                                                                                             *)
Plan(c, r) ==
    LET me == committer[c]
        gens == GensOf(ToCommit(me, r))
        first == Min(gens)
    IN  /\ me.at = "plan" /\ me.plan[r] = 0 /\ gens # {}
        /\ \E last \in gens :
            LET agreed == IF plans[r][first] = 0 \/ Bug = "takes_no_agreed_plan" THEN last ELSE plans[r][first] IN
            /\ plans' = IF plans[r][first] = 0 THEN [plans EXCEPT ![r][first] = last] ELSE plans
            /\ Goes(c, IF IsGap(me, r) THEN [at |-> "damaged"]
                       ELSE IF agreed > Max(gens) THEN [at |-> "start"]  \* another has seen more: read again
                       ELSE [me EXCEPT !.plan[r] = agreed])
        /\ StorageUnchanged /\ BaseUnchanged

Planned(me) == {r \in Regions : me.plan[r] # 0}
Range(me, r) == {sst \in ToCommit(me, r) : sst.gen <= me.plan[r]}
SameProgress(me) == \A r \in Planned(me) : Newest.mark[r] = versions[me.read].mark[r]

(* The last part of step 2: between the plan and the first write, a look at the newest version. *)
LookAgain(c) ==
    LET me == committer[c] IN
    /\ me.at = "plan" /\ Planned(me) # {}
    /\ IF SameProgress(me) \/ Bug = "writes_without_another_look" THEN Goes(c, [me EXCEPT !.at = "reduce"])
                                                                  ELSE BeginsAgain(c)
    /\ StorageUnchanged /\ BaseUnchanged /\ UNCHANGED plans

Changes(me, r, k) == \E sst \in Range(me, r) : Writes(sst.gen, k)
Result(me, r, k) == Above(GensOf(Range(me, r)), k, 0)
Deletes(me) == [r \in Regions |-> IF r \in Planned(me) THEN {k \in Keys : Changes(me, r, k) /\ Result(me, r, k) = 0}
                                                       ELSE {}]
Upserts(me) == [r \in Regions |-> IF r \in Planned(me) THEN {k \in Keys : Result(me, r, k) # 0} ELSE {}]
Nothing == [r \in Regions |-> {}]
Stored(v, keys) == [r \in Regions |-> {k \in keys[r] : versions[v].rows[r][k] # 0}]

(* Step 3: the SSTs are read. One that is gone was collected after another committer's commit, or is lost. *)
Reduce(c) ==
    LET me == committer[c]
        there == \A r \in Planned(me) : Range(me, r) \subseteq dirs[r]
    IN  /\ me.at = "reduce"
        /\ IF there
           THEN Goes(c, [me EXCEPT !.at = IF Stored(me.read, Deletes(me)) = Nothing \/ Upserts(me) = Nothing
                                          THEN "upserts" ELSE "deletes"])
           ELSE IF SameProgress(me) THEN Goes(c, [at |-> "damaged"]) ELSE BeginsAgain(c)
        /\ StorageUnchanged /\ BaseUnchanged /\ UNCHANGED plans

(* What Lance does with a pass over the rows `touched`, planned on version v. It looks at the versions since then     *)
(* that still exist. Rows that one of the others has moved come back as they were: nothing detects it.                *)
Conflicts(v, touched) ==
    \E w \in kept : w > v /\ (versions[w].restore \/ \E r \in Regions : versions[w].moved[r] \cap touched[r] # {})
Unseen(v, r) == UNION {versions[w].moved[r] : w \in {x \in v + 1 .. Last : x \notin kept}}
Below(v) == [r \in Regions |-> [k \in Keys |-> IF k \in Unseen(v, r) THEN versions[v].rows[r][k]
                                                                     ELSE Newest.rows[r][k]]]
Raised(me) == [r \in Regions |-> IF r \in Planned(me) THEN me.plan[r] ELSE Newest.mark[r]]
MarkerRefused(me) == \E r \in Planned(me) : me.plan[r] <= Newest.mark[r]

Makes(version) ==
    /\ versions' = Append(versions, version)
    /\ kept' = kept \cup {Last + 1}
    /\ UNCHANGED synced

(* Step 5: deletes, without the marker. Where Lance put them on top of an unseen version the round begins again. *)
DeletesPass(c) ==
    LET me == committer[c]
        touched == Stored(me.read, Deletes(me))
        withMarker == Bug = "marker_on_the_deletes_pass"
    IN  /\ me.at = "deletes"
        /\ IF Conflicts(me.read, touched) \/ (withMarker /\ MarkerRefused(me))
           THEN BeginsAgain(c) /\ BaseUnchanged
           ELSE /\ Makes([rows |-> [r \in Regions |-> [k \in Keys |-> IF k \in touched[r] THEN 0
                                                                      ELSE Below(me.read)[r][k]]],
                          mark |-> IF withMarker THEN Raised(me) ELSE Newest.mark, indexed |-> Newest.indexed,
                          moved |-> touched, restore |-> FALSE])
                /\ IF Last = me.read THEN Goes(c, [me EXCEPT !.at = "upserts"]) ELSE BeginsAgain(c)
        /\ StorageUnchanged /\ UNCHANGED plans

(* Step 6: upserts and the marker, in one version. Without upserts the deletes carry it. *)
UpsertsPass(c) ==
    LET me == committer[c]
        onlyDeletes == Upserts(me) = Nothing
        from == IF Stored(me.read, Deletes(me)) = Nothing \/ onlyDeletes THEN me.read ELSE me.read + 1
        touched == IF onlyDeletes THEN Stored(me.read, Deletes(me)) ELSE Upserts(me)
        marked == Bug = "marker_on_the_deletes_pass" /\ from # me.read
    IN  /\ me.at = "upserts"
        /\ IF Conflicts(from, touched) \/ (MarkerRefused(me) /\ ~marked)
           THEN BaseUnchanged
           ELSE Makes([rows |-> [r \in Regions |-> [k \in Keys |-> IF k \in touched[r] THEN Result(me, r, k)
                                                                   ELSE Below(from)[r][k]]],
                       mark |-> IF marked THEN Newest.mark ELSE Raised(me),
                       indexed |-> IF "index" \in Allowed THEN Newest.indexed ELSE Raised(me), moved |-> touched,
                       restore |-> FALSE])
        /\ BeginsAgain(c)
        /\ StorageUnchanged /\ UNCHANGED plans

(* Step 8: the indexes are extended, in a version that moves no row. *)
NothingToCommit(me) == \A r \in Regions : ToCommit(me, r) = {}
CatchUp(c) ==
    LET me == committer[c] IN
    /\ me.at = "plan" /\ NothingToCommit(me) /\ "index" \in Allowed
    /\ versions[me.read].indexed # versions[me.read].mark
    /\ IF Conflicts(me.read, Nothing)
       THEN BeginsAgain(c) /\ BaseUnchanged
       ELSE /\ Makes([Newest EXCEPT !.indexed = versions[me.read].mark, !.moved = Nothing, !.restore = FALSE])
            /\ Goes(c, [me EXCEPT !.read = Last + 1])
    /\ StorageUnchanged /\ UNCHANGED plans

(* Step 9: the base goes to the disk, then the SSTs out of the manifests. *)
Prunable(me) ==
    {r \in Regions : \E sst \in manifest[r].ssts : sst.gen <= versions[me.read].mark[r]}
CaughtUp(me) ==
    /\ me.at = "plan" /\ NothingToCommit(me)
    /\ "index" \in Allowed => versions[me.read].indexed = versions[me.read].mark
Sync(c) ==
    LET me == committer[c] IN
    /\ CaughtUp(me) /\ Prunable(me) # {}
    /\ synced' = IF Bug = "prunes_before_the_sync" \/ me.read < synced THEN synced ELSE me.read
    /\ Goes(c, [at |-> "prune", read |-> me.read])
    /\ StorageUnchanged /\ UNCHANGED <<versions, kept, plans>>

Prune(c, r) ==
    LET me == committer[c]
        dropped == {sst \in manifest[r].ssts : sst.gen <= versions[me.read].mark[r]}
        back == {g \in GensOf(dropped) : g > Newest.mark[r] /\ g <= restored.back[r]}
    IN  /\ me.at = "prune" /\ dropped # {}
        /\ manifest' = [manifest EXCEPT ![r].ssts = @ \ dropped]
        /\ restored' = [restored EXCEPT !.gone[r] = @ \cup back]
        /\ NextVersion(r)
        /\ UNCHANGED <<dirs, outlived, published, plans, versions, kept, synced, tag, committer, sstCollector,
                       planCollector, reader>>

Finish(c) ==
    LET me == committer[c] IN
    /\ CaughtUp(me) \/ me.at = "prune"
    /\ Prunable(me) = {}
    /\ BeginsAgain(c)
    /\ StorageUnchanged /\ BaseUnchanged /\ UNCHANGED plans

(* After any error, an answer that was lost, or a crash: what the next commit does is decided by storage alone. *)
Restart(c) ==
    /\ "restart" \in Allowed
    /\ committer[c].at \notin {"start", "damaged"}
    /\ BeginsAgain(c)
    /\ StorageUnchanged /\ BaseUnchanged /\ UNCHANGED plans

CommitterStep(c) ==
    \/ ReadManifests(c) \/ OpenBase(c) \/ LookAgain(c) \/ Reduce(c) \/ DeletesPass(c) \/ UpsertsPass(c) \/ CatchUp(c)
    \/ Sync(c) \/ Finish(c) \/ (\E r \in Regions : Plan(c, r) \/ Prune(c, r))

---------------------------------------------------------------------------------------------------------------------
(* A collector of SST directories: flush.garbage.ssts and retained. It lists, then reads the manifest, then the base. *)

CollectorLeaves == UNCHANGED <<manifest, written, outlived, published, plans, versions, kept, synced, tag, restored,
                               committer, planCollector, reader>>
Turns(c, to) == sstCollector' = [sstCollector EXCEPT ![c] = to]

ListSsts(c, r) ==
    /\ sstCollector[c].at = "start" /\ dirs[r] # {}
    /\ Turns(c, [at |-> "listed", region |-> r, names |-> dirs[r]])
    /\ UNCHANGED dirs /\ CollectorLeaves

ReadManifest(c) ==
    LET me == sstCollector[c] IN
    /\ me.at = "listed"
    /\ Turns(c, [at |-> "manifest read", region |-> me.region, names |-> me.names, seen |-> manifest[me.region],
                 noted |-> outlived[me.region] \cap me.names])
    /\ UNCHANGED dirs /\ CollectorLeaves

(* What was published while the version with `mark` was the newest: the old manifests have it. Everything that is     *)
(* published now is at least that.                                                                                    *)
NeededForTag(r, gen) ==
    tag.version # 0 /\ Bug # "collects_what_a_tag_needs" /\ versions[tag.version].mark[r] < gen /\ gen <= tag.until[r]

IsGarbage(me, sst) ==
    LET r == me.region IN
    /\ sst \notin me.seen.ssts                                                                            \* rule 1
    /\ IF sst.gen > me.seen.replay
       THEN Bug = "collects_flushes_under_way" \/ sst \in me.noted                                        \* rule 2
       ELSE IF sst.gen > Newest.mark[r] THEN \E other \in me.seen.ssts : other.gen = sst.gen              \* rule 3
       ELSE sst.gen <= Newest.indexed[r] /\ ~NeededForTag(r, sst.gen)                                     \* rule 4

Judge(c) ==
    LET me == sstCollector[c]
        garbage == {sst \in me.names : IsGarbage(me, sst)}
    IN  /\ me.at = "manifest read"
        /\ Turns(c, IF garbage = {} THEN [at |-> "start"]
                                    ELSE [at |-> "delete", region |-> me.region, names |-> garbage])
        /\ UNCHANGED dirs /\ CollectorLeaves

DeleteSst(c) ==
    LET me == sstCollector[c] IN
    /\ me.at = "delete"
    /\ \E sst \in me.names :
        /\ dirs' = [dirs EXCEPT ![me.region] = @ \ {sst}]
        /\ Turns(c, IF me.names = {sst} THEN [at |-> "start"] ELSE [me EXCEPT !.names = @ \ {sst}])
    /\ CollectorLeaves

SstCollectorStep(c) == (\E r \in Regions : ListSsts(c, r)) \/ ReadManifest(c) \/ Judge(c) \/ DeleteSst(c)

(* A collector of plans: flush.garbage.plans. A plan goes once every version that is kept has committed its start. *)

ReadVersions(c, r) ==
    /\ planCollector[c].at = "start"
    /\ LET settled == Min({versions[v].mark[r] : v \in IF Bug = "collects_plans_by_the_newest_version" THEN {Last}
                                                                                                     ELSE kept})
       IN  /\ \E g \in 1 .. settled : plans[r][g] # 0
           /\ planCollector' = [planCollector EXCEPT ![c] = [at |-> "delete", region |-> r, settled |-> settled]]
    /\ UNCHANGED <<manifest, dirs, written, outlived, published, plans, versions, kept, synced, tag, restored,
                   committer, sstCollector, reader>>

DeletePlan(c) ==
    LET me == planCollector[c] IN
    /\ me.at = "delete"
    /\ \/ /\ \E g \in 1 .. me.settled : plans[me.region][g] # 0 /\ plans' = [plans EXCEPT ![me.region][g] = 0]
          /\ UNCHANGED planCollector
       \/ /\ \A g \in 1 .. me.settled : plans[me.region][g] = 0
          /\ planCollector' = [planCollector EXCEPT ![c] = [at |-> "start"]]
          /\ UNCHANGED plans
    /\ UNCHANGED <<manifest, dirs, written, outlived, published, versions, kept, synced, tag, restored, committer,
                   sstCollector, reader>>

PlanCollectorStep(c) == (\E r \in Regions : ReadVersions(c, r)) \/ DeletePlan(c)

---------------------------------------------------------------------------------------------------------------------
(* A reader of storage alone: ingest.engine.read. The levels above the base first, then the base, then the SSTs. *)

ReaderOnly == UNCHANGED <<manifest, dirs, written, outlived, published, plans, versions, kept, synced, tag, restored,
                          committer, sstCollector, planCollector>>
Idle(me) == [at |-> "start", level |-> me.level, shown |-> me.shown]
ReaderBaseFirst == Bug = "reads_the_base_first"

Capture(x) ==
    LET me == reader[x] IN
    /\ me.at = "start"
    /\ reader' = [reader EXCEPT ![x] = [at |-> "captured", level |-> me.level, shown |-> me.shown, seen |-> manifest,
          base |-> Last,
          promised |-> [r \in Regions |-> IF me.level = "durable" THEN Generations
                                          ELSE IF me.level = "flushed" THEN manifest[r].replay ELSE Newest.mark[r]]]]
    /\ ReaderOnly

(* Rows of the log that the base has committed meanwhile: capture again. *)
ReadBase(x) ==
    LET me == reader[x]
        base == IF ReaderBaseFirst THEN me.base ELSE Last
        seen == IF ReaderBaseFirst THEN manifest ELSE me.seen
        overtaken == me.level = "durable" /\ \E r \in Regions : versions[base].mark[r] > seen[r].replay
    IN  /\ me.at = "captured"
        /\ reader' = [reader EXCEPT ![x] = IF overtaken THEN Idle(me)
                                           ELSE [me EXCEPT !.at = "opened", !.base = base, !.seen = seen]]
        /\ ReaderOnly

SstsAbove(me, r) ==
    IF me.level = "committed" THEN {} ELSE {sst \in me.seen[r].ssts : sst.gen > versions[me.base].mark[r]}
Found(me, r, k) ==
    Above(GensOf(SstsAbove(me, r)) \cup (IF me.level = "durable" THEN Logged(me.seen[r]) ELSE {}), k,
          versions[me.base].rows[r][k])

(* Whether each key in the answer is as it was at a moment between the beginning of the read and now, and not before  *)
(* the one shown last. Not more: between the two passes of a commit the base has the deletes of a generation without  *)
(* its puts, and whoever captured the levels before that generation was published sees just that.                     *)
Moments(me, r) == me.promised[r] .. (IF me.level = "durable" THEN Generations ELSE manifest[r].replay)
IsTrue(me) ==
    \A r \in Regions, k \in Keys :
        \E g \in Moments(me, r) : g >= me.shown[r][k] /\ Found(me, r, k) = Row(r, k, g)
Shown(me) ==
    [r \in Regions |-> [k \in Keys |->
        Min({g \in Moments(me, r) : g >= me.shown[r][k] /\ Found(me, r, k) = Row(r, k, g)})]]

Answer(x) ==
    LET me == reader[x]
        there == \A r \in Regions : SstsAbove(me, r) \subseteq dirs[r]
    IN  /\ me.at = "opened"
        /\ reader' = [reader EXCEPT ![x] = IF ~there THEN Idle(me)  \* collected: the base has its rows, read again
                                           ELSE IF IsTrue(me) THEN [Idle(me) EXCEPT !.shown = Shown(me)]
                                           ELSE [me EXCEPT !.at = "wrong"]]
        /\ ReaderOnly

---------------------------------------------------------------------------------------------------------------------
(* What others do to the table, and the machine. *)

Died == /\ committer' = [c \in Committers |-> [at |-> "start"]]
        /\ sstCollector' = [c \in SstCollectors |-> [at |-> "start"]]
        /\ planCollector' = [c \in PlanCollectors |-> [at |-> "start"]]
        /\ reader' = [x \in Readers |-> [Idle(reader[x]) EXCEPT !.shown = [r \in Regions |-> [k \in Keys |-> 0]]]]

(* Lance does not sync: a power cut takes versions back, down to the newest that somebody has synced. What goes       *)
(* through our own store is on the disk when the call returns.                                                        *)
PowerCut ==
    /\ "power cut" \in Allowed /\ synced < Last
    /\ \E v \in synced .. Last - 1 :
        /\ versions' = SubSeq(versions, 1, v)
        /\ kept' = kept \cap 1 .. v
        /\ tag' = IF tag.version > v THEN [tag EXCEPT !.version = 0] ELSE tag
    /\ Died
    /\ UNCHANGED <<manifest, dirs, written, outlived, published, plans, synced, restored>>

(* Maintenance deletes old versions, after a sync of the newest. They stay longer than any committer takes from its   *)
(* look at the newest version to its last pass.                                                                       *)
InPass == {c \in Committers : committer[c].at \in {"reduce", "deletes", "upserts"}}
CleanUp ==
    LET held == {committer[c].read : c \in InPass}
        young == {v \in kept : \E w \in held : v >= w}
    IN  /\ "clean up" \in Allowed
        /\ kept' = ({Last, tag.version} \ {0}) \cup (IF Bug = "cleans_up_under_a_pass" THEN {} ELSE young)
        /\ kept' # kept
        /\ synced' = IF Bug = "cleans_up_before_the_sync" THEN synced ELSE Last
        /\ UNCHANGED <<manifest, dirs, written, outlived, published, plans, versions, tag, restored, committer,
                       sstCollector, planCollector, reader>>

Tag ==
    /\ "tag" \in Allowed /\ tag.version = 0
    /\ tag' = [version |-> Last, until |-> [r \in Regions |-> manifest[r].replay]]
    /\ UNCHANGED <<manifest, dirs, written, outlived, published, plans, versions, kept, synced, restored, committer,
                   sstCollector, planCollector, reader>>

(* Somebody puts the base back to a version that is kept. It takes back what was committed since and is pruned. *)
Restore ==
    /\ "restore" \in Allowed /\ ~restored.done
    /\ \E v \in kept \ {Last} :
        /\ versions' = Append(versions, [versions[v] EXCEPT !.moved = Nothing, !.restore = TRUE])
        /\ restored' = [done |-> TRUE, rows |-> versions[v].rows, mark |-> versions[v].mark,
                        gone |-> [r \in Regions |-> {g \in versions[v].mark[r] + 1 .. Newest.mark[r] :
                                                     g \notin GensOf(manifest[r].ssts)}],
                        back |-> Newest.mark]
    /\ kept' = kept \cup {Last + 1}
    /\ UNCHANGED <<manifest, dirs, written, outlived, published, plans, synced, tag, committer, sstCollector,
                   planCollector, reader>>

(* Another program compacts: every row is moved, none is changed. *)
Compact ==
    /\ "compaction" \in Allowed /\ Last < VersionsMax
    /\ Makes([Newest EXCEPT !.moved = [r \in Regions |-> {k \in Keys : Newest.rows[r][k] # 0}], !.restore = FALSE])
    /\ UNCHANGED <<manifest, dirs, written, outlived, published, plans, tag, restored, committer, sstCollector,
                   planCollector, reader>>

---------------------------------------------------------------------------------------------------------------------
Environment ==
    \/ \E r \in Regions : Claim(r)
    \/ \E c \in Committers : Restart(c)
    \/ PowerCut
    \/ Tag
    \/ Restore
    \/ Compact

Next ==
    \/ \E r \in Regions : WriteSst(r)
    \/ \E r \in Regions : Offer(r)
    \/ \E r \in Regions : Publish(r)
    \/ \E r \in Regions : Discard(r)
    \/ \E c \in Committers : ReadManifests(c)
    \/ \E c \in Committers : OpenBase(c)
    \/ \E c \in Committers : \E r \in Regions : Plan(c, r)
    \/ \E c \in Committers : LookAgain(c)
    \/ \E c \in Committers : Reduce(c)
    \/ \E c \in Committers : DeletesPass(c)
    \/ \E c \in Committers : UpsertsPass(c)
    \/ \E c \in Committers : CatchUp(c)
    \/ \E c \in Committers : Sync(c)
    \/ \E c \in Committers : \E r \in Regions : Prune(c, r)
    \/ \E c \in Committers : Finish(c)
    \/ \E c \in SstCollectors : \E r \in Regions : ListSsts(c, r)
    \/ \E c \in SstCollectors : ReadManifest(c)
    \/ \E c \in SstCollectors : Judge(c)
    \/ \E c \in SstCollectors : DeleteSst(c)
    \/ \E c \in PlanCollectors : \E r \in Regions : ReadVersions(c, r)
    \/ \E c \in PlanCollectors : DeletePlan(c)
    \/ \E x \in Readers : Capture(x)
    \/ \E x \in Readers : ReadBase(x)
    \/ \E x \in Readers : Answer(x)
    \/ CleanUp
    \/ Environment

Spec == Init /\ [][Next]_vars

---------------------------------------------------------------------------------------------------------------------
(* What must hold. *)

(* Storage as it is at this moment shows the newest row of every key: no acknowledged row is lost, and none hidden. *)
NothingLost ==
    \A r \in Regions, k \in Keys :
        LET m == manifest[r]
            gens == {g \in GensOf(m.ssts) : g > Newest.mark[r]} \cup Logged(m)
        IN  Above(gens, k, Newest.rows[r][k]) = Row(r, k, Generations)

(* The base never holds an older row than its marker says, and none of a generation that was not published. *)
NoOlderRow ==
    \A r \in Regions, k \in Keys :
        \E g \in Newest.mark[r] .. manifest[r].replay : Newest.rows[r][k] = Row(r, k, g)

(* Nothing that is needed is collected: by whoever reads the newest manifest, by a committer, by an index that lags,  *)
(* by a tagged version, by the table itself.                                                                          *)
ListedExists == \A r \in Regions : manifest[r].ssts \subseteq dirs[r]
PublishedBetween(r, low, high) == {sst \in published[r] : low < sst.gen /\ sst.gen <= high}
LaggingIndexServed ==
    \A r \in Regions : PublishedBetween(r, Newest.indexed[r], Newest.mark[r]) \subseteq dirs[r]
TaggedWhole ==
    tag.version # 0 =>
        \A r \in Regions : PublishedBetween(r, versions[tag.version].mark[r], tag.until[r]) \subseteq dirs[r]
NotDamaged == \A c \in Committers : committer[c].at # "damaged"
ReadableNewest == Last \in kept

(* Every answer is of a moment after the read began, and none goes back behind the one before it. *)
ReadsTrue == \A x \in Readers : reader[x].at # "wrong"

(* Not so: TLC must find a way to all rows in the base and nothing left in the manifests. *)
NeverDone == \E r \in Regions : Newest.mark[r] < Generations \/ manifest[r].ssts # {}

(* The marker goes back only by a restore, or with versions that a power cut takes. *)
MarkerRises == [][Last' <= Last \/ versions'[Last'].restore
                  \/ \A r \in Regions : versions'[Last'].mark[r] >= Newest.mark[r]]_vars

(* Progress, though every committer and collector but one of each may sleep for ever anywhere. *)
Fair(c, s, p) ==
    /\ WF_vars(\E r \in Regions : WriteSst(r) \/ Publish(r))
    /\ WF_vars(CleanUp)
    /\ WF_vars(CommitterStep(c))
    /\ WF_vars(SstCollectorStep(s))
    /\ WF_vars(PlanCollectorStep(p))
FairSpec == Spec /\ Fair(CHOOSE c \in Committers : TRUE, CHOOSE c \in SstCollectors : TRUE,
                         CHOOSE c \in PlanCollectors : TRUE)
AllCommitted == <>[](\A r \in Regions : Newest.mark[r] = Generations /\ manifest[r].ssts = {})
AllCollected ==
    <>[](\A r \in Regions : dirs[r] = {} /\
           (InPass = {} => \A g \in Gens : plans[r][g] = 0))  \* a committer that sleeps in a pass holds versions
=============================================================================
