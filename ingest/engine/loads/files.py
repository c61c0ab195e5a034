"""Find the files that a load reads: names and globs, local and on S3, with their formats and a state that detects
changes.

The ending of a file's name decides its format; a directory that contains `_versions` is a Lance table. `.gz`, `.bz2`
and `.zst` may follow the endings of text formats. A Lance table is read at the version that is its newest now.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import lance
import pyarrow as pa
from pyarrow import fs

from memwal import wal
from memwal.flush import BaseTable, NotInitialised
from memwal.ingest.engine.loads.log_rows import are_all_committed
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion
from memwal.wal.errors import first_line
from memwal.wal.layout import ROOT
from memwal.wal.store.s3_options import read_options

Format = Literal["parquet", "csv", "ndjson", "arrow", "lance"]
ENDINGS: Mapping[str, Format] = {
    "parquet": "parquet",
    "pq": "parquet",
    "csv": "csv",
    "ndjson": "ndjson",
    "jsonl": "ndjson",
    "json": "ndjson",
    "arrow": "arrow",
    "ipc": "arrow",
    "feather": "arrow",
    "lance": "lance",
}
_COMPRESSED = ("gz", "zst", "bz2")
_WILD = "*?["
_CHUNK = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """One file, or one version of a Lance table, that a load reads.

    Thread safety. Immutable.
    """

    name: str
    """Its name in messages."""
    format: Format
    path: str
    """Path in `filesystem`; the address of a Lance table."""
    filesystem: Any
    storage_options: Mapping[str, str]
    state: tuple[Any, ...]
    """Size and modification time, or the version of a Lance table: differs after a change."""

    def opened(self) -> pa.NativeFile:
        """Open the file for random access. Raises OSError."""
        return self.filesystem.open_input_file(self.path)

    def streamed(self) -> pa.NativeFile:
        """Open the file as a stream, decompressed according to its ending. Raises OSError."""
        return self.filesystem.open_input_stream(self.path)

    def dataset(self) -> lance.LanceDataset:
        """Open the version of a Lance table. Raises OSError, ValueError."""
        return lance.dataset(self.path, version=self.state[0], storage_options=dict(self.storage_options) or None)

    def expect_unchanged(self) -> None:
        """Raise Invalid if the file changed since it was found."""
        if self.format != "lance" and _state(self.filesystem.get_file_info(self.path)) != self.state:
            raise changed(self.name)


def changed(name: str) -> Invalid:
    """Return the error for a file that another program changed while it was read."""
    return Invalid(f"{name}: the file changed while it was loaded, so nothing was; load it again when it is complete")


def find_files(patterns: Sequence[str], form: str | None, storage_options: Mapping[str, str]) -> list[InputFile]:
    """Return the files that `patterns` name, in their order; the files of a glob are sorted by name.

    `form`: format of all of them; None: by their endings. `storage_options`: of the table; used for s3:// too.
    Raises: Invalid with every problem.
    """
    found, problems = list[InputFile](), list[str]()
    for pattern in patterns:
        try:
            found += [_file(name, form, storage_options) for name in _names(pattern, storage_options)]
        except Invalid as error:
            problems += error.lines
    times = Counter(file.path for file in found)
    twice = sorted({file.name for file in found if times[file.path] > 1})
    problems += [f"{name}: the file is named twice; a load reads it once" for name in twice]
    if problems:
        raise Invalid.of(problems)
    return found


def token_of(files: Sequence[InputFile]) -> str:
    """Return a token of the contents of `files`, in their order: equal for equal contents, wherever they are.

    Reads every file once; for a Lance table, the list of its data files. Raises Invalid with the file.
    """
    whole = hashlib.sha256()
    for file in files:
        one = hashlib.sha256()
        try:
            for data in _contents(file):
                one.update(data)
        except OSError as error:
            raise Invalid(f"{file.name}: cannot be read: {first_line(error)}") from error
        whole.update(one.digest())
    return f"sha256:{whole.hexdigest()[:32]}"


def _contents(file: InputFile) -> Iterator[bytes]:
    if file.format == "lance":
        for fragment in file.dataset().get_fragments():
            yield repr(fragment.metadata.to_json()).encode()
        return
    with file.opened() as opened:
        while data := opened.read(_CHUNK):
            yield data


def _names(pattern: str, storage_options: Mapping[str, str]) -> list[str]:
    """Return the files that match a name or glob. Raises: Invalid."""
    scheme, is_url, _ = pattern.partition("://")
    if is_url and scheme not in ("s3", "file"):
        raise Invalid(f"{pattern}: files are read from local paths and s3:// only")
    if scheme == "file" and is_url:
        pattern, is_url = urlsplit(pattern).path, ""
    if not any(letter in pattern for letter in _WILD) or (not is_url and Path(pattern).exists()):
        return [pattern]
    # Not by Path: its patterns must be relative.
    found = _on_s3(pattern, storage_options) if is_url else glob.glob(pattern, recursive=True)  # noqa: PTH207
    names = sorted(found)
    if not names:
        raise Invalid(f"{pattern}: no file has such a name")
    return names


def _on_s3(pattern: str, storage_options: Mapping[str, str]) -> Iterable[str]:
    segments = pattern.removeprefix("s3://").split("/")
    fixed = next(at for at, segment in enumerate(segments) if any(letter in segment for letter in _WILD))
    if fixed == 0:
        raise Invalid(f"{pattern}: name the bucket; a glob may follow it")
    system = _filesystem(segments[0], storage_options)
    selector = fs.FileSelector("/".join(segments[:fixed]), allow_not_found=True, recursive=len(segments) > fixed + 1)
    for info in _asked(pattern, lambda: system.get_file_info(selector)):
        parts = info.path.split("/")
        if len(parts) == len(segments) and all(map(fnmatchcase, parts, segments)):
            yield f"s3://{info.path}"


def _file(name: str, form: str | None, storage_options: Mapping[str, str]) -> InputFile:
    bucket = name.removeprefix("s3://").partition("/")[0] if name.startswith("s3://") else ""
    system = _filesystem(bucket, storage_options) if bucket else fs.LocalFileSystem()
    path = name.removeprefix("s3://") if bucket else str(Path(name).absolute())
    info = _asked(name, lambda: system.get_file_info(path.rstrip("/")))
    if info.type == fs.FileType.NotFound:
        raise Invalid(f"{name}: the file does not exist")
    if info.type == fs.FileType.Directory:
        return _table(name, path.rstrip("/"), system, storage_options if bucket else {})
    if info.type != fs.FileType.File:
        raise Invalid(f"{name}: is no regular file, and a load reads its files several times; write it to one")
    return InputFile(name, _format(name, form), path, system, {}, _state(info))


def _table(name: str, path: str, system: Any, storage_options: Mapping[str, str]) -> InputFile:
    if system.get_file_info(f"{path}/_versions").type != fs.FileType.Directory:
        raise Invalid(f"{name}: is a directory; name its files, such as {name.rstrip('/')}/*.parquet")
    address = name.rstrip("/") if name.startswith("s3://") else path
    version = _asked(name, lambda: lance.dataset(address, storage_options=dict(storage_options) or None).version)
    if system.get_file_info(f"{path}/{ROOT}".rstrip("/")).type == fs.FileType.Directory:
        try:
            base = BaseTable.open(address, storage_options)
        except NotInitialised:
            base = None
        if base is not None and not are_all_committed(base, wal.open_store(address, storage_options)):
            raise Invalid(f"{name}: the table has rows that are not committed yet; commit them first (memwal commit)")
    return InputFile(name, "lance", address, system, storage_options, (version,))


def _format(name: str, form: str | None) -> Format:
    known = sorted(set(ENDINGS.values()) - {"lance"})
    if form is not None:
        if form not in known:
            raise Invalid(f"--format {form}: no format of files{suggestion(form, known)}")
        return ENDINGS[form]
    endings = Path(name).name.lower().split(".")[1:]
    ending = endings[-2] if len(endings) > 1 and endings[-1] in _COMPRESSED else endings[-1] if endings else ""
    if ending not in ENDINGS or ENDINGS[ending] == "lance":
        raise Invalid(f"{name}: no format is known by this ending; give --format {' | '.join(known)}")
    return ENDINGS[ending]


def _filesystem(bucket: str, storage_options: Mapping[str, str]) -> fs.FileSystem:
    """Return S3 by the options of the table, or of the environment. Raises StoreRefused."""
    options = read_options(storage_options, bucket, os.environ)
    scheme, _, host = (options.endpoint or "https://").partition("://")
    given: dict[str, Any] = {
        "access_key": options.access_key_id,
        "secret_key": options.secret_access_key,
        "session_token": options.session_token,
        "region": options.region,
        "endpoint_override": host.rstrip("/") or None,
        "scheme": scheme,
        "anonymous": options.skip_signature,
        "force_virtual_addressing": options.virtual_hosted,
        "connect_timeout": options.connect_timeout,
        "request_timeout": options.timeout,
        "proxy_options": options.proxy,
    }
    return fs.S3FileSystem(**{name: value for name, value in given.items() if value})


def _state(info: fs.FileInfo) -> tuple[Any, ...]:
    return info.size, info.mtime_ns


def _asked(name: str, ask: Any) -> Any:
    """Return `ask()`. Raises: Invalid for a file that cannot be accessed."""
    try:
        return ask()
    except (OSError, ValueError) as error:
        raise Invalid(f"{name}: cannot be read: {first_line(error)}") from error
