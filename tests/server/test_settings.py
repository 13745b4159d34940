"""Settings: one file, flags over it, every message says what to write."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import Denied, Invalid
from kvtier.server import settings as settings
from kvtier.server.sessions import ADMIN, READ, WRITE
from kvtier.server.settings import (
    SETTINGS,
    Config,
    Listen,
    from_values,
    load,
    memory_limit,
    parse_listen,
    parse_size,
    parse_toml,
    parse_user,
)

PATIENCE = 30.0


def made(directory: Path, **values: Any) -> Config:
    """A checked configuration with its sockets in `directory`."""
    values.setdefault("socket", str(directory / "k.sock"))
    values.setdefault("arena_bytes", "64MiB")
    return from_values({name: (name, value) for name, value in values.items()})


def refused(directory: Path, **values: Any) -> str:
    with pytest.raises(Invalid) as caught:
        made(directory, **values)
    return str(caught.value)


def file(directory: Path, name: str) -> str:
    path = directory / name
    path.write_text("x")
    return str(path)


# --- values


def test_nothing_said_is_a_daemon_of_this_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_FILE", tmp_path / "absent.toml")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = load(None, dict.fromkeys(("socket", "arena_bytes")))
    assert found.arena_bytes == memory_limit() // 4
    assert found.socket_mode == 0o600 and not found.users and found.metrics is None and found.token_file is None
    assert found.grpc == (Listen(path=found.socket.with_name("kvtier.sock.grpc")),)
    assert all(listen.path for listen in found.grpc), "no TCP port unless one is written"


def test_a_file_is_read_and_flags_go_over_it(tmp_path: Path) -> None:
    toml = tmp_path / "k.toml"
    toml.write_text(
        f"""
        socket = "{tmp_path}/a.sock"
        socket_mode = "660"
        arena_bytes = "1.5GiB"
        users = ["uid:1000 engines write", "gid:2000 readers read", "any guests read"]
        grpc = ["unix:{tmp_path}/g.sock"]
        metrics = 9464
        """
    )
    found = load(toml, {"socket": tmp_path / "b.sock", "metrics": "127.0.0.1:9465", "arena_bytes": None})
    assert found.socket == tmp_path / "b.sock" and found.socket_mode == 0o660 and found.arena_bytes == 3 * 2**29
    assert found.metrics == Listen(host="127.0.0.1", port=9465) and found.grpc == (Listen(path=tmp_path / "g.sock"),)
    assert [(u.kind, u.number, u.tenant, u.role) for u in found.users] == [
        ("uid", 1000, "engines", WRITE),
        ("gid", 2000, "readers", READ),
        ("any", -1, "guests", READ),
    ]
    assert load(toml, {}).metrics == Listen(host="127.0.0.1", port=9464)


def test_the_default_file_counts_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = tmp_path / "kvtier.toml"
    monkeypatch.setattr(settings, "DEFAULT_FILE", toml)
    flags = {"socket": str(tmp_path / "k.sock"), "arena_bytes": "64MiB"}
    assert load(None, flags).socket_mode == 0o600
    toml.write_text('socket_mode = "666"')
    assert load(None, flags).socket_mode == 0o666


def test_there_are_at_most_a_dozen_settings() -> None:
    assert len(SETTINGS) <= 12
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert {setting.name for setting in SETTINGS} == set(Config.__slots__) - {"poison"}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        ("4KiB", 4096),
        ("4 kib", 4096),
        ("1.5G", 1_500_000_000),
        ("2TiB", 2**41),
        (" 3MB ", 3_000_000),
        ("7mi", 7 * 2**20),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "4XB", "GiB", "-1", "1e9", "4 4", "٤", "9" * 400, "1.GiB", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(Invalid, match="is not a size: write 512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("unix:/run/x.sock", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:0", True),
        ("[::1]:50051", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("10.0.0.1:65535", False),
        ("some.host:80", False),
        ("localhost.evil.example:80", False),
    ],
)
def test_listeners(text: str, loopback: bool) -> None:
    assert parse_listen(text).loopback is loopback
    assert str(parse_listen(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9464",
        "host",
        "host:",
        "host:65536",
        "host:-1",
        "::1:80",
        "[::g]:1",
        "http://x:1",
        "unix:",
        "unix:a\0b",
        7,
        None,
        "a b:1",
    ],
)
def test_what_is_no_listener(text: Any) -> None:
    with pytest.raises(Invalid):
        parse_listen(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "uid:1",
        "uid:1 t",
        "uid:1 t owner",
        "uid: t read",
        "any:1 t read",
        "pid:1 t read",
        "uid:-1 t read",
        "uid:4294967295 t read",
        3,
    ],
)
def test_what_is_no_user(text: Any) -> None:
    with pytest.raises(Invalid):
        parse_user(text)


def test_users_may_be_named() -> None:
    assert parse_user("uid:root t admin").number == 0 and parse_user("gid:root t admin").number == 0
    with pytest.raises(Invalid, match="not known on this host: write its number"):
        parse_user("uid:no-such-user t read")


# --- messages that say what to write


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    toml = tmp_path / "k.toml"
    toml.write_text("arena_byte = 5")
    with pytest.raises(Invalid, match=r"k\.toml: there is no setting 'arena_byte': did you mean arena_bytes\?"):
        load(toml, {})
    with pytest.raises(Invalid, match="the settings are socket, socket_mode,"):
        parse_toml(b"zzz = 1", "f")
    with pytest.raises(Invalid, match="f is not TOML"):
        parse_toml(b"socket = ", "f")
    with pytest.raises(Invalid, match="f is not TOML"):
        parse_toml(b"\xff", "f")
    with pytest.raises(Invalid, match="f is not TOML"):
        parse_toml(b"a = " + b"[" * 20_000, "f")
    with pytest.raises(Invalid, match="not a file of settings"):
        parse_toml(b"#" * 70_000, "f")
    with pytest.raises(Invalid, match=r"cannot read .*correct --config"):
        load(tmp_path / "absent.toml", {})


def test_a_message_says_where_the_value_was_written(tmp_path: Path) -> None:
    toml = tmp_path / "k.toml"
    toml.write_text('socket_mode = "9"')
    with pytest.raises(Invalid, match=r"k\.toml: socket_mode: '9' is not octal text: write \"660\""):
        load(toml, {})
    with pytest.raises(Invalid, match=r"^--socket-mode: "):
        load(toml, {"socket_mode": "777"})


def test_every_value_has_its_type(tmp_path: Path) -> None:
    for values in (
        {"arena_bytes": True},
        {"arena_bytes": -1},
        {"arena_bytes": 1.5},
        {"socket": 3},
        {"socket": ""},
        {"socket_mode": 660},
        {"users": "uid:1 t read"},
        {"users": [1]},
        {"users": ["any t read"] * 2000},
        {"grpc": "127.0.0.1:1"},
        {"grpc": ["unix:/tmp/a.sock"] * 9},
        {"metrics": True},
        {"metrics": ":9464"},
        {"metrics": "unix:/tmp/m.sock"},
        {"token_file": []},
    ):
        assert refused(tmp_path, **values), values


def test_limits_of_paths_and_memory(tmp_path: Path) -> None:
    assert "choose a shorter one" in refused(tmp_path, socket="/tmp/" + "x" * 200)
    assert "create it, or choose another socket" in refused(tmp_path, socket=str(tmp_path / "no" / "k.sock"))
    assert 'write arena_bytes = "4GiB"' in refused(tmp_path, arena_bytes=4096)
    assert "choose a smaller arena_bytes" in refused(tmp_path, arena_bytes="4096TiB")
    assert "choose another path" in refused(tmp_path, grpc=[f"unix:{tmp_path}/k.sock"])
    assert "write each once" in refused(tmp_path, grpc=["unix:/tmp/g.sock", "unix:/tmp/g.sock"])


def test_the_memory_limit_is_the_least_of_all_control_groups(tmp_path: Path) -> None:
    """The limits of a service and of everything it is nested in, for both versions of control groups."""
    own = tmp_path / "own"
    for name, limit in (
        ("memory.max", "max"),
        ("a/memory.max", "3000"),
        ("a/b/memory.max", "5000"),
        ("memory/c/memory.limit_in_bytes", "700"),
    ):
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n")
    own.write_text("0::/a/b\n")
    assert settings._cgroup_limits(tmp_path / "fs", own) == [3000, 5000]
    own.write_text("4:memory:/c\n3:cpu:/a\n")
    assert settings._cgroup_limits(tmp_path / "fs", own) == [700]
    own.write_text("0::/../../a\n")
    assert settings._cgroup_limits(tmp_path / "fs", own) == [3000]
    own.unlink()
    assert settings._cgroup_limits(tmp_path / "fs", own) == []


# --- credentials


def test_tcp_needs_a_token_and_the_network_needs_tls(tmp_path: Path) -> None:
    tokens, cert, key, ca = (file(tmp_path, name) for name in ("tokens", "cert", "key", "ca"))
    tls = {"tls_cert": cert, "tls_key": key}
    for address in ("127.0.0.1:50051", "[::1]:50051", "0.0.0.0:50051"):
        assert "write token_file" in refused(tmp_path, grpc=[address])
        assert "write token_file" in refused(tmp_path, grpc=[address], **tls)
    assert "write tls_cert and tls_key too" in refused(tmp_path, grpc=["0.0.0.0:50051"], token_file=tokens)
    assert "write tls_cert and tls_key too" in refused(tmp_path, grpc=["some.host:50051"], token_file=tokens)
    assert made(tmp_path, grpc=["127.0.0.1:50051"], token_file=tokens).tls_cert is None
    assert made(tmp_path, grpc=["0.0.0.0:50051"], token_file=tokens, **tls).grpc[0].port == 50051
    assert made(tmp_path, grpc=["0.0.0.0:50051"], token_file=tokens, tls_client_ca=ca, **tls).tls_client_ca == Path(ca)


def test_metrics_stay_on_loopback_or_are_locked(tmp_path: Path) -> None:
    tokens, cert, key = (file(tmp_path, name) for name in ("tokens", "cert", "key"))
    assert made(tmp_path, metrics="9464").metrics == Listen(host="127.0.0.1", port=9464)
    assert made(tmp_path, metrics="off").metrics is None
    assert "or listen on 127.0.0.1 instead" in refused(tmp_path, metrics="0.0.0.0:9464")
    assert "write tls_cert" in refused(tmp_path, metrics="0.0.0.0:9464", token_file=tokens)
    assert made(tmp_path, metrics="0.0.0.0:9464", token_file=tokens, tls_cert=cert, tls_key=key).metrics is not None


def test_tls_files_come_in_pairs_and_must_be_readable(tmp_path: Path) -> None:
    cert, key = file(tmp_path, "cert"), file(tmp_path, "key")
    assert "write tls_key too" in refused(tmp_path, tls_cert=cert)
    assert "write tls_cert too" in refused(tmp_path, tls_key=key)
    assert "write tls_cert and tls_key too" in refused(tmp_path, tls_client_ca=cert)
    assert "tls_cert: " in refused(tmp_path, tls_cert=str(tmp_path / "absent"), tls_key=key)
    assert "token_file: " in refused(tmp_path, token_file=str(tmp_path / "absent"))


# --- who is who


def test_the_first_matching_user_counts(tmp_path: Path) -> None:
    users = ["uid:1000 engines write", "gid:2000 readers read", "uid:0 ops read"]
    found = made(tmp_path, users=users)
    assert (found.peer(1000, 2000, 7).tenant, found.peer(1000, 2000, 7).role) == ("engines", WRITE)
    assert (found.peer(1001, 2000, 7).tenant, found.peer(1001, 2000, 7).role) == ("readers", READ)
    assert (found.peer(0, 0, 7).tenant, found.peer(0, 0, 7).role) == ("ops", READ), (
        "an entry for root stands above the rule for root"
    )
    with pytest.raises(Denied, match=r'add "uid:1001 TENANT ROLE" to the setting `users`'):
        found.peer(1001, 1001, 7)


def test_without_entries_everyone_whom_the_socket_lets_in_may_write(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert found.peer(12345, 1, 7).role == WRITE and found.peer(12345, 1, 7).tenant == "local"
    assert found.peer(0, 0, 7).role == ADMIN and found.peer(os.geteuid(), 0, 7).role == ADMIN
    assert found.peer(12345, 1, 7).uid == 12345 and found.peer(12345, 1, 7).pid == 7
    with_entries = made(tmp_path, users=["uid:5 t read"])
    assert with_entries.peer(0, 0, 7).role == ADMIN, "root stays admin unless an entry says otherwise"


# --- the SSD tier


def test_the_ssd_tier_is_a_table_or_one_flag(tmp_path: Path) -> None:
    toml = tmp_path / "kvtier.toml"
    toml.write_text('[ssd]\npath = "/var/lib/kvtier"\nsize = "2TiB"\nsync = true\nwrite = "500MB"\ndaily = "20TB"\n')
    said = load(toml, {}).ssd
    assert said is not None
    assert (said.path, said.size, said.sync, said.write, said.daily, said.free) == (
        Path("/var/lib/kvtier"),
        2**41,
        True,
        5 * 10**8,
        2 * 10**13,
        2**30,
    )
    assert load(None, {"ssd": "path=/var/lib/kvtier, size=2TiB, sync=true, write=500MB, daily=20TB"}).ssd == said
    assert load(None, {"ssd": str(said)}).ssd == said, "what is shown can be said again"
    assert load(toml, {"ssd": "off"}).ssd is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/var/lib/kvtier", "path=/var/lib/kvtier,size=2TiB"),
        ("path=/a", "needs a path and a size"),
        ("size=1TiB", "needs a path and a size"),
        ("path=/a,size=1TiB,size=2TiB", "write each key once"),
        ("path=/a,size=lots", "is not a size"),
        ("path=/a,size=3MiB", "4194304 to 17592186044416 bytes"),
        ("path=/a,size=17TiB", "4194304 to 17592186044416 bytes"),
        ("path=/a,size=1TiB,sync=maybe", "true or false"),
        ("path=/a,size=1TiB,speed=9", "its keys are path, size, sync, write, daily, free"),
        (7, "needs a path and a size"),
    ],
)
def test_ssd_settings_that_are_refused(value: object, words: str) -> None:
    with pytest.raises(Invalid, match=re.escape(words)):
        load(None, {"ssd": value})
