"""What callers hold, as plain data."""

from __future__ import annotations

from kvtier.store.accounts import Account, Reservation, Tenant
from tests.support.inside import Inside


def made(rows: list[int | None]) -> Reservation:
    with Inside(8 << 20) as inside:
        namespace = inside.space(4096).namespace
    return Reservation(namespace, 4096, rows, [0] * len(rows), [b""] * len(rows))


def test_a_reservation_is_open_while_any_entry_is() -> None:
    assert made([None, 3]).open and not made([None, None]).open and not made([]).open


def test_what_was_aborted_or_dropped_is_not_stored() -> None:
    reservation = made([None, None, None])
    assert reservation.stored([0, 1, 2]) == 3
    reservation.lost.add(1)
    assert reservation.stored([0, 1, 2]) == 2 and reservation.stored([1]) == 0 and reservation.stored([0, 2]) == 2


def test_accounts_of_one_tenant_share_it_and_are_told_apart() -> None:
    tenant = Tenant("t")
    one, two = Account(tenant), Account(tenant)
    assert one.tenant is two.tenant and one != two and not one.own
    one.leased.add(1)
    assert not two.leased, "each has sets of its own"
