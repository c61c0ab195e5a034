"""The log: entries, region manifests, epochs and fencing over an object store. See README.md for formats and
protocol."""

from wal.appender import WalAppender
from wal.clock import Clock, FakeClock, Ids, SeededIds, SystemClock, SystemIds
from wal.codec.arrow import ArrowCodec
from wal.codec.lance import LanceCodec
from wal.codec.port import WAL_FORMATS, EntryCodec, WalFormat, codec_for
from wal.epoch import EpochGuard
from wal.errors import (
    ConcurrentUse,
    Corrupt,
    Fenced,
    OutcomeUnknown,
    Overtaken,
    Poisoned,
    Resized,
    Sealed,
    StoreRefused,
    StoreUnavailable,
    WalError,
)
from wal.fence import Claim, claim
from wal.garbage import WalCollector, WalGarbage
from wal.invariants import InvariantViolation, check_succession
from wal.layout import bucket_region, regions
from wal.lease import ReadLease
from wal.manifest import ManifestStore, RegionManifest, RegionStatus, SsTable
from wal.manifest_garbage import ManifestCollector, ManifestGarbage
from wal.options import WalOptions
from wal.records import BatchPart, Entry, EntryHeader
from wal.replay import find_tip, read_tail, replay
from wal.store.local import LocalStore
from wal.store.memory import MemoryStore
from wal.store.open import open_store, probe
from wal.store.port import ObjectInfo, ObjectStore, PutOutcome
from wal.tail import WalTailer

__all__ = [
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
    "FakeClock",
    "Fenced",
    "Ids",
    "InvariantViolation",
    "LanceCodec",
    "LocalStore",
    "ManifestCollector",
    "ManifestGarbage",
    "ManifestStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "OutcomeUnknown",
    "Overtaken",
    "Poisoned",
    "PutOutcome",
    "ReadLease",
    "RegionManifest",
    "RegionStatus",
    "Resized",
    "Sealed",
    "SeededIds",
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
    "WalTailer",
    "bucket_region",
    "check_succession",
    "claim",
    "codec_for",
    "find_tip",
    "open_store",
    "probe",
    "read_tail",
    "regions",
    "replay",
]
