"""Requests survive the wire byte for byte; a stream counts only when it was closed."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from ingest.errors import Invalid, Unavailable
from ingest.flight_wire import closed_rows, closing, from_flight, pack, raise_over_flight, unpack


@pytest.mark.parametrize("rows", [None, pa.table({"k": ["a", "ü"], "v": [[1.0], None]})])
def test_a_request_comes_back_as_it_was(rows: pa.Table | None) -> None:
    request = {"op": "get", "columns": ["a", "b"], "filter": None, "n": 2**40}
    found, found_rows = unpack(pack(request, rows))
    assert found == request
    assert found_rows == rows


def test_only_the_closing_message_has_a_row_count() -> None:
    assert closed_rows(pa.py_buffer(closing(3))) == 3
    assert closed_rows(None) is None


def test_an_error_keeps_its_kind_and_details() -> None:
    with pytest.raises(flight.FlightServerError) as raised:
        raise_over_flight(Invalid("column 'x' is null in row 3", {"column": "x", "row": 3}))
    found = from_flight(raised.value, "grpc://127.0.0.1:1")
    assert isinstance(found, Invalid)
    assert (found.message, found.details) == ("column 'x' is null in row 3", {"column": "x", "row": 3})


def test_no_answer_is_unavailable_and_names_the_endpoint() -> None:
    found = from_flight(flight.FlightUnavailableError("refused"), "grpc://127.0.0.1:1")
    assert isinstance(found, Unavailable)
    assert "grpc://127.0.0.1:1" in found.message
