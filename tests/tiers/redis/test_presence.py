"""What Redis was last heard to have: answers grow old, are bounded and counted by namespace."""

from __future__ import annotations

from kvtier.tiers.redis import presence
from kvtier.tiers.redis.presence import Presence

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


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
