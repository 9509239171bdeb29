#!/usr/bin/env python3
"""Makes the sample databases from their SQL, and checks the sample data.

    python3 datasets/build.py            # <db>.sqlite beside each <db>.sql
    python3 datasets/build.py --check    # builds in a temporary folder and checks everything

Nothing but the standard library is used. dinsql itself does not need this script: it loads the .sql files on its own.
"""

import argparse
import csv
import json
import os
import re
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent / "sample"
LANGUAGES = ["en", "tr", "de"]
RECORD_KEYS = ["id", "db", "question", "evidence", "gold", "difficulty"]
DIFFICULTIES = {"simple", "moderate", "challenging"}
DESCRIPTION_HEADER = ["original_column_name", "column_name", "column_description", "data_format", "value_description"]
IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*")


def sources(language):
    """The .sql files of a language, in a fixed order."""
    return sorted((ROOT / language).glob("*/*.sql"))


def build(source, target):
    """Runs one .sql file into a new database; the old file is replaced only once the new one is whole."""
    unfinished = target.with_name(target.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    with closing(sqlite3.connect(unfinished)) as connection:
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.executescript(source.read_text(encoding="utf-8"))
        # VACUUM lays the pages out afresh, so that equal SQL gives equal bytes.
        connection.execute("VACUUM")
    os.replace(unfinished, target)


def tables(connection):
    """Table names in the order of their creation."""
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")]


def shape(connection, names):
    """What must be equal in each language: types, keys and rows, by position instead of by name."""
    described = []
    for name in names:
        columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
        position = {column[1]: column[0] for column in columns}
        keys = [
            (names.index(key[2]), position[key[3]])
            for key in connection.execute(f"PRAGMA foreign_key_list({name})").fetchall()
        ]
        rows = connection.execute(f"SELECT * FROM {name}").fetchall()
        described.append(([(c[2], c[3], c[5]) for c in columns], sorted(keys), rows))
    return described


def ordered_at_top(sql):
    """Whether the outermost query has an ORDER BY."""
    flat, previous = sql, None
    while flat != previous:
        previous, flat = flat, re.sub(r"\([^()]*\)", " ", flat)
    return "ORDER BY" in flat.upper()


class Checker:
    """Collects complaints, so that one call shows them all."""

    def __init__(self):
        self.complaints = []

    def expect(self, holds, complaint):
        if not holds:
            self.complaints.append(complaint)
        return holds

    def database(self, source, connection):
        self.expect(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], f"{source}: integrity")
        self.expect(not connection.execute("PRAGMA foreign_key_check").fetchall(), f"{source}: foreign keys")
        for name in tables(connection):
            columns = [column[1] for column in connection.execute(f"PRAGMA table_info({name})")]
            for identifier in [name, *columns]:
                self.expect(IDENTIFIER.fullmatch(identifier), f"{source}: identifier `{identifier}`")
        for path in sorted((source.parent / "database_description").glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                header, *lines = list(csv.reader(file))
            known = [column[1] for column in connection.execute(f"PRAGMA table_info({path.stem})")]
            self.expect(header == DESCRIPTION_HEADER, f"{path}: header")
            self.expect([line[0] for line in lines] == known, f"{path}: columns are not those of `{path.stem}`")
            self.expect(all(len(line) == len(header) and all(line[:4]) for line in lines), f"{path}: an empty field")

    def rows(self, where, gold, connection):
        """The rows of a gold query; complains of empty ones and of ties that leave the answer to chance."""
        try:
            forward = connection.execute(gold).fetchall()
            connection.execute("PRAGMA reverse_unordered_selects = ON")
            backward = connection.execute(gold).fetchall()
        except sqlite3.Error as error:
            self.expect(False, f"{where}: {error}")
            return None
        finally:
            connection.execute("PRAGMA reverse_unordered_selects = OFF")
        self.expect(any(value is not None for row in forward for value in row), f"{where}: no rows, or only NULL")
        same = forward == backward if ordered_at_top(gold) else Counter(forward) == Counter(backward)
        self.expect(same, f"{where}: depends on the order of the scan (a tie?)")
        return forward


def read_questions(language):
    lines = (ROOT / language / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check():
    checker = Checker()
    counts = Counter()
    questions = {language: read_questions(language) for language in LANGUAGES}
    first = questions[LANGUAGES[0]]
    for language in LANGUAGES:
        for field in ("id", "difficulty"):
            same = [q[field] for q in questions[language]] == [q[field] for q in first]
            checker.expect(same, f"{language}: `{field}` differs from {LANGUAGES[0]}")
        for record in questions[language]:
            where = f"{language} {record['id']}"
            checker.expect(list(record) == RECORD_KEYS, f"{where}: keys")
            checker.expect(record["difficulty"] in DIFFICULTIES, f"{where}: difficulty")
            checker.expect(record["question"] == record["question"].strip() != "", f"{where}: question")
    checker.expect(len({q["id"] for q in first}) == len(first), "an id occurs twice")

    with tempfile.TemporaryDirectory() as folder:
        connections = {}
        shapes = {}
        for language in LANGUAGES:
            for source in sources(language):
                target = Path(folder) / f"{language}-{source.stem}.sqlite"
                build(source, target)
                again = Path(folder) / "again.sqlite"
                build(source, again)
                checker.expect(target.read_bytes() == again.read_bytes(), f"{source}: two builds differ")
                connection = sqlite3.connect(f"file:{target}?mode=ro", uri=True)
                connections[language, source.stem] = connection
                checker.database(source, connection)
                shapes[language, source.stem] = shape(connection, tables(connection))
                counts["databases"] += 1

        # Database ids are paired by the questions: the same id must always meet the same counterpart.
        for language in LANGUAGES[1:]:
            pairs = {(a["db"], b["db"]) for a, b in zip(first, questions[language])}
            checker.expect(len(pairs) == len({a for a, _ in pairs}), f"{language}: databases are not parallel")
            for ours, theirs in sorted(pairs):
                same = shapes[LANGUAGES[0], ours] == shapes[language, theirs]
                checker.expect(same, f"{language}: `{theirs}` differs from `{ours}` in structure or rows")

        for records in zip(*questions.values()):
            checker.expect(len({bool(r["evidence"]) for r in records}) == 1, f"{records[0]['id']}: evidence")
            results = []
            for language, record in zip(LANGUAGES, records):
                where = f"{language} {record['id']}"
                results.append(checker.rows(where, record["gold"], connections[language, record["db"]]))
                counts[f"gold {language}"] += 1
            keep_order = ordered_at_top(records[0]["gold"])
            for language, result in zip(LANGUAGES[1:], results[1:]):
                if result is None or results[0] is None:
                    continue
                same = result == results[0] if keep_order else Counter(result) == Counter(results[0])
                checker.expect(same, f"{language} {records[0]['id']}: other rows than in {LANGUAGES[0]}")
        for connection in connections.values():
            connection.close()

    for complaint in checker.complaints:
        print(complaint, file=sys.stderr)
    for record in first:
        counts[record["difficulty"]] += 1
        counts[record["db"]] += 1
        counts["with evidence"] += bool(record["evidence"])
    print(f"{len(first)} questions in {len(LANGUAGES)} languages; " + ", ".join(f"{k}: {n}" for k, n in counts.items()))
    print(f"{len(checker.complaints)} complaints" if checker.complaints else "all checks passed")
    return not checker.complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the data instead of writing the databases")
    if parser.parse_args().check:
        sys.exit(0 if check() else 1)
    for language in LANGUAGES:
        for source in sources(language):
            target = source.with_suffix(".sqlite")
            build(source, target)
            print(target)


if __name__ == "__main__":
    main()
