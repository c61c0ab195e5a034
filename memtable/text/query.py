"""The query of a match, in the notation of Lucene and tantivy, parsed once for all levels.

    web server      plain words: a row matches with any of them, and better with more
    +web -server    a required word; an excluded word
    "web server"    these words in this order (an index with positions)
    serv*           words that begin with "serv"
    serch~ serch~2  words within one edit, or two: a letter inserted, deleted or replaced

`+` and `-` may also precede a phrase, a prefix and a fuzzy word. Prose is never a syntax error. A sign counts only at
the start of a word and directly before a letter, a digit or a phrase; a quote only where a word starts and another
quote closes it; `*`, `~`, `~1` and `~2` only at the end of one word, and `~` only if the word has more letters than
edits. Elsewhere they are punctuation, like all other characters: AND, OR, fields and brackets have no meaning.

An index of ngrams: a word with a sign stands for all its ngrams, so `+server` requires `ser`, `erv`, `rve` and `ver`,
in any order. `*`, `~`, `~1` and `~2` at its end are ignored, as ngrams find parts of words and similar words anyway.

A query of several columns: each part (the plain words together, and every other part) may be satisfied by any of the
columns; an excluded part must be absent from all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tantivy

from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import IndexSpec
from memwal.memtable.text.analysis import analyzer, begins

Occur = Literal["should", "must", "must_not"]
Kind = Literal["any", "all", "phrase", "prefix", "fuzzy"]
MAX_WORDS = 1024
"""Words after analysis; Lucene's limit. With ten times as many Lance takes over a second on rows its index lacks."""
MAX_CHARACTERS = 1 << 16
"""Bounds the time to parse a text, which may hold any amount of punctuation besides words."""
MAX_FUZZY_WORDS = 32
"""Each may stand for a thousand terms."""
MAX_FUZZY = 40
"""Letters of a fuzzy word. Lance's automaton for two edits has 10,000 states at most; words of 60 letters exceed it."""

_OCCUR: dict[str, Occur] = {"": "should", "+": "must", "-": "must_not"}
_PARTS = re.compile(r"""(?<!\S)([+-]?)"([^"]+)"|(?<!\S)([+-]?)(\w\S*)|(\S+)""")
_FUZZY = re.compile(r"(.+)~([12]?)", re.DOTALL)
_MARKS = re.compile(r"(?:\*|[12]?~)*")
"""Signs behind a word, read backwards: a search for their end from the front is quadratic in `a***…b`."""


@dataclass(frozen=True, slots=True)
class Clause:
    """One part of a query, for one column.

    `tokens`: the terms to look up, with their places; for a prefix, first the beginnings of terms, then whole terms.
    `text`: its source, for Lance, which derives the same tokens from it; for a fuzzy word the token, which Lance does
    not analyse. `edits`: for a fuzzy word, the maximum number of edits. `in_lance`: whether Lance can answer it.
    `ngrams`: if all ngrams of a word are required, the source of each, for Lance in place of `text`.
    """

    occur: Occur
    kind: Kind
    text: str
    tokens: tuple[tuple[int, str], ...]
    edits: int = 0
    in_lance: bool = True
    ngrams: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextQuery:
    """A row matches if it has every "must", no "must_not", and, without a "must", any "should".

    Invariants. Immutable. Every clause has tokens. Without a "should" or "must" the query has no clauses, and no row
    matches.
    """

    clauses: tuple[Clause, ...]


class TextParser:
    """Queries on one column.

    Thread safety. Any thread. Invariants. Tokens are those of the index: words that it does not keep (stop words, long
    words) are omitted from a query, as they are from a text.
    """

    def __init__(self, spec: IndexSpec) -> None:
        self.column = spec.column
        self._analyzer = analyzer(spec)
        self._begins = begins(spec)
        positions = spec.parameters.get("with_position", False)
        self._words = spec.parameters.get("base_tokenizer") != "ngram"
        # With the raw tokenizer, Lance (pylance 14.0.2) finds empty texts for all words, phrases and fuzzy words that
        # no text has.
        self._in_lance = spec.parameters.get("base_tokenizer") != "raw"
        self._phrases = positions and self._words

    def parse(self, text: Any) -> TextQuery:
        """Parse a text.

        Raises InvalidRows for a value that is not a string of valid Unicode, for a phrase without positions, and for
        too many words.
        """
        return TextQuery(tuple(by_column[self.column] for by_column in parse([self], text)))

    def plain(self, occur: Occur, text: str) -> Clause:
        """Return the clause of plain words; without tokens if the index keeps none of them."""
        return Clause(occur, "any", text, self._tokens(text), in_lance=self._in_lance or text != "")

    def phrase(self, occur: Occur, text: str) -> Clause:
        """Return the clause of quoted words. Raises InvalidRows for several words in an index without positions."""
        tokens = self._tokens(text)
        if len(tokens) < 2:
            return Clause(occur, "all", text, tokens, in_lance=self._in_lance)
        if not self._phrases:
            raise InvalidRows(
                f'match: "{text[:40]}" is a phrase, and the fts index on column {self.column!r} keeps no positions'
                " of words; leave out the quotes, or create the table with with_position = true",
                column=self.column,
            )
        return Clause(occur, "phrase", text, tokens, in_lance=self._in_lance)

    def marked(self, occur: Occur, word: str, *, signed: bool) -> Clause | None:
        """Return the clause of a word with a sign before or behind it; None if no sign counts."""
        if not self._words:
            return self._marked_ngrams(occur, word, signed=signed)
        if word.endswith("*") and (begin := self._begins.analyze(word[:-1])) and len(begin) == 1:
            # Terms are stems, and "library" does not begin its stem "librari": so the stem of the prefix counts too.
            tokens = ((0, begin[0]), *self._tokens(word[:-1]))
            return Clause(occur, "prefix", word[:-1], tokens, in_lance=False)
        if (found := _FUZZY.fullmatch(word)) and (clause := self._fuzzy(occur, found[1], int(found[2] or 1))):
            return clause
        return Clause(occur, "all", word, self._tokens(word), in_lance=self._in_lance) if signed else None

    def _marked_ngrams(self, occur: Occur, word: str, *, signed: bool) -> Clause | None:
        """Do as `marked`, for an index of ngrams."""
        marks = _MARKS.match(word[::-1])
        bare = word[: len(word) - marks.end()] if marks else word
        if not signed:
            return None if bare == word else self.plain(occur, bare)
        # All ngrams have one place, and Lance requires any, not all, of several words at one place. Therefore Lance
        # gets a query for each ngram: its source, since Lance derives the ngram from it again. It cannot answer for
        # ngrams of several lengths, as it also derives the shorter ones of a long one's source, and requires any of
        # them.
        tokens = self._analyzer.pre_tokenize(bare).tokens
        sources = {token.text: bare[token.char_offset_from : token.char_offset_to] for token in tokens}
        alone = all(self._analyzer.analyze(source) == [ngram] for ngram, source in sources.items())
        return Clause(occur, "all", bare, self._tokens(bare), in_lance=alone, ngrams=tuple(sources.values()))

    def _fuzzy(self, occur: Occur, word: str, edits: int) -> Clause | None:
        tokens = self._tokens(word)
        if len(tokens) != 1 or len(token := tokens[0][1]) <= edits:
            return None
        if len(token) > MAX_FUZZY:
            raise self.too_much(len(token), f"letters in the fuzzy word {token[:20]}…", MAX_FUZZY)
        # Lance splits a fuzzy word where this tokenizer does, whatever the tokenizer of the index.
        alike = self._in_lance and _SIMPLE.analyze(token) == [token]
        return Clause(occur, "fuzzy", token, tokens, edits, in_lance=alike)

    def _tokens(self, text: str) -> tuple[tuple[int, str], ...]:
        tokens = self._analyzer.pre_tokenize(text).tokens
        # A repeated word counts twice, as in Lance; an ngram does not, since all ngrams have one place.
        return tuple(dict.fromkeys((token.position, token.text) for token in tokens))

    def too_much(self, found: int, what: str, most: int) -> InvalidRows:
        """Return the error for a text that exceeds a limit."""
        return InvalidRows(f"match: the text has {found} {what}; ask for at most {most}", column=self.column)


_SIMPLE = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).build()


def parse(parsers: Sequence[TextParser], text: Any) -> list[dict[str, Clause]]:
    """Parse a text for several columns: return for each part of it one clause per column, all with one `occur`.

    A part lacks the columns whose index keeps none of its words. Parts and columns have the invariants of `TextQuery`.
    Raises: as `TextParser.parse`.
    """
    _check(text, parsers)
    plain: list[str] = []
    parts: list[dict[str, Clause]] = []
    for sign, phrase, word_sign, word, other in _PARTS.findall(text):
        occur = _OCCUR[sign or word_sign]
        if phrase:
            parts.append({parser.column: parser.phrase(occur, phrase) for parser in parsers})
            continue
        may_be = word and (word_sign or word.endswith("*") or "~" in word)
        marked = [parser.marked(occur, word, signed=bool(word_sign)) for parser in parsers] if may_be else []
        if any(marked):
            # One column's tokenizer may find a prefix or fuzzy word where another's does not.
            clauses = (clause or parser.plain(occur, word) for parser, clause in zip(parsers, marked, strict=True))
            parts.append({parser.column: clause for parser, clause in zip(parsers, clauses, strict=True)})
        else:
            plain.append(word or other)
    words = " ".join(plain) if parts else text  # a raw tokenizer keeps every space
    parts.append({parser.column: parser.plain("should", words) for parser in parsers})
    return _checked(parts, parsers)


def _check(text: Any, parsers: Sequence[TextParser]) -> None:
    """Raise InvalidRows unless `text` is a string of characters within the length limit."""
    if not isinstance(text, str):
        columns = ", ".join(repr(parser.column) for parser in parsers)
        plural = "s" if len(parsers) > 1 else ""
        raise InvalidRows(
            f"match: the text for column{plural} {columns} is a {type(text).__name__}; give a string of words"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRows(f"match: the text has half a surrogate pair at {error.start}; correct it") from None
    if len(text) > MAX_CHARACTERS:
        raise parsers[0].too_much(len(text), "characters", MAX_CHARACTERS)


def _checked(parts: list[dict[str, Clause]], parsers: Sequence[TextParser]) -> list[dict[str, Clause]]:
    """Omit clauses without tokens. Raises InvalidRows if a column gets too many words."""
    kept = [{column: clause for column, clause in part.items() if clause.tokens} for part in parts]
    kept = [part for part in kept if part]
    for parser in parsers:
        clauses = [part[parser.column] for part in kept if parser.column in part]
        if (words := sum(len(clause.tokens) for clause in clauses)) > MAX_WORDS:
            raise parser.too_much(words, "words", MAX_WORDS)
        if (fuzzy := sum(clause.kind == "fuzzy" for clause in clauses)) > MAX_FUZZY_WORDS:
            raise parser.too_much(fuzzy, "fuzzy words", MAX_FUZZY_WORDS)
    return kept if any(occur_of(part) != "must_not" for part in kept) else []


def occur_of(part: Mapping[str, Clause]) -> Occur:
    """Return the `occur` of a part, which is the same in each of its columns."""
    return next(iter(part.values())).occur
