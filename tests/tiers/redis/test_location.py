"""Where a Redis is: URLs, options and password files that are understood or refused, and that no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import Invalid
from kvtier.server.settings import BY_NAME, load
from kvtier.tiers.redis.location import RedisLocation, make, parse_url

ODD = "p@ss:/#%25 w"
ENCODED = "p%40ss%3A%2F%23%2525%20w"


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
        '[redis]\nurl = "rediss://bob@h:1"\npassword_file = "/p"\nca = "/ca.pem"\n'
        'ttl = 60\ntimeout = 0.5\nwrite = "500MB"\n'
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
