# SPDX-License-Identifier: Apache-2.0
"""Steps as a file for https://ui.perfetto.dev: a stream of ``TracePacket`` messages of ``perfetto_trace.proto``.

Each process is a track. A call has its phases inside it, one after another from its begin: their order is not known."""

from collections.abc import Iterator, Mapping, Sequence

from dlrover.python.rl.page.spans import Span, StepLanes

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _EVENT, _FLAGS, _TRACK = 8, 10, 11, 13, 60  # of TracePacket
_UUID, _NAME = 1, 2  # of TrackDescriptor
_TYPE, _TRACK_OF, _CATEGORY, _LABEL, _ANNOTATION = 9, 11, 22, 23, 4  # of TrackEvent
_KEY, _TEXT = 10, 6  # of DebugAnnotation
_BEGIN, _END = 1, 2
_CLEARED = 1  # flag of the first packet of a sequence


def trace(steps: Sequence[StepLanes]) -> bytes:
    """Return the content of the file; time 0 is the begin of the first step."""
    zero_s = min((step.begin_s for step in steps), default=0.0)
    processes = list(dict.fromkeys(lane.process for step in steps for lane in step.lanes))
    tracks = {process: number for number, process in enumerate(["steps", *processes], 1)}
    packets = [_packet({_FLAGS: _CLEARED})]
    packets += [_packet({_TRACK: _message({_UUID: uuid, _NAME: name})}) for name, uuid in tracks.items()]
    for step in steps:
        name = f"step {step.step}" + ", unfinished" * step.is_open
        whole = Span(step.begin_s, step.end_s, "call", name)
        packets += _slice(tracks["steps"], whole, zero_s)
        for lane in step.lanes:
            for span in lane.spans:
                packets += _slice(tracks[lane.process], span, zero_s)
    return b"".join(_field(_PACKET, packet) for packet in packets)


def _slice(track: int, span: Span, zero_s: float) -> Iterator[bytes]:
    """Yield the begin and end of a span, around its phases."""
    texts = {"cause": span.cause} if span.cause else {}
    yield _event(track, span.begin_s - zero_s, _BEGIN, span.label, span.kind, texts)
    whole_s = sum(span.phases.values())
    scale, at_s = min(1.0, (span.end_s - span.begin_s) / whole_s) if whole_s > 0 else 0.0, span.begin_s - zero_s
    for name, seconds in span.phases.items():
        yield _event(track, at_s, _BEGIN, name, "phase", {})
        at_s += max(seconds, 0.0) * scale
        yield _event(track, at_s, _END)
    yield _event(track, span.end_s - zero_s, _END)


def _event(
    track: int, at_s: float, kind: int, label: str = "", category: str = "", texts: Mapping[str, str] | None = None
) -> bytes:
    event = _message({_TYPE: kind, _TRACK_OF: track})
    if kind == _BEGIN:
        event += _message({_CATEGORY: category, _LABEL: label})
        event += b"".join(
            _field(_ANNOTATION, _message({_KEY: key, _TEXT: text})) for key, text in (texts or {}).items()
        )
    return _packet({_TIMESTAMP: max(round(at_s * 1e9), 0), _EVENT: event})


def _packet(fields: Mapping[int, int | str | bytes]) -> bytes:
    return _message({_SEQUENCE: 1, **fields})


def _message(fields: Mapping[int, int | str | bytes]) -> bytes:
    return b"".join(_field(number, value) for number, value in fields.items())


def _field(number: int, value: int | str | bytes) -> bytes:
    """Encode a field: a number as a varint, a text or a message with its length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
