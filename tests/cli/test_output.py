"""Exit codes of errors, and sizes for people."""

from __future__ import annotations

from kvtier.cli.output import Exit, size


def test_exit_code_5_and_the_mapping_of_errors() -> None:
    from kvtier import errors
    from kvtier.cli.output import code_of

    assert (
        code_of(errors.Lost("x")) == Exit.FAULT
        and code_of(errors.KvtierError("x")) == Exit.FAULT
        and code_of(errors.Stale("x")) == Exit.FAULT
    )
    assert code_of(errors.Denied("x")) == Exit.REFUSED and code_of(errors.Full("x")) == Exit.REFUSED
    assert code_of(errors.NotFound("x")) == Exit.NEGATIVE and code_of(errors.Invalid("x")) == Exit.USAGE
    assert {code_of(kind("x")) for kind in errors.BY_CODE.values()} <= set(Exit)


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
