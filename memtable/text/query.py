"""The query of a match, in the notation of Lucene and tantivy, parsed once for all levels.

    web server      plain words: a row matches with any of them, and better with more
    +web -server    a required word; an excluded word
    "web server"    these words in this order (an index with positions)
    serv*           words that begin with "serv"

`+` and `-` may precede a phrase or a prefix too. Prose is no syntax error: a sign counts only at the start of a word
and directly before a letter, a digit or a phrase; a quote only where a word starts and another quote closes it; `*`
only at the end of one word. Elsewhere they are punctuation, like all other characters: no AND, no OR, no field, no
bracket.
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
"""Words after analysis; Lucene's limit. With ten times as many Lance takes over a second on rows its index lacks."""
MAX_CHARACTERS = 1 << 16
"""Bounds the time to parse a text, which may hold any amount of punctuation besides words."""

_OCCUR: dict[str, Occur] = {"": "should", "+": "must", "-": "must_not"}
_PARTS = re.compile(r"""(?<!\S)([+-]?)"([^"]+)"|(?<!\S)([+-]?)(\w\S*)|(\S+)""")


@dataclass(frozen=True, slots=True)
class Clause:
    """One part of a query.

    `tokens`: the terms to look up, with their places; of a prefix, first beginnings of terms, then whole terms.
    `text`: its source, for Lance, which makes the same tokens of it.
    """

    occur: Occur
    kind: Kind
    text: str
    tokens: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class TextQuery:
    """A row matches if it has every "must", no "must_not", and, without a "must", any "should".

    Invariants. Immutable. Every clause has tokens. Without a "should" or "must" there is no clause, and no row matches.
    """

    clauses: tuple[Clause, ...]

    @property
    def has_prefix(self) -> bool:
        """Whether any clause is a prefix, for which Lance has no query."""
        return any(clause.kind == "prefix" for clause in self.clauses)


class TextParser:
    """Queries on one column.

    Thread safety. Any thread. Invariants. Tokens are those of the index: words that it does not keep (stop words, long
    words) are left out of a query, as they are left out of a text.
    """

    def __init__(self, spec: IndexSpec) -> None:
        self._column = spec.column
        self._analyzer = analyzer(spec)
        self._begins = begins(spec)
        positions = spec.parameters.get("with_position", False)
        self._phrases = positions and spec.parameters.get("base_tokenizer") != "ngram"

    def parse(self, text: Any) -> TextQuery:
        """Parse a text. Raises InvalidRows if it is no string or not Unicode, for a phrase without positions, and for
        too many words."""
        if not isinstance(text, str):
            raise InvalidRows(
                f"match: the text for column {self._column!r} is a {type(text).__name__}; give a string of words"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRows(f"match: the text has half a surrogate pair at {error.start}; correct it") from None
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
        words = " ".join(plain) if clauses else text  # a raw tokenizer keeps every space
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
        # Terms are stems, and "library" does not begin its stem "librari": so the stem of the prefix counts too.
        return Clause(occur, "prefix", text, ((0, begin), *self._tokens(text)))

    def _tokens(self, text: str) -> tuple[tuple[int, str], ...]:
        tokens = self._analyzer.pre_tokenize(text).tokens
        # A repeated word counts twice, as in Lance; an ngram does not, since all ngrams have one place.
        return tuple(dict.fromkeys((token.position, token.text) for token in tokens))

    def _checked(self, clauses: list[Clause]) -> TextQuery:
        words = sum(len(clause.tokens) for clause in clauses)
        if words > MAX_WORDS:
            raise self._too_much(words, "words", MAX_WORDS)
        positive = any(clause.occur != "must_not" for clause in clauses)
        return TextQuery(tuple(clauses) if positive else ())

    def _too_much(self, found: int, what: str, most: int) -> InvalidRows:
        return InvalidRows(f"match: the text has {found} {what}; ask for at most {most}", column=self._column)
