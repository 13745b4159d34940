"""A process that forks while it uses the store: the child starts afresh, the parent goes on, and nobody reads another's
memory by chance.

The forking happens in processes of the tests' own (`Peer`), which say what they saw.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.daemon import PATIENCE, Daemon, Peer, until

FORK = """
client = Patient(ADDRESS)
ns = client.register(description(60_000))
put(client, ns, range(8))
lease = client.lease(ns, hashes(range(8))).__enter__()
view = lease[3]

def sockets():
    files = ["/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(file) for file in files if os.path.exists(file)]
    return [name for name in names if name.startswith("socket:")]

def child(work):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(write, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return json.loads(said) if said else None, status

mine = set(sockets())
"""


def fork_peer(daemon: Daemon, code: str) -> Peer:
    return Peer(FORK + code, daemon)


def test_a_fork_child_starts_afresh_and_its_parent_goes_on(daemon: Daemon) -> None:
    code = """
def work():
    inherited = mine & set(sockets())
    arenas = sum("memfd:kvtier-arena" in line for line in open("/proc/self/maps"))
    found = [int(client.lookup(ns, hashes(range(8)))), len(client.get(ns, hashes(range(8))))]
    bodies = [is_body(one, n) for n, one in enumerate(client.get(ns, hashes(range(8))))]
    session = client._connection.attach(1).session.hex()
    with client.lease(ns, hashes(range(8))) as own:
        again = [is_body(one, n) for n, one in enumerate(own)]
    lease.__exit__(None, None, None)  # the parent's: nothing to end here
    with client.fill(ns, hashes([100])) as slots:
        slots[0][:] = body(100, 60_000)
    return [len(inherited), arenas, found, bodies, again, slots.sealed, session]
said, status = child(work)
say([said[:-1], said[-1] != client._connection.attach(1).session.hex(), status])
say([is_body(one, n) for n, one in enumerate(lease)])
say(client.status()["leased_blocks"])
say(int(client.lookup(ns, hashes([100]))))
lease.__exit__(None, None, None)
hear()
"""
    with fork_peer(daemon, code) as peer:
        eight = [True] * 8
        assert peer.hear() == [[0, 0, [8, 8], eight, eight, 1], True, 0]
        assert peer.hear() == eight
        assert peer.hear() == 8, "the child's end took nothing from the parent"
        assert peer.hear() == 1
        until(lambda: daemon.status()["sessions"] == 2, "the child's session ended with it")


@pytest.mark.parametrize("touch", ["view[0]", "bytes(view[:10])", "lease[0].sum()", "client._connection"])
def test_a_fork_child_dies_rather_than_read_its_parents_view(daemon: Daemon, touch: str) -> None:
    code = f"""
def work():
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    inner = child(lambda: str({touch}))
    return inner[1]
said, status = child(work)
say([said, status])
say([is_body(one, n) for n, one in enumerate(lease)])
lease.__exit__(None, None, None)
"""
    with fork_peer(daemon, code) as peer:
        dead = 0 if touch == "client._connection" else signal.SIGSEGV
        assert [n & 0x7F for n in peer.hear()] == [dead, 0]
        assert peer.hear() == [True] * 8


def test_a_later_mapping_of_the_child_cannot_land_under_an_inherited_view(daemon: Daemon) -> None:
    code = """
def work():
    import mmap, resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    low, high = client._connection._retired, None
    start = view.ctypes.data
    ends = [(line, line.split()[0].split("-")) for line in open("/proc/self/maps")]
    inside = [line for line, (low, high) in ends if int(low, 16) <= start < int(high, 16)]
    maps = [mmap.mmap(-1, 64 << 20) for _ in range(20)]
    addresses = [np.frombuffer(one, np.uint8).ctypes.data for one in maps]
    clear = all(not (address <= start < address + (64 << 20)) for address in addresses)
    return [inside[0].split()[1], clear]
say(child(work))
lease.__exit__(None, None, None)
"""
    with fork_peer(daemon, code) as peer:
        assert peer.hear() == [["---p", True], 0]


def test_forking_while_other_threads_use_the_client(daemon: Daemon) -> None:
    code = """
import multiprocessing
stop = threading.Event()
failures = []
def busy(k):
    own = client.register(description(60_000))
    while not stop.is_set():
        try:
            put(client, own, range(100 * k, 100 * k + 3))
            with client.lease(own, hashes(range(100 * k, 100 * k + 3))) as blocks:
                assert all(is_body(one, n) for n, one in enumerate(blocks, 100 * k))
        except BaseException as error:
            failures.append(repr(error))
threads = [threading.Thread(target=busy, args=(k,)) for k in range(1, 5)]
for thread in threads:
    thread.start()
def work(queue):
    own = client.register(description(60_000))
    inherited = mine & set(sockets())
    bodies = [is_body(one, n) for n, one in enumerate(client.get(own, hashes(range(8))))]
    queue.put([len(inherited), int(client.lookup(own, hashes(range(8)))), bodies])
context = multiprocessing.get_context("fork")
answers = []
for _ in range(12):
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    answers.append(queue.get())
    process.join(30)
    answers[-1].append(process.exitcode)
stop.set()
for thread in threads:
    thread.join(30)
lease.__exit__(None, None, None)
say([answers, failures])
hear()
"""
    with fork_peer(daemon, code) as peer:
        answers, failures = peer.hear(within=2 * PATIENCE)
        assert failures == []
        assert answers == [[0, 8, [True] * 8, 0]] * 12
        until(lambda: daemon.status()["sessions"] == 2, "the children's sessions ended with them")


def test_a_parent_that_dies_first_gives_its_session_back_though_its_child_lives(daemon: Daemon) -> None:
    code = """
read, write = os.pipe()
pid = os.fork()
if not pid:
    os.close(write)
    os.read(read, 1)   # lives until the parent is gone
    time.sleep(ARGS_WAIT)
    os._exit(0)
say(pid)
hear()
""".replace("ARGS_WAIT", "20")
    with fork_peer(daemon, code) as peer:
        child = peer.hear()
        try:
            assert daemon.status()["leased_blocks"] == 8
            peer.kill()
            until(lambda: daemon.status()["held_bytes"] == 0, "the parent's leases are back")
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
    daemon.quiet()
