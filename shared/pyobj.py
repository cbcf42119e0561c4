"""Python objects over ZeroMQ, with what the pickling and the transport cost apart in the trace."""

from __future__ import annotations

import pickle
from typing import Any

import zmq
import zmq.asyncio

from shared import trace


def send(socket: zmq.Socket[bytes], message: Any, track: trace.NullTrack) -> None:
    """Sends one message, which a `recv_pyobj` takes too."""
    data = pickle.dumps(message)
    track.lap("serialize")
    socket.send(data)
    track.lap_out("send", (message,), len(data))


async def send_async(socket: zmq.asyncio.Socket, message: Any, track: trace.NullTrack) -> None:
    """The same from an event loop."""
    data = pickle.dumps(message)
    track.lap("serialize")
    await socket.send(data)
    track.lap_out("send", (message,), len(data))


async def recv_async(socket: zmq.asyncio.Socket, track: trace.NullTrack) -> Any:
    """The next message."""
    data = await socket.recv()
    start_ns = track.now()
    message = pickle.loads(data)
    track.span("deserialize", start_ns, messages=(message,), num_bytes=len(data))
    return message


def drain(socket: zmq.Socket[bytes], track: trace.NullTrack) -> list[Any]:
    """Everything that has arrived."""
    frames: list[bytes] = []
    try:
        while True:
            frames.append(socket.recv(zmq.NOBLOCK))
    except zmq.Again:
        track.lap("receive")
    if not frames:
        return []
    messages = [pickle.loads(frame) for frame in frames]
    track.lap_in("deserialize", messages, sum(map(len, frames)))
    return messages
