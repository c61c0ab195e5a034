"""The parser of filters: a tree that contains only what `allowed` lists.

The grammar and its precedence are those of sqlparser, the parser of Lance and DataFusion, as far as Lance supports
them. This parser refuses everything that it does not know, so that no planner sees it: Lance's planner panics on
placeholders and on texts such as `N'a'`, and both planners abort the process on deep nesting. Consecutive operators of
one precedence form one node, whatever their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter import allowed

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*') | (?P<double>"(?:[^"]|"")*") | (?P<backtick>`(?:[^`]|``)*`)
      | (?P<gap>\s+ | --[^\n]* | /\*.*?(?:\*/|\Z)) | (?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*)
      | (?P<name>[^\W\d][\w$]*) | <= | >= | <> | != | == | << | >> | :: | \|\| | .""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `kind`: a group of _TOKEN, or "other". `lower`: the text in lower case."""

    kind: str
    text: str
    lower: str


NOTHING = Token("", "", "")


def tokenize(predicate: str) -> list[Token]:
    """Return the tokens of a predicate without gaps. Raises: ValueError for a comment inside a comment."""
    tokens = list[Token]()
    for match in _TOKEN.finditer(predicate):
        kind, text = match.lastgroup or "other", match.group()
        if kind != "gap":
            tokens.append(Token(kind, text, text.lower()))
        elif text.count("/*") > 1:
            raise ValueError("it has a comment inside a comment; leave it out")
    return tokens


SHOWN = 200
LONG = 2_000
"""Filters with more characters than this use a smaller cache."""
COMPARISONS = frozenset(("=", "==", "<>", "!=", "<", "<=", ">", ">="))
_NOT, _IS, _LIKE, _COMPARE, _PRODUCT, _CAST = 15, 17, 19, 20, 40, 50
_BINARY = {
    "or": 5,
    "and": 10,
    "<<": 22,
    ">>": 22,
    "+": 30,
    "-": 30,
    **dict.fromkeys(COMPARISONS, _COMPARE),
    **dict.fromkeys(("*", "/", "%", "||"), _PRODUCT),
}
_SPECIAL = {
    "is": _IS,
    "like": _LIKE,
    "ilike": _LIKE,
    "in": _COMPARE,
    "between": _COMPARE,
    "::": _CAST,
    ".": 99,
    "[": 99,
}
_GRAMMAR = """
    and or not in is null like ilike between true false case when then else end as cast escape similar to distinct from
    exists interval select
"""
_RESERVED = frozenset(_GRAMMAR.split())
"""Words that need backticks as the name of a column."""
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_HEX = re.compile(r"'(?:[0-9a-fA-F]{2})*'")
_TYPED = frozenset(("date", "time", "timestamp", "datetime", "interval", "decimal", "numeric"))
_TESTS = frozenset(("null", "true", "false"))
_CLOCKS = frozenset(("current_date", "current_time", "current_timestamp"))


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A part of a filter. `kind` decides the meaning of the other attributes:

        column, name, number, text, double, hex, word      `text`: the column's name, or the token
        field, index                                        `text`: name of the field; parts: the value, and the index
        call                                                `text`: function in lower case; parts: arguments
        array, group, prefix                                parts: elements, or one part; `text`: of prefix its operator
        chain                                               parts joined by `operators`, all of one precedence
        in, between, like, is, distinct                     `text`: with NOT, in lower case; parts: the operands
        cast                                                `text`: the type; `operators`: ("cast",), ("try_cast",),
                                                            ("::",), or ("",) for a type in front of a text

    `depth`: nesting depth of operators. `grows`: whether it contains a growing function.
    """

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()
    operators: tuple[str, ...] = ()
    depth: int = 0
    grows: bool = False

    @property
    def bare(self) -> Node:
        """The node without brackets around it."""
        node = self
        while node.kind == "group":
            node = node.parts[0]
        return node

    @property
    def literal(self) -> str | None:
        """The characters of a text in single or double quotes; None for anything else."""
        if self.bare.kind not in ("text", "double"):
            return None
        text = self.bare.text
        return text[1:-1].replace(text[0] * 2, text[0])

    def walk(self, *, calls: bool = True) -> Iterator[Node]:
        """Yield the node and all below it; without `calls` no arguments of functions."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.parts if calls or node.kind != "call" else ())


def parse(filter: str, columns: Sequence[str]) -> Node:
    """Return the tree of a filter; `columns`: of the table. Raises: InvalidRows, naming what is not allowed."""
    try:
        return (_kept if len(filter) <= LONG else _long_kept)(filter, tuple(columns))
    except ValueError as error:
        raise InvalidRows(f"filter {shown(filter)}: {error}") from None


def shown(filter: str) -> str:
    """Return a filter as it appears in an error: quoted, on one line, truncated if it is long."""
    return repr(filter if len(filter) <= SHOWN else filter[:SHOWN] + "...")


def _parsed(filter: str, columns: tuple[str, ...]) -> Node:
    if len(filter) > allowed.LONGEST:
        raise ValueError(
            f"it has {len(filter)} characters, at most {allowed.LONGEST} are allowed: use get for keys, or split it"
        )
    parser = _Parser(tokenize(filter), columns)
    tree = parser.expression(0)
    parser.take("")
    return tree


_kept = lru_cache(maxsize=128)(_parsed)
_long_kept = lru_cache(maxsize=4)(_parsed)


class _Parser:
    """Reads the tokens of one filter from left to right. Raises: ValueError for what is not allowed."""

    def __init__(self, tokens: Sequence[Token], columns: Sequence[str]) -> None:
        self._tokens, self._columns = tokens, columns
        self._folded = {name.lower(): name for name in reversed(columns)}
        self._place = self._nesting = self._growing = 0

    def expression(self, above: int) -> Node:
        """Read an operand and the following operators that bind more strongly than `above`."""
        left = self._operand()
        while True:
            negated = "not " if self._at().lower == "not" else ""
            word = self._at(bool(negated)).lower
            if not negated and _BINARY.get(word, 0) > above:
                parts, operators = [left], list[str]()
                while _BINARY.get(self._at().lower) == _BINARY[word]:
                    operators.append(self.take().lower)
                    parts.append(self.expression(_BINARY[word]))
                left = self._node("chain", "", parts, operators)
            elif _SPECIAL.get(word, 0) > above and (not negated or word in ("in", "between", "like", "ilike")):
                self._place += 1 + bool(negated)
                left = self._special(left, negated, word)
            else:
                return left

    def _special(self, left: Node, negated: str, word: str) -> Node:
        """Read the rest of an operator that takes more than an operand on its right."""
        if word in ("is", "["):
            return self._is(left) if word == "is" else self._index(left)
        if word == "in":
            return self._node("in", negated + word, [left, *self._list("(", ")", least=1)])
        if word == "between":
            low = self.expression(_COMPARE)
            self.take("and")
            return self._node("between", negated + word, [left, low, self.expression(_COMPARE)])
        if word == "::":
            return self._node("cast", self._type(), [left], ["::"])
        if word == ".":
            name = self.take()
            if name.kind not in ("name", "backtick"):
                raise ValueError(f"{name.text:.60} is not expected behind a dot")
            return self._node("field", _name(name), [left])
        pattern = self.expression(_LIKE)
        if self._at().lower == "escape":
            self.take("escape")
            self.take("'\\'")  # the default, and the only one that DataFusion has
        return self._node("like", negated + word, [left, pattern])

    def _index(self, left: Node) -> Node:
        if "::" in left.operators:  # to sqlparser it is the size of a list
            raise ValueError(f"the type '{left.text}[' is not allowed; write brackets around the cast")
        self._place -= 1
        (index,) = self._list("[", "]", least=1, most=1)
        if index.kind in ("text", "double"):
            return self._node("field", index.literal or "", [left])
        return self._node("index", "", [left, index])

    def _is(self, left: Node) -> Node:
        negated = "not " if self._at().lower == "not" else ""
        self._place += bool(negated)
        word = self.take()
        if word.lower == "distinct":
            self.take("from")  # sqlparser takes all that follows for the right side
            return self._node("distinct", f"is {negated}distinct from", [left, self._nested(0)])
        if word.lower not in _TESTS:
            raise ValueError(f"IS {word.text:.60} is not allowed; write IS [NOT] NULL, TRUE, FALSE or DISTINCT FROM")
        return self._node("is", f"is {negated}{word.lower}", [left])

    # ---- operands ------------------------------------------------------------------------------------------------

    def _operand(self) -> Node:
        token, after = self._at(), self._at(1)
        if token.text in ("(", "["):
            elements = self._list("(", ")", least=1, most=1) if token.text == "(" else self._list("[", "]")
            return self._node("group" if token.text == "(" else "array", "", elements)
        self._place += 1
        if token.text in ("-", "+") or token.lower == "not":
            return self._node("prefix", token.lower, [self._nested(_NOT if token.lower == "not" else _PRODUCT)])
        if token.kind == "backtick":
            return Node("column", _name(token))
        if token.kind == "number" and not _NUMBER.fullmatch(token.text):
            raise ValueError(f"{token.text:.60} is not a number; write digits, as in 1000000 or 1e6")
        if token.kind == "double":
            self._expect_no_column(Node("double", token.text).literal or "", token.text)
        if token.kind in ("text", "number", "double"):
            return Node(token.kind, token.text)
        if token.text in ("?", "$", ":"):
            raise ValueError(
                f"{token.text!r} begins a placeholder, for which a filter has no value: write the value in its place"
            )
        if token.kind != "name":
            raise ValueError(f"{token.text:.60} is not allowed here" if token.text else "it ends too early")
        return self._named(token, token.lower, after)

    def _named(self, token: Token, word: str, after: Token) -> Node:
        if word in _TESTS or (word in _CLOCKS and after.text != "("):
            return Node("word", word)
        if word == "x" and _HEX.fullmatch(after.text):
            return Node("hex", self.take().text)
        if word in _TYPED and (after.kind in ("text", "double") or (after.text == "(" and word != "interval")):
            self._place -= 1
            kind, text = self._type(), self.take()
            if text.kind not in ("text", "double"):
                raise ValueError(f"{kind} needs a text behind it")
            return self._node("cast", kind, [Node(text.kind, text.text)], [""])
        if word in ("cast", "try_cast") and after.text == "(":
            self._place += 1
            inner = self._nested(0)
            self.take("as")
            cast = self._node("cast", self._type(), [inner], [word])
            self.take(")")
            return cast
        if after.text == "(" and word not in _RESERVED:
            return self._call(word, self._list("(", ")", least=int(word in allowed.FORMS)))
        if word in _RESERVED:
            raise ValueError(f"{token.text:.60} {after.text:.60} is not allowed here")
        if after.kind in ("text", "double"):
            raise ValueError(f"{token.text:.60}{after.text:.60} is no text that Lance knows: write {after.text:.60}")
        column = token.text if token.text in self._columns else self._folded.get(word)
        return Node("name", token.text) if column is None else Node("column", column)

    def _type(self) -> str:
        written = self.take().lower
        if self._at().lower in ("unsigned", "precision"):
            written += f" {self.take().lower}"
        if self._at().text == "(":
            while not written.endswith(")") and self._at() is not NOTHING:
                written += self.take().text
        if reason := allowed.type_problem(written):
            raise ValueError(reason)
        return written

    def _list(self, opening: str, ending: str, *, least: int = 0, most: int = allowed.LONGEST) -> list[Node]:
        self.take(opening)
        parts = list[Node]()
        while len(parts) < least or self._at().text != ending:
            if parts:
                self.take("," if len(parts) < most else ending)
            parts.append(self._nested(0))
        self.take(ending)
        return parts

    # ---- limits --------------------------------------------------------------------------------------------------

    def _nested(self, above: int) -> Node:
        self._nesting += 1
        if self._nesting > allowed.NESTING:
            raise ValueError(f"it nests more than {allowed.NESTING} brackets, NOT or signs; nest fewer")
        inner = self.expression(above)
        self._nesting -= 1
        return inner

    def _node(self, kind: str, text: str, parts: Sequence[Node], operators: Sequence[str] = ()) -> Node:
        """Return a node that is within the limits."""
        own = len(operators) if kind == "chain" else 0 if kind == "group" else allowed.HEAVY
        depth = own + max((part.depth for part in parts), default=0)
        if depth > allowed.DEPTH:
            raise ValueError(f"it chains more than {allowed.DEPTH} operators: use IN (...) or split the filter")
        compares = kind in ("in", "between", "group") or not COMPARISONS.isdisjoint(operators)
        if not compares and any(len(part.bare.text) > allowed.TEXT for part in parts):
            raise ValueError(
                f"it computes with a text of more than {allowed.TEXT} characters; compare it with a column"
            )
        if kind in ("call", "array") and len(parts) > allowed.ARGUMENTS:
            raise ValueError(
                f"{text or 'a list'} has more than {allowed.ARGUMENTS} elements; use IN (...) for many values"
            )
        grows = any(part.grows for part in parts)
        if "||" in operators or (kind == "call" and _grows(text, parts)):
            self._growing += 1
            if grows or self._growing > allowed.GROWING_CALLS:
                raise ValueError(f"{text or '||'} makes a longer value of longer ones, or too often; use it once")
            grows = True
        return Node(kind, text, tuple(parts), tuple(operators), depth, grows)

    def _call(self, name: str, arguments: Sequence[Node]) -> Node:
        numbers = [each.bare.text if each.bare.kind == "number" else "" for each in arguments]
        reason = allowed.function_problem(name) or allowed.size_problem(name, numbers)
        if name in allowed.CASTS and not reason:
            reason = allowed.type_problem((arguments[-1].literal if arguments else "") or "", arrow=True)
        if reason:
            raise ValueError(reason)
        return self._node("call", name, arguments)

    def _expect_no_column(self, text: str, double: str) -> None:
        """Refuse a double-quoted text that names a column or is compared: it would pass every row, or none."""
        after = self._at(self._at().lower == "not").lower
        if text.lower() in self._folded or after in COMPARISONS or after in ("in", "is", "between", "like", "ilike"):
            single = "'" + text.replace("'", "''") + "'"
            raise ValueError(
                f"{double:.200} is a text, as in Lance: write `{text:.200}` for the column, or {single:.200}"
            )

    # ---- tokens --------------------------------------------------------------------------------------------------

    def _at(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else NOTHING

    def take(self, word: str | None = None) -> Token:
        """Return the next token, which must be `word` if that is given; the end is an empty word."""
        token = self._at()
        if word is not None and token.lower != word:
            raise ValueError(
                f"{token.text:.60} is not expected here"
                if token.text
                else f"it ends too early: {word.upper()} is missing"
            )
        self._place += 1
        return token


def _name(token: Token) -> str:
    return token.text[1:-1].replace("``", "`") if token.kind == "backtick" else token.text


def _grows(name: str, arguments: Sequence[Node]) -> bool:
    """Return whether a call returns a longer value; it does not if a replacement is no longer than what it replaces."""
    if name in ("replace", "regexp_replace") and len(arguments) > 2 and (new := arguments[2].literal) is not None:
        old = arguments[1].literal or ""
        return new != "" and (name != "replace" or len(new.encode()) > len(old.encode()))
    return name in allowed.GROWING
