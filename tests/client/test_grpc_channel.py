"""The channel of a gRPC client: pings, forks, and who does without it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvtier.protocol import rpc
from kvtier.protocol.limits import CHUNK
from kvtier.protocol.v1 import kvtier_pb2 as pb
from kvtier.server import grpc as grpc_server
from kvtier.server.sessions import WRITE
from kvtier.server.sessions import Peer as PeerOf
from kvtier.server.settings import Listen
from kvtier.server.verbs import Service
from tests.support.daemon import ROOT, MiB, Peer, description, hashes, until
from tests.support.inside import Inside
from tests.support.listeners import ListeningDaemon, RawGrpc, method

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def listening() -> Iterator[ListeningDaemon]:
    with ListeningDaemon(256 * MiB) as daemon:
        yield daemon


# A client that goes away in the middle


# Sizes


# A daemon that comes and goes


def test_the_pings_of_our_client_agree_with_the_server() -> None:
    """KVB-11 b, the settings: what we send is never more often than what the server accepts, whatever the interval."""
    for ping in (rpc.PING, 1.0):
        client, server = dict(rpc.client_options(ping)), dict(rpc.server_options(ping))
        assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
        assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
        assert client["grpc.http2.max_pings_without_data"] == 0
        assert client["grpc.max_receive_message_length"] >= server["grpc.max_send_message_length"] > CHUNK
        assert server["grpc.max_receive_message_length"] >= client["grpc.max_send_message_length"] > CHUNK


@pytest.mark.long
def test_an_idle_connection_is_pinged_and_stays(tmp_path: Path) -> None:
    """KVB-11 b, live, with pings each second (gRPC's client sends none more often).

    Idle while five are sent, then a get.

    The third ping that comes too soon ends a connection: the control is a server that accepts one only every two
    seconds.
    """
    ping = 1.0
    with Inside() as inside:
        service = Service(inside.store, inside.sessions)
        made = {
            name: grpc_server.GrpcServer(
                service, [Listen(tmp_path / name)], unix_peer=PeerOf("local", WRITE), ping=expected
            )
            for name, expected in (("agreed", ping), ("strict", 6 * ping))
        }
        states: dict[str, list[grpc.ChannelConnectivity]] = {name: [] for name in made}
        callers = {name: RawGrpc(f"unix:{tmp_path / name}", options=rpc.client_options(ping)) for name in made}
        try:
            for name, caller in callers.items():
                made[name].start()
                caller.unary(method("Status"))
                caller.channel.subscribe(states[name].append, try_to_connect=False)
                caller.unary(method("Status"))
            time.sleep(5.5 * ping)
            known = callers["agreed"].register(description(4096).canonical)
            keys = pb.Keys(handle=known.handle, boot=known.boot, layer_hi=1, head_hi=1, hashes=hashes([1]))
            assert callers["agreed"].code(method("Get"), keys.SerializeToString(), streaming=True) == (CODE.OK, "")
            until(lambda: set(states["strict"]) - {grpc.ChannelConnectivity.READY}, "the control is sent away", 10)
            assert set(states["agreed"]) == {grpc.ChannelConnectivity.READY}
        finally:
            for caller in callers.values():
                caller.channel.close()
            for one in made.values():
                one.close()


# Forks


_FORKED = """
client = Client(*ARGS[:1])
ns = client.register(description(4096))
put(client, ns, [1])
child = os.fork()
if child == 0:
    try:
        said = []
        for _ in range(2):
            began = time.monotonic()
            answer = client.lookup(ns, hashes([1]), deadline=0.5)
            said.append([int(answer), answer.reason, time.monotonic() - began])
        say(said)
    finally:
        os._exit(0)
os.waitpid(child, 0)
say(client.lookup(ns, hashes([1]), deadline=10))
"""


def test_where_grpc_does_not_survive_a_fork_the_child_hears_misses_in_time(listening: ListeningDaemon) -> None:
    """Without gRPC's own fork handlers its threads are missing in the child, where a bare call would never end."""
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    with Peer(_FORKED, listening, f"grpc+unix:{listening.socket}.grpc", env=environment) as peer:
        (first, why, took), (second, then, quick) = peer.hear()
        assert (first, second) == (0, 0) and "no answer within" in why and "did not survive the fork" in then
        assert took < 5 and quick < 0.5
        assert peer.hear() == 1


def test_a_client_of_the_unix_transport_does_without_grpc() -> None:
    """Importing gRPC takes longer than the rest together, and engines that fork want none of its threads."""
    program = "import sys, kvtier; kvtier.Client('unix:/nowhere').close(); print('grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


# An arena that cannot be mapped


# the sparse arena of the daemon goes with it


# Bytes that change on their way


# Other languages: stubs that know nothing of our framing
