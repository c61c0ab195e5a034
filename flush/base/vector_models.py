"""Read the trained centroids and codebooks of the base table's vector indexes, which new memtables use.

pylance returns the centroids of an index but not its codebook, and reads the whole index for them. This module reads
the two Lance files in `_indices/{uuid}/` directly, the metadata and one buffer of each:

    index.idx       schema metadata lance:index = {"type": "IVF_PQ", "distance_type"}, lance:ivf = number of the buffer
                    with IVF.centroids_tensor = 4
    auxiliary.idx   storage_metadata = a list of one JSON text, {"codebook_position", "nbits", "num_sub_vectors",
                    "dimension", ...}: number of the buffer with the codebook, a Tensor
    Tensor          data_type = 1 (1: float16, 2: float32, 3: float64), shape = 2 (packed), data = 3

The codes of sub-vector m are the m-th part of the codebook, whatever shape is recorded. They encode residuals to the
nearest centroid under l2, residuals of unit vectors under cosine, and the vectors themselves under dot. Found by
decoding the rows of indexes built by pylance 14.0.2; a test repeats it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2
from lance.file import LanceFileReader, LanceFileSession

from memwal.flush.base.existing_indexes import has_files
from memwal.memtable import IndexSpec, VectorModel
from memwal.wal.panics import as_exception, panics_as_errors
from memwal.wal.region_manifest import MessageFields, message_classes

_LOG = logging.getLogger("memwal.models")
_Field = descriptor_pb2.FieldDescriptorProto
_MESSAGES: MessageFields = {
    "Tensor": ((1, "data_type", _Field.TYPE_INT32), (3, "data", _Field.TYPE_BYTES)),
    "IVF": ((4, "centroids_tensor", "Tensor"),),
}
_NUMBERS: Mapping[int, str] = {1: "<f2", 2: "<f4", 3: "<f8"}


class _Unusable(Exception):
    """An index that memtables cannot use as a model; the text has the reason."""


_INDEX, _CODES = "index.idx", "auxiliary.idx"


@panics_as_errors
def vector_models(
    dataset: lance.LanceDataset, indexes: Sequence[IndexSpec], storage_options: Mapping[str, str]
) -> dict[str, VectorModel]:
    """Return, by column, the model of each ivf_pq index in `indexes` that is built with the declared kind and metric.

    Reads some kilobytes of two files per index. Never raises for an index that cannot be read or used: it is omitted
    and the reason logged, because a memtable without a model trains one.
    """
    models: dict[str, VectorModel] = {}
    wanted = {spec.name: spec for spec in indexes if spec.kind == "ivf_pq"}
    built = dataset.describe_indices() if wanted else []
    for index in built:
        if (spec := wanted.get(index.name)) is None:
            continue
        segment = next(filter(has_files, index.segments), None)
        if segment is None:
            continue  # built over nulls only: not trained
        try:
            directory = f"{dataset.uri}/_indices/{segment.uuid}"
            width = dataset.schema.field(spec.column).type.list_size
            models[spec.column] = _model(directory, spec, width, storage_options)
        except _Unusable as reason:
            _LOG.info("%s: index %s is no model for memtables: %s", dataset.uri, index.name, reason)
        except BaseException as error:  # noqa: BLE001 - pylance raises any class for a file it cannot read
            _LOG.warning("%s: cannot read the model of index %s: %s", dataset.uri, index.name, as_exception(error))
    return models


def _model(directory: str, spec: IndexSpec, width: int, storage_options: Mapping[str, str]) -> VectorModel:
    session = LanceFileSession(directory, storage_options=dict(storage_options))
    index = session.open_reader(_INDEX)
    metadata = index.metadata().schema.metadata or {}
    described = json.loads(metadata.get(b"lance:index", b"{}"))
    metric = spec.parameters.get("metric", "l2")
    if (described.get("type"), described.get("distance_type")) != ("IVF_PQ", metric):
        kind = f"{described.get('type')} with the metric {described.get('distance_type')}"
        raise _Unusable(f"it is {kind}, not IVF_PQ with {metric}")
    codes = session.open_reader(_CODES)
    storage = json.loads(json.loads((codes.metadata().schema.metadata or {})[b"storage_metadata"])[0])
    ivf = _IVF.FromString(_buffer(session, _INDEX, index, int(metadata[b"lance:ivf"])))
    codebook = _numbers(_TENSOR.FromString(_buffer(session, _CODES, codes, storage["codebook_position"])))
    model = VectorModel(
        _numbers(ivf.centroids_tensor).reshape(-1, storage["dimension"]),
        codebook.reshape(storage["num_sub_vectors"], 2 ** storage["nbits"], -1),
        residual=metric != "dot",
    )
    if problem := model.problem(width):
        raise _Unusable(f"it {problem}")
    return model


def _buffer(session: LanceFileSession, name: str, file: LanceFileReader, number: int) -> bytes:
    """Return a global buffer of a file.

    `read_global_buffer` is not used: it holds the GIL while it waits for Lance's threads, which may wait for a memwal
    scanning thread that needs the GIL.
    """
    place = file.metadata().global_buffers[number]
    return bytes(session.read_range(name, place.position, place.size))


def _numbers(tensor: Any) -> npt.NDArray[np.float32]:
    if tensor.data_type not in _NUMBERS:
        raise _Unusable(f"its numbers are of the type {tensor.data_type}")
    return np.frombuffer(tensor.data, _NUMBERS[tensor.data_type]).astype(np.float32)


_TENSOR, _IVF = message_classes("memwal.lance_index", _MESSAGES, ["Tensor", "IVF"])
