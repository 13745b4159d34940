"""Tokens and certificates: what a file may hold, who is let in, what is said about it, and files that change."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from kvtier.errors import Denied, Invalid, Unauthenticated
from kvtier.server import access
from kvtier.server.access import MAX_TOKENS, Certificates, Tokens, issue
from kvtier.server.sessions import ADMIN, READ, ROLES, WRITE
from tests.support.listeners import pki, write_private

TOKEN = sha256(b"names of tests must not change from run to run").hexdigest()
LINE = f"ci acme write sha256:{sha256(TOKEN.encode()).hexdigest()}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_private(tmp_path / "tokens", LINE + "\n")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at on every call."""
    monkeypatch.setattr(access, "_LOOK_EVERY", 0.0)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="kvtier.server.access"):
        yield caplog


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_a_token_lets_its_owner_in(file: Path) -> None:
    entry = Tokens(file).check(bearer(TOKEN), "x")
    assert (entry.name, entry.peer.tenant, entry.peer.role) == ("ci", "acme", WRITE)
    assert Tokens(file).check(f"bearer   {TOKEN} ", "x").name == "ci"
    assert Tokens(file).permit(bearer(TOKEN)) and not Tokens(file).permit(bearer(TOKEN[:-1]))


def test_an_issued_token_is_random_and_its_line_holds_only_its_digest() -> None:
    token, line = issue("a", "b", "admin")
    assert token != issue("a", "b", "admin")[0] and len(token) == 64
    assert token not in line and line == f"a b admin sha256:{sha256(token.encode()).hexdigest()}"
    for wrong in (
        ("a b", "t", "read"),
        ("a", "", "read"),
        ("a", "t", "root"),
        ("a/b", "t", "read"),
        ("a" * 65, "t", "read"),
        ("ä", "t", "read"),
    ):
        with pytest.raises(Invalid):
            issue(*wrong)


def test_the_documented_command_makes_the_digest(tmp_path: Path) -> None:
    digest = (
        subprocess.run(["sha256sum"], input=TOKEN.encode(), capture_output=True, check=True, timeout=10)
        .stdout.split()[0]
        .decode()
    )
    assert (
        Tokens(write_private(tmp_path / "t", f"me acme read sha256:{digest}\n")).check(bearer(TOKEN), "x").peer.role
        == READ
    )


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        bearer(TOKEN[:-1]),
        bearer(TOKEN + "0"),
        bearer(TOKEN.upper()),
        bearer(LINE),
        bearer(LINE[-64:]),
    ],
)
def test_everyone_else_stays_outside(file: Path, header: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Tokens(file).check(header, "x")
    assert isinstance(caught.value, Denied) and TOKEN[:8] not in str(caught.value)


@pytest.mark.parametrize("token", ["short", "x" * 31, "x" * 257, "x" * 100_000])
def test_a_token_that_could_be_guessed_is_not_taken_even_if_listed(tmp_path: Path, token: str) -> None:
    listed = write_private(tmp_path / "t", f"me acme read sha256:{sha256(token.encode()).hexdigest()}\n")
    with pytest.raises(Unauthenticated):
        Tokens(listed).check(bearer(token), "x")


@pytest.mark.parametrize("token", ["x" * 32, "x" * 256, "!" * 64])
def test_other_generators_than_ours_are_fine(tmp_path: Path, token: str) -> None:
    listed = write_private(tmp_path / "t", f"me acme read sha256:{sha256(token.encode()).hexdigest()}\n")
    assert Tokens(listed).check(bearer(token), "x").name == "me"


def test_comments_blank_lines_and_all_roles(tmp_path: Path) -> None:
    made = {role: issue(role, "acme", role) for role in ROLES}
    text = "# who may call\n\n  # indented\n" + "".join(f"  {line}\t\n\n" for _, line in made.values())
    tokens = Tokens(write_private(tmp_path / "t", text))
    assert len(tokens) == 3
    assert [tokens.check(bearer(token), "x").peer.role for token, _ in made.values()] == [READ, WRITE, ADMIN]
    assert len(Tokens(write_private(tmp_path / "empty", "# nobody\n"))) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ci acme write", "3 words"),
        (f"{LINE} more", "5 words"),
        (f"c/i acme write {LINE[-71:]}", "a name has"),
        (f"ci ac\x00me write {LINE[-71:]}", "a tenant has"),
        (f"ci acme owner {LINE[-71:]}", "role must be read, write or admin"),
        (f"ci acme write {TOKEN}", "not a digest"),
        (f"ci acme write sha256:{TOKEN[:-1]}", "not a digest"),
        (f"ci acme write sha256:{'A' * 64}", "not a digest"),
        (f"ci acme write md5:{'a' * 64}", "not a digest"),
        (f"{LINE}\n{LINE.replace('ci', 'cd')}", "one digest twice"),
        (f"{LINE}\n{issue('ci', 'b', 'read')[1]}", "one name twice"),
        ("\n".join(issue(f"n{i}", "t", "read")[1] for i in range(MAX_TOKENS + 1)), f"at most {MAX_TOKENS}"),
        ("#" * (512 * 1024 + 1), "more than 524288 bytes"),
        ("\x80\xff" * 10, "1 words"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_never_quoted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Invalid, match=words) as caught:
        Tokens(write_private(tmp_path / "t", text))
    assert str(tmp_path / "t") in str(caught.value)
    assert TOKEN not in str(caught.value) and LINE[-64:] not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "taken"),
    [(0o600, True), (0o400, True), (0o640, True), (0o604, False), (0o644, False), (0o620, False), (0o602, False)],
)
def test_nobody_else_may_read_or_change_it(file: Path, mode: int, taken: bool) -> None:
    file.chmod(mode)
    if taken:
        assert len(Tokens(file)) == 1
    else:
        with pytest.raises(Invalid, match=f"chmod 600 {file}"):
            Tokens(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_not_taken(file: Path) -> None:
    os.chown(file, 4242, 0)
    with pytest.raises(Invalid, match="belongs to uid 4242"):
        Tokens(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(Invalid, match="token_file"):
            Tokens(path)


def test_a_link_is_followed(file: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts secrets: the name is a link that moves."""
    link = tmp_path / "link"
    link.symlink_to(file)
    tokens = Tokens(link)
    assert tokens.permit(bearer(TOKEN))
    other, line = issue("new", "acme", "read")
    aside = tmp_path / "aside"
    aside.symlink_to(write_private(tmp_path / "tokens2", line))
    aside.replace(link)
    assert tokens.permit(bearer(other)) and not tokens.permit(bearer(TOKEN))


def test_every_entry_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a match, and never by `==`: how long a check takes says nothing about how close a guess came."""
    made = [issue(f"n{i}", "t", "read") for i in range(50)]
    tokens = Tokens(write_private(tmp_path / "t", "\n".join(line for _, line in made)))
    compared: list[int] = []
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return real(a, b)

    monkeypatch.setattr(access.hmac, "compare_digest", counting)
    for token in (made[0][0], made[-1][0], secrets.token_hex(32)):
        compared.clear()
        tokens.permit(bearer(token))
        assert compared == [32] * 50


def test_bad_tokens_are_counted_not_listed(
    file: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(file)
    for n in range(100):
        assert not tokens.permit(bearer(f"{n:064x}"), f"10.0.0.{n}")
    assert [(record.message, record.fields["calls"], record.fields["last"]) for record in said.records] == [
        ("unknown token refused", 1, "10.0.0.0")
    ]
    monkeypatch.setattr(tokens, "_say_again", 0.0)  # ten seconds later
    assert not tokens.permit(bearer("f" * 64), "10.0.0.200")
    assert (said.records[-1].fields["calls"], said.records[-1].fields["last"]) == (100, "10.0.0.200")
    assert not any("0" * 60 in str(record.__dict__) for record in said.records)


def test_a_changed_file_is_read_again(file: Path, said: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(file)
    other, line = issue("new", "acme", "admin")
    write_private(file, line)
    assert tokens.permit(bearer(other)) and not tokens.permit(bearer(TOKEN))
    assert [record.message for record in said.records if "reload" in record.message] == ["reloaded"]
    write_private(file, LINE)
    tokens.reload()
    assert tokens.permit(bearer(TOKEN)) and not tokens.permit(bearer(other))


@pytest.mark.parametrize("broken", ["garbage", "unreadable", "gone"])
def test_a_file_that_breaks_leaves_what_was_there_in_force_and_says_so_once(
    file: Path, said: pytest.LogCaptureFixture, broken: str
) -> None:
    tokens = Tokens(file)
    if broken == "garbage":
        write_private(file, f"ci acme write {TOKEN}")
    elif broken == "unreadable":
        write_private(file, issue("new", "acme", "read")[1]).chmod(0o644)
    else:
        file.unlink()
    for _ in range(5):
        assert tokens.permit(bearer(TOKEN))
    assert [record.message for record in said.records] == ["reload failed"]
    assert TOKEN not in str(said.records[0].__dict__)
    with pytest.raises(Invalid):
        tokens.reload()
    assert tokens.permit(bearer(TOKEN))
    write_private(file, LINE)
    assert tokens.permit(bearer(TOKEN)) and said.records[-1].message == "reloaded"


def test_a_file_is_not_looked_at_on_every_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_LOOK_EVERY", 3600.0)
    tokens = Tokens(file)
    write_private(file, issue("new", "acme", "read")[1])
    assert tokens.permit(bearer(TOKEN))
    tokens.reload()
    assert not tokens.permit(bearer(TOKEN))


def test_calls_and_reloads_may_come_from_any_thread(file: Path) -> None:
    """A check sees the old list or the new one, never none."""
    tokens = Tokens(file)
    line = issue("new", "acme", "read")[1]
    stop = time.monotonic() + 1.0
    faults: list[object] = []

    def check() -> None:
        while time.monotonic() < stop:
            if not tokens.permit(bearer(TOKEN)):
                faults.append("refused")

    def change() -> None:
        n = 0
        while time.monotonic() < stop:
            n += 1
            write_private(file, f"{LINE}\n{line if n % 2 else ''}\n")
            try:
                tokens.reload()
            except Exception as error:
                faults.append(error)

    threads = [threading.Thread(target=work) for work in (check, check, change)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []


# Certificates


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = (Path(shutil.copy(path, tmp_path)) for path in pki().server)
    key.chmod(0o600)
    return cert, key


def test_certificates_are_read_whole_and_stay_the_same_object(pair: tuple[Path, Path]) -> None:
    certificates = Certificates(*pair, pki().good.ca)
    assert certificates.current() == (pair[0].read_bytes(), pair[1].read_bytes(), pki().good.ca.read_bytes())
    assert certificates.current() is certificates.current()
    assert certificates.context().verify_mode.name == "CERT_REQUIRED"
    assert Certificates(*pair, None).context().verify_mode.name == "CERT_NONE"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda cert, key: key.write_text(pki().client[1].read_text()), "KEY_VALUES_MISMATCH|mismatch"),
        (lambda cert, key: cert.write_text("nonsense"), "cannot be used together"),
        (lambda cert, key: key.write_text("nonsense"), "cannot be used together"),
        (lambda cert, key: cert.unlink(), "tls_cert: cannot read"),
        (lambda cert, key: key.unlink(), "tls_key: cannot read"),
        (lambda cert, key: key.chmod(0o644), "chmod 600"),
        (lambda cert, key: encrypt(key), "no passphrase"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_the_key_is_never_quoted(
    pair: tuple[Path, Path], break_it: object, words: str
) -> None:
    secret = pair[1].read_text().splitlines()[1]
    assert callable(break_it)
    certificates = Certificates(*pair, None)
    before = certificates.current()
    break_it(*pair)
    for attempt in (lambda: Certificates(*pair, None), certificates.reload):
        with pytest.raises(Invalid, match=words) as caught:
            attempt()
        assert secret not in str(caught.value)
    assert certificates.current() is before


def encrypt(key: Path) -> None:
    command = ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    key.chmod(0o600)


def test_changed_certificates_are_read_again(pair: tuple[Path, Path], said: pytest.LogCaptureFixture) -> None:
    certificates = Certificates(*pair, None)
    before = certificates.current()
    for source, target in zip(pki().client, pair, strict=True):
        write_private(target, source.read_text())
    after = certificates.current()
    assert after is not before and after[0] == pki().client[0].read_bytes()
    assert [record.message for record in said.records] == ["reloaded"]
