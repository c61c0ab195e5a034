"""The tokenizer of a text index, equal to the one of Lance's inverted index with the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tantivy

from memwal.memtable.errors import InvalidRows
from memwal.memtable.index_spec import NGRAM_LENGTHS, IndexSpec

ENGLISH: tuple[str, ...] = (
    *("i", "me", "my", "myself", "we", "our", "ours", "ourselves", "you", "your"),
    *("yours", "yourself", "yourselves", "he", "him", "his", "himself", "she", "her", "hers"),
    *("herself", "it", "its", "itself", "they", "them", "their", "theirs", "themselves", "what"),
    *("which", "who", "whom", "this", "that", "these", "those", "am", "is", "are"),
    *("was", "were", "be", "been", "being", "have", "has", "had", "having", "do"),
    *("does", "did", "doing", "should", "a", "an", "the", "and", "but", "if"),
    *("or", "because", "as", "until", "while", "of", "at", "by", "for", "with"),
    *("about", "against", "between", "into", "through", "during", "before", "after", "above", "below"),
    *("to", "from", "up", "down", "in", "out", "on", "off", "over", "under"),
    *("again", "further", "then", "once", "here", "there", "when", "where", "why", "how"),
    *("all", "any", "both", "each", "few", "more", "most", "other", "some", "such"),
    *("only", "own", "same", "so", "than", "too", "very", "can", "will", "just"),
    *("now", "re"),
)
"""Lance's English stop words.

Found with Lance itself: every word of the known English lists was indexed as a document of one word (pylance 14.0.2,
base_tokenizer "simple", stem false); these were not found again. "no", "nor" and "not" are not stop words. tantivy's
own English list has only 33 words, so the same text would match differently before and after a commit.
"""

MAX_TOKEN_LENGTH = 40


def analyzer(spec: IndexSpec) -> tantivy.TextAnalyzer:
    """Return the analyzer for an fts index; parameters that the spec lacks have Lance's defaults.

    Order of the filters as in Lance (tested against `lance.tokenize`): removal of long tokens, lower case, stem, stop
    words, ASCII folding. Raises InvalidRows if tantivy has no stop words of the language.
    """
    given = spec.parameters
    language = str(given.get("language", "English"))
    of_words = given.get("base_tokenizer") != "ngram"
    builder = _cased(given)
    if given.get("stem", of_words):
        builder = builder.filter(tantivy.Filter.stemmer(language))
    if given.get("remove_stop_words", of_words):
        try:
            custom = given.get("custom_stop_words")
            words = ENGLISH if custom is None and language == "English" else custom
            stop = tantivy.Filter.stopword(language) if words is None else tantivy.Filter.custom_stopword(list(words))
            builder = builder.filter(stop)
        except ValueError:
            raise InvalidRows(
                f"index fts on column {spec.column!r}: no stop words of language {language!r} are known;"
                " give custom_stop_words or set remove_stop_words = false",
                column=spec.column,
            ) from None
    return _folded(builder, given)


def begins(spec: IndexSpec) -> tantivy.TextAnalyzer:
    """Return the analyzer for a prefix, without stemming and stop words."""
    return _folded(_cased(spec.parameters), spec.parameters)


def _cased(given: Mapping[str, Any]) -> tantivy.TextAnalyzerBuilder:
    kind = given.get("base_tokenizer", "simple")
    if kind == "ngram":
        shortest, most = (given.get(name, default) for name, default in NGRAM_LENGTHS.items())
        tokenizer = tantivy.Tokenizer.ngram(shortest, most, given.get("prefix_only", False))
    else:
        kinds = {"whitespace": tantivy.Tokenizer.whitespace, "raw": tantivy.Tokenizer.raw}
        tokenizer = kinds.get(kind, tantivy.Tokenizer.simple)()
    builder = tantivy.TextAnalyzerBuilder(tokenizer)
    longest = given.get("max_token_length", MAX_TOKEN_LENGTH)
    if longest is not None:
        builder = builder.filter(tantivy.Filter.remove_long(longest))
    return builder.filter(tantivy.Filter.lowercase()) if given.get("lower_case", True) else builder


def _folded(builder: tantivy.TextAnalyzerBuilder, given: Mapping[str, Any]) -> tantivy.TextAnalyzer:
    return (builder.filter(tantivy.Filter.ascii_fold()) if given.get("ascii_folding", True) else builder).build()
