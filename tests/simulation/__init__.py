"""The whole of memwal in one thread, with everything that can go wrong, decided by one seed.

`python -m tests.simulation --seed N --trace` shows the run of a seed step by step; `make simulate SEEDS=20000` looks
for a seed that fails; with `--append` on tables without a key. What is real: claims, appender, region core, memtables,
flush, commit, collector, readers, and pylance on a directory. What is simulated: time, chance, who runs next,
and the storage's answers.

| module | what lives there |
|---|---|
| `scheduler` | actors (greenlets), who runs next, simulated time |
| `storage` | the store port with faults |
| `lance_calls` | the same for pylance's own storage calls |
| `oracle` | what may be read, when |
| `process` | a writer process: regions, serving and flushing |
| `actors` | readers, committers, collectors, strangers, a Spark driver, chaos |
| `world` | one run: a seed's weather, the actors, the end |
| `planted` | faults that the simulation must find |
| `table_world` | another kind of run, `--table`: flush, commit, collection, the base table and who interferes |
| `table_actors`, `table_planted` | its inspector, collector, upkeep and stranger; faults that it must find |
| `daemon_world` | a third kind, `--daemons`: micro-batches through daemons that fight over regions, and resizes |
| `daemon`, `daemon_planted` | one of its daemons; faults that it must find |
"""
