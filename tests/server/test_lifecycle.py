"""The daemon's beginning and end: what it refuses at the start, and how it ends whatever its clients are doing.

Exit codes: `test_config`.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.protocol import frames
from kvtier.protocol.frames import Verb
from kvtier.protocol.v1 import kvtier_pb2 as pb
from tests.support.daemon import PATIENCE, Daemon, MiB, Peer, Raw, description, hashes, is_body, put, until

END = 20.0  # seconds: calls under way have 2, everything else is quicker


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


def ends(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """(exit code, what it said on stderr) of a server that is expected to end by itself."""
    try:
        _, said = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said.decode()


# The end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_is_clean_whatever_clients_hold_or_do(number: signal.Signals) -> None:
    """Leases, reservations, sockets that say nothing, half a frame, answers that nobody takes, a session in limbo."""
    with Daemon() as daemon, ExitStack() as stack:
        client = stack.enter_context(daemon.client())
        ns = client.register(description(4096))
        put(client, ns, range(8))
        lease = stack.enter_context(client.lease(ns, hashes(range(8))))
        stack.enter_context(client.fill(ns, hashes(range(100, 108))))
        with Raw(daemon.socket) as gone:
            handle = pb.RegisterReply.FromString(
                gone.call(Verb.REGISTER, pb.RegisterRequest(description=description(4096).canonical))[1]
            ).handle
            message = pb.Keys(handle=handle, layer_hi=1, head_hi=1, hashes=hashes([500]), id=1, nbytes=4096 + 256)
            assert gone.call(Verb.RESERVE, message)[0] == 0
        until(lambda: daemon.status()["limbo_sessions"] == 1, "a session is in limbo")
        idle = stack.enter_context(Raw(daemon.socket))
        half = stack.enter_context(Raw(daemon.socket))
        half.send(frames.pack(Verb.LOOKUP, 1, 0, bytes(100))[:50])
        stack.enter_context(Raw(daemon.socket, greet=False))
        deaf = stack.enter_context(Raw(daemon.socket))
        try:
            for _ in range(64):
                deaf.send(frames.pack(Verb.STATUS, 1, 0, b""))
                time.sleep(0.001)
        except ConnectionError:
            pass  # two frames met on a busy machine, and the daemon closed
        daemon.status(check_integrity=True)
        assert daemon.process is not None
        began = time.monotonic()
        daemon.process.send_signal(number)
        assert daemon.process.wait(END) == 0
        assert time.monotonic() - began < END
        assert not daemon.socket.exists()
        assert [is_body(view, n) for n, view in enumerate(lease)] == [True] * 8, "a mapping outlives the daemon"
        assert client.lookup(ns, hashes([1])) == 0
        with pytest.raises((frames.Closed, ConnectionError)):
            idle.receive()
        assert daemon.faults() == []
        stack.close()
        daemon.start()


def test_calls_that_got_in_are_answered_before_the_end(daemon: Daemon) -> None:
    large = frames.pack(Verb.LOOKUP, 1, 0, b"")
    with ExitStack() as stack:
        connections = [stack.enter_context(Raw(daemon.socket)) for _ in range(12)]
        for connection in connections:
            handle = pb.RegisterReply.FromString(
                connection.call(Verb.REGISTER, pb.RegisterRequest(description=description(4096).canonical))[1]
            ).handle
            run = pb.Run(layer_hi=1, head_hi=1, hashes=hashes(range(16_000)))
            large = frames.pack(Verb.LOOKUP, 7, 0, pb.LookupRequest(handle=handle, run=[run]).SerializeToString())
        senders = [threading.Thread(target=connection.send, args=(large,)) for connection in connections]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(PATIENCE)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        for connection in connections:
            status, request, _, _ = connection.receive()
            assert (status, request) == (0, 7)
            with pytest.raises((frames.Closed, ConnectionError)):
                connection.receive()
        assert daemon.process.wait(END) == 0
    daemon.start()


def test_a_second_signal_does_not_wait(daemon: Daemon) -> None:
    """A client that takes no answers holds the end up for 2 s; whoever asks twice means it."""
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    until(
        lambda: daemon.process is None or daemon.process.poll() is not None or not daemon.socket.exists(),
        "it has begun to end",
    )
    if daemon.process.poll() is None:
        daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(END) in (0, -signal.SIGTERM)
    daemon.start()


# The path


def test_a_second_daemon_on_the_path_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.register(description(4096))
        put(client, ns, range(4))
        with client.lease(ns, hashes(range(4))) as blocks:
            for _ in range(3):
                code, said = ends(daemon.spawn())
                assert code == 3
                assert (
                    f"another daemon serves {daemon.socket}" in said
                    and "choose another" in said
                    and "Traceback" not in said
                )
            assert [is_body(view, n) for n, view in enumerate(blocks)] == [True] * 4
            assert client.lookup(ns, hashes(range(4))) == 4
        assert daemon.status()["sessions"] == 2


def test_daemons_that_start_at_the_same_moment_leave_one() -> None:
    with Daemon() as daemon:
        daemon.terminate()
        processes = [daemon.spawn() for _ in range(4)]
        try:
            until(lambda: sum(process.poll() is None for process in processes) == 1, "one is left")
            assert [process.returncode for process in processes if process.returncode is not None] == [3] * 3
            until(lambda: daemon.socket.exists(), "it serves")
            with Raw(daemon.socket) as connection:
                assert connection.call(Verb.STATUS, b"")[0] == 0
        finally:
            for process in processes:
                process.terminate()
                process.communicate(timeout=PATIENCE)
        daemon.start()


def test_what_a_dead_daemon_left_is_taken_over(daemon: Daemon) -> None:
    daemon.kill()
    assert daemon.socket.is_socket(), "left behind"
    with pytest.raises(ConnectionRefusedError):
        Raw(daemon.socket)
    daemon.start()
    assert daemon.status()["known_blocks"] == 0


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "lock is a directory", "lock is a symlink"])
def test_nothing_but_a_socket_is_removed_from_the_path(kind: str, tmp_path: Path) -> None:
    daemon = Daemon()
    try:
        lock = daemon.directory / "kvtier.sock.lock"
        precious = tmp_path / "precious"
        precious.write_text("not yours")
        match kind:
            case "file":
                daemon.socket.write_text("not yours")
            case "directory":
                daemon.socket.mkdir()
            case "symlink":
                daemon.socket.symlink_to(precious)
            case "lock is a directory":
                lock.mkdir()
            case "lock is a symlink":
                lock.symlink_to(precious)
        before = sorted((path.name, path.is_symlink(), path.is_dir()) for path in daemon.directory.iterdir())
        code, said = ends(daemon.spawn())
        assert code == 3
        assert said.startswith("kvtier-server: ") and str(daemon.socket) in said and "Traceback" not in said
        assert precious.read_text() == "not yours"
        assert kind != "file" or daemon.socket.read_text() == "not yours"
        after = sorted((path.name, path.is_symlink(), path.is_dir()) for path in daemon.directory.iterdir())
        assert [entry for entry in after if entry[0] != lock.name or entry in before] == before
    finally:
        daemon.close()


def test_who_may_connect_is_the_sockets_mode() -> None:
    with Daemon(64 * MiB, "--socket-mode", "640") as daemon:
        assert daemon.socket.stat().st_mode & 0o777 == 0o640
    with Daemon() as daemon:
        assert daemon.socket.stat().st_mode & 0o777 == 0o600


def test_help_names_every_flag() -> None:
    daemon = Daemon()
    try:
        process = daemon.spawn("--help")
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        for flag in ("--socket", "--socket-mode", "--arena-bytes", "--config", "--help"):
            assert flag in said.decode()
    finally:
        daemon.close()


# Around it


def test_the_environment_changes_no_key_and_no_byte() -> None:
    """Hash seed, time zone and locale of daemon and clients differ; what one puts the others get."""
    strange = [
        {"PYTHONHASHSEED": "random", "TZ": "Asia/Kathmandu", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "0", "TZ": "America/St_Johns", "LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "0"},
        {"PYTHONHASHSEED": "4294967295", "TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONOPTIMIZE": "2"},
    ]
    code = """
client = Patient(ADDRESS)
ns = client.register(description(512, model="\\u0130stanbul \\u0131", rope={"i": "I"}))
put(client, ns, ARGS[0])
say("put")
hear()
say([[is_body(one, n) for one in client.get(ns, hashes([n]))] for n in range(3)])
say(ns.digest.hex())
"""
    environments = [{**os.environ, **some} for some in strange]
    with Daemon(environment=environments[0]) as daemon, ExitStack() as stack:
        peers = [
            stack.enter_context(Peer(code, daemon, [n], env=environment)) for n, environment in enumerate(environments)
        ]
        with daemon.client() as client:
            ns = client.register(description(512, model="İstanbul ı", rope={"i": "I"}))
            assert [peer.hear() for peer in peers] == ["put"] * 3
            assert client.lookup(ns, hashes(range(3))) == 3
            assert [peer.ask(True) for peer in peers] == [[[True]] * 3] * 3
            assert {peer.hear() for peer in peers} == {ns.digest.hex()}
        assert "+05:45" not in daemon.log.read_text() and "Z level=" in daemon.log.read_text(), (
            "times in the log are UTC"
        )


def test_running_out_of_descriptors_is_survived(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.register(description(4096))
        put(client, ns, range(4))
        with ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(Raw(daemon.socket))
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (daemon.descriptors() + 6, 4096))
            crowd = []
            for _ in range(40):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stack.callback(connection.close)
                connection.setblocking(False)
                try:
                    connection.connect(str(daemon.socket))
                except BlockingIOError:
                    break
                crowd.append(connection)
            for _ in range(20):
                assert client.lookup(ns, hashes(range(4))) == 4, "who is connected goes on"
            until(lambda: "accepting fails" in daemon.log.read_text(), "the log says so")
        put(client, ns, range(4, 8))
        until(lambda: daemon.status()["sessions"] == 2, "it accepts again")
        assert daemon.log.read_text().count("accepting fails") <= 3, "a line per change of state"
        with client.lease(ns, hashes(range(8))) as blocks:
            assert [is_body(view, n) for n, view in enumerate(blocks)] == [True] * 8
