"""Tokens in every form that the public API accepts."""

from __future__ import annotations

import numpy as np
import pytest

from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Invalid
from tests.messages import raises


@pytest.mark.parametrize("given", ["loader:17", ("loader", 17), ("loader", np.int64(17)), Token("loader", 17)])
def test_every_form_means_the_same(given: object) -> None:
    assert Token.parse(given) == Token("loader", 17)  # type: ignore[arg-type]


def test_a_name_may_hold_colons() -> None:
    assert Token.parse("a:b:3") == Token("a:b", 3)


def test_no_token_is_no_token() -> None:
    assert Token.parse(None) is None


@pytest.mark.parametrize(
    "given", ["loader", "loader:x", ":3", "loader:-1", ("loader",), 7, ("a", 1.5), ("a", 1.0), ("a", True), (1, 1)]
)
def test_what_is_no_token_is_refused_with_the_forms(given: object) -> None:
    with raises(Invalid):
        Token.parse(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["\udcff", "file \ud800 a", "\ude00\ud83d"])
def test_a_name_that_is_no_utf8_is_refused_in_one_line(name: str) -> None:
    """A file name that is not valid UTF-8 gives this name; a region could not retire it."""
    with raises(Invalid) as refused:
        Token(name, 1)
    refused.value.message.encode()
    assert Token("😀", 1).producer == "😀"


@pytest.mark.parametrize("sequence", [2**63, 10**5000], ids=["2**63", "10**5000"])
def test_a_number_that_no_entry_can_hold_is_refused_by_every_way_in(sequence: int) -> None:
    assert Token.parse(("loader", 2**63 - 1)) == Token.parse("loader:9223372036854775807")
    with raises(Invalid):
        Token("loader", sequence)
    with pytest.raises(Invalid):
        Token.parse(("loader", sequence))
