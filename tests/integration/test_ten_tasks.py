"""Ten tasks of a first hour, as a user types them, and the wrong guesses that people from other programs make.

A task is at most five lines of Python, or two commands. They run in order, in one directory: a task may use the tables
and files of the tasks before it. Each wrong guess is answered by one line with the problem, the place and the remedy.
"""

from __future__ import annotations

import ast
import json
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE, Cli, Start, wait_until
from tests.integration.test_follow import MEMWAL

PYTHON = {
    "1. create a table": """
import memwal
table = memwal.open("books.lance", data=[{"id": 1, "title": "Harbor lights", "vector": [1.0, 0.0]}], key="id")
print(table.count())
""",
    "2. put rows": """
table.put([{"id": 2, "title": "Mountain paths", "vector": [0.0, 1.0]}])
print(table.get([2])["title"].to_pylist())
""",
    "3. update one column": """
table.update(where="id = 2", values={"title": "The old harbor"})
print(table.get([2])["title"].to_pylist(), table.get([2])["vector"].to_pylist())
""",
    "4. search by vector and by text": """
print(table.search([0.1, 0.9]).limit(1).to_list()[0]["id"])
table.create_index("title", "fts")
print(table.match("title", "lights", columns=["id"])["id"].to_pylist())
""",
    "5. search by both": """
print(table.hybrid([0.0, 1.0], "harbor", columns=["id"])["id"].to_pylist())
""",
    "6. read the change feed": """
for rows in table.changes(since="earliest"):
    for change in rows.to_pylist():
        print(change["_change"], change["id"], change["title"])
""",
    "7. read an earlier version": """
before = table.optimize() and table.version
table.delete([1])
print(table.count(), table.checkout(before) or table.count())
table.checkout_latest()
""",
    "8. try wrong names": """
try:
    table.insert([{"id": 3}])
except AttributeError as error:
    print(error)
""",
}
COMMANDS = {
    "9. load a CSV file": "memwal config new films.toml --from films.csv\nmemwal load films.toml films.csv",
    "10. follow a directory": "memwal load films.toml incoming --follow",
}
PRINTED = {
    "1. create a table": "1",
    "2. put rows": "['Mountain paths']",
    "3. update one column": "['The old harbor'] [[0.0, 1.0]]",
    "4. search by vector and by text": "2\n[1]",
    "5. search by both": "[2, 1]",
    "6. read the change feed": "insert 1 Harbor lights\ninsert 2 Mountain paths\nupdate 2 The old harbor",
    "7. read an earlier version": "1 2",
    "8. try wrong names": "a table has no 'insert'; call put(rows)",
}
FILMS = "id,title,year\n1,The lighthouse,2019\n2,Night train,1959\n"

GUESSES = {
    "table.insert([row])": "call put(rows)",
    "table.upsert([row])": "call put(rows)",
    "table.append([row])": "call put(rows)",
    "table.find(1)": "call get(keys)",
    "table.fetch(1)": "call get(keys)",
    "table.query('SELECT 1')": "sql(query)",
    "table.rows": "call scan()",
    "table.subscribe()": "call changes(",
    "table.watch()": "call changes(",
    "table.history()": "call list_versions()",
    "table.drop()": "delete its directory",
    "table.close_all()": "did you mean 'close'?",
    "table.add_index('title', 'fts')": "call create_index(",
    "table.columns": "use schema",
    "table.xyzzy": "dir(table)",
    "table[1]": "call get(keys)",
    "table['title']": "scan(columns, filter)",
    "[each for each in table]": "iterate over scan()",
    "table.search([1.0, 0.0]).top(3)": "use limit(n)",
    "memwal.create_table('b.lance')": "call memwal.open(",
    "memwal.Table('b.lance')": "call memwal.open(",
    "memwal.read('books.lance')": "call memwal.open(",
    "memwal.conect('grpc://host:1')": "did you mean 'connect'?",
    "table.put([{**row, 'titel': 'x'}])": "column 'titel' is not in the table; did you mean 'title'?",
    "table.put([{**row, 'id': 'three'}])": "column 'id', which is int64, in row 0: it is string; convert it",
    "table.put([{**row, 'vector': [1.0, 0.0, 0.0]}])": "in row 0: its length is 3; give 2 elements",
    "table.put([{'title': 'x'}])": "key column 'id' is missing: add it",
    "table.put(row)": "pass an Arrow table or batch, a pandas or polars frame, or a list of dicts",
    "table.scan(filter='titel = 1')": "did you mean 'title'?",
    "table.scan(order_by='titel')": "did you mean 'title'?",
    "table.scan(columns=['titel'])": "did you mean 'title'?",
    "table.scan(where='id = 1')": "write filter",
    "table.search('vector', [1.0, 0.0, 0.0])": "column 'vector' has 2; give 2 numbers",
    "table.search('vektor', [1.0, 0.0])": "did you mean 'vector'?",
    "table.hybrid([1.0, 0.0], 'x', limit=1)": "write k",
    "table.update(where='id = 1', set={'title': 'x'})": "write values",
    "table.update(where='id = 1', values={'titel': 'x'})": "did you mean 'title'?",
    "table.delete(where='id = 1')": "write filter",
    "table.changes(starting_version=1)": "write since",
    "table.create_index('title', 'text')": "known are 'ivf_pq', 'fts', 'btree'",
    "memwal.open('b.lance')": "give its columns and its key",
    "memwal.open('b.lance', data=[row])": "name its key",
    "memwal.open('b.lance', data=[row], key='ids')": "did you mean 'id'?",
    "memwal.open('b.lance', data=[row], primary_key='id')": "write key",
    "memwal.open('b.lance', data=[row], key='id', indices={'title': 'fts'})": "did you mean 'indexes'?",
    "memwal.open('b.lance', rows=[row], key='id')": "write data",
    "memwal.open('films.csv')": "a table is a directory",
    "memwal.open('incoming', read_only=True)": "correct table.uri",
    "memwal.connect('localhost:1')": "write grpc://host:port",
}
"""Python by a user of LanceDB, pandas, Spark or Kafka, and what its error says."""

TYPED = {
    "quary films.toml": "did you mean 'query'?",
    "query": "Missing argument 'CONFIG': TOML file",
    "query films.toml --fliter 'id = 1'": "did you mean --filter?",
    "query films.toml --where 'id = 1'": "write --filter",
    "query films.toml --filter 'titel = 1'": "did you mean 'title'?",
    "query books.lance": "memwal config new FILE --from books.lance writes one",
    "query none.toml": "give the path of a TOML file",
    "put films.toml": "write memwal load CONFIG FILES",
    "insert films.toml": "write memwal load CONFIG FILES",
    "select films.toml": "write memwal query",
    "subscribe films.toml": "write memwal tail",
    "create films.toml": "write memwal config new CONFIG --from FILE, then memwal init CONFIG",
    "ls": "write memwal status",
    "history films.toml": "write memwal log",
    "version": "write memwal --version",
    "index ad films.toml title fts": "did you mean 'add'? (see memwal index --help)",
    "load films.toml": "Missing argument 'FILES...': Parquet, CSV",
    "load films.toml wrong.csv": "wrong.csv: column 'titel' is not in the table; did you mean 'title'?",
    "load films.toml none.csv": "the file does not exist",
}
"""Commands, and what their error says."""

TYPES = {
    "integer": "write int32 or int64",
    "int": "write int32 or int64",
    "bigint": "write int64",
    "varchar": "write string",
    "text": "write string",
    "float": "write float32 or float64",
    "double": "write float64",
    "boolean": "write bool",
    "timestamp": "write timestamp[us] or timestamp[us, UTC]",
    "vector": "write vector[N], where N is the width of your vectors",
    "int65": "did you mean 'int64'?",
}
"""Types of columns in a configuration, and what their error says."""

PROGRAM = """
import json, sys
tasks, guesses = json.loads(sys.stdin.read())
variables = {}
for task, lines in tasks.items():
    print("task", task)
    exec(lines, variables)
variables["row"] = {"id": 3, "title": "x", "vector": [1.0, 0.0]}
for guess in guesses:
    try:
        print("guess", json.dumps([guess, "no error", repr(eval(guess, variables))]))
    except Exception as error:
        print("guess", json.dumps([guess, type(error).__name__, str(error)]))
print("table", variables["table"])
variables["table"].close()
with variables["memwal"].open("books.lance", read_only=True) as table:
    print("table", table)
"""
"""Runs the tasks and the guesses as a program of a user does; the tests' own tables have more attributes."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the user."""
    place = tmp_path_factory.mktemp("first_hour")
    (place / "films.csv").write_text(FILMS)
    (place / "wrong.csv").write_text(FILMS.replace("title", "titel"))
    (place / "incoming").mkdir()
    return place


@pytest.fixture(scope="module")
def output(place: Path) -> list[str]:
    """Return what the tasks in Python and the guesses print."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=place,
        input=json.dumps([PYTHON, list(GUESSES)]),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_task_is_short() -> None:
    assert len(PYTHON) + len(COMMANDS) == 10
    for task, text in PYTHON.items():
        lines = text.strip().splitlines()
        assert len(lines) <= 5, task
        assert max(map(len, lines)) <= 120, task
        ast.parse(text)
    for task, text in COMMANDS.items():
        assert len(text.splitlines()) <= 2, task
        assert max(map(len, text.splitlines())) <= 80, task


def test_the_tasks_in_python(output: list[str]) -> None:
    printed: dict[str, list[str]] = {}
    for line in output:
        word, _, rest = line.partition(" ")
        if word == "task":
            printed[rest] = []
        elif word in ("guess", "table"):
            break
        else:
            list(printed.values())[-1].append(line)
    assert {task: "\n".join(lines) for task, lines in printed.items()} == PRINTED


def test_a_wrong_guess_in_python_is_answered_in_one_line(output: list[str]) -> None:
    answers: list[Any] = [json.loads(line.removeprefix("guess ")) for line in output if line.startswith("guess ")]
    assert [guess for guess, _, _ in answers] == list(GUESSES)
    wrong = [
        (guess, kind, text)
        for guess, kind, text in answers
        if GUESSES[guess] not in text or "\n" in text or kind not in ("Invalid", "AttributeError", "TypeError")
    ]
    assert wrong == []


def test_a_table_shows_what_it_reads(output: list[str]) -> None:
    writer, reader = (line for line in output if line.startswith("table "))
    assert writer.endswith("key id, columns id, title, vector, reads latest>")
    assert reader.endswith("key id, columns id, title, vector, read-only, reads durable>")


def test_the_tasks_in_commands_and_wrong_commands(cli: Cli, start: Start, output: list[str], place: Path) -> None:
    """After the tasks in Python, since a guess names their table."""
    assert output
    for line in COMMANDS["9. load a CSV file"].splitlines():
        ran = cli(*shlex.split(line)[1:], cwd=place)
        assert ran.code == 0, ran.err
    assert "2 rows" in ran.out
    (follow,) = COMMANDS["10. follow a directory"].splitlines()
    running = start([*MEMWAL, *shlex.split(follow)[1:]], cwd=place)
    (place / "incoming/more.csv").write_text("id,title,year\n3,Still walking,2008\n")
    query = ("query", "films.toml", "--format", "csv", "--columns", "id,title", "--order-by", "id")
    wait_until(lambda: "3,Still walking" in cli(*query, cwd=place).out)
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 0
    assert cli(*query, cwd=place).out.splitlines()[1:] == ["1,The lighthouse", "2,Night train", "3,Still walking"]
    wrong = []
    for typed, said in TYPED.items():
        ran = cli(*shlex.split(typed), cwd=place)
        lines = [line for line in ran.error_lines if line.startswith("memwal: ")]
        if (ran.code, len(lines)) != (2, 1) or said not in lines[0]:
            wrong.append((typed, ran.code, ran.err))
    assert wrong == []


@pytest.mark.parametrize(("name", "said"), TYPES.items())
def test_a_type_of_another_program(name: str, said: str, cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[table]\nuri = "t.lance"\nkey = ["id"]\n[table.columns]\nid = "int64"\nx = "{name}"\n')
    ran = cli("config", "check", config)
    assert ran.code == 2
    assert ran.err == f"memwal: {config}: [table] columns.x = '{name}' is not a column type; {said}\n"


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_short_command_imports_no_storage_and_takes_little(option: str, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "memwal.ingest.cli.app", option]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "typer" in modules
    assert modules.isdisjoint({"lance", "pyarrow", "pyspark", "numpy", "pandas", "datafusion", "faiss"})
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
