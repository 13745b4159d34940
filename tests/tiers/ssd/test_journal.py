"""The index on disk: frames, torn ends, failed appends, checkpoints, the bound; made from raw bytes where the writer
would not make them."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier.errors import Full
from kvtier.tiers.ssd import recovery
from kvtier.tiers.ssd.disk import Disk
from kvtier.tiers.ssd.journal import FORGET, PUT, RECORD, IndexFiles, Journal, checkpoint_bytes
from tests.support.disks import READ_ONLY, Failing

LIMIT = 1 << 20


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def put(*numbers: int, page: int | None = None) -> np.ndarray:
    pages = [n if page is None else page for n in numbers]
    return recovery.puts(
        [key(n) for n in numbers],
        nbytes=[4000] * len(numbers),
        page=pages,
        slot=[4096] * len(numbers),
        namespace=[1] * len(numbers),
        checksum=numbers,
    )


def forget(*numbers: int) -> np.ndarray:
    return recovery.forgets([key(n) for n in numbers])


class Book:
    """A journal, and what a fresh one would read."""

    def __init__(self, path: Path, disk: Disk | None = None, limit: int = LIMIT, sync: bool = False) -> None:
        self.path = path
        self.journal = Journal(path, limit, sync, disk or Disk())
        self.told = list(self.journal.load())

    def again(self) -> Book:
        self.journal.close()
        return Book(self.path)

    def live(self) -> list[int]:
        return live(self.told)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))


def live(told: list[object]) -> list[int]:
    """Numbers of the blocks that are there, in the order they were put."""
    records, _ = recovery.read(told)  # type: ignore[arg-type]
    return [int.from_bytes(k, "little") for k in recovery.keys_of(records)]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    made = Book(tmp_path)
    yield made
    made.journal.close()


def frame(
    kind: int, body: bytes, magic: int = 0x4A54564B, length: int | None = None, check: int | None = None
) -> bytes:
    length = len(body) if length is None else length
    check = xxhash.xxh3_64_intdigest(body, seed=kind << 40 ^ len(body)) if check is None else check
    return struct.pack("<IIQQ", magic, kind, length, check) + body


# --- what is read is what was written


def test_nothing_is_read_from_an_empty_directory(book: Book) -> None:
    assert book.told == []
    assert book.names() == ["journal.00000001"]
    assert book.journal.total == book.journal.end == 0


def test_records_come_back_in_order_until_they_are_forgotten(book: Book) -> None:
    book.journal.append(put(1, 2, 3))
    book.journal.append(forget(2))
    book.journal.append(put(4))
    book.journal.append(recovery.join(forget(1), put(1, page=9)))
    read = book.again()
    assert read.live() == [3, 4, 1]
    records, _ = recovery.read(read.told)
    assert records[-1]["page"] == 9 and (records["kind"] == PUT).all()
    assert records["checksum"].tolist() == [3, 4, 1]


def test_of_two_on_one_slot_the_later_counts(book: Book) -> None:
    book.journal.append(put(1, 2, 3))
    book.journal.append(put(7, page=2))
    assert book.again().live() == [1, 3, 7]


def test_who_lost_its_slot_does_not_come_back_when_the_later_goes(book: Book) -> None:
    """A power cut may take the earlier's tombstone and leave the later's put and end: found by the crash replay on a
    busy machine."""
    book.journal.append(put(1, 2, 3))
    book.journal.append(put(7, page=2))
    book.journal.append(forget(7))
    again = book.again()
    assert again.live() == [1, 3]
    again.journal.append(recovery.join(put(7, page=3), forget(1)))
    assert again.again().live() == [7]


def test_namespaces_come_before_what_names_them(book: Book) -> None:
    book.journal.append(put(1), [(1, "tenant", b"{}"), (5, "größe", b"\x00" * 1000)])
    read = book.again()
    assert read.told[:2] == [(1, "tenant", b"{}"), (5, "größe", b"\x00" * 1000)]
    assert isinstance(read.told[2], bytes)


def test_a_record_has_64_bytes_as_the_page_says() -> None:
    assert RECORD.itemsize == 64
    record = put(258)[0]
    assert record.tobytes() == struct.pack("<IIIIIIQ", PUT, 4000, 258, 4096, 1, 0, 258) + key(258)
    assert forget(5)[0].tobytes() == struct.pack("<IIIIIIQ", FORGET, 0, 0, 0, 0, 0, 0) + key(5)


def test_a_file_is_frames_and_nothing_else(book: Book) -> None:
    book.journal.append(put(1, 2), [(1, "t", b"{}")])
    book.journal.append(forget(1))
    raw = (book.path / "journal.00000001").read_bytes()
    assert raw == frame(2, struct.pack("<II", 1, 1) + b"t{}") + frame(1, put(1, 2).tobytes()) + frame(
        1, forget(1).tobytes()
    )


# --- torn ends and other bytes


def test_every_prefix_is_a_state_that_was(tmp_path: Path) -> None:
    book = Book(tmp_path / "a") if (tmp_path / "a").mkdir() is None else None
    assert book is not None
    ends, states = [0], [[]]
    for step in (put(1, 2), forget(1), put(3), put(1), forget(2, 3)):
        book.journal.append(step)
        ends.append(book.journal.end)
        states.append(book.again().live())
        book = Book(tmp_path / "a")
    raw = (tmp_path / "a" / "journal.00000001").read_bytes()
    (tmp_path / "b").mkdir()
    for cut in range(len(raw) + 1):
        (tmp_path / "b" / "journal.00000001").write_bytes(raw[:cut])
        torn = Book(tmp_path / "b")
        whole = max(i for i, end in enumerate(ends) if end <= cut)
        assert torn.live() == states[whole]
        assert torn.journal.end == ends[whole] == (tmp_path / "b" / "journal.00000001").stat().st_size, (
            "the torn end is cut off"
        )
        assert torn.journal.damaged == ([] if cut in ends else ["journal.00000001"])
        torn.journal.append(put(50))
        assert torn.again().live() == [*states[whole], 50], "and what comes after is read"
    book.journal.close()


def test_every_changed_byte_ends_the_journal_there(book: Book, tmp_path: Path) -> None:
    book.journal.append(put(1))
    first = book.journal.end
    book.journal.append(put(2))
    book.journal.append(put(3))
    raw = (book.path / "journal.00000001").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    for at in range(len(raw)):
        (other / "journal.00000001").write_bytes(raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :])
        damaged = Book(other)
        assert damaged.live() == [1, 2, 3][: at // first]
        damaged.journal.close()


@pytest.mark.parametrize(
    "bad",
    [
        frame(1, put(9).tobytes(), magic=1),
        frame(4, b""),
        frame(0, b""),
        frame(1, put(9).tobytes()[:-1]),
        frame(1, put(9).tobytes(), length=2**40),
        frame(1, put(9).tobytes(), length=2**64 - 1),
        frame(1, put(9).tobytes(), check=0),
        frame(2, b"\x01\x00\x00"),
        frame(2, struct.pack("<II", 1, 100) + b"short"),
        frame(2, struct.pack("<II", 1, 2) + b"\xff\xfe{}"),
        frame(3, b"x"),
        b"\0" * 100,
        b"\x80\x04\x95 a pickle",
    ],
    ids=[
        "magic",
        "kind 4",
        "kind 0",
        "odd record",
        "long",
        "endless",
        "check",
        "no number",
        "tenant beyond",
        "not text",
        "end with body",
        "zeros",
        "strange",
    ],
)
def test_what_is_no_frame_ends_the_journal(bad: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal.00000001").write_bytes(frame(1, put(1).tobytes()) + bad + frame(1, put(2).tobytes()))
    book = Book(tmp_path)
    assert book.live() == [1]
    assert book.journal.damaged == ["journal.00000001"]
    book.journal.close()


def test_a_torn_journal_does_not_end_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "journal.00000001").write_bytes(frame(1, put(1).tobytes()) + b"torn")
    (tmp_path / "journal.00000002").write_bytes(frame(1, put(2).tobytes()))
    book = Book(tmp_path)
    assert book.live() == [1, 2]
    assert book.journal.number == 2
    book.journal.close()


# --- appends that fail


@pytest.mark.parametrize(("call", "sync"), [("append", False), ("append", True), ("sync", True)])
def test_a_failed_append_leaves_nothing(call: str, sync: bool, tmp_path: Path) -> None:
    disk = Failing()
    book = Book(tmp_path, disk, sync=sync)
    book.journal.append(put(1))
    end = book.journal.end
    disk.fail(call, errno.ENOSPC, times=1)
    with pytest.raises(OSError):
        book.journal.append(put(2), [(1, "t", b"{}")])
    assert book.journal.end == end == (tmp_path / "journal.00000001").stat().st_size
    book.journal.append(put(3))
    assert book.again().live() == [1, 3]


def test_what_a_failed_append_left_is_cut_off_before_the_next(tmp_path: Path) -> None:
    """The half that could not be cut off at once must not hide what comes after it."""
    disk = Failing()
    book = Book(tmp_path, disk)
    book.journal.append(put(1))
    for name, code in READ_ONLY.items():
        disk.fail(name, code)
    with pytest.raises(OSError):
        book.journal.append(put(2))
    assert (tmp_path / "journal.00000001").stat().st_size > book.journal.end, "half of it lies there"
    with pytest.raises(OSError):
        book.journal.append(put(3))
    with pytest.raises(OSError):
        book.journal.rotate()
    disk.heal()
    book.journal.append(put(4))
    assert book.again().live() == [1, 4]


def test_a_failed_rotate_changes_nothing(tmp_path: Path) -> None:
    disk = Failing()
    book = Book(tmp_path, disk)
    book.journal.append(put(1))
    for call in ("open", "sync_directory"):
        descriptors = len(os.listdir("/proc/self/fd"))
        disk.fail(call, errno.EMFILE, times=1)
        with pytest.raises(OSError):
            book.journal.rotate()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert book.journal.number == 1
        disk.fail("append", errno.ENOSPC, times=1)
        with pytest.raises(OSError):
            book.journal.append(put(2))
        assert live(list(Journal(tmp_path, LIMIT, False, Disk()).load())) == [1], (
            "it cut the right file to the right length"
        )
    assert book.journal.rotate() == 2
    book.journal.append(put(5))
    assert book.again().live() == [1, 5]


# --- checkpoints


def checkpointed(book: Book, namespaces: dict[int, tuple[str, bytes]], records: np.ndarray) -> int:
    book.journal.coming = checkpoint_bytes(len(records), namespaces)
    number = book.journal.rotate()
    book.journal.checkpoint(number, namespaces, records)
    book.journal.replace(number, written=True)
    return number


def test_a_checkpoint_takes_the_place_of_what_came_before(book: Book) -> None:
    book.journal.append(put(1, 2, 3), [(1, "t", b"{}")])
    book.journal.append(forget(2))
    number = checkpointed(book, {1: ("t", b"{}")}, put(1, 3))
    assert book.names() == [f"checkpoint.{number:08d}", f"journal.{number:08d}"]
    assert book.journal.since == 0
    assert book.journal.total == sum((book.path / name).stat().st_size for name in book.names())
    book.journal.append(put(4))
    read = book.again()
    assert read.live() == [1, 3, 4]
    assert read.told[0] == (1, "t", b"{}")
    assert read.journal.total == sum((book.path / name).stat().st_size for name in read.names())


def test_the_size_of_a_checkpoint_is_known_before(book: Book) -> None:
    namespaces = {1: ("t", b"{}"), 2: ("ü" * 10, b"x" * 333)}
    for n in (0, 1, 70_000):
        records = put(*range(n))
        number = checkpointed(book, namespaces, records)
        assert (book.path / f"checkpoint.{number:08d}").stat().st_size == checkpoint_bytes(n, namespaces)
    assert len(book.again().live()) == 70_000


def test_appends_may_run_beside_a_checkpoint(book: Book) -> None:
    book.journal.append(put(1))
    book.journal.coming = 200
    number = book.journal.rotate()
    book.journal.append(put(2))
    book.journal.checkpoint(number, {}, put(1))
    book.journal.append(forget(1))
    book.journal.replace(number, written=True)
    assert book.again().live() == [2]


@pytest.mark.parametrize("call", ["append", "sync", "open", "rename", "sync_directory"])
def test_a_failed_checkpoint_leaves_what_was(call: str, tmp_path: Path) -> None:
    disk = Failing()
    book = Book(tmp_path, disk)
    book.journal.append(put(1))
    book.journal.coming = 1000
    number = book.journal.rotate()
    disk.fail(call, errno.ENOSPC, times=1)
    written = False
    with pytest.raises(OSError):
        try:
            book.journal.checkpoint(number, {}, put(1))
            written = True
        finally:
            book.journal.replace(number, written)
    book.journal.append(put(2))
    assert book.journal.total == sum((tmp_path / name).stat().st_size for name in book.names()), (
        "nothing is counted that is not there"
    )
    assert book.again().live() == [1, 2]
    fresh = Book(tmp_path)
    assert not any(name.endswith(".tmp") for name in fresh.names()), "halves are removed at a start"
    fresh.journal.close()


def test_a_checkpoint_without_its_end_does_not_count(book: Book) -> None:
    book.journal.append(put(1, 2))
    book.journal.rotate()
    raw = b"".join([frame(1, put(7).tobytes()), frame(3, b"")])
    for cut in range(len(raw)):
        (book.path / "checkpoint.00000002").write_bytes(raw[:cut])
        assert live(list(Journal(book.path, LIMIT, False, Disk()).load())) == [1, 2]
    (book.path / "checkpoint.00000002").write_bytes(raw)
    assert live(list(Journal(book.path, LIMIT, False, Disk()).load())) == [7]


def test_a_damaged_checkpoint_gives_what_stands_before_the_damage(book: Book) -> None:
    checkpointed(book, {}, put(*range(100_000)))
    path = book.path / "checkpoint.00000002"
    raw = bytearray(path.read_bytes())
    raw[len(raw) * 9 // 10] ^= 1
    path.write_bytes(raw)
    read = book.again()
    assert read.live() == list(range(1 << 16)), "the first frame"
    assert read.journal.damaged == ["checkpoint.00000002"]


# --- the bound


def test_index_files_keep_within_their_limit(tmp_path: Path) -> None:
    book = Book(tmp_path, limit=1000)
    with pytest.raises(Full):
        for n in range(1000):
            book.journal.append(put(n))
            assert book.journal.total <= 1000
    used = book.journal.end
    assert 900 <= used <= 1000
    assert book.again().live() == list(range(used // (24 + 64)))


def test_appends_leave_room_for_the_next_checkpoint(tmp_path: Path) -> None:
    book = Book(tmp_path, limit=2000)
    book.journal.spare = 800
    with pytest.raises(Full):
        for n in range(1000):
            book.journal.append(put(n))
    assert book.journal.total <= 1200
    book.journal.coming = 800
    book.journal.rotate()
    with pytest.raises(Full):
        book.journal.append(put(*range(1000)))
    assert book.journal.total <= 2000
    book.journal.replace(2, written=False)
    assert book.journal.total <= 1200
    book.journal.close()


# --- names


def test_only_files_with_the_right_names_count(tmp_path: Path) -> None:
    good = frame(1, put(1).tobytes())
    for name in (
        "journal.1",
        "journal.0000001",
        "journal.00000001.tmp",
        "journal.00000001~",
        "xjournal.00000001",
        "journal.٠٠٠٠٠٠٠١",
        "journal.-0000001",
    ):
        (tmp_path / name).write_bytes(good)
    assert IndexFiles(tmp_path).all == []
    for name in ("journal.00000001", "journal.123456789", "checkpoint.00000003.tmp"):
        (tmp_path / name).write_bytes(good)
    found = IndexFiles(tmp_path)
    assert sorted(found.journals) == [1, 123456789]
    assert [path.name for path in found.temporary] == ["checkpoint.00000003.tmp"]


@pytest.mark.parametrize("name", ["journal.00000001", "checkpoint.00000009"])
@pytest.mark.parametrize("what", ["symlink", "directory", "fifo"])
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(name: str, what: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(frame(1, put(1).tobytes()) + frame(3, b""))
    inside = tmp_path / "inside"
    inside.mkdir()
    if what == "symlink":
        (inside / name).symlink_to(outside)
    elif what == "directory":
        (inside / name).mkdir()
    else:
        os.mkfifo(inside / name)
    journal = Journal(inside, LIMIT, False, Disk())
    if name.startswith("journal"):
        with pytest.raises(OSError):
            list(journal.load())
    else:
        assert list(journal.load()) == []
    journal.close()
    assert outside.read_bytes() == frame(1, put(1).tobytes()) + frame(3, b"")


def test_a_planted_half_is_replaced_not_followed(book: Book, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (book.path / "checkpoint.00000002.tmp").symlink_to(outside)
    book.journal.append(put(1))
    checkpointed(book, {}, put(1))
    assert not outside.exists()
    assert book.again().live() == [1]
