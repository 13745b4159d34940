"""The parts of the Redis tier that need no server: settings, the bytes in front of a block, what was heard, the breaker."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import Invalid, Lost
from kvtier.server.settings import BY_NAME, load
from kvtier.tiers import breaker
from kvtier.tiers.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from kvtier.tiers.redis import presence
from kvtier.tiers.redis.location import RedisLocation, make, parse_url
from kvtier.tiers.redis.presence import Presence
from kvtier.tiers.redis.value import FRONT_BYTES, front, read_front
from tests.support.daemon import until

ODD = "p@ss:/#%25 w"
ENCODED = "p%40ss%3A%2F%23%2525%20w"
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


# --- location


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("redis://host", {"nodes": (("host", 6379),), "tls": False}),
        ("rediss://host:7000/3", {"nodes": (("host", 7000),), "tls": True, "db": 3}),
        ("redis://[::1]:7000/", {"nodes": (("::1", 7000),), "tls": False}),
        ("redis://a:1,b,c:3", {"nodes": (("a", 1), ("b", 6379), ("c", 3)), "tls": False}),
        ("unix:///run/redis.sock", {"nodes": (("/run/redis.sock", 0),), "tls": False}),
        (f"redis://:{ENCODED}@host", {"nodes": (("host", 6379),), "tls": False, "user": None, "password": ODD}),
        (f"redis://bob:{ENCODED}@host", {"nodes": (("host", 6379),), "tls": False, "user": "bob", "password": ODD}),
        ("unix://bob:x@/run/r.sock", {"nodes": (("/run/r.sock", 0),), "tls": False, "user": "bob", "password": "x"}),
        ("redis://:%C3%BC@h", {"nodes": (("h", 6379),), "tls": False, "user": None, "password": "ü"}),
    ],
)
def test_urls_that_are_understood(url: str, fields: dict[str, object]) -> None:
    assert parse_url(url) == fields


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{ODD}@host",
        "redis://:secret#@host",
        "redis://:secret%zz@host",
        "redis://:secret%ff@host",
        "redis://:secret@",
        "redis://:secret@host:0",
        "redis://:secret@host:65536",
        "redis://:secret@host/name",
        "redis://:secret@host/1?x=y",
        "redis://:secret@a," * 65 + "a",
        "http://:secret@host",
        "unix://:secret@host/path",
        "unix://:secret@",
        "secret",
        "",
        7,
        None,
    ],
)
def test_urls_that_are_refused_say_what_to_write_and_no_secret(url: object) -> None:
    with pytest.raises(Invalid) as error:
        make(url)
    assert "secret" not in str(error.value) and "p@ss" not in str(error.value)
    assert "write" in str(error.value) or "encoded" in str(error.value) or "UTF-8" in str(error.value)


def test_a_password_is_shown_nowhere() -> None:
    location = make(f"redis://bob:{ENCODED}@host:1/2")
    for text in (str(location), repr(location)):
        assert ODD not in text and ENCODED not in text and "p@ss" not in text
    assert str(location).startswith("url=redis://bob:***@host:1/2,prefix=kvtier,")


@pytest.mark.parametrize("raw", [ODD, f"{ODD}\n", f"{ODD}\r\n"])
def test_a_password_file_is_read_each_time(tmp_path: Path, raw: str) -> None:
    file = tmp_path / "password"
    file.write_text(raw)
    location = make("redis://host", {"password_file": file})
    assert location.secret() == ODD
    file.write_text("next\n")
    assert location.secret() == "next"
    file.unlink()
    with pytest.raises(Invalid, match="No such file"):
        location.secret()
    file.write_bytes(b"\xff")
    with pytest.raises(Invalid, match="UTF-8"):
        location.secret()
    file.write_bytes(b"x" * 5000)
    with pytest.raises(Invalid, match="more than"):
        location.secret()


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("redis://:x@h", {"password_file": Path("/p")}, "in one place"),
        ("redis://a,b", {}, "cluster"),
        ("redis://a,b", {"cluster": True, "sentinel": "m"}, "exclude"),
        ("redis://a/1", {"cluster": True}, "database 0"),
        ("redis://a", {"ca": Path("/ca")}, "rediss"),
        ("rediss://a", {"cert": Path("/c")}, "belong together"),
        ("redis://a", {"prefix": "a b"}, "prefix"),
        ("redis://a", {"prefix": "*"}, "prefix"),
        ("redis://a", {"timeout": 0.0}, "timeout"),
        ("redis://a", {"timeout": float("nan")}, "timeout"),
        ("redis://a", {"connections": 1}, "connections"),
        ("redis://a", {"ttl": -1}, "ttl"),
    ],
)
def test_what_does_not_go_together_is_refused(url: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        make(url, options)


def test_the_setting_is_a_table_or_one_flag(tmp_path: Path) -> None:
    toml = tmp_path / "k.toml"
    toml.write_text(
        '[redis]\nurl = "rediss://bob@h:1"\npassword_file = "/p"\nca = "/ca.pem"\nttl = 60\ntimeout = 0.5\nwrite = "500MB"\n'
    )
    said = load(toml, {}).redis
    assert said == RedisLocation(
        nodes=(("h", 1),),
        tls=True,
        user="bob",
        password_file=Path("/p"),
        ca=Path("/ca.pem"),
        ttl=60,
        timeout=0.5,
        write=500_000_000,
    )
    flag = "url=rediss://bob@h:1, password_file=/p, ca=/ca.pem, ttl=60, timeout=0.5, write=500MB"
    assert load(None, {"redis": flag}).redis == said
    assert load(toml, {"redis": str(said)}).redis == said, "what is shown can be said again"
    assert load(toml, {"redis": "off"}).redis is None
    nodes = load(None, {"redis": "url=redis://a:1,b:2,c,cluster=true,prefix=x"}).redis
    assert (
        nodes is not None and nodes.nodes == (("a", 1), ("b", 2), ("c", 6379)) and nodes.cluster and nodes.prefix == "x"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("redis://:secret@h", "write each key once"),
        ("url=redis://:secret@h,url=x", "once"),
        ({"url": "redis://h", "secret": 1}, "no key 'secret'"),
        ({}, "needs a url"),
        ({"url": "redis://:sec#ret@h"}, "percent-encoded"),
        ({"url": "redis://h", "ttl": "soon"}, "ttl is a number"),
        ({"url": "redis://h", "cluster": "maybe"}, "true or false"),
        ({"url": "redis://h", "sentinel": 3}, "is a name"),
        ({"url": "redis://h", "write": "much"}, "not a size"),
        (3, "needs a url"),
    ],
)
def test_settings_that_are_refused(value: object, words: str) -> None:
    with pytest.raises(Invalid, match=words) as error:
        BY_NAME["redis"].parse(value)
    assert ":secret@" not in str(error.value)


# --- the front


def test_a_front_is_read_back() -> None:
    raw = front(KEY, 2**24, 2**64 - 1)
    assert len(raw) == FRONT_BYTES == 32
    assert read_front(raw, KEY, 2**24) == 2**64 - 1


def test_a_front_that_is_not_of_this_block_is_lost() -> None:
    good = front(KEY, 4096, 77)
    for raw, key, nbytes in [
        (good, OTHER, 4096),
        (good, KEY, 4097),
        (good[:-1], KEY, 4096),
        (good + b"\0", KEY, 4096),
        (b"", KEY, 4096),
    ]:
        with pytest.raises(Lost):
            read_front(raw, key, nbytes)
    for at in [*range(16), *range(24, 32)]:  # every byte but the checksum's
        bad = bytearray(good)
        bad[at] ^= 0x10
        with pytest.raises(Lost):
            read_front(bytes(bad), KEY, 4096)


# --- what was heard


def test_answers_grow_old() -> None:
    answers = Presence()
    answers.hear([(KEY, True), (OTHER, False)], handle=3)
    now = answers._answers[KEY][1]
    assert answers.get(KEY, now) is True and answers.get(OTHER, now) is False and answers.get(b"x", now) is None
    assert answers.get(KEY, now + presence.HOLD) is True and answers.get(KEY, now + presence.HOLD + 0.1) is None
    assert answers.get(OTHER, now + presence.ABSENT + 0.1) is None
    assert (
        answers.fresh(KEY, now + presence.FRESH)
        and not answers.fresh(KEY, now + presence.FRESH + 0.1)
        and not answers.fresh(OTHER, now)
    )
    assert answers.handles() == {3}
    answers.check_integrity()


def test_a_yes_to_an_older_question_does_not_bring_a_forgotten_block_back() -> None:
    answers = Presence()
    answers.hear([(KEY, True)])
    began = answers._answers[KEY][1]
    answers.hear([(KEY, False)])
    answers.hear([(KEY, True)], began=began)
    assert answers.get(KEY, answers._answers[KEY][1]) is False
    answers.hear([(KEY, True)])
    assert answers.get(KEY, answers._answers[KEY][1]) is True, "but a write does"


def test_what_is_heard_is_bounded_and_namespaces_are_counted() -> None:
    answers = Presence(most=8)
    for n in range(100):
        answers.hear([(n.to_bytes(32, "little"), True)], handle=1 + n % 2)
        answers.check_integrity()
    assert len(answers) == 8 and answers.handles() == {1, 2}
    assert len(answers.forget(1)) == 4 and answers.handles() == {2} and answers.forget(1) == []
    answers.check_integrity()


# --- the breaker


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE", (0.01, 0.05))
    one = Breaker()
    for _ in range(5):
        assert not one.bad("once")
        assert not one.good() and one.closed, "a success in between"
    assert not one.bad("first")
    assert one.bad("second") and one.state == OPEN and one.reason == "second"
    assert not one.bad("a call from before"), "it is open already"
    until(one.due, "a trial is due")
    assert one.state == HALF_OPEN and not one.due(), "one trial at a time"
    assert not one.bad("a call from before") and one.state == HALF_OPEN, "which is no trial"
    assert not one.bad("trial", trial=True) and one.state == OPEN
    until(one.due, "another")
    assert one.good() and one.state == CLOSED and one.reason == ""
    assert one.opened_total == 1


def test_pauses_grow_to_a_limit() -> None:
    one = Breaker()
    one.bad("x")
    one.bad("x")
    waits = []
    for _ in range(12):
        before = breaker.time.monotonic()
        one.bad("x", trial=True)
        waits.append(one._not_before - before)
    assert (
        waits[0] < waits[2] < waits[4]
        and max(waits) <= breaker.PAUSE[1] + 1
        and min(waits[6:]) >= breaker.PAUSE[1] * 0.75
    )
