"""What a match asks for, in the notation of Lucene and tantivy, parsed once for all levels.

    web server      plain words: any of them matches, more of them match better
    +web -server    a word that must be there; one that must not
    "web server"    these words in this order (an index with positions)
    serv*           words that begin so

`+` and `-` go before a phrase or a prefix too. Prose is no syntax error: a sign counts only at the start of a word and
directly before a letter, a digit or a phrase; a quote only where a word starts and another quote closes it; `*` only at
the end of one word. Elsewhere they are punctuation, as is every other character: no AND, no OR, no field, no bracket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import IndexSpec
from memwal.memtable.text.analysis import analyzer, begins

Occur = Literal["should", "must", "must_not"]
Kind = Literal["any", "all", "phrase", "prefix"]
MAX_WORDS = 1024
"""Words after analysis; Lucene's limit. Ten times as many take Lance more than a second on rows its index lacks."""
MAX_CHARACTERS = 1 << 16
"""Bounds the time a text takes to read: punctuation is no word, however much there is."""

_OCCUR: dict[str, Occur] = {"": "should", "+": "must", "-": "must_not"}
_PARTS = re.compile(r"""(?<!\S)([+-]?)"([^"]+)"|(?<!\S)([+-]?)(\w\S*)|(\S+)""")


@dataclass(frozen=True, slots=True)
class Clause:
    """One part of a query.

    `tokens`: what to look up, with their places; of a prefix first how terms begin, then terms that match whole.
    `text`: what it was made of, for Lance, which makes the same tokens of it.
    """

    occur: Occur
    kind: Kind
    text: str
    tokens: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class TextQuery:
    """A row matches when it has every "must", no "must_not", and any "should" where there is no "must".

    Invariants. Immutable. Every clause has tokens; without a "should" or "must" there is no clause, and no row matches.
    """

    clauses: tuple[Clause, ...]

    @property
    def has_prefix(self) -> bool:
        """Whether any clause is a prefix, which Lance has no query for."""
        return any(clause.kind == "prefix" for clause in self.clauses)


class TextParser:
    """Queries on one column.

    Thread safety. Any thread. Invariants. Tokens are those of the index: words it does not keep (stop words, long
    ones) are left out of a query as they are of a text.
    """

    def __init__(self, spec: IndexSpec) -> None:
        self._column = spec.column
        self._analyzer = analyzer(spec)
        self._begins = begins(spec)
        positions = spec.parameters.get("with_position", False)
        self._phrases = positions and spec.parameters.get("base_tokenizer") != "ngram"

    def parse(self, text: Any) -> TextQuery:
        """Raises InvalidRows for what is no string or no Unicode, a phrase without positions, and too many words."""
        if not isinstance(text, str):
            raise InvalidRows(
                f"match: the text for column {self._column!r} is a {type(text).__name__}; give a string of words"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRows(f"match: the text has half a surrogate pair at {error.start}; mend it") from None
        if len(text) > MAX_CHARACTERS:
            raise self._too_much(len(text), "characters", MAX_CHARACTERS)
        plain: list[str] = []
        clauses: list[Clause] = []
        for sign, phrase, word_sign, word, other in _PARTS.findall(text):
            if phrase:
                clauses.append(self._phrase(_OCCUR[sign], phrase))
            elif word.endswith("*") and (begin := self._begins.analyze(word[:-1])) and len(begin) == 1:
                clauses.append(self._prefix(_OCCUR[word_sign], word[:-1], begin[0]))
            elif word_sign:
                clauses.append(Clause(_OCCUR[word_sign], "all", word, self._tokens(word)))
            else:
                plain.append(word or other)
        words = " ".join(plain) if clauses else text  # a raw tokenizer takes every space as it is
        clauses.append(Clause("should", "any", words, self._tokens(words)))
        return self._checked([clause for clause in clauses if clause.tokens])

    def _phrase(self, occur: Occur, text: str) -> Clause:
        tokens = self._tokens(text)
        if len(tokens) < 2:
            return Clause(occur, "all", text, tokens)
        if not self._phrases:
            raise InvalidRows(
                f'match: "{text[:40]}" is a phrase, and the fts index on column {self._column!r} keeps no positions'
                " of words; leave out the quotes, or create the table with with_position = true",
                column=self._column,
            )
        return Clause(occur, "phrase", text, tokens)

    def _prefix(self, occur: Occur, text: str, begin: str) -> Clause:
        # Terms are stems, and "library" is no beginning of its own, "librari": the stem of what is typed counts too.
        return Clause(occur, "prefix", text, ((0, begin), *self._tokens(text)))

    def _tokens(self, text: str) -> tuple[tuple[int, str], ...]:
        tokens = self._analyzer.pre_tokenize(text).tokens
        # A word said twice counts twice, as in Lance; an ngram does not, since all of them have one place.
        return tuple(dict.fromkeys((token.position, token.text) for token in tokens))

    def _checked(self, clauses: list[Clause]) -> TextQuery:
        words = sum(len(clause.tokens) for clause in clauses)
        if words > MAX_WORDS:
            raise self._too_much(words, "words", MAX_WORDS)
        positive = any(clause.occur != "must_not" for clause in clauses)
        return TextQuery(tuple(clauses) if positive else ())

    def _too_much(self, found: int, what: str, most: int) -> InvalidRows:
        return InvalidRows(f"match: the text has {found} {what}; ask for at most {most}", column=self._column)
