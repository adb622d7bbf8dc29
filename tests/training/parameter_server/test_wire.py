"""Messages over sockets: whole or refused, whatever comes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import InputError, PeerLostError
from asynckfold.training.parameter_server import wire

Pair = tuple[socket.socket, socket.socket]


def made_pair() -> Pair:
    here, there = socket.socketpair()
    there.settimeout(5)
    return here, there


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = made_pair()
    with here, there:
        yield here, there


VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=9), st.lists, max_leaves=5)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.binary(max_size=999))
def test_what_is_sent_arrives(header: dict[str, object], payload: bytes) -> None:
    here, there = made_pair()
    with here, there:
        wire.send(here, header, memoryview(payload))
        assert wire.receive(there) == (header, len(payload))
        room = bytearray(len(payload))
        wire.fill(there, memoryview(room), len(payload))
        assert room == payload


def test_a_large_payload_arrives_in_pieces() -> None:
    here, there = made_pair()
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        values = np.arange(500, dtype=np.float64)
        wire.send(here, {}, memoryview(values).cast("B"))
        found = np.empty_like(values)
        wire.receive(there)
        wire.fill(there, memoryview(found).cast("B"), values.nbytes)
        assert np.array_equal(found, values)


def framed(magic: bytes, text: bytes, length: int | None = None) -> bytes:
    return struct.pack("!4sIQ", magic, len(text) if length is None else length, 0) + text


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a message"),
        (framed(b"AKF1", b"{}", wire.HEADER_LIMIT + 1), "is not a message"),
        (framed(b"AKF1", b"{"), "not JSON"),
        (framed(b"AKF1", b"\xff"), "not JSON"),
        (framed(b"AKF1", b"[" * 100_000), "not JSON"),
        (framed(b"AKF1", b"[1]"), "not a JSON object"),
        (framed(b"AKF1", b"{}", 9), "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_what_is_no_message_is_refused(pair: Pair, data: bytes, told: str) -> None:
    here, there = pair
    here.sendall(data)
    here.close()
    with pytest.raises(wire.FrameError, match=told):
        wire.receive(there)


@given(st.binary(max_size=64))
def test_noise_never_does_more_than_that(data: bytes) -> None:
    here, there = made_pair()
    with here, there:
        here.sendall(data)
        here.close()
        try:
            header, _ = wire.receive(there)
        except wire.FrameError:
            return
        assert json.dumps(header).startswith("{")


def test_a_payload_of_another_length_is_refused(pair: Pair) -> None:
    here, there = pair
    wire.send(here, {}, memoryview(b"12345"))
    _, size = wire.receive(there)
    with pytest.raises(wire.FrameError, match="announces 5 bytes where 4 belong"):
        wire.fill(there, memoryview(bytearray(4)), size)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match=r"must be host:port.* Write for instance '127"):
        wire.parse(address)


def test_a_port_in_use_is_refused() -> None:
    with closing(wire.listen("127.0.0.1:0")) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"free port: received {address} \(Address already"):
            wire.listen(address)


@pytest.mark.parametrize("address", ["203.0.113.1:0", "no.such.host.invalid:0"])
def test_an_address_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="an address of this machine"):
        wire.listen(address)


def test_an_address_that_does_not_answer_is_told_after_the_timeout() -> None:
    with closing(wire.listen("127.0.0.1:0")) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(PeerLostError, match=rf"no parameter server answered at {address} within"):
        wire.connect(address, 0.3)
