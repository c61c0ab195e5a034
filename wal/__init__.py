"""The write-ahead log: entries, region manifests, epochs and fencing over an object store.

README.md has the formats and the protocols.
"""

from memwal.wal.appender import WalAppender
from memwal.wal.clock import Clock, Ids, SystemClock, SystemIds
from memwal.wal.codec.arrow import ArrowCodec
from memwal.wal.codec.lance import LanceCodec
from memwal.wal.codec.port import WAL_FORMATS, EntryCodec, WalFormat, codec_for
from memwal.wal.errors import (
    ConcurrentUse,
    Corrupt,
    Fenced,
    FencedAfterWrite,
    OutcomeUnknown,
    Overtaken,
    Poisoned,
    Resized,
    Sealed,
    StoreRefused,
    StoreUnavailable,
    WalError,
)
from memwal.wal.fence import Claim, Known, Released, claim, settle_claim
from memwal.wal.garbage import WalCollector, WalGarbage
from memwal.wal.invariants import InvariantViolation, check_succession
from memwal.wal.layout import BUCKETS_MAX, bucket_region, named, regions
from memwal.wal.lease import ReadLease
from memwal.wal.log_tail import LogTail
from memwal.wal.manifest import EpochGuard, ManifestHistory, ManifestStore, RegionManifest, RegionStatus, SsTable
from memwal.wal.manifest_garbage import ManifestCollector, ManifestGarbage
from memwal.wal.read_ahead import ReadAhead
from memwal.wal.records import BatchPart, Entry, EntryHeader
from memwal.wal.replay import find_tip, read_tail, replay, tail_end
from memwal.wal.retries import WalOptions
from memwal.wal.store.local import LocalStore
from memwal.wal.store.open import open_store, probe
from memwal.wal.store.port import ObjectInfo, ObjectStore, PutOutcome
from memwal.wal.store.requests import REQUESTS, RequestKey

__all__ = [
    "BUCKETS_MAX",
    "REQUESTS",
    "WAL_FORMATS",
    "ArrowCodec",
    "BatchPart",
    "Claim",
    "Clock",
    "ConcurrentUse",
    "Corrupt",
    "Entry",
    "EntryCodec",
    "EntryHeader",
    "EpochGuard",
    "Fenced",
    "FencedAfterWrite",
    "Ids",
    "InvariantViolation",
    "Known",
    "LanceCodec",
    "LocalStore",
    "LogTail",
    "ManifestCollector",
    "ManifestGarbage",
    "ManifestHistory",
    "ManifestStore",
    "ObjectInfo",
    "ObjectStore",
    "OutcomeUnknown",
    "Overtaken",
    "Poisoned",
    "PutOutcome",
    "ReadAhead",
    "ReadLease",
    "RegionManifest",
    "RegionStatus",
    "Released",
    "RequestKey",
    "Resized",
    "Sealed",
    "SsTable",
    "StoreRefused",
    "StoreUnavailable",
    "SystemClock",
    "SystemIds",
    "WalAppender",
    "WalCollector",
    "WalError",
    "WalFormat",
    "WalGarbage",
    "WalOptions",
    "bucket_region",
    "check_succession",
    "claim",
    "codec_for",
    "find_tip",
    "named",
    "open_store",
    "probe",
    "read_tail",
    "regions",
    "replay",
    "settle_claim",
    "tail_end",
]
