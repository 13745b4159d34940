"""The table of verbs: every verb is there, and which role may call what."""

from __future__ import annotations

from kvtier.protocol.frames import Verb
from kvtier.server.sessions import ADMIN, READ, WRITE
from kvtier.server.verbs import HANDLERS


def test_which_role_may_call_what() -> None:
    needs = {
        role: {verb for verb, handler in HANDLERS.items() if handler.role == role} for role in (READ, WRITE, ADMIN)
    }
    assert needs[ADMIN] == {Verb.DROP, Verb.PIN, Verb.UNPIN, Verb.TTL}
    assert needs[WRITE] == {Verb.RESERVE, Verb.SEAL, Verb.ABORT, Verb.DELETE}
    assert set.union(*needs.values()) == set(Verb) - {Verb.HELLO}


def test_what_takes_slots_is_taken_back_if_its_answer_is_lost() -> None:
    assert {verb for verb, handler in HANDLERS.items() if handler.undo} == {Verb.RESERVE, Verb.LEASE}
