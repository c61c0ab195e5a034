"""OpenTelemetry spans of puts, reads, flushes, commits, collections and micro-batches.

Off by default, without importing OpenTelemetry. Code that creates a span costs one `if` while tracing is off:

    with tracing.span("memwal.region.flush", region=name) if tracing.on else tracing.OFF:

Tracing begins with `[tracing] enabled` (`begin`), or in a Python program that has set up OpenTelemetry itself
(`join`). A trace crosses processes in the W3C headers `traceparent` and `tracestate`, on Flight calls and in Spark's
tasks. A process without its own OpenTelemetry, such as a Spark executor, passes on the headers that it received
(`continued`).

Spans contain names, ids and numbers: no rows, and no error texts, which may quote values.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Headers = tuple[tuple[str, str], ...]
"""Pairs of name and value that identify the parent of a span; empty: no parent."""
Kind = Literal["INTERNAL", "SERVER", "CLIENT"]

FIELDS = ("traceparent", "tracestate")
"""Names of the headers."""
OFF = nullcontext()
"""Replaces a span while tracing is off."""
on = False
"""Whether this process creates spans or passes them on. Never becomes False again."""

_tracer: Any = None
_api: Any = None
"""The module `opentelemetry.trace`."""
_received: ContextVar[Headers] = ContextVar("memwal_trace", default=())
_beginning = threading.Lock()


class Wanted(Protocol):
    """The settings of [tracing]; see `settings.sections.TracingSettings`."""

    @property
    def enabled(self) -> bool: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def sample(self) -> float: ...


def begin(service: str, wanted: Wanted, environ: Mapping[str, str] = os.environ) -> None:
    """Create spans from now on if `wanted` enables them, and export them in a background thread. Only the first call
    counts.

    `service`: the `service.name` of this process, unless OpenTelemetry's environment variables set one. If the
    program has set up OpenTelemetry itself, its exporter receives the spans.
    Raises: ModuleNotFoundError without the extra `otel`.
    """
    if not wanted.enabled:
        return
    join()
    with _beginning:
        if _tracer is None:
            from opentelemetry import trace

            _take(trace, _provider(service, wanted, environ).get_tracer("memwal"))


def join() -> None:
    """Create spans from now on if the program has set up a tracer provider of OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or _tracer is not None:
        return
    provider = trace.get_tracer_provider()
    if not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        _take(trace, provider.get_tracer("memwal"))


def check_installed(wanted: Wanted) -> None:
    """Check that the extra `otel` is installed if spans are wanted. Raises: ModuleNotFoundError."""
    if wanted.enabled:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401


def _take(api: Any, tracer: Any) -> None:
    global on, _api, _tracer  # noqa: PLW0603 - one state of the process, read wherever spans are created
    _api, _tracer = api, tracer
    on = True


def _provider(service: str, wanted: Wanted, environ: Mapping[str, str]) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": service})
    sampler = ParentBasedTraceIdRatio(wanted.sample) if wanted.sample < 1 else None  # None: OTEL_TRACES_SAMPLER
    provider = TracerProvider(sampler=sampler, resource=resource)
    url = f"{wanted.endpoint.rstrip('/')}/v1/traces" if wanted.endpoint else None
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


# ---- spans -----------------------------------------------------------------------------------------------------------


@contextmanager
def span(name: str, kind: Kind = "INTERNAL", **attributes: str | int | bool) -> Iterator[Any]:
    """Open a span during the context, as a child of the current one.

    Yields the span; None in a process that only passes traces on. `attributes`: without their prefix "memwal.";
    `note` adds more.
    """
    if _tracer is None:
        yield None
        return
    options = {"record_exception": False, "set_status_on_exception": False}  # they would record the error's text
    with _tracer.start_as_current_span(name, kind=_api.SpanKind[kind], **options) as started:
        note(started, **attributes)
        try:
            yield started
        except BaseException as error:
            _failed(started, error)
            raise


def note(started: Any, **attributes: str | int | bool) -> None:
    """Add attributes to a span; do nothing for None."""
    if started is not None:
        for name, value in attributes.items():
            started.set_attribute(f"memwal.{name}", value)


@contextmanager
def steps(name: str, contexts: Iterable[Any], **attributes: str | int | bool) -> Iterator[None]:
    """Open a span in each of `contexts` (results of `present`; None is skipped) for one step that serves all of
    them."""
    with ExitStack() as stack:
        started = []
        for context in contexts:
            if context is not None and _tracer is not None:
                started.append(_tracer.start_span(name, context=context))
                stack.callback(started[-1].end)
                note(started[-1], **attributes)
        try:
            yield
        except BaseException as error:
            for each in started:
                _failed(each, error)
            raise


def present() -> Any:
    """Return the context of the current span for `steps` of another thread; None if the span is not recorded."""
    if _tracer is None:
        return None
    context = _api.get_current_span().get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    from opentelemetry.context import get_current

    return get_current()


def traced(name: str, call: Callable[P, R]) -> Callable[P, R]:
    """Return `call` in a span "memwal.NAME" with the rows and bytes of its first argument or of its answer."""

    @wraps(call)
    def in_span(*args: P.args, **kwargs: P.kwargs) -> R:
        with span(f"memwal.{name}", "CLIENT") as started:
            answer = call(*args, **kwargs)
            note(started, **(_sizes(args[0] if args else None) | _sizes(answer)))
            return answer

    return in_span


def _sizes(value: Any) -> dict[str, int]:
    """Return the "rows" and "bytes" of an Arrow table, a receipt, a list of rows or a count; {} for any other value."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"rows": value}
    if isinstance(value, list):
        return {"rows": len(value)}
    rows = getattr(value, "num_rows", getattr(value, "rows", None))
    found = {"rows": rows, "bytes": getattr(value, "nbytes", None)}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def _failed(started: Any, error: BaseException) -> None:
    kind = type(error).__name__
    started.set_status(_api.Status(_api.StatusCode.ERROR, kind))
    started.set_attribute("error.type", kind)


# ---- from process to process -----------------------------------------------------------------------------------------


def headers() -> Headers:
    """Return the headers that make another process's spans children of the current span; () without a span."""
    if _tracer is None:
        return _received.get()
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return tuple(carrier.items())


@contextmanager
def continued(given: Headers) -> Iterator[None]:
    """Return a context where `given` is the parent of new spans, and the result of `headers`; () changes nothing."""
    global on
    if not given:
        yield
    elif _tracer is None:
        on, before = True, _received.set(given)
        try:
            yield
        finally:
            _received.reset(before)
    else:
        from opentelemetry.context import attach, detach

        token = attach(_propagator().extract(dict(given)))
        try:
            yield
        finally:
            detach(token)


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
